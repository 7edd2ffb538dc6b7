# SPDX-License-Identifier: Apache-2.0
"""Damage to files, by accident or on purpose, and checks of the consequences."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

from onea.errors import OneaError


def content(path: Path) -> dict[str, bytes | None]:
    """Every path below a folder with the content of the file; None for other things and for files of gigabytes."""

    def read(place: Path) -> bytes | None:
        plain = place.is_file() and not place.is_symlink() and place.stat().st_size < 2**30
        return place.read_bytes() if plain else None

    return {str(place.relative_to(path)): read(place) for place in sorted(path.rglob("*"))}


def check_sentence(what: str, error: OneaError) -> None:
    text = str(error)
    assert "\n" not in text, f"{what}: {text}"
    assert text.endswith((".", "?")), f"{what}: {text}"
    assert len(text) < 1_000, f"{what}: {len(text)} characters"


def accidents(path: Path, rng: random.Random, per_file: int) -> Iterator[str]:
    """Damage a folder in one way at a time; the caller checks and restores it in between."""
    files = sorted(place.relative_to(path) for place in path.rglob("*") if place.is_file() and place.stat().st_size)
    for name in files:
        whole = (path / name).read_bytes()
        for _ in range(per_file):
            data, position = bytearray(whole), rng.randrange(len(whole))
            kind = rng.choice(["flip", "byte", "cut", "more", "zeros", "gone within"])
            if kind == "flip":
                data[position] ^= 1 << rng.randrange(8)
            elif kind == "byte":
                data[position] = rng.randrange(256)
            elif kind == "cut":
                del data[position:]
            elif kind == "more":
                data += rng.randbytes(rng.randrange(1, 100))
            elif kind == "zeros":
                data[position : position + 512] = bytes(len(data[position : position + 512]))
            else:
                del data[position : position + rng.randrange(1, 64)]
            (path / name).write_bytes(data)
            yield f"{name}: {kind} at {position}"
        for kind in ("gone", "empty", "folder", "link", "dangling link", "pipe", "hard link"):
            (path / name).unlink()
            other = path.parent / "elsewhere"
            other.write_bytes(whole)
            if kind == "empty":
                (path / name).touch()
            elif kind == "folder":
                (path / name).mkdir()
                (path / name / "letter.txt").write_text("a file of the user")
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
    for first, second in rng.sample(pairs, min(6 * per_file, 45, len(pairs))):
        contents = (path / first).read_bytes(), (path / second).read_bytes()
        (path / first).write_bytes(contents[1])
        (path / second).write_bytes(contents[0])
        yield f"{first} and {second} swapped"
