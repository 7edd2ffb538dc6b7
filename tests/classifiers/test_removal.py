# SPDX-License-Identifier: Apache-2.0
"""Statistics after the removal of images equal those of the remaining images."""

from __future__ import annotations

import pytest
import torch

from onea.classifiers.statistics import ClassStatistics


@pytest.mark.parametrize("directions", [0, 24])
def test_removing_images_equals_never_adding_them(directions):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(60, 24, generator=generator) + torch.arange(60)[:, None] % 3
    rows = torch.arange(60) % 3
    empty = ClassStatistics.empty(24, directions=directions)
    removed = torch.zeros(60, dtype=torch.bool)
    removed[torch.tensor([0, 3, 9, 4, 7, 10, 13])] = True  # none of the third class
    found = empty.add(features, rows).remove(features[removed], rows[removed])
    expected = empty.add(features[~removed], rows[~removed])
    assert torch.equal(found.counts, expected.counts)
    assert found.degrees_of_freedom == expected.degrees_of_freedom
    torch.testing.assert_close(found.means, expected.means, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.scatter, expected.scatter, rtol=1e-5, atol=1e-4)
    if directions:
        # All directions are kept, so that each class's scatter is exact but for float32.
        squares = (part.factors.transpose(1, 2) @ part.factors for part in (found, expected))
        torch.testing.assert_close(*squares, rtol=1e-4, atol=1e-3)


def test_removing_no_images_changes_nothing():
    known = ClassStatistics.empty(4).add(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    assert known.remove(torch.empty(0, 4), torch.empty(0, dtype=torch.int64)) is known
