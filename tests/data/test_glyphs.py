# SPDX-License-Identifier: Apache-2.0
import dataclasses
import unicodedata

import numpy as np
import pytest

from onea.data import glyphs
from onea.data.glyphs import CHARS, FAMILIES, MINI, PLANS, SIDE, load_glyphs
from onea.errors import OneaError


@pytest.fixture(scope="module")
def mini():
    return load_glyphs("glyphs-mini")


@pytest.fixture
def tiny(monkeypatch):
    """A plan of five classes, for tests that do not depend on the number of classes."""
    plan = dataclasses.replace(PLANS["glyphs-mini"], families={"suits": FAMILIES["suits"], "yin-yang": "☯"}, train=2)
    monkeypatch.setitem(PLANS, "tiny", plan)
    return "tiny"


# ---- the table


def test_the_full_table_is_large_uneven_and_has_a_single_class_task():
    sizes = [len(chars) for chars in FAMILIES.values()]
    assert len(CHARS) >= 120
    assert len(set(CHARS)) == len(CHARS)
    assert 1 in sizes[1:-1]
    assert sizes[0] != max(sizes)
    assert len(set(sizes)) >= 6


def test_mini_is_a_subset_of_about_fifty_classes():
    sizes = [len(FAMILIES[name]) for name in MINI]
    assert 8 <= len(sizes) <= 10
    assert 45 <= sum(sizes) <= 55
    assert 1 in sizes


def test_class_names_are_unique_unicode_names():
    names = {unicodedata.name(char).lower() for char in CHARS}
    assert len(names) == len(CHARS)


# ---- the images


def test_shapes_labels_and_counts(mini):
    count = len(mini.classes)
    for split, each in ((mini.train, 12), (mini.test, 4)):
        assert split.pixels.dtype == np.uint8
        assert split.pixels.shape == (count * each, 3, SIDE, SIDE)
        assert np.array_equal(np.bincount(split.labels), np.full(count, each))
    assert not mini.mirror
    assert len(set(mini.classes)) == count


def test_every_class_is_in_exactly_one_group(mini):
    assert [group.name for group in mini.groups] == list(MINI)
    assert sorted(c for group in mini.groups for c in group.classes) == list(range(len(mini.classes)))
    for group in mini.groups:
        assert [mini.classes[c] for c in group.classes] == [unicodedata.name(x).lower() for x in FAMILIES[group.name]]


def test_the_full_plan_has_the_documented_counts():
    plan = PLANS["glyphs"]
    assert (plan.train, plan.test, plan.chars) == (24, 8, CHARS)
    assert sum(1 for _ in plan.items("train")) == 24 * len(CHARS)


def test_images_are_reproducible(mini):
    glyphs._glyphs.cache_clear()
    again = load_glyphs("glyphs-mini")
    assert again.fingerprint == mini.fingerprint
    assert np.array_equal(again.train.pixels, mini.train.pixels)
    assert np.array_equal(again.test.pixels, mini.test.pixels)


def test_the_global_random_state_does_not_matter(tiny):
    np.random.seed(1)
    first = load_glyphs(tiny)
    state = np.random.get_state()[1].copy()
    second = load_glyphs(tiny)
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(np.random.get_state()[1], state)


def test_a_subset_has_the_images_of_the_whole_dataset(mini, tiny):
    whole, part = mini.train.pixels.reshape(-1, 12, 3, SIDE, SIDE), load_glyphs(tiny).train.pixels
    suits = len(FAMILIES["suits"])
    assert np.array_equal(part[: 2 * suits], whole[:suits, :2].reshape(-1, 3, SIDE, SIDE))


def test_images_differ_and_show_something(mini):
    flat = mini.train.pixels.reshape(len(mini.train), -1)
    assert len(np.unique(flat[:, ::97], axis=0)) == len(flat)
    assert flat.std(axis=1).min() > 8


def test_unknown_name():
    with pytest.raises(OneaError, match="did you mean 'glyphs-mini'"):
        load_glyphs("glyphs-mine")


# ---- the cache


def test_the_cache_is_used(tiny, tmp_path, monkeypatch):
    drawn = load_glyphs(tiny, tmp_path / "new")
    monkeypatch.setattr(glyphs, "_draw", lambda *_: pytest.fail("rendered again"))
    read = load_glyphs(tiny, tmp_path / "new")
    assert read.fingerprint == drawn.fingerprint
    assert np.array_equal(read.test.pixels, drawn.test.pixels)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".bin"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove"])
def test_a_damaged_cache_is_drawn_again(tiny, tmp_path, damage):
    drawn = load_glyphs(tiny, tmp_path)
    (path,) = tmp_path.glob("*.bin")
    whole = path.read_bytes()
    flipped = bytes([whole[0] ^ 255]) + whole[1:]
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"truncate": whole[:-10], "flip": flipped, "empty": b""}[damage])
    assert load_glyphs(tiny, tmp_path).fingerprint == drawn.fingerprint
    assert path.read_bytes() == whole


def test_an_unwritable_cache_is_reported(tiny, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OneaError, match="ONEA_CACHE"):
        load_glyphs(tiny, tmp_path / "file")
