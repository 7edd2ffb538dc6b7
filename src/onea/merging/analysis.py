# SPDX-License-Identifier: Apache-2.0
"""The effect of a merge on each singular direction of its base: its update, and the turn of the basis.

Pure functions on tensors; ``describe`` turns them into a few lines of text per matrix, small enough for a record.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from onea.merging.fusion import Fusion, left_singular, normalised, opening

MOST_DIRECTIONS = 16  # points of a matrix's series; more directions are averaged in consecutive blocks
MOST_BLOCKS = 16  # rows and columns of the overlap, which is averaged over layers


def update_norms(fusion: Fusion) -> Tensor:
    """How far the merge moved each matrix along each left singular direction of its base, ``[matrices, directions]``.

    ``u_i^T (merged - base)`` is ``m_i g_i w u_i^T (align - base)``, so its norm is the update strength of direction i.
    """
    norms: Tensor = (fusion.left.mT @ (fusion.merged - fusion.base)).norm(dim=-1)
    return norms


def basis_overlap(fusion: Fusion) -> Tensor:
    """``|U_base^T U_merged|``, ``[matrices, directions, directions]``: what of a base direction is where afterwards."""
    after, _ = left_singular(fusion.merged)
    overlap: Tensor = (fusion.left.mT @ after).abs()
    return overlap


def share_inside(fusion: Fusion) -> Tensor:
    """How much of the align side (of its squared norm) lies in the columns of the base, ``[matrices]``.

    Alignment drops the rest. Where the base spans everything this is 1, and alignment is the weighted mean; a random
    side has a share of directions / rows inside.
    """
    whole = fusion.align.flatten(1).norm(dim=1)
    inside = (fusion.left.mT @ fusion.align).flatten(1).norm(dim=1)
    dropped = (whole > 0) & (_rank(fusion.left) > 0)  # of nothing, or where there is no base, nothing is
    return torch.where(dropped, inside / whole.where(whole > 0, torch.ones_like(whole)), torch.ones_like(whole)) ** 2


def closeness(fusion: Fusion) -> Tensor:
    """Mean squared cosine of the principal angles between the columns of base and align, ``[matrices]``.

    1 is the same subspace; two random ones have directions / rows.
    """
    of_align, _ = left_singular(fusion.align)
    smaller = torch.minimum(_rank(fusion.left), _rank(of_align)).clamp_min(1)
    found: Tensor = (fusion.left.mT @ of_align).flatten(1).norm(dim=1) ** 2 / smaller
    return found


def _rank(left: Tensor) -> Tensor:
    directions: Tensor = left.norm(dim=1) > 0.5  # those without anything are zero vectors
    return directions.sum(1)


def block_overlap(overlap: Tensor, blocks: int) -> Tensor:
    """An overlap summarised to at most ``blocks`` by ``blocks``: ``||U_I^T U_J||_F / sqrt(|I|)`` for blocks I and J.

    It is 1 on the diagonal for an unchanged basis whatever the size of the blocks; a mean of absolute values would
    sink towards what random directions give.

    >>> block_overlap(torch.eye(4), 2)
    tensor([[1., 0.],
            [0., 1.]])
    """
    energy = overlap**2
    inside = block_means(energy.mT, blocks).mT  # the mean over base directions of a block ...
    sizes = [len(part) for part in _parts(energy.shape[-1], blocks)]
    # ... of the sum over merged directions of a block
    return (block_means(inside, blocks) * torch.tensor(sizes, dtype=energy.dtype, device=energy.device)).sqrt()


def block_means(values: Tensor, blocks: int) -> Tensor:
    """Means over at most so many consecutive, nearly equal parts of the last dimension.

    >>> block_means(torch.tensor([1.0, 3.0, 5.0, 5.0]), 2)
    tensor([2., 5.])
    """
    parts = _parts(values.shape[-1], blocks)
    return torch.stack([values[..., part.start : part.stop].mean(-1) for part in parts], dim=-1)


def describe(fusions: list[tuple[list[str], Fusion]]) -> dict[str, Any]:
    """The analysis of every adapter matrix as JSON-able values, by kind (``down``, ``up``) and layer.

    Series run along the base's singular directions, strongest first, as numbers with blanks between them: as lists
    they would take twice the room in a record. ``inside``, ``closeness`` and ``opening`` are means over the layers.
    Names are ``blocks.LAYER.KIND.weight``; other tensors are left out.
    """
    found: dict[str, Any] = {}
    for names, fusion in fusions:
        placed = {index: place for index, name in enumerate(names) if (place := _place(name))}
        if not placed or fusion.merged.shape[1] < 2:
            continue
        series = {
            "update": block_means(update_norms(fusion), MOST_DIRECTIONS),
            "gate": block_means(fusion.gates, MOST_DIRECTIONS),
            "value": block_means(normalised(fusion.spectrum), MOST_DIRECTIONS),
        }
        overlap = block_overlap(basis_overlap(fusion), MOST_BLOCKS)
        means = {
            "inside": share_inside(fusion),
            "closeness": closeness(fusion),
            "opening": opening(fusion.gates, fusion.left.mT @ (fusion.align - fusion.base)),
        }
        for index, (layer, kind) in placed.items():
            entry = found.setdefault(kind, {"directions": fusion.spectrum.shape[1], "layers": []})
            entry["layers"].append({"layer": layer} | {name: _text(values[index]) for name, values in series.items()})
        for kind in {kind for _, kind in placed.values()}:
            mine = [index for index, (_, its) in placed.items() if its == kind]
            found[kind]["overlap"] = _text(overlap[mine].mean(0).flatten(), ".3f")
            found[kind] |= {name: round(float(values[mine].mean()), 4) for name, values in means.items()}
    return found


def _parts(count: int, blocks: int) -> list[range]:
    blocks = min(count, blocks)
    edges = [count * index // blocks for index in range(blocks + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _place(name: str) -> tuple[int, str] | None:
    """Layer and kind of an adapter's matrix.

    >>> _place("blocks.3.down.weight"), _place("blocks.3.down.bias")
    ((3, 'down'), None)
    """
    match name.split("."):
        case ["blocks", layer, kind, "weight"]:
            return int(layer), kind
    return None


def _text(values: Tensor, form: str = ".4g") -> str:
    return " ".join(format(value, form) for value in values.tolist())
