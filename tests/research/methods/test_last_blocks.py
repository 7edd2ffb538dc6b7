# SPDX-License-Identifier: Apache-2.0
"""Adapters only in the last blocks, for every method with the common options of adapters."""

from __future__ import annotations

import pytest
import torch
from support.methods import learn_all, prepared, shown_images

from onea.errors import OneaError
from onea.learner.adapter_training import AdapterTraining
from onea.research.methods import METHODS, method_class

METHODS_WITH_ADAPTERS = [
    name for name in sorted(METHODS.builtin) if issubclass(method_class(name).Options, AdapterTraining)
]


def prepared_with(values: dict, method: str = "one-a-plus", **options):
    return prepared(values, method, options=values["options"] | options)


def test_methods_with_adapters_are_found():
    assert {"one-a", "one-a-plus", "adapter", "running-mean", "first-task"} <= set(METHODS_WITH_ADAPTERS)


@pytest.mark.parametrize("method", METHODS_WITH_ADAPTERS)
def test_adapters_only_in_the_last_blocks_can_be_resumed(method, tiny_run):
    whole = learn_all(prepared_with(tiny_run, method, adapter_blocks=1))
    adapter_state = whole.adapter.state_dict()
    assert {name.rsplit(".", 2)[0] for name in adapter_state} == {f"blocks.{whole.vit.depth - 1}"}
    assert any(bool(value.any()) for name, value in adapter_state.items() if "up." in name), "it was trained"
    first, second = (prepared_with(tiny_run, method, adapter_blocks=1) for _ in range(2))
    learn_all(first, [0, 1])
    second.method.load_state_dict({name: value.clone() for name, value in first.method.state_dict().items()})
    learn_all(second, [2])
    expected, actual = whole.state_dict(), second.method.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert torch.isfinite(whole.scores(shown_images(second))).all()


def test_more_adapter_blocks_than_the_network_has_are_refused(tiny_run):
    with pytest.raises(
        OneaError, match=r"adapter_blocks is 3, but 'tiny\.safetensors' has 2 blocks; give 2 or fewer, or 0 for all"
    ):
        prepared_with(tiny_run, adapter_blocks=3)
    with pytest.raises(OneaError, match="adapter_blocks is -1; it must not be negative"):
        prepared_with(tiny_run, adapter_blocks=-1)


@pytest.mark.parametrize("operator", ["one-a", "fisher", "regmean", "ties", "knots", "opcm", "acmap"])
def test_operators_merge_adapters_of_the_last_blocks(operator, tiny_run):
    method = learn_all(prepared_with(tiny_run, "adapter", adapter_blocks=1, merge=operator))
    assert all(torch.isfinite(value).all() for value in method.adapter.state_dict().values())
