# SPDX-License-Identifier: Apache-2.0
"""The bundled dataset ``glyphs``: characters of many writing systems and symbol families.

Images are rendered from a sheet of glyphs (``assets/glyphs.png``, drawn by ``tools/pack_glyphs.py``). Every image has
its own random seed, derived from its name, so a part of the dataset is the same alone or with the rest:
``glyphs-mini`` is a subset of ``glyphs``.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache as memo
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from onea.data.dataset import Dataset, Group, Labels, Pixels, Split
from onea.errors import OneaError, did_you_mean
from onea.files import CACHE_REMEDY, write_atomically

VERSION = "glyphs/v1"  # part of every seed
SIDE = 96
CELL, TRAIN_CELLS, TEST_CELLS = 80, 8, 2  # of the sheet: side of a glyph, and typefaces per row
_DIGEST_SIZE = 32
_CANVAS = 136  # leaves room to rotate a glyph

# Every family is a task. Excluded are characters that look like another one (in any typeface, case or rotation), whose
# training and test typefaces show different things, or whose bold typeface is a copy of the regular one. The table does
# not depend on a library; tests check the first and the last of these rules.
FAMILIES: dict[str, str] = {
    "suits": "♠♥♦♧",
    "digits": "012345678",
    "greek": "ΔΣΦΨΩβζλμξπ",
    "dice": "⚀⚃",
    "chess": "♚♛♜♝♞♟",
    "latin": "ACDHKMNPQRUXYZÆ",
    "yin-yang": "☯",
    "arrows": "➔↔↩↰↷↹⇄⇒⇪",
    "cyrillic": "ДЖЛУЧЩЪЫЮ",
    "weather": "☀☁☂☄⚡",
    "armenian": "ԳԴԽԾՃՊՖթ",
    "zodiac": "♈♉♊♋♌♍♎♏♐♑♒♓",
    "hebrew": "אבגלעצש",
    "mathematics": "∂∉∫√∝≈≠≤⊕⊠⋈",
    "hazards": "☢☣☠",
    "georgian": "აგდკჟრშჰ",
    "currency": "$€£¥₩₪₹",
    "objects": "✂✈✏☕⚓⚖♻♿",
    "arabic": "بجسطعك",
    "music": "♩♫♬♮",
    "tifinagh": "ⴼⴿⵄⵋⵣ",
}
MINI: tuple[str, ...] = ("suits", "greek", "dice", "digits", "yin-yang", "chess", "weather", "georgian", "music")
CHARS = "".join(FAMILIES.values())

Plane = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Plan:
    """What to draw: families with their characters, and how many images of each."""

    families: Mapping[str, str]
    train: int
    test: int

    def items(self, split: str) -> Iterator[tuple[int, str, str, int]]:
        """Label, family, character and number of every image of one split, in order."""
        label = 0
        for family, chars in self.families.items():
            for char in chars:
                for i in range(self.train if split == "train" else self.test):
                    yield label, family, char, i
                label += 1

    @property
    def chars(self) -> str:
        return "".join(self.families.values())

    @property
    def key(self) -> str:
        """Hex digest of everything that determines the pixels."""
        text = json.dumps([VERSION, SIDE, self.train, self.test, list(self.families.items())])
        return hashlib.sha256(text.encode() + Path(__file__).read_bytes() + _sheet().tobytes()).hexdigest()


PLANS: dict[str, _Plan] = {
    "glyphs": _Plan(FAMILIES, train=24, test=8),
    "glyphs-mini": _Plan({name: FAMILIES[name] for name in MINI}, train=12, test=4),
}


def load_glyphs(name: str = "glyphs", cache: Path | None = None) -> Dataset:
    """Draw a bundled dataset, or read it from the cache; each script or symbol family is a group.

    Args:
        name: ``glyphs``, or ``glyphs-mini`` for a small fixed part of it.
        cache: folder that keeps the drawn images between runs; None draws them every time.

    Raises:
        OneaError: for an unknown name, or when the cache folder cannot be written.
    """
    if name not in PLANS:
        raise OneaError(f"Unknown bundled dataset '{name}': {did_you_mean(name, PLANS)}")
    plan = PLANS[name]
    pixels = _read(plan, cache) if cache is not None else None
    if pixels is None:
        pixels = np.concatenate([_draw_split(plan, "train"), _draw_split(plan, "test")])
        if cache is not None:
            _write(plan, cache, pixels)
    cut = len(plan.chars) * plan.train
    return Dataset(
        name=name,
        classes=tuple(unicodedata.name(char).lower() for char in plan.chars),
        train=Split(_labels(plan, "train"), pixels=pixels[:cut]),
        test=Split(_labels(plan, "test"), pixels=pixels[cut:]),
        fingerprint=hashlib.sha256(f"{VERSION} {plan.chars} {_digest(pixels).hexdigest()}".encode()).hexdigest(),
        groups=_groups(plan),
        mirror=False,
    )


def draw_glyphs(chars: Mapping[str, str], train: int, test: int) -> Iterator[tuple[str, str, int, Pixels]]:
    """Some images of the dataset ``glyphs``: split, character, number and pixels ``uint8 [3, SIDE, SIDE]`` of each.

    ``chars`` are characters by family; test images have other typefaces than training images.
    """
    plan = _Plan(chars, train, test)
    for split in ("train", "test"):
        for (_, _, char, number), pixels in zip(plan.items(split), _draw_split(plan, split), strict=True):
            yield split, char, number, pixels


def _labels(plan: _Plan, split: str) -> Labels:
    return np.array([label for label, *_ in plan.items(split)], dtype=np.int64)


def _groups(plan: _Plan) -> tuple[Group, ...]:
    groups, start = [], 0
    for family, chars in plan.families.items():
        groups.append(Group(family, tuple(range(start, start + len(chars)))))
        start += len(chars)
    return tuple(groups)


# ---- drawing


def _draw_split(plan: _Plan, split: str) -> Pixels:
    images = []
    for _, family, char, i in plan.items(split):
        glyphs = _glyphs(char, split)
        images.append(_draw(glyphs[i % len(glyphs)], _rng(family, char, split, i)))
    return np.stack(images)


@memo
def _sheet() -> Plane:
    with (resources.files("onea") / "assets" / "glyphs.png").open("rb") as file, Image.open(file) as sheet:
        return np.asarray(sheet)


@memo
def _glyphs(char: str, split: str) -> list[Image.Image]:
    """A character in every typeface of a split, each centred on a canvas."""
    row = CHARS.index(char)
    cells = np.split(_sheet()[row * CELL : (row + 1) * CELL], TRAIN_CELLS + TEST_CELLS, axis=1)
    margin = (_CANVAS - CELL) // 2
    return [
        Image.fromarray(np.pad(cell, margin))
        for cell in (cells[:TRAIN_CELLS] if split == "train" else cells[TRAIN_CELLS:])
        if cell.any()
    ]


def _rng(family: str, char: str, split: str, i: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{VERSION}/{family}/{char}/{split}/{i}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def _draw(glyph: Image.Image, rng: np.random.Generator) -> Pixels:
    """One image ``uint8 [3, SIDE, SIDE]``: a glyph placed on a textured background, with noise and blur."""
    mask = np.asarray(_place(glyph, rng), dtype=np.float32)[..., None] / 255
    background, colour = _colours(rng)
    background = background + _texture(rng, rng.uniform(0.03, 0.1))
    ink = colour + _clouds(rng)[..., None] * 0.06
    image = background + mask * (ink - background)
    image += rng.standard_normal(image.shape, dtype=np.float32) * np.float32(rng.uniform(0.0, 0.04))
    picture = Image.fromarray((image.clip(0, 1) * 255).astype(np.uint8), "RGB")
    picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.0, 0.9)))
    return np.asarray(picture).transpose(2, 0, 1)


def _place(glyph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """The glyph rotated, slanted, scaled and shifted a little, on a canvas of the final size."""
    angle = np.deg2rad(rng.uniform(-9, 9))
    slant, stretch = rng.uniform(-0.08, 0.08), rng.uniform(0.93, 1.07)
    scale = rng.uniform(66, 82) / CELL
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    forward = scale * turn @ np.array([[stretch, slant], [0.0, 1.0 / stretch]])
    back = np.linalg.inv(forward)  # Pillow maps pixels of the result to the source
    shift = rng.uniform(-4, 4, size=2)
    offset = _CANVAS / 2 - back @ (SIDE / 2 + shift)
    data = (*back[0], offset[0], *back[1], offset[1])
    return glyph.transform((SIDE, SIDE), Image.Transform.AFFINE, data, Image.Resampling.BICUBIC)


def _colours(rng: np.random.Generator) -> tuple[Plane, Plane]:
    """Colours of background and ink, with enough contrast in brightness."""
    # Muted, because saturated colours dominate the features of a backbone that was trained on photographs.
    pairs = rng.uniform(0.1, 0.9, size=(12, 2, 1)) + rng.uniform(-0.2, 0.2, size=(12, 2, 3))
    pairs = pairs.clip(0, 1).astype(np.float32)
    bright = pairs @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    # Capped, so that the first pair with enough contrast is chosen, not always the one with the most.
    background, ink = pairs[np.minimum(abs(bright[:, 0] - bright[:, 1]), 0.45).argmax()]
    return background, ink


def _texture(rng: np.random.Generator, strength: float) -> Plane:
    """A faint coloured pattern for the background: a gradient, clouds or stripes."""
    kind = rng.integers(3)
    if kind == 0:
        plane = _waves(rng, 0.15, 0.25)
    elif kind == 1:
        plane = _clouds(rng)
    else:
        plane = _waves(rng, 2.0, 6.0)
    tint = rng.uniform(0.3, 1.0, size=3) * rng.choice([-1, 1], size=3)
    pattern: Plane = (strength * plane[..., None] * tint).astype(np.float32)
    return pattern


def _waves(rng: np.random.Generator, low: float, high: float) -> Plane:
    """A wave in a random direction with ``low`` to ``high`` periods across the image; a part of one is a gradient."""
    angle, phase, periods = rng.uniform(0, 2 * np.pi), rng.uniform(0, 2 * np.pi), rng.uniform(low, high)
    line = np.linspace(-np.pi, np.pi, SIDE, dtype=np.float32)
    wave: Plane = np.sin(periods * (np.cos(angle) * line[:, None] + np.sin(angle) * line) + phase).astype(np.float32)
    return wave


def _clouds(rng: np.random.Generator) -> Plane:
    """Smooth noise between -1 and 1: a few random values, enlarged."""
    small = rng.uniform(-1, 1, size=(5, 5)).astype(np.float32)
    return np.asarray(Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float32)


# ---- cache: raw bytes, followed by their sha256


def _cache_file(plan: _Plan, cache: Path) -> Path:
    return cache / f"glyphs-{plan.key[:16]}.bin"


def _read(plan: _Plan, cache: Path) -> Pixels | None:
    """The cached pixels, or None when there are none or they are damaged."""
    try:
        content = np.fromfile(_cache_file(plan, cache), np.uint8)
        pixels = content[:-_DIGEST_SIZE].reshape(-1, 3, SIDE, SIDE)
    except (OSError, ValueError):
        return None
    return pixels if _digest(pixels).digest() == content[-_DIGEST_SIZE:].tobytes() else None


def _write(plan: _Plan, cache: Path, pixels: Pixels) -> None:
    write_atomically(_cache_file(plan, cache), pixels.tobytes() + _digest(pixels).digest(), CACHE_REMEDY)


def _digest(pixels: Pixels) -> hashlib._Hash:
    return hashlib.sha256(np.ascontiguousarray(pixels).data)
