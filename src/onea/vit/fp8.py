# SPDX-License-Identifier: Apache-2.0
"""Frozen linear layers in FP8, forward and backward; nothing else of a network changes.

An FP8 product is about twice as fast on hardware that supports it. Every row of weights has its own scale, which maps
its largest value to the largest FP8 number. Every row of tokens has one as well, unless the weights before a layer
bound each channel of its inputs: then the channel bounds are the scales, folded into the weights, and no row maximum is
computed. The backward pass multiplies FP8 gradients by a second copy of the weights, scaled by columns. Gradients
inside an MLP, the widest rows, are bounded by the norms of the rows that enter the MLP's backward pass.

The output of a layer norm has a known length, so each channel after its gain, and after the next linear layer, is
bounded. No hook comes between a norm and these layers. The output of attention is not bounded, because prefixes and
updates of the values change it. Most values are far smaller than their bound, typically by the root of the width (28
for ViT-B), because a token rarely points along one channel. This costs no precision in a floating-point format."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FORMAT = torch.float8_e4m3fn  # three bits of mantissa; with a scale per row, its range suffices for gradients, too
_LARGEST = torch.finfo(FORMAT).max
_MIN_MAXIMUM = 1e-30  # for a row of zeros: the reciprocal of its scale must be finite
_MIN_NORM = 1e-15  # for a row of zeros, whose norm is a divisor
_MULTIPLE = 16  # the hardware requires both sides of a matrix to be multiples of this


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[M, K]`` in FP8, and the float32 scale ``[M, 1]`` by which each is to be multiplied.

    >>> numbers, scale = quantise_rows(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> (numbers.float() * scale).tolist()
    [[1.0, -2.0], [0.0, 0.0]]
    """
    rows = rows.float()
    maximum = rows.abs().amax(1, keepdim=True).clamp_min(_MIN_MAXIMUM)
    return _convert(rows * (_LARGEST / maximum)), maximum / _LARGEST


def _quantise(rows: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """``rows * factors`` in FP8 with scales of 1, or the result of ``quantise_rows`` without factors."""
    if factors is None:
        return quantise_rows(rows)
    return _convert(rows.float() * factors), rows.new_ones(len(rows), 1, dtype=torch.float32)


def _convert(rows: Tensor) -> Tensor:
    return rows.to(FORMAT).flatten().view(rows.shape)  # row-major in memory, as FP8 products require


def scaled_matmul(a: Tensor, scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T`` of FP8 matrices ``[M, K]`` and ``[N, K]``, each with a scale per row, in bfloat16.

    Without CUDA, the same numbers are multiplied in float32.
    """
    if a.device.type == "cuda":
        return torch._scaled_mm(a, b.t(), scale, b_scale.t(), bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    wide = F.linear(a.float() * scale, b.float() * b_scale)
    return (wide if bias is None else wide + bias.float()).to(torch.bfloat16)


class _LinearFunction(torch.autograd.Function):
    """Tokens times frozen weights; only the tokens get a gradient."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        transposed: Tensor,
        transposed_scale: Tensor,
        bias: Tensor | None,
        input_factors: Tensor | None,
    ) -> Tensor:
        context.save_for_backward(transposed, transposed_scale)
        context.dtype = x.dtype
        return scaled_matmul(*_quantise(x, input_factors), weight, scale, bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = scaled_matmul(*quantise_rows(gradients[0]), *context.saved_tensors)
        return gradient.to(context.dtype), None, None, None, None, None, None


class Fp8Linear(nn.Linear):
    """A frozen linear layer with FP8 products and outputs in bfloat16.

    The original weights are kept for methods that replace weights, which set ``disabled``.

    Args:
        layer: the layer to replace.
        limits: the largest absolute value of each input channel, ``[in_features]``; None for one scale per row.

    Attributes:
        disabled: whether to compute with the original weights.
        input_factors: factors that map the limits to the largest FP8 number; None without limits.
    """

    weight_fp8: Tensor
    weight_scale: Tensor
    transposed_fp8: Tensor
    transposed_scale: Tensor
    input_factors: Tensor | None

    def __init__(self, layer: nn.Linear, limits: Tensor | None = None):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.disabled = False
        with torch.no_grad():
            factors = None if limits is None else _LARGEST / limits.to(layer.weight.device).clamp_min(_MIN_MAXIMUM)
            weight, scale = quantise_rows(layer.weight if factors is None else layer.weight / factors)
            transposed, transposed_scale = quantise_rows(layer.weight.t())
        self.register_buffer("weight_fp8", weight.contiguous(), persistent=False)
        self.register_buffer("weight_scale", scale.contiguous(), persistent=False)
        self.register_buffer("transposed_fp8", transposed.contiguous(), persistent=False)
        self.register_buffer("transposed_scale", transposed_scale.contiguous(), persistent=False)
        self.register_buffer("input_factors", factors, persistent=False)

    def cast_originals(self, dtype: torch.dtype) -> None:
        """Cast the original weights and bias; the FP8 weights do not change."""
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.data = parameter.data.to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Tokens ``[..., in_features]`` to ``[..., out_features]``."""
        if self.disabled:
            return super().forward(input)
        output: Tensor = _LinearFunction.apply(
            input.reshape(-1, self.in_features),
            self.weight_fp8,
            self.weight_scale,
            self.transposed_fp8,
            self.transposed_scale,
            self.bias,
            self.input_factors,
        )
        return output.view(*input.shape[:-1], self.out_features)


class _MlpFunction(torch.autograd.Function):
    """Two frozen layers with a GELU between them; only the tokens get a gradient.

    The backward pass is linear in the gradient: each row that enters is scaled to the norm ``_LARGEST``, the bounds of
    the hidden gradients follow from the weights, and the result is scaled back.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, approximate: str, *weights: Any) -> Tensor:
        (first, first_scale, first_bias, factors), (second, second_scale, bias, hidden_factors) = (
            weights[:4],
            weights[4:8],
        )
        hidden = scaled_matmul(*_quantise(x, factors), first, first_scale, first_bias)
        context.save_for_backward(hidden, *weights[8:])
        context.dtype, context.approximate, context.others = x.dtype, approximate, len(weights) + 1
        active = F.gelu(hidden, approximate=approximate)
        return scaled_matmul(*_quantise(active, hidden_factors), second, second_scale, bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, second, second_scale, factors, first, first_scale = context.saved_tensors
        upper = gradients[0].float()
        norm = upper.norm(dim=1, keepdim=True).clamp_min(_MIN_NORM)
        inner = scaled_matmul(*_quantise(upper, _LARGEST / norm), second, second_scale)
        inner = torch.ops.aten.gelu_backward(inner, hidden, approximate=context.approximate)
        gradient = scaled_matmul(_quantise(inner, factors)[0], norm / _LARGEST, first, first_scale)
        return gradient.to(context.dtype), *(None,) * context.others


class Fp8Mlp(nn.Module):
    """Replaces an MLP of two ``Fp8Linear`` layers with limits, and a GELU between them."""

    hidden_factors: Tensor
    transposed_fp8: Tensor
    transposed_scale: Tensor

    def __init__(self, mlp: Any):
        super().__init__()
        self.fc1, self.act, self.fc2 = mlp.fc1, mlp.act, mlp.fc2
        self._original = (mlp,)  # in a tuple, so that it is no submodule: each layer has one name
        limits = gradient_bounds(mlp.fc2).clamp_min(_MIN_MAXIMUM)
        transposed, scale = quantise_rows(mlp.fc1.weight.detach().t() * limits)
        self.register_buffer("hidden_factors", (1 / limits).contiguous(), persistent=False)
        self.register_buffer("transposed_fp8", transposed.contiguous(), persistent=False)
        self.register_buffer("transposed_scale", scale.contiguous(), persistent=False)

    def original(self) -> nn.Module:
        """The replaced MLP."""
        return self._original[0]  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """The update of tokens ``[..., width]``."""
        if self.fc1.disabled:
            return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]
        layers = [(fc.weight_fp8, fc.weight_scale, fc.bias, fc.input_factors) for fc in (self.fc1, self.fc2)]
        backward = (
            *(self.fc2.transposed_fp8, self.fc2.transposed_scale),
            *(self.hidden_factors, self.transposed_fp8, self.transposed_scale),
        )
        flat = x.reshape(-1, self.fc1.in_features)
        output: Tensor = _MlpFunction.apply(flat, self.act.approximate, *layers[0], *layers[1], *backward)
        return output.view(*x.shape[:-1], self.fc2.out_features)

    @staticmethod
    def can_replace(mlp: Any) -> bool:
        """Whether an ``Fp8Mlp`` can replace this module."""
        layers = [getattr(mlp, name, None) for name in ("fc1", "fc2")]
        have_limits = all(isinstance(layer, Fp8Linear) and layer.input_factors is not None for layer in layers)
        return have_limits and type(mlp.act) is nn.GELU


def to_fp8(blocks: nn.Module) -> None:
    """Replace the linear layers in these blocks by FP8 layers, except those of unsupported sizes."""
    limits = {layer: bounds for block in blocks.children() for layer, bounds in input_bounds(block).items()}
    for parent, name, layer in _linear_layers(blocks):
        if layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0:
            setattr(parent, name, Fp8Linear(layer, limits.get(layer)))
    for block in blocks.children():
        if Fp8Mlp.can_replace(mlp := getattr(block, "mlp", None)):
            block.mlp = Fp8Mlp(mlp)


def from_fp8(module: nn.Module) -> None:
    """Restore the original layers."""
    for block in list(module.modules()):
        if isinstance(mlp := getattr(block, "mlp", None), Fp8Mlp):
            block.mlp = mlp.original()
    for parent, name, layer in _linear_layers(module):
        if isinstance(layer, Fp8Linear):
            original = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            original.weight, original.bias = layer.weight, layer.bias
            setattr(parent, name, original)


def _linear_layers(module: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """All linear layers, with their parent modules and their names in them."""
    return [
        (parent, name, layer)
        for parent in module.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]


# Both factors of an FP8 product have relative errors of at most 1/16, and its bfloat16 result of 1/256: a factor of
# 1.134 together. The rest is a margin for factors below the smallest normal number.
_ROUNDING = 1.25
_MAX_GELU_SLOPE = 1.13  # at the root of 2, rounded up; the tanh approximation is not steeper


def norm_bounds(norm: nn.LayerNorm) -> Tensor:
    """Bounds of the output of a norm: at most one of ``d`` channels has a token's whole length, the root of ``d - 1``.

    >>> norm_bounds(nn.LayerNorm(5, elementwise_affine=False))
    tensor([2., 2., 2., 2., 2.])
    """
    gain, shift = _affine(norm)
    return gain.abs() * math.sqrt(len(gain) - 1) + shift.abs()


def hidden_bounds(norm: nn.LayerNorm, layer: nn.Linear) -> Tensor:
    """Bounds of the output of a linear layer after a norm, in FP8 or not, also after a contracting activation.

    Each channel is the product of a row of weights and a token of length ``sqrt(d)``, plus a constant.
    """
    weight = layer.weight.detach().float()
    gain, shift = (part.to(weight.device) for part in _affine(norm))
    constant = weight @ shift if layer.bias is None else weight @ shift + layer.bias.detach().float()
    # Rounding errors are relative to the sizes of all terms, even if these cancel each other.
    constant = torch.maximum(constant.abs(), weight.abs() @ shift.abs())
    lengths: Tensor = (weight * gain).norm(dim=1)
    return _ROUNDING * (lengths * math.sqrt(len(gain)) + constant)


def gradient_bounds(layer: nn.Linear) -> Tensor:
    """Bounds of gradients of norm 1 after the backward pass of a linear layer, in FP8 or not, and the GELU before it.

    >>> gradient_bounds(nn.Linear(3, 3)).shape
    torch.Size([3])
    """
    lengths: Tensor = layer.weight.detach().float().norm(dim=0)
    return _ROUNDING * _MAX_GELU_SLOPE * lengths


def input_bounds(block: Any) -> dict[nn.Module, Tensor]:
    """Bounds of each input channel, for the linear layers of a block whose inputs are bounded.

    Empty for blocks without layer norms before attention and MLP. An MLP with gates multiplies two hidden layers, and
    an MLP with a norm changes its hidden layer: then only the inputs of the first layers are bounded.
    """
    from timm.layers import GELU, GELUTanh, Mlp, QuickGELU
    from timm.models.eva import EvaBlock
    from timm.models.vision_transformer import Block

    bounds: dict[nn.Module, Tensor] = {}
    if type(block) not in (Block, EvaBlock):
        return bounds
    for norm, parent, names in (
        (block.norm1, block.attn, ("qkv", "q_proj", "k_proj", "v_proj")),
        (block.norm2, block.mlp, ("fc1", "fc1_g", "fc1_x")),
    ):
        if isinstance(norm, nn.LayerNorm):
            layers = (getattr(parent, name, None) for name in names)
            bounds |= {layer: norm_bounds(norm) for layer in layers if isinstance(layer, nn.Linear)}
    mlp, contracting = block.mlp, (nn.ReLU, nn.GELU, nn.SiLU, GELU, GELUTanh, QuickGELU)
    if type(mlp) is Mlp and isinstance(mlp.norm, nn.Identity) and type(mlp.act) in contracting and mlp.fc1 in bounds:
        bounds[mlp.fc2] = hidden_bounds(block.norm2, mlp.fc1)
    return bounds


def _affine(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Gain and shift of each channel."""
    (width,) = norm.normalized_shape
    gain = torch.ones(width) if norm.weight is None else norm.weight.detach().float()
    return gain, torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().float()
