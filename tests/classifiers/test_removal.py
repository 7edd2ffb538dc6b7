# SPDX-License-Identifier: Apache-2.0
"""Statistics without some of their images are those of the others."""

from __future__ import annotations

import pytest
import torch

from onea.classifiers.statistics import ClassStatistics


@pytest.mark.parametrize("directions", [0, 24])
def test_what_is_taken_out_was_never_in(directions):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(60, 24, generator=generator) + torch.arange(60)[:, None] % 3
    rows = torch.arange(60) % 3
    empty = ClassStatistics.empty(24, directions=directions)
    gone = torch.zeros(60, dtype=torch.bool)
    gone[torch.tensor([0, 3, 9, 4, 7, 10, 13])] = True  # none of the third class
    found = empty.add(features, rows).remove(features[gone], rows[gone])
    wanted = empty.add(features[~gone], rows[~gone])
    assert torch.equal(found.counts, wanted.counts)
    assert found.freedom == wanted.freedom
    torch.testing.assert_close(found.means, wanted.means, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.scatter, wanted.scatter, rtol=1e-5, atol=1e-4)
    if directions:
        # All directions are kept, so that each class's scatter is exact but for float32.
        squares = (part.factors.transpose(1, 2) @ part.factors for part in (found, wanted))
        torch.testing.assert_close(*squares, rtol=1e-4, atol=1e-3)


def test_nothing_taken_is_nothing_changed():
    known = ClassStatistics.empty(4).add(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    assert known.remove(torch.empty(0, 4), torch.empty(0, dtype=torch.int64)) is known
