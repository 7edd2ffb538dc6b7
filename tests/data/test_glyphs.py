# SPDX-License-Identifier: Apache-2.0
import dataclasses
import unicodedata

import numpy as np
import pytest

from onea.data import glyphs
from onea.data.glyph_families import FACES, FAMILIES, LOOKALIKE, MINI, faces_of, has_glyph, lookalikes, outline
from onea.data.glyphs import PLANS, SIDE, load_glyphs
from onea.errors import OneaError

CHARS = "".join(FAMILIES.values())


@pytest.fixture(scope="module")
def mini():
    return load_glyphs("glyphs-mini")


@pytest.fixture
def tiny(monkeypatch):
    """A plan of five classes, for what does not depend on the number of classes."""
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


def test_mini_is_a_part_of_about_fifty_classes():
    sizes = [len(FAMILIES[name]) for name in MINI]
    assert 8 <= len(sizes) <= 10
    assert 45 <= sum(sizes) <= 55
    assert 1 in sizes


def test_class_names_are_unique_unicode_names():
    names = {unicodedata.name(char).lower() for char in CHARS}
    assert len(names) == len(CHARS)


def test_every_class_is_drawn_by_faces_that_have_it():
    for char in CHARS:
        faces = faces_of(char)
        assert faces.train, char
        assert faces.test, char
        assert all(has_glyph(face, char) for face in (*faces.train, *faces.test)), char


def test_a_missing_character_has_no_face():
    missing = "漢"  # in none of the fonts, all of which would draw a box
    assert faces_of(missing) == ((), ())
    assert not any(has_glyph(face, missing) for pair in FACES.values() for face in pair)


def test_no_class_is_the_box_for_missing_characters():
    def pixels(face, char):
        return np.asarray(outline(face, char, 32, 48))

    for char in CHARS:
        for face in (*faces_of(char).train, *faces_of(char).test):
            assert not np.array_equal(pixels(face, char), pixels(face, "\uffff")), (face, char)


def test_test_faces_are_held_out():
    family = {face: name for name, faces in FACES.items() for face in faces}
    for char in CHARS:
        train, test = faces_of(char)
        assert not set(train) & set(test), char
        trained = {family[face] for face in train if face in family}
        tested = {family[face] for face in test}
        assert not trained & tested or (trained == tested and all("Bold" in face for face in test)), char


def test_a_held_out_weight_is_not_a_copy_of_the_other_one():
    for char in CHARS:
        train, test = faces_of(char)
        if test == ("DejaVuSans-Bold",):
            assert not np.array_equal(outline(train[0], char, 32, 48), outline(test[0], char, 32, 48)), char


def test_no_two_classes_look_alike():
    assert lookalikes(CHARS) == []


@pytest.mark.parametrize("pair", ["AА", "AΑ", "Δ∆", "Oo", "69", "←→", "↑→", "Cc", "НH", "∑Σ", "Zz"])
def test_known_lookalikes_are_found(pair):
    assert [(a, b) for a, b, alike in lookalikes(pair) if alike >= LOOKALIKE] == [(pair[0], pair[1])]


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


def test_full_plan_has_the_promised_counts():
    plan = PLANS["glyphs"]
    assert (plan.train, plan.test, plan.chars) == (24, 8, CHARS)
    assert sum(1 for _ in plan.items("train")) == 24 * len(CHARS)


def test_two_generations_are_identical(mini):
    glyphs._outline.cache_clear()
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


def test_a_part_has_the_images_of_the_whole(mini, tiny):
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


def test_cache_is_read_back(tiny, tmp_path, monkeypatch):
    drawn = load_glyphs(tiny, tmp_path / "new")
    monkeypatch.setattr(glyphs, "_draw", lambda *_: pytest.fail("drawn again"))
    read = load_glyphs(tiny, tmp_path / "new")
    assert read.fingerprint == drawn.fingerprint
    assert np.array_equal(read.test.pixels, drawn.test.pixels)
    assert sorted(path.suffix for path in (tmp_path / "new").iterdir()) == [".bin", ".json"]


@pytest.mark.parametrize("suffix", [".bin", ".json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove"])
def test_a_damaged_cache_is_drawn_again(tiny, tmp_path, suffix, damage):
    drawn = load_glyphs(tiny, tmp_path)
    (path,) = tmp_path.glob(f"*{suffix}")
    whole = path.read_bytes()
    flipped = bytes([whole[0] ^ 255]) + whole[1:]
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"truncate": whole[:-10], "flip": flipped, "empty": b""}[damage])
    assert load_glyphs(tiny, tmp_path).fingerprint == drawn.fingerprint
    assert path.read_bytes() == whole


def test_an_unwritable_cache_is_a_clear_error(tiny, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OneaError, match="ONEA_CACHE"):
        load_glyphs(tiny, tmp_path / "file")
