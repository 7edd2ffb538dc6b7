# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onea.errors import OneaError
from onea.merging.average import RunningMean
from onea.merging.operator import Sizes
from onea.tensors import Tensors

SIZES = Sizes(3, 4, 30, 40)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 12), st.integers(0, 999))
def test_the_running_mean_equals_the_mean_of_all_tasks(count, seed):
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(count)]
    kept: Tensors = {"w": sides[0]}
    state: Tensors = {}
    for side in sides[1:]:
        kept, state = RunningMean()(kept, {"w": side}, SIZES, state)
    torch.testing.assert_close(kept["w"], torch.stack(sides).mean(0))


def test_nan_is_refused():
    with pytest.raises(OneaError, match="NaN"):
        RunningMean()({"w": torch.ones(1)}, {"w": torch.tensor([torch.nan])}, SIZES, {})
