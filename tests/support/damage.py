# SPDX-License-Identifier: Apache-2.0
"""What can happen to files, by accident or on purpose, and what may come of it."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

from onea.errors import OneaError


def content(path: Path) -> dict[str, bytes | None]:
    """Every file below a folder with what it holds; None for anything else, and for gigabytes."""

    def read(place: Path) -> bytes | None:
        plain = place.is_file() and not place.is_symlink() and place.stat().st_size < 2**30
        return place.read_bytes() if plain else None

    return {str(place.relative_to(path)): read(place) for place in sorted(path.rglob("*"))}


def check_sentence(what: str, error: OneaError) -> None:
    text = str(error)
    assert "\n" not in text, f"{what}: {text}"
    assert text.endswith((".", "?")), f"{what}: {text}"
    assert len(text) < 1_000, f"{what}: {len(text)} characters"


def accidents(path: Path, rng: random.Random, each: int) -> Iterator[str]:
    """Change a fresh folder in one way at a time; the caller looks at it in between."""
    files = sorted(place.relative_to(path) for place in path.rglob("*") if place.is_file() and place.stat().st_size)
    for name in files:
        whole = (path / name).read_bytes()
        for _ in range(each):
            data, place = bytearray(whole), rng.randrange(len(whole))
            kind = rng.choice(["flip", "byte", "cut", "more", "zeros", "gone within"])
            if kind == "flip":
                data[place] ^= 1 << rng.randrange(8)
            elif kind == "byte":
                data[place] = rng.randrange(256)
            elif kind == "cut":
                del data[place:]
            elif kind == "more":
                data += rng.randbytes(rng.randrange(1, 100))
            elif kind == "zeros":
                data[place : place + 512] = bytes(len(data[place : place + 512]))
            else:
                del data[place : place + rng.randrange(1, 64)]
            (path / name).write_bytes(data)
            yield f"{name}: {kind} at {place}"
        for kind in ("gone", "empty", "folder", "link", "dangling link", "pipe", "hard link"):
            (path / name).unlink()
            other = path.parent / "elsewhere"
            other.write_bytes(whole)
            if kind == "empty":
                (path / name).touch()
            elif kind == "folder":
                (path / name).mkdir()
                (path / name / "letter.txt").write_text("dear mum")
            elif kind == "link":
                (path / name).symlink_to(other)
            elif kind == "dangling link":
                (path / name).symlink_to(path.parent / "nowhere")
            elif kind == "pipe":
                os.mkfifo(path / name)
            elif kind == "hard link":
                os.link(other, path / name)
            yield f"{name}: {kind}"
            assert other.read_bytes() == whole, f"{name}: {kind} was followed"
            assert not (path.parent / "nowhere").exists(), f"{name}: {kind} was followed"
    pairs = list(itertools.combinations(files, 2))
    for one, two in rng.sample(pairs, min(6 * each, 45, len(pairs))):
        first, second = (path / one).read_bytes(), (path / two).read_bytes()
        (path / one).write_bytes(second)
        (path / two).write_bytes(first)
        yield f"{one} and {two} swapped"
