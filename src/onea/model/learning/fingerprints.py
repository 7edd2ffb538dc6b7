# SPDX-License-Identifier: Apache-2.0
"""Whether a photo was there before: a fingerprint of 14 bytes that copies of a photo share and other photos do not.

A fingerprint reveals the average colour and the contrast of its photo and, to whoever has a copy, that the photo was
taught, which is what it is for. Its layout bits are made so that no blurred picture can be drawn from them: each tells
whether the signs of two frequencies differ and not what they are, so either sign of a frequency remains as likely as
before. ``benchmarks/privacy/fingerprints.py`` measures what decoders make of fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from onea.data.dataset import Pixels
from onea.runtime import NO_PROGRESS, Progress
from onea.tensors import row_blocks

WORDS = 2  # of 64 bits: one of the layout, one of the colours
NO_PRINTS = torch.empty(0, WORDS, dtype=torch.int64)
_BITS, _COLOURS, _SIDE = 64, 6, 32
_FLIPPED = 6  # bits that a copy may have otherwise
_APART = 6  # what the colours of a copy may differ by, of 255
_FLAT = 2  # an image of less contrast in every colour has no features that could be compared
_ROUNDING = 1e-3  # a coefficient of less has no sign
_AT_ONCE = 256
_GREY = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)


def fingerprints(pixels: Pixels) -> Tensor:
    """The fingerprint of each of these images ``uint8 [N, 3, H, W]``, as ``int64 [N, 2]``.

    The 128 lowest frequencies of the image in grey (a discrete cosine transform) make 64 pairs, a lower one and a
    higher one; a bit for each says whether their signs differ. Six bytes are the mean and the spread of each colour.
    """
    parts = [_fingerprints(pixels[start : start + _AT_ONCE]) for start in range(0, len(pixels), _AT_ONCE)]
    return torch.cat([NO_PRINTS, *parts])


def _fingerprints(pixels: Pixels) -> Tensor:
    small = F.adaptive_avg_pool2d(torch.from_numpy(np.ascontiguousarray(pixels)).float(), _SIDE).double()
    transform, rows, columns = _frequencies()
    grey = torch.einsum("nchw,c->nhw", small, _GREY)
    lower, higher = ((transform @ grey @ transform.T)[:, rows, columns] > _ROUNDING).split(_BITS, 1)
    colours = torch.cat([small.mean((2, 3)), small.std((2, 3), unbiased=False)], 1)
    packed = np.zeros((len(small), 8 * WORDS), np.uint8)
    packed[:, : _BITS // 8] = np.packbits((lower ^ higher).numpy(), axis=1)
    packed[:, _BITS // 8 :][:, :_COLOURS] = colours.round().numpy().astype(np.uint8)
    return torch.from_numpy(packed.view("<i8").astype(np.int64))


@cache
def _frequencies() -> tuple[Tensor, Tensor, Tensor]:
    """The cosine transform, and the rows and columns of its lowest frequencies but that of the mean."""
    step = torch.arange(_SIDE, dtype=torch.float64)
    transform = torch.cos(torch.pi * (step + 0.5) * step[:, None] / _SIDE) / _SIDE**0.5
    first, second = torch.meshgrid(step.long(), step.long(), indexing="ij")
    order = ((first + second) * _SIDE + first).flatten().argsort()[1 : 2 * _BITS + 1]
    return transform, first.flatten()[order], second.flatten()[order]


def same_photos(first: Tensor, second: Tensor) -> Tensor:
    """Whether fingerprints ``[N, 2]`` and ``[M, 2]`` are of one photo, ``bool [N, M]``; of no contrast, they never are.

    >>> from numpy.random import default_rng
    >>> found = fingerprints(default_rng(0).integers(0, 256, (3, 3, 40, 40), dtype=np.uint8))
    >>> same_photos(found[:2], found).tolist()
    [[True, False, False], [False, True, False]]
    """
    # Of bits as 1 and -1, the product is what agrees less what does not.
    same = _signs(first) @ _signs(second).T >= _BITS - 2 * _FLIPPED
    rows = same.any(1).nonzero()[:, 0]  # as a rule few, and only for these do colours matter
    here, there = _colours(first[rows]), _colours(second)
    alike = same[rows] & (here[:, 3:] >= _FLAT).any(1)[:, None]
    for one, other in zip(here.T, there.T, strict=True):
        alike &= (one[:, None] - other).abs_() <= _APART
    same[rows] = alike
    return same


def copies(prints: Tensor, among: Tensor, progress: Progress = NO_PROGRESS) -> Iterator[tuple[slice, Tensor]]:
    """``same_photos``, some rows at a time, so that memory does not grow with the number of pairs.

    Args:
        prints: ``[N, 2]``; each block comes with the rows of these that it is about.
        among: the others, ``[M, 2]``.
        progress: hears of every block, and may stop there.
    """
    for rows in row_blocks(len(prints), len(among)):
        progress.note("comparing photos with those known")
        yield rows, same_photos(prints[rows], among)


def first_copies(prints: Tensor, among: Tensor) -> Tensor:
    """The first of the others that is the same photo, by its row, ``int64 [N]``; -1 where there is none."""
    found = [_first(same) for _, same in copies(prints, among)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *found])


@dataclass(frozen=True)
class Repeats:
    """Photos of an update that were there before.

    Attributes:
        before: whether it was taught before as the same class, ``bool [N]``.
        twice: whether it came earlier in the update as the same class, ``bool [N]``.
        known: rows of the fingerprints known before that are of a photo of the update, as the same class, ``[K]``.
        conflicts: photos that are also there under another class, and which.
        fingerprints: of the update, ``[N, 2]``.
    """

    before: Tensor
    twice: Tensor
    known: Tensor
    conflicts: dict[int, str]
    fingerprints: Tensor

    @property
    def seen(self) -> Tensor:
        """Whether a photo was there before as the same class, ``bool [N]``."""
        return self.before | self.twice

    def unseen_by(self, trained: Tensor) -> Tensor:
        """Photos that say how well new ones are answered, ``bool [N]``: new, and no copy was trained on."""
        fresh = ~self.seen & ~trained
        fresh[fresh.clone()] = first_copies(self.fingerprints[fresh], self.fingerprints[trained]) < 0
        return fresh


def find_repeats(
    prints: Tensor,
    labels: Sequence[str],
    known: Tensor = NO_PRINTS,
    known_labels: Sequence[str] = (),
    progress: Progress = NO_PROGRESS,
) -> Repeats:
    """Photos with these fingerprints and classes that are among others, or among themselves.

    >>> one = torch.tensor([[5, 255 << 24]])
    >>> find_repeats(torch.cat([one, one, one]), ["apple", "apple", "pear"]).seen.tolist()
    [False, True, False]
    """
    number = {label: index for index, label in enumerate(dict.fromkeys([*known_labels, *labels]))}
    mine, theirs = (torch.tensor([number[label] for label in each]) for each in (labels, known_labels))
    before, twice, taught = (torch.zeros(len(each), dtype=torch.bool) for each in (prints, prints, known))
    conflicts: dict[int, str] = {}

    def note_conflicts(rows: slice, same: Tensor, others: Sequence[str]) -> None:
        found = _first(same)
        for row, other in enumerate(found.tolist(), rows.start):
            if other >= 0:
                conflicts.setdefault(row, others[other])

    for rows, same in copies(prints, known, progress):
        own = same & (mine[rows, None] == theirs)
        before[rows] = own.any(1)
        taught |= own.any(0)
        note_conflicts(rows, same & ~own, known_labels)
    for rows, same in copies(prints, prints, progress):
        same = same.tril(rows.start - 1)  # those that came earlier
        own = same & (mine[rows, None] == mine)
        twice[rows] = own.any(1)
        note_conflicts(rows, same & ~own, labels)
    return Repeats(before, twice, taught.nonzero()[:, 0], conflicts, prints)


def _first(same: Tensor) -> Tensor:
    """The first column of each row that is true, ``int64 [N]``; -1 where none is."""
    if not same.shape[1]:
        return torch.full((len(same),), -1)
    return torch.where(same.any(1), same.byte().argmax(1), -1)


def _bytes(prints: Tensor) -> npt.NDArray[np.uint8]:
    return prints.numpy().astype("<i8").reshape(len(prints), WORDS).view(np.uint8)


def _signs(prints: Tensor) -> Tensor:
    bits = np.unpackbits(_bytes(prints)[:, : _BITS // 8], axis=1)
    return torch.from_numpy(bits).float() * 2 - 1


def _colours(prints: Tensor) -> Tensor:
    return torch.from_numpy(_bytes(prints)[:, _BITS // 8 :][:, :_COLOURS].astype(np.int16))
