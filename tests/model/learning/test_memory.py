# SPDX-License-Identifier: Apache-2.0
"""Models that store small copies of photos: which ones, what they train, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models import class_folders, tiny_model

import onea
from onea.data import small_copies
from onea.errors import OneaError
from onea.model.exemplars import Copies, count_bytes, count_images
from onea.model.learning.fingerprints import compute_fingerprints
from onea.model.learning.memory_report import memory_lines

A, B, C, D, E, F = (f"class{number:02d}" for number in range(6))
TRIGGER = {"options": {"trigger": 0.3}}


@pytest.fixture(scope="module")
def files(tiny_images):
    return class_folders(tiny_images / "train")


def teach(model, files, *names, last=6, **options):
    chosen = [(file, name) for name in names for file in files[name][:last]]
    return model.learn([file for file, _ in chosen], [name for _, name in chosen], **options)


def stored(model):
    return {name: sum(file.images for file in kept) for name, kept in model.snapshot().state.exemplars.items()}


def taught_in_updates(vit, files, memory, *updates, **params):
    model = tiny_model(vit, memory=memory, **TRIGGER | params)
    for names in updates:
        teach(model, files, *names)
    return model


UPDATES = (A, B, C), (D,), (E,), (F,)


def test_without_memory_nothing_is_stored(tiny_vit, files):
    model = taught_in_updates(tiny_vit, files, 0, *UPDATES)
    assert stored(model) == {}
    assert [update["trained"] for update in model.history] == [True, False, False, False]
    assert [update["replayed"] for update in model.history] == [0, 0, 0, 0]


def test_an_update_trains_as_soon_as_enough_classes_wait(tiny_vit, files):
    """One of four classes waits, then two of five, which are more than 30 %; then one of six."""
    model = taught_in_updates(tiny_vit, files, 3, *UPDATES)
    assert [update["trained"] for update in model.history] == [True, False, True, False]
    assert [update["replayed"] for update in model.history] == [0, 0, 3 * 4, 0]
    assert stored(model) == dict.fromkeys((A, B, C, D, E, F), 3)
    assert set(model.snapshot().state.adapter_images) == {A, B, C, D, E}


def test_pending_copies_are_deleted_by_the_training(tiny_vit, files):
    model = taught_in_updates(tiny_vit, files, "pending", *UPDATES[:2])
    assert stored(model) == {D: 6}
    assert [update["trained"] for update in teach(model, files, E).history] == [True, False, True]
    assert model.history[-1]["replayed"] == 6
    assert stored(model) == {}


def test_classes_taught_one_by_one_train_with_memory(tiny_vit, files):
    alone = taught_in_updates(tiny_vit, files, 0, (A,), (B,), (C,))
    assert not any(update["trained"] for update in alone.history)
    model = taught_in_updates(tiny_vit, files, 4, (A,), (B,), (C,))
    assert [update["trained"] for update in model.history] == [False, True, True]


def test_statistics_and_history_count_photos_once(tiny_vit, files):
    model = taught_in_updates(tiny_vit, files, 4, *UPDATES)
    assert [update["images"] for update in model.history] == [18, 6, 6, 6]
    assert [update["repeated"] for update in model.history] == [0, 0, 0, 0]
    assert [update["classes"] for update in model.history] == [[A, B, C], [D], [E], [F]]
    assert model.snapshot().state.images == [6] * 6
    assert len(model.snapshot().state.fingerprints) == 36


def test_the_adapter_counts_a_copy_of_a_trained_class_once(tiny_vit, files):
    model = taught_in_updates(tiny_vit, files, 4, *UPDATES[:2])
    before = dict(model.snapshot().state.adapter_images)
    teach(model, files, E)
    after = model.snapshot().state.adapter_images
    assert {name: after[name] for name in (A, B, C)} == before


def test_an_update_that_does_not_train_equals_one_without_memory(tiny_vit, files):
    without, with_memory = (taught_in_updates(tiny_vit, files, memory, *UPDATES[:2]) for memory in (0, 3))
    for name, value in without.snapshot().state.statistics.state_dict().items():
        assert torch.equal(value, with_memory.snapshot().state.statistics.state_dict()[name]), name
    for name, tensor in without.snapshot().state.adapter.items():
        assert torch.equal(tensor, with_memory.snapshot().state.adapter[name])


def test_more_photos_of_a_class_share_its_places(tiny_vit, files):
    model = tiny_model(tiny_vit, memory=4)
    teach(model, files, A, B, last=3)
    assert stored(model) == {A: 3, B: 3}
    teach(model, files, A, B)  # three of six are new
    assert stored(model) == {A: 4, B: 4}
    known = set(map(tuple, model.snapshot().state.fingerprints.tolist()))
    for kept in model.snapshot().state.exemplars.values():
        rows = [tuple(row) for file in kept for row in file.load().fingerprints.tolist()]
        assert len(set(rows)) == len(rows)
        assert known.issuperset(rows)


def test_memory_can_be_lowered_and_switched_off(tiny_vit, files):
    model = taught_in_updates(tiny_vit, files, 5, (A, B, C))
    model.set_params(memory=2)
    assert stored(teach(model, files, D)) == dict.fromkeys((A, B, C, D), 2)
    model.set_params(memory=0)
    assert stored(teach(model, files, E)) == {}


def test_the_megabytes_are_bounded(tiny_vit, files, monkeypatch):
    model = tiny_model(tiny_vit, memory=6, image_size=280)
    teach(model, files, A, B, C)
    full = count_bytes(model.snapshot().state.exemplars)
    limit = full // 2
    monkeypatch.setattr("onea.model.learning.replay.MEGABYTE", limit)
    model.set_params(memory_mb=1)
    teach(model, files, D)
    exemplars = model.snapshot().state.exemplars
    assert 0 < count_bytes(exemplars) <= limit
    assert len({file.images for kept in exemplars.values() for file in kept}) == 1  # the same number of each class


def test_an_update_with_later_leaves_the_training_to_refresh(tiny_vit, files):
    model = tiny_model(tiny_vit, memory=4)
    teach(model, files, A, B, C, later=True)
    assert not model.history[-1]["trained"]
    assert any("it is due now" in line for line in memory_lines(model.snapshot().state, 4))
    report = model.refresh()
    assert (report.photos, report.copies, report.other_photos) == (0, 12, 0)
    if report.kept:
        assert model.history[-1]["kind"] == "refresh"
        assert set(model.snapshot().state.adapter_images) == {A, B, C}
    else:
        assert model.history[-1]["kind"] == "learn"


def test_refresh_recognises_photos_that_were_taught(tiny_vit, tiny_images, files, tmp_path):
    model = taught_in_updates(tiny_vit, files, 0, *UPDATES)
    before = model.snapshot().state
    report = model.refresh(tiny_images)  # with the test photos, which were never taught
    assert (report.photos, report.copies, report.other_photos) == (36, 0, 18)
    state = model.snapshot().state
    assert state.images == before.images
    assert state.classes == before.classes
    assert torch.equal(state.fingerprints, before.fingerprints)
    if report.kept:
        assert set(state.adapter_images) == set(state.classes)
        assert model.undo().snapshot().state is before


def test_refresh_with_copies_alone_works_with_a_background(tiny_vit, files):
    model = taught_in_updates(tiny_vit, files, 3, (A, B, C))
    model.learn_background(files[F])
    assert model.refresh().copies == 9


def test_refresh_keeps_the_earlier_version_if_it_is_better(tiny_vit, files, monkeypatch):
    model = taught_in_updates(tiny_vit, files, 6, *UPDATES)
    monkeypatch.setattr("onea.model.learning.refresh._accuracies", lambda update: (0.9, 0.8))
    before = model.snapshot().state
    report = model.refresh()
    assert (report.kept, report.before, report.after) == (False, 0.9, 0.8)
    assert model.snapshot().state is before


def test_refresh_needs_photos_of_two_classes(tiny_vit, tiny_images, files):
    model = taught_in_updates(tiny_vit, files, 0, *UPDATES)
    with pytest.raises(OneaError, match="photos of 0 classes to train on"):
        model.refresh()
    with pytest.raises(OneaError, match="photos of 1 class to train on"):
        model.refresh(tiny_images / "train" / A)
    with pytest.raises(OneaError, match="photos of 0 classes"):
        model.refresh(tiny_images / "test")
    assert model.version == 4


def test_the_preset_that_never_trains_stores_nothing(tiny_vit, files):
    with pytest.raises(OneaError, match="preset fast trains nothing"):
        teach(onea.OneA(backbone=tiny_vit, preset="fast", memory=5, threads=1), files, A, B)
    model = teach(onea.OneA(backbone=tiny_vit, preset="fast", threads=1), files, A, B)
    with pytest.raises(OneaError, match="preset fast, which trains nothing"):
        model.refresh()


@pytest.mark.parametrize("memory", [-1, "some", 2.5, True])
def test_an_invalid_memory_is_refused(tiny_vit, files, memory):
    with pytest.raises(OneaError, match="memory is"):
        teach(tiny_model(tiny_vit, memory=memory), files, A, B)


def test_forgetting_and_renaming_apply_to_the_copies(tiny_vit, files):
    model = taught_in_updates(tiny_vit, files, 3, (A, B, C))
    model.forget(A).rename(B, "pear")
    assert stored(model) == {"pear": 3, C: 3}
    model.rename("pear", C, merge=True)
    assert stored(model) == {C: 6}
    assert stored(teach(model, files, D)) == {C: 3, D: 3}


def test_series_do_not_fill_the_places(tiny_vit):
    """Twenty nearly equal photos and four others of a class: the four others are stored."""
    rng = np.random.default_rng(0)
    series = rng.integers(0, 255, (1, 40, 40, 3)) + rng.integers(0, 3, (20, 40, 40, 3))
    others = rng.integers(0, 255, (4, 40, 40, 3))
    photos = np.concatenate([series, others]).clip(0, 255).astype(np.uint8)
    more = rng.integers(0, 255, (40, 40, 40, 3), dtype=np.uint8)
    model = tiny_model(tiny_vit, memory=6, held_out=0.0)
    model.learn(np.concatenate([photos, more]), ["a"] * 24 + ["b"] * 20 + ["c"] * 20)
    kept = model.snapshot().state.exemplars["a"][0].load().fingerprints
    wanted = compute_fingerprints(model.snapshot().read(list(others.astype(np.uint8))).pixels)
    found = {tuple(row) for row in kept.tolist()}
    assert sum(tuple(row) in found for row in wanted.tolist()) == 4


def test_copies_are_small_and_close_to_the_photos():
    rng = np.random.default_rng(0)
    smooth = rng.integers(0, 255, (10, 3, 20, 20), dtype=np.uint8).repeat(8, 2).repeat(8, 3)
    copies = small_copies.encode(smooth)
    assert sum(map(len, copies)) <= 10 * small_copies.max_bytes(160) == 60_000
    decoded = small_copies.decode(copies, 160)
    assert np.abs(decoded.astype(int) - smooth).mean() < 12
    noise = rng.integers(0, 255, (4, 3, 256, 256), dtype=np.uint8)  # the worst case
    assert sum(map(len, small_copies.encode(noise))) <= 4 * 11_001


def test_a_file_of_copies_is_checked():
    pixels = np.zeros((3, 3, 32, 32), np.uint8)
    copies = Copies.encode(pixels, torch.arange(6).reshape(3, 2))
    content = copies.to_bytes()
    assert Copies.from_bytes(content).contents == copies.contents
    assert torch.equal(Copies.from_bytes(content).fingerprints, copies.fingerprints)
    for damaged in (b"", content[:-1], content[:50]):
        with pytest.raises(ValueError, match="copies"):
            Copies.from_bytes(damaged)
    with pytest.raises(ValueError, match="32 x 32"):
        small_copies.decode(copies.contents, 16)
    with pytest.raises(ValueError, match="not a WebP image"):
        small_copies.decode([b"RIFF????WEBPVP8 "], 32)


def test_totals():
    assert (count_images({}), count_bytes({})) == (0, 0)
