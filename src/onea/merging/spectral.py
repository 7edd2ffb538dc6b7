# SPDX-License-Identifier: Apache-2.0
"""Operators on the singular value decomposition of matrices: KnOTS, TSV-Merge, Iso-C and OPCM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.errors import OneaError
from onea.merging.average import mean
from onea.merging.operator import BaseOperator, MergeResult, Sizes, as_matrix, is_matrix, num_merged
from onea.merging.task_vectors import Votes, count_votes, elect, trim
from onea.schema import BelowOne, Fraction, Positive, ZeroToOne
from onea.tensors import Tensors, cast_like, svd, to_float64

# Smaller singular values are treated as zero; all but the first are relative to the largest one.
_KNOTS_CUTOFF = 1e-5  # as in the official code
_TSV_CUTOFF = 1e-6  # noise, which would disturb the other components
_OPCM_CUTOFF = 1e-9


@dataclass(frozen=True)
class KnOTS(BaseOperator):
    """Rotate both sides into a shared basis of their outputs and merge there, by default to the mean.

    Paper: "Model merging with SVD to tie the Knots". With a linear rule the basis cancels, so the result is the plain
    mean; only a rule for single entries, such as TIES, profits from it. A bias is appended to its weight as a column; a
    vector without a weight is treated as a matrix of one row.

    Attributes:
        rule: how codes are merged: ``mean`` or ``ties``.
        density: share of the new side's code entries that TIES keeps, over all layers together.
        scale: factor on the result; the accumulated side is divided by it before the next merge.
        weights: votes of a side: one per task (``uniform``) or one per class (``classes``).
    """

    title = "KnOTS"
    paper = "https://arxiv.org/abs/2410.19735"
    associative = True

    rule: Literal["mean", "ties"] = "mean"
    density: Fraction = 0.2
    scale: Positive = 1.0
    weights: Votes = "uniform"

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        count, old_scale = num_merged(state), self.scale if "count" in state else 1.0
        bases, old_codes, new_codes = {}, {}, {}
        right = _fold_biases(new)
        for name, left in _fold_biases(accumulated).items():
            bases[name], old_codes[name], new_codes[name] = shared_basis(left / old_scale, right[name])
        votes, new_votes = count_votes(self.weights, sizes, count)
        if self.rule == "ties":
            new_codes = trim(new_codes, self.density)
            codes = {name: elect(code, new_codes[name], votes, new_votes) for name, code in old_codes.items()}
        else:
            total = votes + new_votes
            codes = {name: (votes * code + new_votes * new_codes[name]) / total for name, code in old_codes.items()}
        merged = {name: self.scale * bases[name] @ code for name, code in codes.items()}
        return MergeResult(_unfold_biases(merged, accumulated), {"count": torch.tensor(count + 1)})


@dataclass(frozen=True)
class KnOTSTies(KnOTS):
    """KnOTS with TIES in the shared basis."""

    title = "KnOTS-TIES"
    associative = False

    rule: Literal["mean", "ties"] = "ties"


def shared_basis(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The shared basis ``U`` of ``[left | right]`` and both sides' codes, so that ``left = U @ left_code``.

    Codes include the singular values, so that trimming by magnitude respects the strength of each direction.
    """
    basis, spectrum, rows = svd(torch.cat([left, right], dim=1))
    kept = spectrum > _KNOTS_CUTOFF
    codes = (spectrum[:, None] * rows)[kept]
    return basis[:, kept], codes[:, : left.shape[1]], codes[:, left.shape[1] :]


def _bias_owner(name: str, tensors: Tensors) -> str | None:
    """The weight that a bias belongs to; None for other tensors."""
    weight = name.removesuffix("bias") + "weight"
    if not name.endswith("bias") or tensors[name].dim() != 1 or weight not in tensors:
        return None
    return weight if tensors[weight].dim() > 1 and len(tensors[weight]) == len(tensors[name]) else None


def _fold_biases(tensors: Tensors) -> Tensors:
    """All tensors as float64 matrices, with biases as the last column of their weights."""
    biases = {_bias_owner(name, tensors): name for name in tensors}
    matrices = {}
    for name, tensor in tensors.items():
        if _bias_owner(name, tensors) is not None:
            continue
        value = to_float64(tensor)
        value = value.flatten(1) if value.dim() > 1 else value.reshape(1, -1)
        if name in biases:
            value = torch.cat([value, to_float64(tensors[biases[name]])[:, None]], dim=1)
        matrices[name] = value
    return matrices


def _unfold_biases(matrices: Tensors, original: Tensors) -> Tensors:
    """The inverse of ``_fold_biases``, with the shapes, types and order of the original."""
    weights = {_bias_owner(name, original) for name in original}
    tensors = {}
    for name, tensor in original.items():
        weight = _bias_owner(name, original)
        if weight is not None:
            tensors[name] = cast_like(matrices[weight][:, -1], tensor)
        else:
            tensors[name] = cast_like(matrices[name][:, :-1] if name in weights else matrices[name], tensor)
    return tensors


@dataclass(frozen=True)
class TSV(BaseOperator):
    """Concatenate each side's leading singular vectors after making them orthogonal; vectors are averaged.

    Paper: "Task Singular Vectors: Reducing Task Interference in Model Merging". In this continual form the components
    are divided in proportion to the class counts; equal parts would halve the rank of old tasks at every merge.

    Attributes:
        components: number of components kept from both sides together; 0 keeps as many as a matrix has.
    """

    title = "TSV-Merge"
    paper = "https://arxiv.org/abs/2412.00081"
    uses_sizes = True

    components: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.components < 0 or self.components == 1:
            raise OneaError(f"components is {self.components}; it must be 0, or at least 2 (one for each side).")

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        count = num_merged(state)
        share = sizes.accumulated_classes / (sizes.accumulated_classes + sizes.new_classes)
        merged = {}
        for name, left in accumulated.items():
            if is_matrix(left):
                merged[name] = cast_like(self._merge_matrices(as_matrix(left), as_matrix(new[name]), share), left)
            else:
                merged[name] = cast_like(mean(left, new[name], count), left)
        return MergeResult(merged, {"count": torch.tensor(count + 1)})

    def _merge_matrices(self, old: Tensor, new: Tensor, share: float) -> Tensor:
        budget = min(self.components or old.numel(), *old.shape)
        kept = min(max(1, round(budget * share)), budget - 1)  # at least one of each side
        sides = zip(leading_components(old, kept), leading_components(new, budget - kept), strict=True)
        left, spectrum, right = (torch.cat(pair, dim=-1) for pair in sides)
        return (orthogonalise(left) * spectrum) @ orthogonalise(right).T


def leading_components(matrix: Tensor, components: int) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors ``[out, k]``, values ``[k]`` and right vectors ``[in, k]`` of the largest components."""
    left, spectrum, right = svd(matrix)
    rank = int((spectrum > _TSV_CUTOFF * spectrum[0]).sum())
    kept = min(components, rank)
    return left[:, :kept], spectrum[:kept], right[:kept].T


def orthogonalise(vectors: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns (polar factor); repeated directions share one column's weight."""
    if not vectors.shape[1]:
        return vectors
    left, spectrum, right = svd(vectors)
    factor: Tensor = (left * (spectrum > _TSV_CUTOFF * spectrum[0])) @ right
    return factor


@dataclass(frozen=True)
class IsoC(BaseOperator):
    """Sum all tasks, then set every singular value of the sum to their mean; vectors are averaged.

    Paper: "No Task Left Behind: Isotropic Model Merging". The raw sum is kept as ``sum.NAME``, and only its deployed
    copy is flattened; otherwise each merge would flatten an already flat spectrum.

    Attributes:
        scale: factor on the flattened matrices (alpha).
        tolerance: singular values below this share of the largest are noise and stay zero; without it, flattening
            would raise a matrix of low rank to full rank.
    """

    title = "Iso-C"
    paper = "https://arxiv.org/abs/2502.04959"
    associative = True

    scale: float = 1.0
    tolerance: BelowOne = 1e-5

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        count = num_merged(state)
        merged, kept = {}, {"count": torch.tensor(count + 1)}
        for name, left in accumulated.items():
            if not is_matrix(left):
                merged[name] = cast_like(mean(left, new[name], count), left)
                continue
            right = as_matrix(new[name])
            total = state.get(f"sum.{name}", as_matrix(left)).to(right) + right
            merged[name] = cast_like(self.scale * self._flatten_spectrum(total), left)
            kept[f"sum.{name}"] = total
        return MergeResult(merged, kept)

    def _flatten_spectrum(self, matrix: Tensor) -> Tensor:
        left, spectrum, right = svd(matrix)
        rank = int((spectrum > self.tolerance * spectrum[0]).sum())
        if not rank:
            return torch.zeros_like(matrix)
        flat: Tensor = spectrum[:rank].mean() * left[:, :rank] @ right[:rank]
        return flat


@dataclass(frozen=True)
class OPCM(BaseOperator):
    """Add the part that is orthogonal to the accumulated matrix's leading directions, and keep a task's mean norm.

    Paper: "Merging Models on the Fly Without Retraining: A Sequential Approach to Scalable Continual Model Merging".
    Vectors are added without projection. All tensors are then scaled to the mean norm of the tasks.

    Keeps the ``factor`` by which the sum was divided, and the mean ``norm`` of a task.

    Attributes:
        alpha: the leading directions are the first ones whose singular values sum to at most this share of the total.
        keep_diagonal: reproduce the official code, whose zeroing of the diagonal has no effect.
    """

    title = "OPCM"
    paper = "https://arxiv.org/abs/2501.09522"

    alpha: ZeroToOne = 0.5
    keep_diagonal: bool = False

    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        count = num_merged(state)
        factor = float(state.get("factor", 1.0))
        norm = (count * float(state.get("norm", _norm(accumulated))) + _norm(new)) / (count + 1)
        sums = {}
        for name, left in accumulated.items():
            if is_matrix(left):
                sums[name] = factor * as_matrix(left) + self.project(as_matrix(left), as_matrix(new[name]))
            else:
                sums[name] = factor * to_float64(left) + to_float64(new[name])
        factor = _norm(sums) / norm if norm > 0 and _norm(sums) > 0 else 1.0
        merged = {name: cast_like(sums[name] / factor, left) for name, left in accumulated.items()}
        numbers = {"factor": factor, "norm": norm}
        kept = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
        return MergeResult(merged, {"count": torch.tensor(count + 1), **kept})

    def project(self, accumulated: Tensor, new: Tensor) -> Tensor:
        """``new`` without its part in the leading directions of ``accumulated`` and on the diagonal of its bases.

        This part is subtracted from ``new``, so a thin decomposition suffices.
        """
        left, spectrum, right = svd(accumulated)
        rank = int((spectrum > _OPCM_CUTOFF * spectrum[0]).sum())
        if not rank:
            return new
        left, spectrum, right = left[:, :rank], spectrum[:rank], right[:rank]
        reached = (spectrum.cumsum(0) > self.alpha * spectrum.sum()).nonzero()
        block = int(reached[0]) if len(reached) else rank
        removed = torch.zeros(rank, rank, dtype=torch.bool, device=new.device)
        removed[:block, :block] = True
        if not self.keep_diagonal:
            removed.fill_diagonal_(True)
        conflict: Tensor = left @ (removed * (left.T @ new @ right.T)) @ right
        return new - conflict


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(to_float64(tensor).square().sum()) for tensor in tensors.values()))
