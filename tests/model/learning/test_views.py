# SPDX-License-Identifier: Apache-2.0
"""The cost of an update: how often its images pass through the network, with and without cached views."""

from __future__ import annotations

import pytest
import torch
from support.models import all_blocks_model, class_folders
from support.tiny import write_tiny_images, write_tiny_vit

from onea.learner import fixed_views
from onea.learner.fixed_views import FixedViews
from onea.model.engine import Engine
from onea.model.estimator import OneA
from onea.model.learning.images import read_labelled
from onea.research.runs.evaluation import count_flops
from onea.vit.batching import padded_size
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import NO_HOOKS

EPOCHS, VIEWS = 2, 3  # of these models
LAST = {"adapter_blocks": 1, "min_epochs": EPOCHS, "max_epochs": EPOCHS}


class CountingViT(FrozenViT):
    """Counts the images that pass through each block."""

    def _block(self, index, x, hooks, rotation):
        passed = self.__dict__.setdefault("passed", [0] * self.depth)
        passed[index] += len(x)
        return super()._block(index, x, hooks, rotation)


@pytest.fixture
def count(monkeypatch):
    """A function that returns how many images pass through each block during an update."""
    started = Engine.__init__

    def counting(engine, *given, **named):
        started(engine, *given, **named)
        engine.vit.__class__ = CountingViT

    monkeypatch.setattr(Engine, "__init__", counting)

    def learned(model, files, names) -> list[int]:
        model._load_engine().vit.__dict__["passed"] = [0, 0]
        model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])
        return model._load_engine().vit.passed

    return learned


@pytest.fixture(scope="module")
def files(tiny_images):
    return class_folders(tiny_images / "train")


FIRST = [f"class{number:02d}" for number in range(4)]


@pytest.mark.parametrize("options", [{}, LAST])
@pytest.mark.parametrize("views", [1, VIEWS])
def test_an_update_without_training_computes_each_view_once(tiny_vit, files, count, views, options):
    model = all_blocks_model(tiny_vit, views=views, options=options)
    count(model, files, FIRST)
    passed = count(model, files, ["class04"])
    assert not model.history[-1]["trained"]
    assert passed == [views * len(files["class04"])] * 2


def test_training_computes_the_lower_blocks_of_each_cached_view_once(tiny_vit, files, count):
    model = all_blocks_model(tiny_vit, options=LAST | {"cached_views": 4})
    passed = count(model, files, FIRST)
    update = model.history[-1]
    assert update["epochs"] == EPOCHS
    images = update["images"]
    passes = 2 + (VIEWS - 1)  # before and after training, and the other views of the statistics
    assert passed == [4 * padded_size(images), passes * images + EPOCHS * (images - update["held_out"])]


@pytest.mark.parametrize("options", [{}, {"adapter_blocks": 1, "cached_views": 4}])
def test_classes_with_enough_images_use_no_crops(tiny_vit, files, count, options):
    images = len(files[FIRST[0]])
    model = all_blocks_model(tiny_vit, options=LAST | {"adapter_blocks": 0, "enough_images": images} | options)
    passed = count(model, files, FIRST)
    update, total = model.history[-1], images * len(FIRST)
    seen = 2 * total + EPOCHS * (total - update["held_out"])  # before and after, and in training
    assert update["trained"]
    assert passed == [padded_size(total) if options else seen, seen]

    state = model.snapshot().state
    assert state.images == [images] * len(FIRST)
    assert state.statistics.counts.tolist() == [VIEWS * images] * len(FIRST), (
        "a photo has the same weight as with crops"
    )
    assert state.held_out_features.shape[1] == VIEWS
    passed = count(model, {"class04": files["class04"][: images - 1]}, ["class04"])
    assert passed[1] == VIEWS * (images - 1), "with one photo less, crops are used"
    assert model.snapshot().state.images == [images] * len(FIRST) + [images - 1]


@pytest.mark.parametrize("cached", [2, 5])
def test_training_and_statistics_use_the_same_views(tiny_vit, files, monkeypatch, cached):
    made, crops = [], []
    start, sample_crops = FixedViews.__init__, Engine.sample_crops
    monkeypatch.setattr(
        FixedViews, "__init__", lambda views, *given, **named: made.append(given) or start(views, *given, **named)
    )
    monkeypatch.setattr(Engine, "sample_crops", lambda *args: crops.append(sample_crops(*args)) or crops[-1])
    model = all_blocks_model(tiny_vit, options=LAST | {"cached_views": cached})
    model.learn([file for name in FIRST for file in files[name]], [name for name in FIRST for _ in files[name]])
    (given,) = made
    assert len(crops) == len(given[4]) == max(cached, VIEWS) - 1, "no crop is sampled twice or unused"
    assert all(torch.equal(*pair) for pair in zip(crops, given[4], strict=True))


def test_results_do_not_depend_on_memory(tiny_vit, files, monkeypatch):
    def taught():
        model = all_blocks_model(
            tiny_vit, options=LAST, held_out=0.0
        )  # no guard, whose threshold rounding could decide
        model.learn([file for name in FIRST for file in files[name]], [name for name in FIRST for _ in files[name]])
        return model.snapshot().state.adapter

    kept, again = taught(), taught()
    assert all(torch.equal(again[name], value) for name, value in kept.items())
    monkeypatch.setattr(fixed_views, "MAX_HOST_BYTES", 0)
    computed = taught()
    assert not all(torch.equal(computed[name], value) for name, value in kept.items()), "cached tokens are rounded"
    # Rounded to 11 bits: after a few steps, weights differ by less than a hundredth of the largest.
    for name, value in kept.items():
        torch.testing.assert_close(computed[name], value, rtol=0, atol=0.01 * max(1e-3, float(value.abs().max())))


def test_training_in_low_precision_also_computes_views_in_it(tiny_vit, files, count, monkeypatch):
    model, precisions = all_blocks_model(tiny_vit, options=LAST | {"cached_views": VIEWS}, precision="bf16"), []
    below = CountingViT.to_block_eager

    def noted(vit, *given):
        precisions.append(vit.matrix_dtype)
        return below(vit, *given)

    monkeypatch.setattr(CountingViT, "to_block_eager", noted)
    passed = count(model, files, FIRST)
    update = model.history[-1]
    assert update["epochs"] == EPOCHS
    assert precisions == [torch.bfloat16] * VIEWS
    assert passed == [0, 0], "the float32 network is not used"


@pytest.mark.parametrize("new", [False, True])
def test_all_views_are_computed_in_the_precision_of_the_training(tiny_vit, files, monkeypatch, new):
    model, precisions = all_blocks_model(tiny_vit, precision="bf16"), []
    forward = FrozenViT.forward_eager

    def noted(vit, *given):
        if not torch.is_grad_enabled():
            precisions.append((vit.matrix_dtype, torch.is_autocast_enabled("cpu")))
        return forward(vit, *given)

    def learn(names):
        model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])

    learn(FIRST)
    assert model.history[-1]["trained"]
    monkeypatch.setattr(FrozenViT, "forward_eager", noted)
    learn(["class04"] if new else ["class04", *FIRST])
    assert model.history[-1]["trained"] is not new
    assert precisions == [(torch.bfloat16, True)] * (VIEWS if new else VIEWS + 1)


def test_the_default_update_costs_little_more_than_feature_extraction(tmp_path):
    """Operations, which do not depend on the load: 4.45 forward passes of a network shaped like the default."""
    write_tiny_vit(tmp_path / "vit.safetensors", depth=12, size=112)
    write_tiny_images(tmp_path / "images", classes=20, train=4, test=1, size=128)
    photos = tmp_path / "images" / "train"
    # the rank has the share of the width that it has in the default network
    model = OneA(backbone=str(tmp_path / "vit.safetensors"), options={"rank": 11}, precision="fp32", threads=1)
    engine = model._load_engine()
    pixels = read_labelled(photos, None, engine.side).pixels
    forward_pass = count_flops(lambda: engine.features(pixels, NO_HOOKS))
    learn = count_flops(lambda: model.learn(photos))
    assert model.history[-1]["trained"]
    assert learn < 4.6 * forward_pass
