# SPDX-License-Identifier: Apache-2.0
"""Adapters of the first blocks that are frozen during a task, while the others are trained further."""

from __future__ import annotations

import pytest
import torch
from support.methods import learn_all, prepared
from support.models import tiny_model

import onea
from onea import schedules
from onea.errors import OneaError
from onea.learner import adapter_training, optimisation
from onea.learner.adapter_training import AdapterTraining
from onea.learner.fixed_views import FixedViews
from onea.learner.one_a import OneAOptions
from onea.vit.adapter import Adapters
from onea.vit.hooks import NO_HOOKS

FROZEN = {"adapter_blocks": 1, "cached_views": 2, "freeze_at": 0.5, "epochs": 4, "min_epochs": 4, "max_epochs": 4}


def prepare_run(values: dict, **options):
    return prepared(values, "one-a", options=values["options"] | FROZEN | options)


def test_first_blocks_are_frozen_and_the_last_one_is_trained(tiny_run, monkeypatch):
    ready, drawn, draw = prepare_run(tiny_run), [], FixedViews.sample
    monkeypatch.setattr(FixedViews, "sample", lambda *args: drawn.append(args[-2:]) or draw(*args))
    task = ready.task(0)
    fresh = ready.method.learner.new_adapters(task.seed, task.index).state_dict()
    found = adapter_training.train_adapter(
        ready.method.vit,
        ready.method.learner.new_adapters(task.seed, task.index),
        task,
        ready.method.options,
        ready.method.runtime,
        None,
    )
    ((below, block),) = drawn
    then = below.state_dict()
    assert block == 1
    assert found.report["epochs"] == 4
    for name, value in found.tensors.items():
        assert torch.equal(value, then[name]) == name.startswith("blocks.0."), name
        assert not torch.equal(value, fresh[name]), "all of them learn at first"


def test_without_a_second_part_all_blocks_are_trained(tiny_run, monkeypatch):
    monkeypatch.setattr(FixedViews, "sample", lambda *args: pytest.fail("views are not needed"))
    part = prepare_run(tiny_run, cached_views=1, freeze_at=0.99)
    whole = prepared(tiny_run, "one-a", options=tiny_run["options"] | {"epochs": 4, "min_epochs": 4, "max_epochs": 4})
    reports = []
    for ready in (part, whole):
        method, task = ready.method, ready.task(0)
        found = adapter_training.train_adapter(
            method.vit,
            method.learner.new_adapters(task.seed, task.index),
            task,
            method.options,
            method.runtime,
            None,
        )
        reports.append(found)
    assert reports[0].report == reports[1].report
    assert all(torch.equal(reports[0].tensors[name], value) for name, value in reports[1].tensors.items())


def test_the_second_part_continues_the_first(tiny_run, monkeypatch):
    """Learning rates are those of the whole training; seeds are new, patches are dropped, and early stopping is on."""
    ready = prepare_run(tiny_run, patch_drop_rate=0.5, patience=9)
    parts, shares, fit, set_rates = [], [], adapter_training.train_with_local_head, optimisation._set_learning_rates
    monkeypatch.setattr(
        adapter_training,
        "train_with_local_head",
        lambda *args, **options: parts.append(options) or fit(*args, **options),
    )
    monkeypatch.setattr(optimisation, "_set_learning_rates", lambda *args: shares.append(args[1]) or set_rates(*args))
    task, method = ready.task(0), ready.method
    adapter_training.train_adapter(
        method.vit,
        method.learner.new_adapters(task.seed, task.index),
        task,
        method.options,
        method.runtime,
        None,
        held_out=task,
    )
    assert shares == [schedules.cosine(epoch, 4) for epoch in range(4)]
    first, second = parts
    assert (first["epochs"], second["epochs"]) == (range(2), range(2, 4))
    assert (first.get("patch_sampler"), first.get("should_stop"), first.get("purpose", "")) == (None, None, "")
    assert second["patch_sampler"]
    assert second["should_stop"]
    assert second["purpose"]


def test_tokens_of_the_second_part_include_the_frozen_adapters(tiny_run, monkeypatch):
    ready, made, draw = prepare_run(tiny_run, learning_rate=0.5), [], FixedViews.sample
    monkeypatch.setattr(FixedViews, "sample", lambda *args: made.append((draw(*args), args[5])) or made[-1][0])
    task, method = ready.task(0), ready.method
    adapter_training.train_adapter(
        method.vit, method.learner.new_adapters(task.seed, task.index), task, method.options, method.runtime, None
    )
    ((views, below),) = made
    found, images = views.test_views(task.rows), task.images.test_views(task.rows)
    with torch.no_grad():
        expected, blank = (method.vit.forward_to_block(images, hooks, 1) for hooks in (below, NO_HOOKS))
    assert float((found - expected).norm()) < 0.1 * float((blank - expected).norm())


def test_split_passes_equal_the_whole_pass(tiny_run):
    """A pass split at the last adapter, with frozen ones below, equals the whole pass."""
    ready = prepare_run(tiny_run)
    vit, images = ready.method.vit, ready.task(0).images.test_views(ready.task(0).rows[:4])
    adapters = Adapters(2, vit.width, 4, generator=torch.Generator().manual_seed(1), dropout=0.0)
    with torch.no_grad():
        for adapter in adapters.adapters():
            adapter.up.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    above = adapters.from_block(1)
    below = vit.forward_to_block(images, adapters.frozen_copy(), 1)
    assert not below.requires_grad
    torch.testing.assert_close(vit.forward_from_block(below, above), vit(images, adapters))
    assert [name.split(".")[1] for name, _ in above.named_parameters()] == ["1"] * 4
    assert above.scale == adapters.scale


def test_a_stream_is_learned_and_continued(tiny_run):
    whole = learn_all(prepare_run(tiny_run, patch_drop_rate=0.5))
    assert whole.adapter.first_block == 0
    assert all(bool(adapter.up.weight.any()) for adapter in whole.adapter.adapters())
    first, second = (prepare_run(tiny_run, patch_drop_rate=0.5) for _ in range(2))
    learn_all(first, [0, 1])
    second.method.load_state_dict({name: value.clone() for name, value in first.method.state_dict().items()})
    learn_all(second, [2])
    found = second.method.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in whole.state_dict().items())


def test_a_model_is_saved_and_trained_further(tiny_vit, tiny_images, tmp_path):
    options = {"adapter_blocks": 1, "freeze_at": 0.5}
    model = tiny_model(tiny_vit, options=options, epochs=2).learn(tiny_images / "train")
    model.save(tmp_path / "shop.onea")
    loaded = onea.load(tmp_path / "shop.onea", device="cpu", threads=1)
    assert all(torch.equal(value, loaded.snapshot().state.adapter[name]) for name, value in adapter_of(model).items())
    assert {name.split(".")[1] for name in adapter_of(model)} == {"0", "1"}
    assert loaded.learn(tiny_images / "test").version == 2


def adapter_of(model) -> dict[str, torch.Tensor]:
    return dict(model.snapshot().state.adapter)


@pytest.mark.parametrize(("share", "epochs", "expected"), [(0.0, 20, 0), (0.2, 20, 4), (0.01, 20, 1), (0.9, 1, 1)])
def test_freeze_epoch(share, epochs, expected):
    options = AdapterTraining(adapter_blocks=1, freeze_at=share)
    assert options.freeze_epoch(epochs) == expected


@pytest.mark.parametrize("options", [{"adapter_blocks": 0}, {"adapter_blocks": 1, "cached_views": 0}])
def test_invalid_options_are_refused(options):
    with pytest.raises(OneaError, match="set adapter_blocks to the number"):
        OneAOptions(freeze_at=0.2, **options)
