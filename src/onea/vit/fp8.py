# SPDX-License-Identifier: Apache-2.0
"""Frozen linear layers in FP8, forward and backward; nothing else of a network changes.

An FP8 product is about twice as fast on hardware that supports it. Every row of weights has its own scale, which maps
its largest value to the largest FP8 number. So has every row of tokens, unless the weights before a layer bound each
channel of its inputs: then the channel bounds are the scales, folded into the weights, and no row maximum is computed.
The backward pass multiplies FP8 gradients by a second copy of the weights, which is scaled by its columns. Gradients
inside an MLP, the widest rows, are bounded by the norms of the rows that enter the MLP's backward pass.

A layer norm gives tokens of a known length, so each channel behind its gain, and behind the next linear layer, has a
bound. No hook comes between a norm and these layers. The output of attention has no bound: prefixes and updates of the
values change it. A token's length seldom lies in one direction: values are mostly smaller than their bound by the root
of the width, 28 for ViT-B. A floating-point format has the same precision there."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FORMAT = torch.float8_e4m3fn  # three bits of mantissa; by rows, its range is enough for gradients, too
_LARGEST = torch.finfo(FORMAT).max
_LEAST = 1e-30  # a row of zeros has a scale as well; its reciprocal must stay finite
_SHORTEST = 1e-15  # length of a row whose squares are still numbers
_MULTIPLE = 16  # of both sides of a matrix, or the chip does not take it


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[M, K]`` in eight bits, and the float32 scale ``[M, 1]`` of each, by which it is to be multiplied.

    >>> numbers, scale = quantise_rows(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> (numbers.float() * scale).tolist()
    [[1.0, -2.0], [0.0, 0.0]]
    """
    rows = rows.float()
    most = rows.abs().amax(1, keepdim=True).clamp_min(_LEAST)
    return _converted(rows * (_LARGEST / most)), most / _LARGEST


def quantise_scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Rows ``[M, K]`` in eight bits, times one factor for each column that leaves none larger than the format has.

    >>> quantise_scaled(torch.tensor([[1.0, -2.0], [0.0, 4.0]]), torch.tensor([100.0, 112.0])).tolist()
    [[96.0, -224.0], [0.0, 448.0]]
    """
    return _converted(rows.float() * factors)


def unit_scales(rows: Tensor) -> Tensor:
    """The scale ``[M, 1]`` of rows that are not scaled, or whose scale is part of what they are multiplied with."""
    return rows.new_ones(len(rows), 1, dtype=torch.float32)


def _converted(rows: Tensor) -> Tensor:
    return rows.to(FORMAT).flatten().view(rows.shape)  # row after row in memory, as products want them


def scaled_matmul(a: Tensor, scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T`` of two matrices in eight bits ``[M, K]`` and ``[N, K]``, each with a scale per row, in bfloat16.

    Where there is no CUDA, the same numbers are multiplied in float32.
    """
    if a.device.type == "cuda":
        return torch._scaled_mm(a, b.t(), scale, b_scale.t(), bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    wide = F.linear(a.float() * scale, b.float() * b_scale)
    return (wide if bias is None else wide + bias.float()).to(torch.bfloat16)


class _Product(torch.autograd.Function):
    """Tokens times frozen weights; gradients reach the tokens alone."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        rows: Tensor,
        scale: Tensor,
        columns: Tensor,
        column_scale: Tensor,
        bias: Tensor | None,
        stretch: Tensor | None,
    ) -> Tensor:
        context.save_for_backward(columns, column_scale)
        context.dtype = x.dtype
        numbers, own = quantise_rows(x) if stretch is None else (quantise_scaled(x, stretch), unit_scales(x))
        return scaled_matmul(numbers, own, rows, scale, bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        columns, column_scale = context.saved_tensors
        numbers, own = quantise_rows(gradients[0])
        back = scaled_matmul(numbers, own, columns, column_scale).to(context.dtype)
        return back, None, None, None, None, None, None


class Fp8Linear(nn.Linear):
    """A frozen linear layer whose products are in eight bits; answers are in bfloat16.

    The weights stay beside them as they were, for those who replace them by others (``plain`` is then set).

    Args:
        layer: with the weights.
        limits: how large each channel of its inputs can be, ``[in_features]``; None where rows are to be searched.

    Attributes:
        plain: whether to compute with the weights as they are.
    """

    rows: Tensor
    scale: Tensor
    columns: Tensor
    column_scale: Tensor
    stretch: Tensor | None

    def __init__(self, layer: nn.Linear, limits: Tensor | None = None):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.plain = False
        with torch.no_grad():
            stretch = None if limits is None else _LARGEST / limits.to(layer.weight.device).clamp_min(_LEAST)
            rows, scale = quantise_rows(layer.weight if stretch is None else layer.weight / stretch)
            columns, column_scale = quantise_rows(layer.weight.t())
        for name, value in (("rows", rows), ("scale", scale), ("columns", columns), ("column_scale", column_scale)):
            self.register_buffer(name, value.contiguous(), persistent=False)
        self.register_buffer("stretch", stretch, persistent=False)

    def keep_in(self, dtype: torch.dtype) -> None:
        """Store weights and bias in this precision; what is in eight bits stays so."""
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.data = parameter.data.to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Tokens ``[..., in_features]`` to ``[..., out_features]``."""
        if self.plain:
            return super().forward(input)
        flat = input.reshape(-1, self.in_features)
        found: Tensor = _Product.apply(
            flat, self.rows, self.scale, self.columns, self.column_scale, self.bias, self.stretch
        )
        return found.view(*input.shape[:-1], self.out_features)


class _Mlp(torch.autograd.Function):
    """Two frozen layers with a GELU between them; gradients reach the tokens alone.

    On the way back everything is linear in the gradient: each row that enters is made as long as the largest number of
    eight bits, the limits of what is inside follow from the weights, and what leaves gets its row's length back.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, approximate: str, *weights: Any) -> Tensor:
        rows, scale, bias, stretch, second_rows, second_scale, second_bias, second_stretch, *back = weights
        hidden = scaled_matmul(quantise_scaled(x, stretch), unit_scales(x), rows, scale, bias)
        context.save_for_backward(hidden, *back)
        context.dtype, context.approximate, context.others = x.dtype, approximate, len(weights) + 1
        active = quantise_scaled(F.gelu(hidden, approximate=approximate), second_stretch)
        return scaled_matmul(active, unit_scales(x), second_rows, second_scale, second_bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, columns, column_scale, stretch, first_columns, first_scale = context.saved_tensors
        upper = gradients[0].float()
        length = upper.norm(dim=1, keepdim=True).clamp_min(_SHORTEST)
        inner = scaled_matmul(_converted(upper * (_LARGEST / length)), unit_scales(upper), columns, column_scale)
        inner = torch.ops.aten.gelu_backward(inner, hidden, approximate=context.approximate)
        back = scaled_matmul(quantise_scaled(inner, stretch), length / _LARGEST, first_columns, first_scale)
        return back.to(context.dtype), *(None,) * context.others


class Fp8Mlp(nn.Module):
    """Stands for an MLP of two ``Fp8Linear`` whose inputs have limits, with a GELU between them."""

    stretch: Tensor
    columns: Tensor
    column_scale: Tensor

    def __init__(self, mlp: Any):
        super().__init__()
        self.fc1, self.act, self.fc2 = mlp.fc1, mlp.act, mlp.fc2
        self._mlp = (mlp,)  # no child of its own: layers have one name
        limits = gradient_bounds(mlp.fc2).clamp_min(_LEAST)
        columns, column_scale = quantise_rows(mlp.fc1.weight.detach().t() * limits)
        for name, value in (("stretch", 1 / limits), ("columns", columns), ("column_scale", column_scale)):
            self.register_buffer(name, value.contiguous(), persistent=False)

    def original(self) -> nn.Module:
        """The one it stands for."""
        return self._mlp[0]  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[..., width]`` to what is added to them."""
        first, second = self.fc1, self.fc2
        if first.plain:
            return second(self.act(first(x)))  # type: ignore[no-any-return]
        there = (
            *(first.rows, first.scale, first.bias, first.stretch),
            *(second.rows, second.scale, second.bias, second.stretch),
        )
        back = second.columns, second.column_scale, self.stretch, self.columns, self.column_scale
        flat = x.reshape(-1, first.in_features)
        found: Tensor = _Mlp.apply(flat, self.act.approximate, *there, *back)
        return found.view(*x.shape[:-1], second.out_features)

    @staticmethod
    def can_wrap(mlp: Any) -> bool:
        """Whether it can stand for this module."""
        layers = [getattr(mlp, name, None) for name in ("fc1", "fc2")]
        limited = all(isinstance(layer, Fp8Linear) and layer.stretch is not None for layer in layers)
        return limited and type(mlp.act) is nn.GELU


def to_fp8(blocks: nn.Module) -> None:
    """Let all linear layers in these blocks compute in eight bits, but for those of odd sizes."""
    limits = {layer: each for block in blocks.children() for layer, each in input_bounds(block).items()}
    for parent, name, layer in _layers(blocks):
        if layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0:
            setattr(parent, name, Fp8Linear(layer, limits.get(layer)))
    for block in blocks.children():
        if Fp8Mlp.can_wrap(mlp := getattr(block, "mlp", None)):
            block.mlp = Fp8Mlp(mlp)


def from_fp8(module: nn.Module) -> None:
    """Let all linear layers compute with their weights as they are, and forget those in eight bits."""
    for block in list(module.modules()):
        if isinstance(mlp := getattr(block, "mlp", None), Fp8Mlp):
            block.mlp = mlp.original()
    for parent, name, layer in _layers(module):
        if isinstance(layer, Fp8Linear):
            plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            plain.weight, plain.bias = layer.weight, layer.bias
            setattr(parent, name, plain)


def _layers(module: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """All linear layers, each with the module that holds it and its name there."""
    return [
        (parent, name, layer)
        for parent in module.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]


# Both factors of a product in eight bits are off by 1/16 at most, and its result in bfloat16 by 1/256: 1.134 in all.
# The rest is for factors below the smallest normal number.
_ROUNDED = 1.25
_STEEPEST = 1.13  # the slope of GELU at the root of 2, rounded up; that of its approximation is no larger


def norm_bounds(norm: nn.LayerNorm) -> Tensor:
    """Of what leaves a norm. One channel of ``d`` has all of a token's length at most: the root of ``d - 1``.

    >>> norm_bounds(nn.LayerNorm(5, elementwise_affine=False))
    tensor([2., 2., 2., 2., 2.])
    """
    gain, shift = _affine(norm)
    return gain.abs() * math.sqrt(len(gain) - 1) + shift.abs()


def hidden_bounds(norm: nn.LayerNorm, layer: nn.Linear) -> Tensor:
    """Of what leaves a linear layer behind a norm, in eight bits or in more, and an activation that enlarges nothing.

    Each channel is the product of a row of weights with a token that is ``sqrt(d)`` long, and what is fixed.
    """
    weight = layer.weight.detach().float()
    gain, shift = (part.to(weight.device) for part in _affine(norm))
    fixed = weight @ shift if layer.bias is None else weight @ shift + layer.bias.detach().float()
    # Rounding adds a share of the sizes of all terms, even where they cancel each other.
    fixed = torch.maximum(fixed.abs(), weight.abs() @ shift.abs())
    lengths: Tensor = (weight * gain).norm(dim=1)
    return _ROUNDED * (lengths * math.sqrt(len(gain)) + fixed)


def gradient_bounds(layer: nn.Linear) -> Tensor:
    """Of gradients of length 1 that passed a linear layer, in eight bits or in more, and a GELU behind which it is.

    >>> gradient_bounds(nn.Linear(3, 3)).shape
    torch.Size([3])
    """
    lengths: Tensor = layer.weight.detach().float().norm(dim=0)
    return _ROUNDED * _STEEPEST * lengths


def input_bounds(block: Any) -> dict[nn.Module, Tensor]:
    """The limits of what enters linear layers of a block, channel by channel, for those layers whose inputs have any.

    Empty for blocks without layer norms in front of attention and MLP. An MLP with gates multiplies two hidden layers,
    and one with a norm of its own changes the hidden one: then only what the block's norms leave has limits.
    """
    from timm.layers import Mlp
    from timm.models.eva import EvaBlock
    from timm.models.vision_transformer import Block

    found: dict[nn.Module, Tensor] = {}
    if type(block) not in (Block, EvaBlock):
        return found
    for norm, parent, names in (
        (block.norm1, block.attn, ("qkv", "q_proj", "k_proj", "v_proj")),
        (block.norm2, block.mlp, ("fc1", "fc1_g", "fc1_x")),
    ):
        if isinstance(norm, nn.LayerNorm):
            layers = (getattr(parent, name, None) for name in names)
            found |= {layer: norm_bounds(norm) for layer in layers if isinstance(layer, nn.Linear)}
    mlp = block.mlp
    plain = type(mlp) is Mlp and isinstance(mlp.norm, nn.Identity) and _enlarges_nothing(mlp.act)
    if plain and mlp.fc1 in found:
        found[mlp.fc2] = hidden_bounds(block.norm2, mlp.fc1)
    return found


def _enlarges_nothing(activation: nn.Module) -> bool:
    """Whether it is known to multiply each number by something between 0 and 1."""
    from timm.layers import GELU, GELUTanh, QuickGELU

    return type(activation) in (nn.ReLU, nn.GELU, nn.SiLU, GELU, GELUTanh, QuickGELU)


def _affine(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """What a norm multiplies each channel by, and what it adds."""
    (width,) = norm.normalized_shape
    gain = torch.ones(width) if norm.weight is None else norm.weight.detach().float()
    return gain, torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().float()
