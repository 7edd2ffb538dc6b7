# SPDX-License-Identifier: Apache-2.0
"""GELU that a compiler turns into few instructions, exact to far less than bfloat16 rounds.

The error function of CUDA's library takes longer than the memory that its kernel reads and writes. This one is formula
7.1.26 of Abramowitz and Stegun: off by 1.5e-7 at most, with an exponential that the gradient needs as well.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_P = 0.3275911 / math.sqrt(2)
_POLYNOMIAL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Distribution function and density of the standard normal distribution, for float32.

    >>> below, density = normal(torch.tensor([-1.0, 0.0, 1.0]))
    >>> [round(value, 4) for value in below.tolist()], [round(value, 4) for value in density.tolist()]
    ([0.1587, 0.5, 0.8413], [0.242, 0.3989, 0.242])
    """
    bell = torch.exp(-0.5 * x * x)
    t = 1 / (1 + _P * x.abs())
    tail = torch.zeros_like(t)
    for coefficient in _POLYNOMIAL:
        tail = tail * t + coefficient
    tail = 0.5 * tail * t * bell
    return torch.where(x < 0, tail, 1 - tail), bell / math.sqrt(2 * math.pi)


def gelu(x: Tensor) -> Tensor:
    """``x`` times the share of a normal distribution below it."""
    wide = x.float()
    return (wide * normal(wide)[0]).to(x.dtype)


def gelu_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``x``, given that of what ``gelu`` made of it."""
    wide = x.float()
    below, density = normal(wide)
    return (gradient.float() * (below + wide * density)).to(gradient.dtype)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return gelu(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return gelu_gradient(gradients[0], x)


class Gelu(nn.GELU):
    """PyTorch's GELU; in bfloat16 and where it is compiled for a GPU, ours."""

    def forward(self, input: Tensor) -> Tensor:
        """GELU of each number."""
        compiles = input.is_cuda and input.dtype == torch.bfloat16 and torch.compiler.is_compiling()
        if compiles and self.approximate == "none":
            found: Tensor = _Gelu.apply(input)
            return found
        return F.gelu(input, approximate=self.approximate)


def with_own_gelu(blocks: nn.ModuleList) -> None:
    """Let the MLPs of blocks use it, where they have PyTorch's."""
    for block in blocks:
        mlp: Any = getattr(block, "mlp", None)
        if type(getattr(mlp, "act", None)) is nn.GELU:
            mlp.act = Gelu(mlp.act.approximate)
