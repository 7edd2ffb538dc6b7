# SPDX-License-Identifier: Apache-2.0
"""The sheet of glyphs: separate fonts for training and test, and no two characters that look alike."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from support.pages import ROOT, script

from onea.data.glyphs import CHARS

pack = script("pack_glyphs", "tools")


def test_the_bundled_sheet_is_what_the_script_draws():
    with Image.open(ROOT / "src/onea/assets/glyphs.png") as sheet:
        stored, drawn = (np.asarray(image).astype(int) for image in (sheet, pack.sheet()))
    assert stored.shape == drawn.shape
    assert abs(stored - drawn).mean() < 0.1  # versions of FreeType differ in few pixels


def test_every_class_is_drawn_by_faces_that_have_it():
    for char in CHARS:
        faces = pack.faces_of(char)
        assert faces.train, char
        assert faces.test, char
        assert all(pack.has_glyph(face, char) for face in (*faces.train, *faces.test)), char


def test_a_missing_character_has_no_face():
    missing = "漢"  # in none of the fonts, all of which would draw a box
    assert pack.faces_of(missing) == ((), ())
    assert not any(pack.has_glyph(face, missing) for pair in pack.FACES.values() for face in pair)


def test_no_class_is_the_box_for_missing_characters():
    def pixels(face, char):
        return np.asarray(pack.outline(face, char, 32, 48))

    for char in CHARS:
        for face in (*pack.faces_of(char).train, *pack.faces_of(char).test):
            assert not np.array_equal(pixels(face, char), pixels(face, "\uffff")), (face, char)


def test_test_faces_are_held_out():
    family = {face: name for name, faces in pack.FACES.items() for face in faces}
    for char in CHARS:
        train, test = pack.faces_of(char)
        assert not set(train) & set(test), char
        trained = {family[face] for face in train if face in family}
        tested = {family[face] for face in test}
        assert not trained & tested or (trained == tested and all("Bold" in face for face in test)), char


def test_a_held_out_weight_is_not_a_copy_of_the_other_one():
    for char in CHARS:
        train, test = pack.faces_of(char)
        if test == ("DejaVuSans-Bold",):
            assert not np.array_equal(pack.outline(train[0], char, 32, 48), pack.outline(test[0], char, 32, 48)), char


def test_no_two_classes_look_alike():
    assert pack.lookalikes(CHARS) == []


@pytest.mark.parametrize("pair", ["AА", "AΑ", "Δ∆", "Oo", "69", "←→", "↑→", "Cc", "НH", "∑Σ", "Zz"])
def test_known_lookalikes_are_found(pair):
    assert [(a, b) for a, b, alike in pack.lookalikes(pair) if alike >= pack.LOOKALIKE] == [(pair[0], pair[1])]
