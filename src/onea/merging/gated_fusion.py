# SPDX-License-Identifier: Apache-2.0
"""The mathematics of One-A's merge: fuse matrices in the subspace of a base, whose leading directions move least.

Paper: "One Adapter for All" (arXiv 2603.10237), Eqs. 5-13. With base ``B``, align ``A``, thin SVD ``B = U S Vt``,
gates ``g`` and align share ``w``, the sequence of projection, fusion, gating and reconstruction simplifies to

    merged = B + U diag(m g w) Ut (A - B),        m_i = 1[s_i > 1e-6 s_1]

which needs neither an inverse nor V. It is computed in float64 for all matrices of one shape at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onea.options import Validated
from onea.schema import NotNegative, ZeroToOne
from onea.tensors import Tensors, cast_like, eigh

_DELTA = 1e-8  # avoids division by zero
_CUTOFF = 1e-6  # smaller singular values, relative to the largest one, are treated as zero


@dataclass(frozen=True)
class Gate(Validated):
    """The gate on the singular directions of the base; its fields are options of One-A.

    Attributes:
        gating: hold back the leading singular directions; off moves all directions equally.
        kappa: sharpness of the gate.
        quantile: share of directions, those with the smallest singular values, whose gate exceeds one half.
        even_gates: use the same gate for all directions of a matrix, with an update of the same norm (for an ablation).
    """

    gating: bool = True
    kappa: NotNegative = 2.0
    quantile: ZeroToOne = 0.3
    even_gates: bool = False

    def compute_gates(self, spectrum: Tensor) -> Tensor:
        """The gate of each direction from the singular values."""
        return gate_values(spectrum, self.kappa, self.quantile) if self.gating else torch.ones_like(spectrum)


@dataclass(frozen=True)
class Fusion:
    """Merged matrices and the intermediate results of the merge; the first dimension of all tensors is the matrix.

    Attributes:
        merged: the result.
        spectrum: singular values of the base.
        gates: gates of its singular directions.
        align_share: the align side's share of the information.
        base: the larger side.
        left: left singular vectors of the base, as columns.
        align: the smaller side.
    """

    merged: Tensor
    spectrum: Tensor
    gates: Tensor
    align_share: Tensor
    base: Tensor
    left: Tensor
    align: Tensor


def normalise_spectrum(spectrum: Tensor) -> Tensor:
    """Singular values relative to the largest one."""
    return spectrum / (spectrum[..., :1] + _DELTA)


def gate_values(spectrum: Tensor, kappa: float, quantile: float) -> Tensor:
    """The gate of each singular direction, small for the leading ones and larger for the last ones (Eq. 12).

    >>> gate_values(torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64), kappa=0.0, quantile=0.3)
    tensor([[0.5000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    relative = normalise_spectrum(spectrum)
    threshold = torch.quantile(relative, quantile, dim=-1, keepdim=True)
    return torch.sigmoid(kappa * (threshold - relative))


def left_singular(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors ``[n, out, k]`` and values ``[n, k]`` of float64 matrices ``[n, out, in]``.

    Computed from the smaller Gram matrix, in a fraction of the time of a full decomposition. Vectors whose value is
    below 1e-6 of the largest one are zero, because they lose their precision in the Gram matrix; no caller uses them.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    gram = matrices @ matrices.mT if wide else matrices.mT @ matrices
    eigenvectors = eigh(gram)[1].flip(-1)
    projected = matrices.mT @ eigenvectors if wide else matrices @ eigenvectors
    spectrum = projected.norm(dim=1)  # more accurate than the roots of the eigenvalues
    kept = spectrum > _CUTOFF * spectrum[:, :1]
    if wide:
        return eigenvectors * kept[:, None, :], spectrum
    left = projected / spectrum.where(kept, torch.ones_like(spectrum))[:, None, :] * kept[:, None, :]
    # One Newton-Schulz step restores the orthogonality, which is lost in the division by small values.
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

    Without ``alignment``, the result is the weighted mean. Symmetric (KnOTS) alignment with any linear rule also
    reduces to it. If a base matrix is zero, the result is the align matrix.

    >>> base, align = torch.eye(2, dtype=torch.float64)[None], torch.zeros(1, 2, 2, dtype=torch.float64)
    >>> fuse(base, align, 0.25, Gate(gating=False)).merged[0].diagonal()
    tensor([0.7500, 0.7500], dtype=torch.float64)
    """
    share = torch.as_tensor(align_share, dtype=base.dtype, device=base.device).expand(len(base))
    left, spectrum = left_singular(base)
    gates = gate.compute_gates(spectrum) if alignment else torch.ones_like(spectrum)
    if alignment:
        change = left.mT @ (align - base)
        if gate.even_gates:
            gates = effective_gate(gates, change)[:, None].expand_as(gates)
        step = gates * share[:, None] * (spectrum > _CUTOFF * spectrum[:, :1])
        merged = base + left @ (step[:, :, None] * change)
    else:
        merged = base + share[:, None, None] * (align - base)
    empty = (base == 0).flatten(1).all(1)
    return Fusion(torch.where(empty[:, None, None], align, merged), spectrum, gates, share, base, left, align)


def effective_gate(gates: Tensor, change: Tensor) -> Tensor:
    """The single gate for all directions of a matrix that gives an update of the same norm, ``[matrices]``.

    Args:
        gates: gates of the directions, ``[matrices, directions]``.
        change: the difference of align and base along each direction, ``[matrices, directions, in]``.

    >>> effective_gate(torch.tensor([[0.5, 1.0]]), torch.tensor([[[4.0], [0.0]]]))
    tensor([0.5000])
    """
    norms = change.norm(dim=-1)
    gated, total = (gates * norms).norm(dim=-1), norms.norm(dim=-1)
    ones = torch.ones_like(total)
    return torch.where(total > 0, gated / total.where(total > 0, ones), ones)


def unstack(like: Tensors, fusions: list[tuple[list[str], Fusion]]) -> Tensors:
    """The merged tensors by name, with the shapes, types, devices and order of ``like``."""
    merged = dict(like)
    for names, fusion in fusions:
        for name, matrix in zip(names, fusion.merged, strict=True):
            merged[name] = cast_like(matrix, like[name])
    return merged


def stack(side: Tensors, names: list[str]) -> Tensor:
    """Tensors of one shape as float64 matrices ``[n, out, in]`` on the CPU; a vector is a matrix of one row.

    GPUs decompose small matrices more slowly, and some have no float64. On the CPU, all machines also round equally.
    """
    stacked = torch.stack([side[name] for name in names]).cpu()
    rows = stacked.shape[1] if stacked.dim() > 2 else 1
    return stacked.double().reshape(len(names), rows, -1)
