# SPDX-License-Identifier: Apache-2.0
"""Fixed views: the blocks below the adapter run once for each view, and nothing else changes."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from support.methods import learn_all, prepared

from onea.learner import fixed_views
from onea.learner.fixed_views import FixedViews
from onea.vit.adapter import Adapters
from onea.vit.batching import padded_size

VIEWS = 3


def prepare_run(values: dict, method: str = "one-a-plus", **options):
    return prepared(values, method, options=values["options"] | options)


@contextmanager
def count_images(vit):
    """Count the images that pass the first and the last block."""
    passed = [0, 0]
    handles = []
    for place, block in ((0, vit.vit.blocks[0]), (1, vit.vit.blocks[-1])):

        def count(_, inputs, place=place):
            passed[place] += len(inputs[0])

        handles.append(block.norm1.register_forward_pre_hook(count))
    yield passed
    for handle in handles:
        handle.remove()


@pytest.fixture
def ready(tiny_run):
    return prepare_run(tiny_run, adapter_blocks=1)


@pytest.fixture
def adapters(ready):
    made = Adapters(2, ready.method.vit.width, 4, generator=torch.Generator(), dropout=0.0, first_block=1)
    with torch.no_grad():
        for adapter in made.adapters():
            adapter.up.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return made


def make_views(ready, adapters, dtype=torch.float32) -> FixedViews:
    task, method = ready.task(0), ready.method
    crops = [task.images.sample_crops(len(task), 0.3, torch.Generator().manual_seed(view)) for view in range(1, VIEWS)]
    return FixedViews(method.vit, method.runtime, task.images, task.rows, crops, 0.3, adapters, dtype)


def images_of(ready, positions, views):
    """The same views, computed image by image."""
    task, shown = ready.task(0), []
    crops = [task.images.sample_crops(len(task), 0.3, torch.Generator().manual_seed(view)) for view in range(1, VIEWS)]
    for position, view in zip(positions.tolist(), views.tolist(), strict=True):
        row = task.rows[[position]]
        shown.append(
            task.images.train_views(row, crops[view - 1][[position]], 0.3) if view else task.images.test_views(row)
        )
    return torch.cat(shown)


POSITIONS, OF_EACH = torch.tensor([4, 0, 17, 3, 4, 9]), torch.tensor([0, 2, 1, 0, 1, 2])


@pytest.mark.parametrize("room", [True, False])
def test_features_and_gradients_are_those_of_the_whole_network_on_the_same_views(ready, adapters, room, monkeypatch):
    if not room:
        monkeypatch.setattr(fixed_views, "MAX_HOST_BYTES", 0)
    vit, views = ready.method.vit, make_views(ready, adapters)
    for _ in range(2):  # computed, then kept
        mine = vit.forward_from_block(views.tokens(POSITIONS, OF_EACH), adapters)
        theirs = vit(images_of(ready, POSITIONS, OF_EACH), adapters)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            *(torch.autograd.grad(each.square().sum(), list(adapters.parameters())) for each in (mine, theirs)),
            rtol=1e-3,
            atol=1e-3,
        )
        everyone = torch.arange(len(views.rows))
        for view in range(VIEWS):
            expected = vit(images_of(ready, everyone, torch.full_like(everyone, view)), adapters)
            torch.testing.assert_close(views.features(view, adapters), expected, rtol=1e-4, atol=1e-4)


def test_the_cache_holds_tokens_in_half_precision(ready, adapters):
    whole, half = (
        make_views(ready, adapters, dtype).tokens(POSITIONS, OF_EACH) for dtype in (torch.float32, torch.float16)
    )
    assert half.dtype == torch.float16
    # Half a unit in the last of 11 bits; below the smallest normal number, 2^-14, half of 2^-24.
    torch.testing.assert_close(half.float(), whole, rtol=2**-11, atol=2**-25)


def test_large_tokens_stay_finite_in_half_precision(ready, adapters, monkeypatch):
    below = type(ready.method.vit).forward_to_block
    monkeypatch.setattr(type(ready.method.vit), "forward_to_block", lambda *args: 1e9 * below(*args))
    tokens = make_views(ready, adapters, torch.float16).tokens(POSITIONS, OF_EACH)
    assert tokens.isfinite().all()
    assert tokens.abs().max() == torch.finfo(torch.float16).max


def test_cached_views_pass_the_first_blocks_once(ready, adapters, monkeypatch):
    images = len(ready.task(0))
    with count_images(ready.method.vit) as passed:
        views = make_views(ready, adapters)
        for _ in range(2):
            for view in range(VIEWS):
                views.features(view, adapters)
            views.tokens(POSITIONS, OF_EACH)
    assert passed == [VIEWS * padded_size(images), 2 * VIEWS * images]
    size = VIEWS * images * ready.method.vit.tokens * ready.method.vit.width * 4
    for most, room in ((size, True), (size - 1, False)):
        monkeypatch.setattr(fixed_views, "MAX_HOST_BYTES", most)
        with count_images(ready.method.vit) as passed:
            views = make_views(ready, adapters)
            views.features(0, adapters), views.features(0, adapters)
        assert passed[0] == (1 if room else 2) * padded_size(images)


def test_every_epoch_uses_the_next_view_of_each_image(ready, adapters, monkeypatch):
    asked_for = []
    monkeypatch.setattr(FixedViews, "_look_up", lambda _, *args: asked_for.append(args) or args[0])
    task = ready.task(0)
    chosen = task.subset(torch.arange(len(task)) % 5 != 2)  # held-out images have views, too
    batches = make_views(ready, adapters).batches(chosen, 4, 2)
    seen: dict[int, list[int]] = {}
    for epoch in range(4):
        order = torch.Generator().manual_seed(epoch)
        labels = torch.cat([own for _, own in batches(epoch, order, lambda batch: batch)])
        positions, views = (torch.cat(each) for each in zip(*asked_for, strict=True))
        assert torch.equal(task.labels[positions], labels)
        assert torch.equal(task.rows[positions].sort().values, chosen.rows.sort().values)
        assert set(views[:8].tolist()) == {0, 1}, "a batch or two hold all views"
        for position, view in zip(positions.tolist(), views.tolist(), strict=True):
            seen.setdefault(position, []).append(view)
        asked_for.clear()
    assert all(views in ([0, 1, 0, 1], [1, 0, 1, 0]) for views in seen.values())


def test_adapters_in_all_blocks_use_new_crops_in_every_epoch(tiny_run):
    plain = learn_all(prepare_run(tiny_run)).state_dict()
    for options in ({"adapter_blocks": 2, "cached_views": 0}, {"cached_views": 7}):
        other = learn_all(prepare_run(tiny_run, **options)).state_dict()
        assert plain.keys() == other.keys()
        assert all(torch.equal(plain[name], other[name]) for name in plain)


@pytest.mark.parametrize("views", [1, 3])
def test_guard_drift_map_and_statistics_use_the_cached_views(tiny_run, views):
    ready = prepare_run(tiny_run, adapter_blocks=1, cached_views=2, views=views, guard=0.3)
    task = ready.task(0)
    with count_images(ready.method.vit) as passed:
        report = ready.method.learn(task)
    assert report["trained"] or report["guard"]
    held_out = report["guard"]["images"]
    looks = 2 + (views - 1)  # before, after, and further views
    assert passed == [
        max(2, views) * padded_size(len(task)),
        looks * len(task) + report["epochs"] * (len(task) - held_out),
    ]


def test_a_task_without_training_caches_no_tokens(tiny_run, monkeypatch):
    ready = prepare_run(tiny_run, adapter_blocks=1, single_class="skip", views=2)
    ready.method.learn(ready.task(0))
    monkeypatch.setattr(FixedViews, "__init__", None)
    task = ready.task(1)
    with count_images(ready.method.vit) as passed:
        assert ready.method.learn(task) == {"trained": False}
    assert passed == [2 * padded_size(len(task))] * 2, "each image as it is and in a crop"


@pytest.mark.parametrize("store", ["auto", "exact"])
def test_sampled_crops_are_those_of_training_batches(tiny_run, store):
    task = prepared(tiny_run, store=store).task(0)
    batches = task.images.train_batches(task.rows, 5, 0.3, torch.Generator().manual_seed(2))
    drawn = task.images.sample_crops(len(task), 0.3, torch.Generator().manual_seed(2))
    torch.testing.assert_close(task.images.train_views(task.rows, drawn, 0.3), torch.cat(list(batches)))


def test_files_are_read_once_for_each_view(tiny_run, monkeypatch):
    from onea.data.image_storage import ExactImages

    ready = prepared(tiny_run, "one-a-plus", store="exact", options=tiny_run["options"] | {"adapter_blocks": 1})
    read = []
    original = ExactImages._read
    monkeypatch.setattr(ExactImages, "_read", lambda images, row: read.append(row) or original(images, row))
    task = ready.task(0)
    report = ready.method.learn(task)
    assert report["epochs"] > 1
    assert len(read) == ready.method.options.cached_views * padded_size(len(task))
