# SPDX-License-Identifier: Apache-2.0
"""Adapters of lower blocks that stop learning during a task: what they are then, and what learns on."""

from __future__ import annotations

import pytest
import torch
from method_tools import learn_all, prepared

from onea.errors import OneaError
from onea.methods import adapter_training
from onea.methods.adapter_training import AdapterTraining
from onea.methods.fixed_views import FixedViews
from onea.methods.one_a import OneAOptions
from onea.vit.adapter import Adapters

FROZEN = {"adapter_blocks": 1, "cached_views": 2, "freeze_at": 0.5, "epochs": 4, "min_epochs": 4, "max_epochs": 4}


def asked(values: dict, **options):
    return prepared(values, "one-a", options=values["options"] | FROZEN | options)


def test_lower_blocks_stay_as_they_were_and_the_last_one_learns_on(tiny_run, monkeypatch):
    ready, drawn, draw = asked(tiny_run), [], FixedViews.drawn
    monkeypatch.setattr(FixedViews, "drawn", lambda *given: drawn.append(given[-2:]) or draw(*given))
    task = ready.task(0)
    fresh = ready.method.new_adapter(task).state_dict()
    found = adapter_training.train_adapter(
        ready.method.vit, ready.method.new_adapter(task), task, ready.method.options, ready.method.runtime, None
    )
    ((below, block),) = drawn
    then = below.state_dict()
    assert block == 1
    assert found.report["epochs"] == 4
    for name, value in found.tensors.items():
        assert torch.equal(value, then[name]) == name.startswith("blocks.0."), name
        assert not torch.equal(value, fresh[name]), "all of them learn at first"


def test_the_first_part_is_that_of_a_training_of_all_blocks(tiny_run):
    """Epochs, rates and crops are those of the whole training, up to where it freezes."""
    part = asked(tiny_run, cached_views=1, freeze_at=0.99)
    whole = prepared(tiny_run, "one-a", options=tiny_run["options"] | {"epochs": 4, "min_epochs": 4, "max_epochs": 4})
    reports = []
    for ready in (part, whole):
        method, task = ready.method, ready.task(0)
        found = adapter_training.train_adapter(
            method.vit, method.new_adapter(task), task, method.options, method.runtime, None
        )
        reports.append(found)
    assert reports[0].report == reports[1].report, "nothing is left for the second part"
    assert all(torch.equal(reports[0].tensors[name], value) for name, value in reports[1].tensors.items())


def test_the_second_part_learns_what_lies_above_the_frozen_ones(tiny_run):
    """Split where the last adapter begins, the pass with frozen ones below is the whole pass."""
    ready = asked(tiny_run)
    vit, images = ready.method.vit, ready.task(0).images.plain(ready.task(0).rows[:4])
    adapters = Adapters(2, vit.width, 4, generator=torch.Generator().manual_seed(1), dropout=0.0)
    with torch.no_grad():
        for adapter in adapters.each():
            adapter.up.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    above = adapters.above(1)
    below = vit.forward_below(images, adapters.frozen_copy(), 1)
    assert not below.requires_grad
    torch.testing.assert_close(vit.forward_above(below, above), vit(images, adapters))
    assert [name.split(".")[1] for name, _ in above.named_parameters()] == ["1"] * 4
    assert not torch.equal(below, vit.forward_below(images, above)), "the frozen ones take part"


def test_a_stream_is_learned_and_continued(tiny_run):
    method = learn_all(asked(tiny_run, patch_drop_rate=0.5))
    assert method.kept.first_block == 0
    assert all(bool(adapter.up.weight.any()) for adapter in method.kept.each())


@pytest.mark.parametrize(("share", "epochs", "expected"), [(0.0, 20, 0), (0.2, 20, 4), (0.01, 20, 1), (0.9, 1, 1)])
def test_when_they_are_frozen(share, epochs, expected):
    options = AdapterTraining(adapter_blocks=1, freeze_at=share)
    assert options.frozen_epoch(epochs) == expected


@pytest.mark.parametrize("options", [{"adapter_blocks": 0}, {"adapter_blocks": 1, "cached_views": 0}])
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(OneaError, match="adapter_blocks must say how many"):
        OneAOptions(freeze_at=0.2, **options)
