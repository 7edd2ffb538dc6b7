# SPDX-License-Identifier: Apache-2.0
"""Draw the sheet of glyphs of the bundled dataset ``glyphs``.

    python tools/pack_glyphs.py src/onea/assets/glyphs.png

The sheet has a row for each character and a cell for each typeface: first those of training images, then those of test
images. Cells without a typeface are black. Only DejaVu Sans, Sans Mono, Serif and STIXGeneral are used. The other fonts
that matplotlib ships map code points to other signs (cmr10, STIXNonUni) or claim every code point and draw a box
(LastResort).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from onea.data.glyphs import CELL, CHARS, TEST_CELLS, TRAIN_CELLS

# Upright faces of each family, regular then bold. A family earlier in this table is held out for testing before a
# later one: STIX comes from another foundry than DejaVu, and Sans has nearly everything, so it always trains.
FACES: dict[str, tuple[str, str]] = {
    "STIXGeneral": ("STIXGeneral", "STIXGeneralBol"),
    "DejaVu Serif": ("DejaVuSerif", "DejaVuSerif-Bold"),
    "DejaVu Sans Mono": ("DejaVuSansMono", "DejaVuSansMono-Bold"),
    "DejaVu Sans": ("DejaVuSans", "DejaVuSans-Bold"),
}
# Slanted faces are only for training. The italics of Serif and STIX are left out: they are other letters (an italic
# Cyrillic te is an m), not slanted ones.
SLANTED: dict[str, str] = {"DejaVu Sans Mono": "DejaVuSansMono-Oblique", "DejaVu Sans": "DejaVuSans-Oblique"}

LOOKALIKE = 0.9  # correlation of two characters that are too similar
_EM = 256  # pixels; outlines are drawn at this size and scaled down
_GRID = 32  # side of the masks in comparisons
_STEP = 7.5  # degrees between the rotations in comparisons


class Faces(NamedTuple):
    """The faces of one character for training and for testing."""

    train: tuple[str, ...]
    test: tuple[str, ...]


def font_file(face: str) -> Path:
    """The file of a face among the fonts that matplotlib ships."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


@cache
def _code_points(face: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    # Glyph 0 is the box for missing characters, which a character map may contain.
    return frozenset(code for code, glyph in FT2Font(str(font_file(face))).get_charmap().items() if glyph)


def has_glyph(face: str, char: str) -> bool:
    """Whether a face has a glyph for a character other than the box for missing ones."""
    return ord(char) in _code_points(face)


def faces_of(char: str) -> Faces:
    """Faces of a character for training and testing: a held-out family, else a held-out weight.

    Returns:
        Two disjoint tuples of faces. One is empty when the character cannot be a class.
    """
    have = {family: tuple(f for f in faces if has_glyph(f, char)) for family, faces in FACES.items()}
    families = [family for family, faces in have.items() if faces]
    slanted = tuple(f for family, f in SLANTED.items() if family in families and has_glyph(f, char))
    if len(families) > 1:
        held, *rest = families
        return Faces(tuple(f for family in rest for f in have[family]) + slanted, have[held])
    if not families or len(have[families[0]]) < 2:
        return Faces((), ())
    regular, bold = have[families[0]]
    return Faces((regular, *slanted), (bold,))


@cache
def _font(face: str) -> ImageFont.FreeTypeFont:
    # Basic layout: shaping libraries differ between machines, and single characters do not need one.
    return ImageFont.truetype(str(font_file(face)), _EM, layout_engine=ImageFont.Layout.BASIC)


def outline(face: str, char: str, box: int, side: int) -> Image.Image:
    """One character as a mask: its ink scaled to a box (proportions kept), centred on a square canvas.

    Args:
        face: a face of :data:`FACES` or :data:`SLANTED` that has the character.
        char: one character.
        box: longest side of the ink in pixels.
        side: side of the canvas in pixels.
    """
    font = _font(face)
    left, top, right, bottom = (int(v) for v in font.getbbox(char))
    sheet = Image.new("L", (right - left + 8, bottom - top + 8))
    ImageDraw.Draw(sheet).text((4 - left, 4 - top), char, fill=255, font=font)
    ink = sheet.crop(sheet.getbbox())
    scale = box / max(ink.size)
    ink = ink.resize((max(1, round(ink.width * scale)), max(1, round(ink.height * scale))), Image.Resampling.BOX)
    canvas = Image.new("L", (side, side))
    canvas.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    return canvas


def _unit(images: Sequence[Image.Image]) -> npt.NDArray[np.float32]:
    """Masks as rows of mean zero and length one, so that a product of rows is their correlation."""
    rows = np.stack([np.asarray(image, dtype=np.float32).ravel() for image in images])
    rows -= rows.mean(axis=1, keepdims=True)
    unit: npt.NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(min=1e-6)
    return unit


def similarity(chars: Sequence[str]) -> npt.NDArray[np.float32]:
    """The similarity of characters: the largest correlation over their faces and all rotations.

    Size and position have no effect: each character fills the same box.

    Returns:
        Symmetric ``float32 [N, N]``; the diagonal compares a character with itself and is 1.
    """
    faces = [(*pair.train, *pair.test) for pair in map(faces_of, chars)]
    # The box is the largest whose corners stay on the grid when turned.
    box = int(_GRID / 2**0.5)
    masks = [outline(f, c, box, _GRID) for c, fs in zip(chars, faces, strict=True) for f in fs]
    starts = np.cumsum([0] + [len(fs) for fs in faces[:-1]])
    upright = _unit(masks)
    best = np.full((len(chars), len(chars)), -1.0, dtype=np.float32)
    # Half a turn is enough: turning one character by +a is turning the other by -a, and the maximum below is symmetric.
    for angle in np.arange(0.0, 180.0 + _STEP, _STEP):
        turned = _unit([m.rotate(float(angle), Image.Resampling.BILINEAR) for m in masks])
        rows = np.maximum.reduceat(upright @ turned.T, starts, axis=0)
        np.maximum(best, np.maximum.reduceat(rows, starts, axis=1), out=best)
    symmetric: npt.NDArray[np.float32] = np.maximum(best, best.T)
    return symmetric


def lookalikes(chars: Sequence[str], threshold: float = LOOKALIKE) -> list[tuple[str, str, float]]:
    """Pairs of similar characters, the most similar first.

    Args:
        chars: characters that :func:`faces_of` finds faces for.
        threshold: minimum correlation.
    """
    similar = np.triu(similarity(chars), k=1)
    places = zip(*np.nonzero(similar >= threshold), strict=True)
    pairs = [(chars[i], chars[j], float(similar[i, j])) for i, j in places]
    return sorted(pairs, key=lambda pair: -pair[2])


def sheet() -> Image.Image:
    """Every character in each of its faces."""
    page = Image.new("L", ((TRAIN_CELLS + TEST_CELLS) * CELL, len(CHARS) * CELL))
    for row, char in enumerate(CHARS):
        faces = faces_of(char)
        cells = [*enumerate(faces.train), *enumerate(faces.test, start=TRAIN_CELLS)]
        for column, face in cells:
            page.paste(outline(face, char, CELL, CELL), (column * CELL, row * CELL))
    return page


if __name__ == "__main__":
    sheet().save(sys.argv[1], optimize=True)
