# SPDX-License-Identifier: Apache-2.0
"""Small copies of photos that a model may keep for later trainings (exemplars), in one file for each class.

A file is named by the sha256 of its content, so versions of a model share the files of classes that did not change. It
is read only when an adapter is trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from onea.data import small_copies
from onea.data.dataset import Pixels
from onea.errors import OneaError
from onea.files import check_regular, read_regular
from onea.model.learning.fingerprints import NO_FINGERPRINTS, WORDS

MAX_FILE_BYTES, MAX_COPIES = 2**28, 10_000
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Copies:
    """Small copies of photos of a class.

    Attributes:
        contents: each copy as WebP.
        fingerprints: fingerprints of the photos, ``int64 [N, 2]``.
    """

    contents: tuple[bytes, ...] = ()
    fingerprints: Tensor = NO_FINGERPRINTS

    def __len__(self) -> int:
        return len(self.contents)

    def __add__(self, other: Copies) -> Copies:
        return Copies(self.contents + other.contents, torch.cat([self.fingerprints, other.fingerprints]))

    def select(self, rows: Sequence[int]) -> Copies:
        """The copies of these rows."""
        return Copies(tuple(self.contents[row] for row in rows), self.fingerprints[list(rows)])

    @classmethod
    def encode(cls, pixels: Pixels, fingerprints: Tensor) -> Copies:
        """Copies of square images."""
        return cls(tuple(small_copies.encode(pixels)), fingerprints)

    def to_bytes(self) -> bytes:
        """The content of a file with these copies."""
        data = torch.frombuffer(bytearray(b"".join(self.contents)), dtype=torch.uint8)
        ends = torch.tensor([len(content) for content in self.contents]).cumsum(0)
        return save({"copies": data, "ends": ends, "fingerprints": self.fingerprints.contiguous()})

    @classmethod
    def from_bytes(cls, content: bytes) -> Copies:
        """The copies in the content of a file.

        Raises:
            ValueError: the content is damaged.
        """
        try:
            tensors = load(content)
            data, ends, fingerprints = (tensors.pop(name) for name in ("copies", "ends", "fingerprints"))
        except (SafetensorError, KeyError, AttributeError) as error:
            raise ValueError("not a file of copies") from error
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
        expected = ((torch.uint8, data.shape[:1]), (torch.int64, ends.shape[:1]), (torch.int64, (len(ends), WORDS)))
        if tensors or any(
            value.dtype != dtype or value.shape != shape
            for value, (dtype, shape) in zip((data, ends, fingerprints), expected, strict=True)
        ):
            raise ValueError("not a file of copies")
        if not 0 < len(ends) <= MAX_COPIES or int(ends[-1]) != len(data) or bool((ends <= starts).any()):
            raise ValueError("its copies do not add up")
        whole = data.numpy().tobytes()
        return cls(
            tuple(whole[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)), fingerprints
        )


@dataclass(frozen=True)
class ExemplarFile:
    """A file with copies of photos of a class.

    Attributes:
        sha256: hash of its content, which is its name.
        images: the number of copies.
        size: the number of bytes.
        source: its content, or the folder that has the file.
    """

    sha256: str
    images: int
    size: int
    source: bytes | Path

    @classmethod
    def of(cls, copies: Copies) -> ExemplarFile:
        """A file in memory."""
        content = copies.to_bytes()
        return cls(hashlib.sha256(content).hexdigest(), len(copies), len(content), content)

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{self.sha256}{SUFFIX}"

    def read(self) -> bytes | None:
        """The content of the file; None if it was removed.

        Raises:
            OneaError: it was changed.
        """
        if isinstance(self.source, bytes):
            return self.source
        path = self.source / self.name
        if check_regular(path) is None:
            return None
        content = read_regular(path, MAX_FILE_BYTES)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise _damaged(path, "its content does not match its name")
        return content

    def load(self) -> Copies:
        """The copies in the file; none if it was removed."""
        content = self.read()
        if content is None:
            return Copies()
        try:
            copies = Copies.from_bytes(content)
            if len(copies) != self.images:
                raise ValueError(f"it has {len(copies)} copies instead of {self.images}")
        except ValueError as error:
            raise self._damage(error) from error
        return copies

    def decode(self, side: int) -> tuple[Pixels, Tensor]:
        """The pixels of all copies, ``uint8 [N, 3, side, side]``, and the fingerprints of their photos."""
        copies = self.load()
        try:
            return small_copies.decode(copies.contents, side), copies.fingerprints
        except ValueError as error:
            raise self._damage(error) from error

    def _damage(self, reason: ValueError) -> OneaError:
        return _damaged(Path(self.name) if isinstance(self.source, bytes) else self.source / self.name, str(reason))

    def to_json(self) -> dict[str, Any]:
        """The entry in ``state.json``."""
        return {"sha256": self.sha256, "images": self.images, "size": self.size}


Exemplars = Mapping[str, tuple[ExemplarFile, ...]]
"""The files of each class; a class that another one was merged into may have several."""


def exemplar_files(exemplars: Exemplars) -> Iterator[ExemplarFile]:
    """The files of all classes."""
    return (file for files in exemplars.values() for file in files)


def load_copies(files: Iterable[ExemplarFile]) -> Copies:
    """All copies in these files."""
    return sum((file.load() for file in files), Copies())


def count_images(exemplars: Exemplars) -> int:
    """The number of copies."""
    return sum(file.images for file in exemplar_files(exemplars))


def count_bytes(exemplars: Exemplars) -> int:
    """The number of bytes of all files."""
    return sum(file.size for file in exemplar_files(exemplars))


def _damaged(path: Path, reason: str) -> OneaError:
    return OneaError(f"{path} is damaged ({reason}); restore it from a backup, or remove it to do without its copies.")
