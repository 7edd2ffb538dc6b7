# SPDX-License-Identifier: Apache-2.0
"""KnOTS: rotate both sides into one shared basis of their outputs, and merge there.

Paper: "Model merging with SVD to tie the Knots" (arXiv 2410.19735). With a linear rule the basis cancels and
the result is the plain mean; only a rule such as TIES, which looks at single entries, gains from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onea.merging.operator import MergeResult, Sizes, Traits, check_mergeable, count_of
from onea.merging.ties import Votes, elect, trim, votes_of
from onea.schema import Fraction, Positive
from onea.tensors import Tensors, cast_like, svd, to_float64

_THRESHOLD = 1e-5  # smaller singular values are dropped, as in the official code


def align(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The shared basis ``U`` of ``[left | right]`` and both sides' codes, so that ``left = U @ left_code``.

    The singular values stay with the codes, so that trimming by magnitude sees how much each direction matters.
    """
    basis, spectrum, rows = svd(torch.cat([left, right], dim=1))
    kept = spectrum > _THRESHOLD
    codes = (spectrum[:, None] * rows)[kept]
    return basis[:, kept], codes[:, : left.shape[1]], codes[:, left.shape[1] :]


@dataclass(frozen=True)
class KnOTS(Traits):
    """The mean in the shared basis, which is the mean.

    A bias is folded into its weight as one more column; a vector without a weight is a matrix of one row.

    Attributes:
        rule: how codes are merged: ``mean`` or ``ties``.
        density: share of the new side's code entries that TIES keeps, over all layers together.
        scale: factor on the result; the accumulated side is divided by it again before the next merge.
        weights: the votes of a side: one for every task (``uniform``) or one for every class (``classes``).
    """

    title = "KnOTS"
    paper = "https://arxiv.org/abs/2410.19735"
    associative = True

    rule: Literal["mean", "ties"] = "mean"
    density: Fraction = 0.2
    scale: Positive = 1.0
    weights: Votes = "uniform"

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Merge; ``state["count"]`` is the number of sides inside ``accumulated``, and tells that it is scaled."""
        check_mergeable(accumulated, new)
        count, old_scale = count_of(state), self.scale if "count" in state else 1.0
        bases, old_codes, new_codes = {}, {}, {}
        right = _folded(new)
        for name, left in _folded(accumulated).items():
            bases[name], old_codes[name], new_codes[name] = align(left / old_scale, right[name])
        left_vote, right_vote = votes_of(self.weights, sizes, count)
        if self.rule == "ties":
            new_codes = trim(new_codes, self.density)
            codes = {name: elect(code, new_codes[name], left_vote, right_vote) for name, code in old_codes.items()}
        else:
            total = left_vote + right_vote
            codes = {
                name: (left_vote * code + right_vote * new_codes[name]) / total for name, code in old_codes.items()
            }
        merged = {name: self.scale * bases[name] @ code for name, code in codes.items()}
        return MergeResult(_unfolded(merged, accumulated), {"count": torch.tensor(count + 1)})


@dataclass(frozen=True)
class KnOTSTies(KnOTS):
    """TIES in the shared basis."""

    title = "KnOTS-TIES"
    associative = False

    rule: Literal["mean", "ties"] = "ties"


def _weight_of(name: str, tensors: Tensors) -> str | None:
    """The weight that a bias belongs to, if there is one."""
    weight = name.removesuffix("bias") + "weight"
    if not name.endswith("bias") or tensors[name].dim() != 1 or weight not in tensors:
        return None
    return weight if tensors[weight].dim() > 1 and len(tensors[weight]) == len(tensors[name]) else None


def _folded(tensors: Tensors) -> Tensors:
    """Every tensor as a float64 matrix, biases inside their weights."""
    owners = {_weight_of(name, tensors): name for name in tensors}
    matrices = {}
    for name, tensor in tensors.items():
        if _weight_of(name, tensors) is not None:
            continue
        value = to_float64(tensor)
        value = value.flatten(1) if value.dim() > 1 else value.reshape(1, -1)
        if name in owners:
            value = torch.cat([value, to_float64(tensors[owners[name]])[:, None]], dim=1)
        matrices[name] = value
    return matrices


def _unfolded(matrices: Tensors, original: Tensors) -> Tensors:
    """The reverse of folding, with the shapes, types and order of the original."""
    owners = {_weight_of(name, original) for name in original}
    tensors = {}
    for name, tensor in original.items():
        weight = _weight_of(name, original)
        if weight is not None:
            tensors[name] = cast_like(matrices[weight][:, -1], tensor)
        else:
            tensors[name] = cast_like(matrices[name][:, :-1] if name in owners else matrices[name], tensor)
    return tensors
