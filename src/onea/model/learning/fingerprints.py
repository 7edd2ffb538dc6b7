# SPDX-License-Identifier: Apache-2.0
"""Perceptual hashes (fingerprints) of 14 bytes, to recognise copies of a photo.

A fingerprint reveals the average colour and the contrast of its photo. Its purpose is to recognise copies, so anyone
with a copy of the photo can verify that it was taught. Not even a blurred picture can be reconstructed from the 64
layout bits: each encodes whether the signs of two frequencies differ, so both signs of a frequency remain as likely as
before. ``benchmarks/privacy/fingerprints.py`` tests this with decoders.
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

WORDS = 2  # of 64 bits: layout and colours
NO_FINGERPRINTS = torch.empty(0, WORDS, dtype=torch.int64)
_BITS, _COLOURS, _SIDE = 64, 6, 32
_MAX_FLIPPED_BITS = 6  # in a copy
_MAX_COLOUR_DIFFERENCE = 6  # in a copy, of 255
_MIN_CONTRAST = 2  # images with less in every colour are never copies
_ROUNDING = 1e-3  # smaller coefficients count as zero
_BATCH = 256
_GREY = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)


def compute_fingerprints(pixels: Pixels) -> Tensor:
    """The fingerprint of each of these images ``uint8 [N, 3, H, W]``, as ``int64 [N, 2]``.

    The 128 lowest frequencies of the grey image (a discrete cosine transform) form 64 pairs of a lower and a higher
    one; one bit for each pair encodes whether their signs differ. Six bytes are the mean and the standard deviation of
    each colour.
    """
    parts = [_fingerprints(pixels[start : start + _BATCH]) for start in range(0, len(pixels), _BATCH)]
    return torch.cat([NO_FINGERPRINTS, *parts])


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
    """The cosine transform, and the rows and columns of its lowest frequencies above zero."""
    step = torch.arange(_SIDE, dtype=torch.float64)
    transform = torch.cos(torch.pi * (step + 0.5) * step[:, None] / _SIDE) / _SIDE**0.5
    first, second = torch.meshgrid(step.long(), step.long(), indexing="ij")
    order = ((first + second) * _SIDE + first).flatten().argsort()[1 : 2 * _BITS + 1]
    return transform, first.flatten()[order], second.flatten()[order]


def same_photos(first: Tensor, second: Tensor) -> Tensor:
    """Whether fingerprints ``[N, 2]`` and ``[M, 2]`` are of the same photo, ``bool [N, M]``; False without contrast.

    >>> from numpy.random import default_rng
    >>> fingerprints = compute_fingerprints(default_rng(0).integers(0, 256, (3, 3, 40, 40), dtype=np.uint8))
    >>> same_photos(fingerprints[:2], fingerprints).tolist()
    [[True, False, False], [False, True, False]]
    """
    # With bits as 1 and -1, the product is the number of equal bits less that of different bits.
    same = _signs(first) @ _signs(second).T >= _BITS - 2 * _MAX_FLIPPED_BITS
    rows = same.any(1).nonzero()[:, 0]  # usually few; colours are compared for these alone
    colours, others = _colours(first[rows]), _colours(second)
    same_colours = same[rows] & (colours[:, 3:] >= _MIN_CONTRAST).any(1)[:, None]
    for channel, other_channel in zip(colours.T, others.T, strict=True):
        same_colours &= (channel[:, None] - other_channel).abs_() <= _MAX_COLOUR_DIFFERENCE
    same[rows] = same_colours
    return same


def match_in_blocks(
    fingerprints: Tensor, others: Tensor, progress: Progress = NO_PROGRESS
) -> Iterator[tuple[slice, Tensor]]:
    """``same_photos`` in blocks of rows, so that memory does not grow with the number of pairs.

    Args:
        fingerprints: ``[N, 2]``; each block comes with its rows.
        others: the other fingerprints, ``[M, 2]``.
        progress: is notified of every block, and can cancel.
    """
    for rows in row_blocks(len(fingerprints), len(others)):
        progress.start_phase("finding repeated photos")
        yield rows, same_photos(fingerprints[rows], others)


def find_copies(fingerprints: Tensor, others: Tensor) -> Tensor:
    """The row of the first match among the other fingerprints, ``int64 [N]``; -1 where there is none."""
    blocks = [_first_true(same) for _, same in match_in_blocks(fingerprints, others)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *blocks])


@dataclass(frozen=True)
class Repeats:
    """Repeated photos of an update.

    Attributes:
        taught_before: which photos were taught before as the same class, ``bool [N]``.
        duplicates: which photos are copies of an earlier photo of the update with the same class, ``bool [N]``.
        matched: rows of the known fingerprints that are repeated with the same class, ``[K]``.
        conflicts: positions of photos that also exist with another class, and that class.
        fingerprints: fingerprints of the update, ``[N, 2]``.
    """

    taught_before: Tensor
    duplicates: Tensor
    matched: Tensor
    conflicts: dict[int, str]
    fingerprints: Tensor

    @property
    def repeated(self) -> Tensor:
        """Which photos were taught before or are duplicates, ``bool [N]``."""
        return self.taught_before | self.duplicates

    def independent_of(self, trained: Tensor) -> Tensor:
        """Which new photos have no copy of any class among those trained on, ``bool [N]``."""
        independent = ~self.repeated & ~trained
        copies = find_copies(self.fingerprints[independent], self.fingerprints[trained])
        independent[independent.clone()] = copies < 0
        return independent


def find_repeats(
    fingerprints: Tensor,
    labels: Sequence[str],
    known: Tensor = NO_FINGERPRINTS,
    known_labels: Sequence[str] = (),
    progress: Progress = NO_PROGRESS,
) -> Repeats:
    """Find photos that are known already, or appear more than once.

    >>> one = torch.tensor([[5, 255 << 24]])
    >>> find_repeats(torch.cat([one, one, one]), ["apple", "apple", "pear"]).repeated.tolist()
    [False, True, False]
    """
    index = {label: row for row, label in enumerate(dict.fromkeys([*known_labels, *labels]))}
    classes, known_classes = (torch.tensor([index[label] for label in part]) for part in (labels, known_labels))
    taught_before, duplicates, matched = (
        torch.zeros(len(part), dtype=torch.bool) for part in (fingerprints, fingerprints, known)
    )
    conflicts: dict[int, str] = {}

    def add_conflicts(rows: slice, same: Tensor, others: Sequence[str]) -> None:
        for row, other in enumerate(_first_true(same).tolist(), rows.start):
            if other >= 0:
                conflicts.setdefault(row, others[other])

    for rows, same in match_in_blocks(fingerprints, known, progress):
        same_class = same & (classes[rows, None] == known_classes)
        taught_before[rows] = same_class.any(1)
        matched |= same_class.any(0)
        add_conflicts(rows, same & ~same_class, known_labels)
    for rows, same in match_in_blocks(fingerprints, fingerprints, progress):
        same = same.tril(rows.start - 1)  # compare only with earlier photos
        same_class = same & (classes[rows, None] == classes)
        duplicates[rows] = same_class.any(1)
        add_conflicts(rows, same & ~same_class, labels)
    return Repeats(taught_before, duplicates, matched.nonzero()[:, 0], conflicts, fingerprints)


def _first_true(same: Tensor) -> Tensor:
    """The first true column of each row, ``int64 [N]``; -1 where there is none."""
    if not same.shape[1]:
        return torch.full((len(same),), -1)
    return torch.where(same.any(1), same.byte().argmax(1), -1)


def _bytes(fingerprints: Tensor) -> npt.NDArray[np.uint8]:
    return fingerprints.numpy().astype("<i8").reshape(len(fingerprints), WORDS).view(np.uint8)


def _signs(fingerprints: Tensor) -> Tensor:
    bits = np.unpackbits(_bytes(fingerprints)[:, : _BITS // 8], axis=1)
    return torch.from_numpy(bits).float() * 2 - 1


def _colours(fingerprints: Tensor) -> Tensor:
    return torch.from_numpy(_bytes(fingerprints)[:, _BITS // 8 :][:, :_COLOURS].astype(np.int16))
