# SPDX-License-Identifier: Apache-2.0
"""Whether a photo was there before: a fingerprint of 24 bytes, from which no photo can be made.

Copies that were saved again, smaller or in another format, have nearly the same one (99.5 % of them or more). Photos of
a series do not: among the 17,209 photos of Grocery and CUB-200 nine pairs match; seven were looked at, each one photo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from onea.data.dataset import Pixels

WORDS = 3  # of 64 bits: two of signs, one of colours
NO_PRINTS = torch.empty(0, WORDS, dtype=torch.int64)
_SIGNS, _SIDE = 128, 32
_FLIPPED = 6  # signs that a copy may have otherwise
_APART = 6  # what the colours of a copy may differ by, of 255
_FLAT = 2  # an image of less contrast in every colour has no features that could be compared
_ROUNDING = 1e-3  # a coefficient of less has no sign
_AT_ONCE = 256
_GREY = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)


def fingerprints(pixels: Pixels) -> Tensor:
    """The fingerprint of each of these images ``uint8 [N, 3, H, W]``, as ``int64 [N, 3]``.

    The signs of the 128 lowest frequencies of the image in grey (a discrete cosine transform), and the mean and the
    spread of each of its colours.
    """
    parts = [_fingerprints(pixels[start : start + _AT_ONCE]) for start in range(0, len(pixels), _AT_ONCE)]
    return torch.cat([NO_PRINTS, *parts])


def _fingerprints(pixels: Pixels) -> Tensor:
    small = F.adaptive_avg_pool2d(torch.from_numpy(np.ascontiguousarray(pixels)).float(), _SIDE).double()
    transform, rows, columns = _frequencies()
    grey = torch.einsum("nchw,c->nhw", small, _GREY)
    signs = (transform @ grey @ transform.T)[:, rows, columns] > _ROUNDING
    colours = torch.cat([small.mean((2, 3)), small.std((2, 3), unbiased=False)], 1)
    packed = np.zeros((len(small), 8 * WORDS), np.uint8)
    packed[:, : _SIGNS // 8] = np.packbits(signs.numpy(), axis=1)
    packed[:, _SIGNS // 8 :][:, :6] = colours.round().numpy().astype(np.uint8)
    return torch.from_numpy(packed.view("<i8").astype(np.int64))


@cache
def _frequencies() -> tuple[Tensor, Tensor, Tensor]:
    """The cosine transform, and the rows and columns of its lowest frequencies but that of the mean."""
    step = torch.arange(_SIDE, dtype=torch.float64)
    transform = torch.cos(torch.pi * (step + 0.5) * step[:, None] / _SIDE) / _SIDE**0.5
    first, second = torch.meshgrid(step.long(), step.long(), indexing="ij")
    order = ((first + second) * _SIDE + first).flatten().argsort()[1 : _SIGNS + 1]
    return transform, first.flatten()[order], second.flatten()[order]


def same_photos(first: Tensor, second: Tensor) -> Tensor:
    """Pairs of rows ``[K, 2]`` of these fingerprints that are of one photo; those of images without contrast never are.

    >>> from numpy.random import default_rng
    >>> found = fingerprints(default_rng(0).integers(0, 256, (3, 3, 40, 40), dtype=np.uint8))
    >>> same_photos(found[:2], found).tolist()
    [[0, 0], [1, 1]]
    """
    one, other = _signs(first), _signs(second).T
    candidates = [torch.empty(0, 2, dtype=torch.int64)]
    for start in range(0, len(one), _AT_ONCE):
        # Of signs as 1 and -1, the product is what agrees less what does not.
        close = one[start : start + _AT_ONCE] @ other >= _SIGNS - 2 * _FLIPPED
        candidates.append(close.nonzero() + torch.tensor([start, 0]))
    pairs = torch.cat(candidates)
    here, there = _colours(first)[pairs[:, 0]], _colours(second)[pairs[:, 1]]
    alike = ((here - there).abs() <= _APART).all(1) & (here[:, 3:] >= _FLAT).any(1)
    return pairs[alike]


@dataclass(frozen=True)
class Repeats:
    """Photos of an update that were there before.

    Attributes:
        before: whether it was taught before as the same class, ``bool [N]``.
        twice: whether it came earlier in the update as the same class, ``bool [N]``.
        known: rows of the fingerprints known before that are of a photo of the update, as the same class, ``[K]``.
        twins: pairs of photos of the update that are one photo, ``[T, 2]``.
        conflicts: photos that are also there under another class, and which.
    """

    before: Tensor
    twice: Tensor
    known: Tensor
    twins: Tensor
    conflicts: dict[int, str]

    @property
    def seen(self) -> Tensor:
        """Whether a photo was there before as the same class, ``bool [N]``."""
        return self.before | self.twice

    def unseen_by(self, trained: Tensor) -> Tensor:
        """Photos that say how well new ones are answered, ``bool [N]``: new, and no copy was trained on."""
        fresh = ~self.seen & ~trained
        for row, other in self.twins.tolist():
            fresh[row] &= not bool(trained[other])
            fresh[other] &= not bool(trained[row])
        return fresh


def find_repeats(
    prints: Tensor, labels: Sequence[str], known: Tensor = NO_PRINTS, known_labels: Sequence[str] = ()
) -> Repeats:
    """Photos with these fingerprints and classes that are among others, or among themselves.

    >>> one = torch.tensor([[5, 6, 255 << 24]])
    >>> find_repeats(torch.cat([one, one, one]), ["apple", "apple", "pear"]).seen.tolist()
    [False, True, False]
    """
    before, twice = (torch.zeros(len(prints), dtype=torch.bool) for _ in range(2))
    conflicts: dict[int, str] = {}
    twins = same_photos(prints, prints)
    twins = twins[twins[:, 0] < twins[:, 1]]
    found = []
    for row, other in same_photos(prints, known).tolist():
        if labels[row] == known_labels[other]:
            before[row] = True
            found.append(other)
        else:
            conflicts.setdefault(row, known_labels[other])
    for row, other in twins.tolist():
        if labels[row] == labels[other]:
            twice[other] = True
        else:
            conflicts.setdefault(other, labels[row])
    return Repeats(before, twice, torch.tensor(found, dtype=torch.int64).unique(), twins, conflicts)


def _bytes(prints: Tensor) -> npt.NDArray[np.uint8]:
    return prints.numpy().astype("<i8").reshape(len(prints), WORDS).view(np.uint8)


def _signs(prints: Tensor) -> Tensor:
    bits = np.unpackbits(_bytes(prints)[:, : _SIGNS // 8], axis=1)
    return torch.from_numpy(bits).float() * 2 - 1


def _colours(prints: Tensor) -> Tensor:
    return torch.from_numpy(_bytes(prints)[:, _SIGNS // 8 :][:, :6].astype(np.int64))
