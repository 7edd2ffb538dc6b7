# SPDX-License-Identifier: Apache-2.0
"""The effect of a merge on each singular direction of its base: how far it moves, and how the basis rotates.

Pure functions on tensors; ``analyse`` summarises the results in a few short strings, small enough for a record.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from onea.merging.gated_fusion import Fusion, effective_gate, left_singular, normalise_spectrum

MAX_DIRECTIONS = 16  # points of a matrix's series; consecutive directions are averaged if there are more
MAX_BLOCKS = 16  # rows and columns of the overlap, which is averaged over layers


def update_norms(fusion: Fusion) -> Tensor:
    """How far the merge moved each matrix along each left singular direction of its base, ``[matrices, directions]``.

    ``u_i^T (merged - base)`` is ``m_i g_i w u_i^T (align - base)``, so its norm is the update strength of direction i.
    """
    norms: Tensor = (fusion.left.mT @ (fusion.merged - fusion.base)).norm(dim=-1)
    return norms


def basis_overlap(fusion: Fusion) -> Tensor:
    """The absolute cosines of base and merged directions ``|U_base^T U_merged|``, ``[matrices, k, k]``."""
    after, _ = left_singular(fusion.merged)
    overlap: Tensor = (fusion.left.mT @ after).abs()
    return overlap


def share_in_subspace(fusion: Fusion) -> Tensor:
    """The share of the align side's squared norm in the column space of the base, ``[matrices]``.

    Alignment drops the rest. If the base spans the whole space, the share is 1 and alignment gives the weighted mean. A
    random side has a share of directions / rows.
    """
    norm = fusion.align.flatten(1).norm(dim=1)
    norm_inside = (fusion.left.mT @ fusion.align).flatten(1).norm(dim=1)
    is_aligned = (norm > 0) & (_rank(fusion.left) > 0)  # zero matrices are not projected
    ones = torch.ones_like(norm)
    return torch.where(is_aligned, norm_inside / norm.where(norm > 0, ones), ones) ** 2


def subspace_similarity(fusion: Fusion) -> Tensor:
    """Mean squared cosine of the principal angles between the column spaces of base and align, ``[matrices]``.

    It is 1 for equal subspaces, and directions / rows for two random ones.
    """
    align_left, _ = left_singular(fusion.align)
    smaller = torch.minimum(_rank(fusion.left), _rank(align_left)).clamp_min(1)
    similarity: Tensor = (fusion.left.mT @ align_left).flatten(1).norm(dim=1) ** 2 / smaller
    return similarity


def _rank(left: Tensor) -> Tensor:
    directions: Tensor = left.norm(dim=1) > 0.5  # empty directions are zero vectors
    return directions.sum(1)


def block_overlap(overlap: Tensor, blocks: int) -> Tensor:
    """An overlap summarised to at most ``blocks`` by ``blocks``: ``||U_I^T U_J||_F / sqrt(|I|)`` for blocks I and J.

    The diagonal of an unchanged basis is 1 for blocks of any size; a mean of absolute values would shrink with the size
    of the blocks, towards that of random directions.

    >>> block_overlap(torch.eye(4), 2)
    tensor([[1., 0.],
            [0., 1.]])
    """
    energy = overlap**2
    row_means = block_means(energy.mT, blocks).mT  # over the base directions of a block
    sizes = [len(block) for block in _block_ranges(energy.shape[-1], blocks)]
    sums = block_means(row_means, blocks) * torch.tensor(sizes, dtype=energy.dtype, device=energy.device)
    return sums.sqrt()


def block_means(values: Tensor, blocks: int) -> Tensor:
    """Means over at most ``blocks`` consecutive, nearly equal parts of the last dimension.

    >>> block_means(torch.tensor([1.0, 3.0, 5.0, 5.0]), 2)
    tensor([2., 5.])
    """
    ranges = _block_ranges(values.shape[-1], blocks)
    return torch.stack([values[..., block.start : block.stop].mean(-1) for block in ranges], dim=-1)


def analyse(fusions: list[tuple[list[str], Fusion]]) -> dict[str, Any]:
    """The analysis of every adapter matrix as values for JSON, by kind (``down``, ``up``) and layer.

    Tensor names are ``blocks.LAYER.KIND.weight``; other tensors are left out. Series run along the base's singular
    directions, strongest first, as numbers separated by spaces: lists would take twice the space in a record.
    ``inside`` (``share_in_subspace``), ``closeness`` (``subspace_similarity``) and ``opening`` (``effective_gate``) are
    means over the layers.
    """
    analysis: dict[str, Any] = {}
    for names, fusion in fusions:
        positions = {index: position for index, name in enumerate(names) if (position := _layer_and_kind(name))}
        if not positions or fusion.merged.shape[1] < 2:
            continue
        series = {
            "update": block_means(update_norms(fusion), MAX_DIRECTIONS),
            "gate": block_means(fusion.gates, MAX_DIRECTIONS),
            "value": block_means(normalise_spectrum(fusion.spectrum), MAX_DIRECTIONS),
        }
        overlap = block_overlap(basis_overlap(fusion), MAX_BLOCKS)
        means = {
            "inside": share_in_subspace(fusion),
            "closeness": subspace_similarity(fusion),
            "opening": effective_gate(fusion.gates, fusion.left.mT @ (fusion.align - fusion.base)),
        }
        for index, (layer, kind) in positions.items():
            entry = analysis.setdefault(kind, {"directions": fusion.spectrum.shape[1], "layers": []})
            entry["layers"].append({"layer": layer} | {name: _format(values[index]) for name, values in series.items()})
        for kind in {kind for _, kind in positions.values()}:
            indices = [index for index, position in positions.items() if position[1] == kind]
            analysis[kind]["overlap"] = _format(overlap[indices].mean(0).flatten(), ".3f")
            analysis[kind] |= {name: round(float(values[indices].mean()), 4) for name, values in means.items()}
    return analysis


def _block_ranges(count: int, blocks: int) -> list[range]:
    blocks = min(count, blocks)
    edges = [count * index // blocks for index in range(blocks + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _layer_and_kind(name: str) -> tuple[int, str] | None:
    match name.split("."):
        case ["blocks", layer, kind, "weight"]:
            return int(layer), kind
    return None


def _format(values: Tensor, spec: str = ".4g") -> str:
    return " ".join(format(value, spec) for value in values.tolist())
