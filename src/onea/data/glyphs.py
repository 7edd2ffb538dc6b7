# SPDX-License-Identifier: Apache-2.0
"""The embedded dataset ``glyphs``: characters of many writing systems and symbol families, drawn on the spot.

Every image has its own random stream, seeded by its name, so any part of the dataset comes out the same alone or
with the rest: ``glyphs-mini`` really is a part of ``glyphs``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache as memo
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from onea.data import glyph_families
from onea.data.dataset import Dataset, Group, Labels, Pixels, Split
from onea.data.glyph_families import FAMILIES, MINI, faces_of, outline
from onea.errors import OneaError, nearest
from onea.files import CACHE_REMEDY, write_atomically, write_json

VERSION = "glyphs/v1"  # part of every seed
SIDE = 96
_INK, _CANVAS = 80, 136  # the outline is drawn once a face at this size, then placed; the canvas leaves room to turn

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
        """Hex digest of all that decides the pixels."""
        text = json.dumps([VERSION, SIDE, self.train, self.test, list(self.families.items())])
        return hashlib.sha256(text.encode() + _drawing_code()).hexdigest()


PLANS: dict[str, _Plan] = {
    "glyphs": _Plan(FAMILIES, train=24, test=8),
    "glyphs-mini": _Plan({name: FAMILIES[name] for name in MINI}, train=12, test=4),
}


def load_glyphs(name: str = "glyphs", cache: Path | None = None) -> Dataset:
    """Draw an embedded dataset, or read it from the cache.

    Args:
        name: ``glyphs``, or ``glyphs-mini`` for a small fixed part of it.
        cache: folder that keeps the drawn images between runs; None draws them every time.

    Returns:
        The dataset, with one group for each script or symbol family.

    Raises:
        OneaError: for an unknown name, or when the cache folder cannot be written.
    """
    if name not in PLANS:
        raise OneaError(f"There is no embedded dataset '{name}': {nearest(name, PLANS)}")
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
        fingerprint=hashlib.sha256(f"{VERSION} {plan.chars} {_digest(pixels)}".encode()).hexdigest(),
        groups=_groups(plan),
        mirror=False,
    )


def draw_glyphs(chars: Mapping[str, str], train: int, test: int) -> Iterator[tuple[str, str, int, Pixels]]:
    """Some images of the dataset ``glyphs``: split, character, number and pixels ``uint8 [3, SIDE, SIDE]`` of each.

    Args:
        chars: characters by the family they belong to.
        train: images of each for training; at most as many as ``glyphs`` has.
        test: images of each for testing, in faces that no training image has.
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
        faces = _faces(char)[0 if split == "train" else 1]
        images.append(_draw(_outline(faces[i % len(faces)], char), _rng(family, char, split, i)))
    return np.stack(images)


_faces = memo(faces_of)


@memo
def _outline(face: str, char: str) -> Image.Image:
    return outline(face, char, _INK, _CANVAS)


def _rng(family: str, char: str, split: str, i: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{VERSION}/{family}/{char}/{split}/{i}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def _draw(glyph: Image.Image, rng: np.random.Generator) -> Pixels:
    """One image ``uint8 [3, SIDE, SIDE]``: a glyph placed on a textured ground, with noise and blur."""
    ink = np.asarray(_place(glyph, rng), dtype=np.float32)[..., None] / 255
    ground, colour = _colours(rng)
    canvas = ground + _texture(rng, rng.uniform(0.03, 0.1))
    paint = colour + _clouds(rng)[..., None] * 0.06
    image = canvas + ink * (paint - canvas)
    image += rng.standard_normal(image.shape, dtype=np.float32) * np.float32(rng.uniform(0.0, 0.04))
    picture = Image.fromarray((image.clip(0, 1) * 255).astype(np.uint8), "RGB")
    picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.0, 0.9)))
    return np.asarray(picture).transpose(2, 0, 1)


def _place(glyph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """The glyph turned, slanted, scaled and shifted a little, on a canvas of the final size."""
    angle = np.deg2rad(rng.uniform(-9, 9))
    slant, stretch = rng.uniform(-0.08, 0.08), rng.uniform(0.93, 1.07)
    scale = rng.uniform(66, 82) / _INK
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    forward = scale * turn @ np.array([[stretch, slant], [0.0, 1.0 / stretch]])
    back = np.linalg.inv(forward)  # PIL asks where each pixel of the result comes from
    shift = rng.uniform(-4, 4, size=2)
    offset = _CANVAS / 2 - back @ (SIDE / 2 + shift)
    data = (*back[0], offset[0], *back[1], offset[1])
    return glyph.transform((SIDE, SIDE), Image.Transform.AFFINE, data, Image.Resampling.BICUBIC)


def _colours(rng: np.random.Generator) -> tuple[Plane, Plane]:
    """Colours of the ground and of the ink, far enough apart in brightness to read."""
    # Muted: glaring colours take over the features of a backbone that was trained on photographs.
    pairs = rng.uniform(0.1, 0.9, size=(12, 2, 1)) + rng.uniform(-0.2, 0.2, size=(12, 2, 3))
    pairs = pairs.clip(0, 1).astype(np.float32)
    bright = pairs @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    # Capped, so that the first pair with enough contrast wins, not always the harshest.
    ground, ink = pairs[np.minimum(abs(bright[:, 0] - bright[:, 1]), 0.45).argmax()]
    return ground, ink


def _texture(rng: np.random.Generator, strength: float) -> Plane:
    """A mild coloured pattern for the ground: a gradient, clouds or stripes."""
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
    few = rng.uniform(-1, 1, size=(5, 5)).astype(np.float32)
    return np.asarray(Image.fromarray(few).resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float32)


# ---- cache: raw bytes beside a small JSON file that says what they are


def _paths(plan: _Plan, cache: Path) -> tuple[Path, Path]:
    stem = f"glyphs-{plan.key[:16]}"
    return cache / f"{stem}.bin", cache / f"{stem}.json"


def _shape(plan: _Plan) -> tuple[int, int, int, int]:
    return len(plan.chars) * (plan.train + plan.test), 3, SIDE, SIDE


@memo
def _drawing_code() -> bytes:
    """The source that draws: when it changes, what an older version cached no longer counts."""
    return b"".join(Path(module.__file__ or "").read_bytes() for module in (sys.modules[__name__], glyph_families))


def _digest(pixels: Pixels) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels).data).hexdigest()


def _note(plan: _Plan, pixels: Pixels) -> dict[str, object]:
    return {"key": plan.key, "shape": list(pixels.shape), "sha256": _digest(pixels)}


def _read(plan: _Plan, cache: Path) -> Pixels | None:
    """The cached pixels, or None when they are not there or not what was written."""
    data, note = _paths(plan, cache)
    try:
        pixels = np.fromfile(data, dtype=np.uint8).reshape(_shape(plan))
        return pixels if json.loads(note.read_text(encoding="utf-8")) == _note(plan, pixels) else None
    except (OSError, ValueError):
        return None


def _write(plan: _Plan, cache: Path, pixels: Pixels) -> None:
    data, note = _paths(plan, cache)
    write_atomically(data, pixels.tobytes(), CACHE_REMEDY)
    write_json(note, _note(plan, pixels), CACHE_REMEDY)
