# SPDX-License-Identifier: Apache-2.0
"""The mathematics of One-A's merge: matrices fused into the subspace of a base, gently where it matters most.

Paper: "One Adapter for All" (arXiv 2603.10237), Eqs. 5-13. With base ``B``, align ``A``, thin SVD ``B = U S Vt``,
gates ``g`` and align share ``w``, the whole chain of projection, fusion, gating and reconstruction collapses to

    merged = B + U diag(m g w) Ut (A - B),        m_i = 1[s_i > 1e-6 s_1]

which needs no inverse and no V, and is what is computed here, in float64, for all matrices of one shape at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onea.options import Validated
from onea.schema import NotNegative, ZeroToOne
from onea.tensors import Tensors, eigh

_DELTA = 1e-8  # keeps the normalised spectrum defined
_NULL = 1e-6  # directions below this share of the largest singular value carry nothing of the base


@dataclass(frozen=True)
class Gate(Validated):
    """The gate on the singular directions of the base; its fields are options of One-A.

    Attributes:
        gating: hold back the leading singular directions; off moves all of them alike.
        kappa: sharpness of the gate.
        quantile: share of directions, from the smallest up, whose gate exceeds one half.
        even_gates: open all directions alike, so far that a matrix moves as far as with the gates (for an ablation).
    """

    gating: bool = True
    kappa: NotNegative = 2.0
    quantile: ZeroToOne = 0.3
    even_gates: bool = False

    def gates_of(self, spectrum: Tensor) -> Tensor:
        """The gate of each direction, given the singular values."""
        return gates(spectrum, self.kappa, self.quantile) if self.gating else torch.ones_like(spectrum)


@dataclass(frozen=True)
class Fusion:
    """A stack of merged matrices and what the merge did to them; leading dimension: the matrices.

    Attributes:
        merged: the result.
        spectrum: singular values of the base.
        gates: of its singular directions.
        align_share: the align side's share of the information.
        base: the larger side.
        left: its left singular vectors, as columns.
        align: the smaller side.
    """

    merged: Tensor
    spectrum: Tensor
    gates: Tensor
    align_share: Tensor
    base: Tensor
    left: Tensor
    align: Tensor


def normalised(spectrum: Tensor) -> Tensor:
    """Singular values relative to the largest one."""
    return spectrum / (spectrum[..., :1] + _DELTA)


def gates(spectrum: Tensor, kappa: float, quantile: float) -> Tensor:
    """How far each singular direction may follow the align side: little at the head, more at the tail (Eq. 12).

    >>> gates(torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64), kappa=0.0, quantile=0.3)
    tensor([[0.5000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    relative = normalised(spectrum)
    threshold = torch.quantile(relative, quantile, dim=-1, keepdim=True)
    return torch.sigmoid(kappa * (threshold - relative))


def left_singular(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors ``[n, out, k]`` and values ``[n, k]`` of float64 matrices ``[n, out, in]``.

    From the small Gram matrix, which takes a fraction of the time of a full decomposition and no right vectors.
    Directions below 1e-6 of the largest value, where squaring has cost the precision, come back as zero vectors; every
    user masks them anyway.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    gram = matrices @ matrices.mT if wide else matrices.mT @ matrices
    small = eigh(gram)[1].flip(-1)
    images = matrices.mT @ small if wide else matrices @ small
    spectrum = images.norm(dim=1)  # sharper than the roots of the eigenvalues
    kept = spectrum > _NULL * spectrum[:, :1]
    if wide:
        return small * kept[:, None, :], spectrum
    left = images / spectrum.where(kept, torch.ones_like(spectrum))[:, None, :] * kept[:, None, :]
    # One Newton-Schulz step restores the orthogonality that division by small values has cost.
    return left @ (1.5 * torch.eye(left.shape[2]).to(left) - 0.5 * left.mT @ left), spectrum


def fuse(
    base: Tensor,
    align: Tensor,
    align_share: Tensor | float,
    gate: Gate,
    *,
    alignment: bool = True,
) -> Fusion:
    """Merge ``align`` into ``base``, each ``[matrices, out, in]`` float64.

    Without ``alignment`` this is the weighted mean, which is also what symmetric (KnOTS) alignment gives under any
    linear rule. A base matrix that is entirely zero carries no information, so the align side is taken whole.

    >>> base, align = torch.eye(2, dtype=torch.float64)[None], torch.zeros(1, 2, 2, dtype=torch.float64)
    >>> fuse(base, align, 0.25, Gate(gating=False)).merged[0].diagonal()
    tensor([0.7500, 0.7500], dtype=torch.float64)
    """
    share = torch.as_tensor(align_share, dtype=base.dtype, device=base.device).expand(len(base))
    left, spectrum = left_singular(base)
    opened = gate.gates_of(spectrum) if alignment else torch.ones_like(spectrum)
    if alignment:
        towards = left.mT @ (align - base)
        if gate.even_gates:
            opened = opening(opened, towards)[:, None].expand_as(opened)
        step = opened * share[:, None] * (spectrum > _NULL * spectrum[:, :1])
        merged = base + left @ (step[:, :, None] * towards)
    else:
        merged = base + share[:, None, None] * (align - base)
    empty = (base == 0).flatten(1).all(1)
    return Fusion(torch.where(empty[:, None, None], align, merged), spectrum, opened, share, base, left, align)


def opening(gates: Tensor, towards: Tensor) -> Tensor:
    """How far gates let each matrix go, as a share of the way without them: the one gate that would do the same.

    Args:
        gates: of the directions, ``[matrices, directions]``.
        towards: what lies between base and align along each of them, ``[matrices, directions, in]``.

    >>> opening(torch.tensor([[0.5, 1.0]]), torch.tensor([[[4.0], [0.0]]]))
    tensor([0.5000])
    """
    ways = towards.norm(dim=-1)
    gated, whole = (gates * ways).norm(dim=-1), ways.norm(dim=-1)
    return torch.where(whole > 0, gated / whole.where(whole > 0, torch.ones_like(whole)), torch.ones_like(whole))


def unstack(like: Tensors, fusions: list[tuple[list[str], Fusion]]) -> Tensors:
    """The merged tensors by name, with the shapes, types, devices and order of ``like``."""
    merged = dict(like)
    for names, fusion in fusions:
        for name, matrix in zip(names, fusion.merged, strict=True):
            merged[name] = matrix.reshape(like[name].shape).to(like[name])
    return merged


def stack(side: Tensors, names: list[str]) -> Tensor:
    """Tensors of one shape as float64 matrices ``[n, out, in]`` on the CPU; a vector is a matrix of one row.

    A GPU takes longer to decompose small matrices, or has no float64; and so all machines round alike.
    """
    stacked = torch.stack([side[name] for name in names]).cpu()
    rows = stacked.shape[1] if stacked.dim() > 2 else 1
    return stacked.double().reshape(len(names), rows, -1)
