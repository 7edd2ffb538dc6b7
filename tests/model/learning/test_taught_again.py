# SPDX-License-Identifier: Apache-2.0
"""A class that is taught again is the same class: its weight in the merge, and its counts in model folders."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import class_folders, resealed
from support.models import tiny_model as made

import onea
from onea.errors import OneaError
from onea.merging.operator import Sizes
from onea.model.storage import folder as folders

A, B, C, D, E, F = (f"class{number:02d}" for number in range(6))
IMAGES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 10**6), min_size=1)


@given(old=IMAGES, new=IMAGES)
def test_every_class_and_every_image_counts_once(old, new):
    sizes = Sizes.from_counts(old, new)
    assert sizes.accumulated_classes + sizes.new_classes == pytest.approx(len(old.keys() | new.keys()))
    assert sizes.accumulated_samples + sizes.new_samples == sum(old.values()) + sum(new.values())
    swapped = Sizes.from_counts(new, old)
    assert (swapped.new_classes, swapped.new_samples) == (sizes.accumulated_classes, sizes.accumulated_samples)


@given(old=st.integers(1, 1000), new=st.integers(1, 1000))
def test_different_classes_count_as_in_the_paper(old, new):
    """Exactly, so nothing changes for a model that is never taught a class twice."""
    sizes = Sizes.from_counts({f"old {n}": n + 1 for n in range(old)}, {f"new {n}": n + 3 for n in range(new)})
    assert (sizes.accumulated_classes, sizes.new_classes) == (old, new)
    assert sizes.new_share == new / (old + new)


@given(images=IMAGES, times=st.integers(1, 20))
def test_repeated_updates_have_equal_weights(images, times):
    """The newest of k updates has the weight 1 / k, so the adapter is the mean of all k."""
    before = {name: times * count for name, count in images.items()}
    assert Sizes.from_counts(before, images).new_share == pytest.approx(1 / (times + 1))


def tiny_model(vit, **params):
    """A model that merges by One-A, which reports its shares, and trains on a quarter of the classes or more."""
    return made(vit, **{"options": {"merge": "one-a", "min_share": 0.25}} | params)


@pytest.fixture(scope="module")
def files(tiny_images):
    return class_folders(tiny_images / "train")


def teach(model, files, *names, first=0, last=6):
    """Teach some images of each class; of four or more, one is held out of training."""
    chosen = [(file, name) for name in names for file in files[name][first:last]]
    return model.learn([file for file, _ in chosen], [name for _, name in chosen])


def new_share(model):
    """The weight of the new adapter in the last merge."""
    merge = model.history[-1]["merge"]
    return merge["align_share"] if merge["base"] == "accumulated" else 1 - merge["align_share"]


def merged(model):
    return dict(model.snapshot().state.adapter_images)


def test_two_new_classes_count_as_much_as_two_that_were_taught_three_times(tiny_vit, files):
    model = tiny_model(tiny_vit)
    for _ in range(3):
        teach(model, files, A, B)
    assert merged(model) == {A: 15, B: 15}
    teach(model, files, C, D)
    assert new_share(model) == 0.5
    assert merged(model) == {A: 15, B: 15, C: 5, D: 5}


def test_new_classes_train_the_adapter_after_many_repetitions(tiny_vit, files):
    """Small backbones train on updates of a quarter of the classes or more: two of four are."""
    model = tiny_model(tiny_vit, epochs=1)
    for _ in range(7):
        teach(model, files, A, B)
    assert [update["trained"] for update in model.history] == 4 * [True] + 3 * [False]  # shares of 1, 1/2, 1/3, 1/4
    assert merged(model) == {A: 20, B: 20}
    assert teach(model, files, C, D).history[-1]["trained"]


def test_known_classes_are_weighted_by_their_images(tiny_vit, files):
    model = teach(tiny_model(tiny_vit), files, A, B)
    teach(model, files, A, B, last=2)  # two more of each, after five
    assert new_share(model) == pytest.approx(2 / 7)
    assert merged(model) == {A: 7, B: 7}


def test_an_update_of_known_and_new_classes(tiny_vit, files):
    """The new class counts as one, the known one as a half, since half of its images came earlier."""
    model = teach(teach(tiny_model(tiny_vit), files, A, B, C), files, A, D)
    assert new_share(model) == pytest.approx(1.5 / 4)
    assert merged(model) == {A: 10, B: 5, C: 5, D: 5}


def test_a_class_that_no_adapter_was_trained_on_counts_as_new(tiny_vit, files):
    """Taught alone, it only had statistics."""
    model = teach(teach(tiny_model(tiny_vit), files, A, B), files, C)
    assert merged(model) == {A: 5, B: 5}
    teach(model, files, C, D)
    assert new_share(model) == 0.5
    assert merged(model) == {A: 5, B: 5, C: 5, D: 5}


def test_a_forgotten_class_taught_again_is_the_same_class(tiny_vit, files):
    """The adapter still contains what it learned from the class."""
    model = teach(tiny_model(tiny_vit), files, A, B, C).forget(A)
    assert merged(model) == {A: 5, B: 5, C: 5}
    teach(model, files, A, D)
    assert new_share(model) == pytest.approx(1.5 / 4)
    assert merged(model) == {A: 10, B: 5, C: 5, D: 5}


def test_familiarity_after_forgetting_all_and_teaching_again(tiny_vit, files):
    """The scatter of forgotten photos must not remain, or all other photos would be too far from the class."""
    model = teach(tiny_model(tiny_vit, views=1), files, A)  # one class trains no adapter
    asked = [*files[A], *files[B]]
    before = [model.threshold_, *model.familiarity(asked)]
    teach(model.forget(A), files, A)
    assert [model.threshold_, *model.familiarity(asked)] == pytest.approx(before, rel=1e-4)


def test_a_renamed_class_is_the_same_class(tiny_vit, files):
    model = teach(tiny_model(tiny_vit), files, A, B, C).rename(A, "apple")
    assert merged(model) == {"apple": 5, B: 5, C: 5}
    teach(model, {**files, "apple": files[A]}, "apple", D)
    assert new_share(model) == pytest.approx(1.5 / 4)
    teach(model, files, A, E)  # a class with the old name is another class now
    assert new_share(model) == pytest.approx(2 / 6)
    assert merged(model) == {"apple": 10, B: 5, C: 5, D: 5, A: 5, E: 5}


def test_a_class_renamed_to_a_forgotten_one_inherits_its_count(tiny_vit, files):
    model = teach(tiny_model(tiny_vit), files, A, B, C).forget(A).rename(B, A)
    assert merged(model) == {A: 10, C: 5}


def test_undo_restores_the_counts(tiny_vit, files):
    model = teach(tiny_model(tiny_vit), files, A, B)
    teach(model, files, A, C).rename(A, "apple").undo().undo()
    assert merged(model) == {A: 5, B: 5}
    assert new_share(teach(model, files, A, C)) == pytest.approx(1.5 / 3)


def test_counts_are_saved(tiny_vit, files, tmp_path):
    path = teach(teach(tiny_model(tiny_vit), files, A, B, C), files, A, B).save(tmp_path / "m.onea")
    model = onea.load(path, threads=1, precision="fp32")
    assert merged(model) == {A: 10, B: 10, C: 5}
    teach(model, files, A, D)
    assert new_share(model) == pytest.approx((1 / 3 + 1) / 4)
    folders.change(path, lambda state, version, date: state.rename(A, "apple", version, date))
    assert merged(onea.load(path)) == {"apple": 10, B: 10, C: 5}
    folders.undo(path)
    assert merged(onea.load(path)) == {A: 10, B: 10, C: 5}


def test_a_service_counts_in_the_same_way(shop, files):
    from support.serving import service_of

    from onea.model.learning.images import read_labelled

    service = service_of(shop)  # knows four classes
    for _ in range(2):
        job = service.teach(read_labelled(files[A] + files[B], [A] * 6 + [B] * 6, service.side))
        assert job.ended.wait(60)
        assert job.error is None
    assert [update["trained"] for update in service.current.state.updates] == [True, True, False]  # 1/4, then 1/6
    assert dict(service.current.state.adapter_images) == merged(onea.load(shop)) == {A: 10, B: 10, C: 5, D: 5}


@pytest.mark.parametrize("merged", [[6, 30], {"a": "many"}, {"a": -1}, {"a": 0}, {"a": 2.5}, 7, None])
def test_invalid_counts_are_damage(tiny_vit, files, tmp_path, merged):
    path = teach(tiny_model(tiny_vit, epochs=1), files, A, B).save(tmp_path / "m.onea")
    state = path / "states/000001/state.json"
    state.write_bytes(resealed(json.loads(state.read_text()) | {"adapter_images": merged}))
    with pytest.raises(OneaError, match="damaged"):
        onea.load(path)
