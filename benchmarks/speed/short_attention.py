# SPDX-License-Identifier: Apache-2.0
"""Attention over few tokens on a GPU in bfloat16: PyTorch's kernels and ours, forward and backward.

    python benchmarks/speed/short_attention.py --out short-attention.csv --variants 64x4 64x8

All implementations read ``[images, tokens, 3 x width]`` and write its gradient, including the time of reordering it.
PyTorch's are not compiled, which would reduce that time. Ten calls are recorded as one CUDA graph; the result is the
median of nine replays. The last two columns are the relative errors of values and gradients compared with float64. A
variant of our kernels is the number of rows per tile and of warps per program; without ``--variants``, it is the one
that networks use. Unsupported shapes have no row.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from cuda_timing import microseconds
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from onea.vit.short_attention import tile_size
from onea.vit.short_attention_kernels import short_attention_backward, short_attention_forward

SHAPES = ((128, 6, 65), (128, 6, 44), (64, 6, 65))
THEIRS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
REPEATS, REPLAYS = 10, 9

Forward = Callable[[], Tensor]
Both = Callable[[], tuple[Tensor, Tensor]]


def attend(qkv: Tensor, heads: int) -> Tensor:
    """Attention as networks compute it without our kernels."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def theirs(backend: SDPBackend, qkv: Tensor, upper: Tensor, heads: int) -> tuple[Forward, Both]:
    """PyTorch's attention, with its gradient."""

    def forward() -> Tensor:
        with torch.no_grad(), sdpa_kernel(backend):
            return attend(qkv, heads)

    def both() -> tuple[Tensor, Tensor]:
        with sdpa_kernel(backend):
            out = attend(qkv, heads)
            (grad,) = torch.autograd.grad(out, qkv, upper)
            return out.detach(), grad

    return forward, both


def ours(tile: int, warps: int, qkv: Tensor, upper: Tensor, heads: int) -> tuple[Forward, Both]:
    """Our kernels with this number of rows per tile."""
    images, tokens, width = upper.shape
    sizes = tokens, heads, width // heads, tile

    def forward() -> Tensor:
        out = torch.empty_like(upper)
        short_attention_forward[(images * heads,)](qkv, out, *sizes, num_warps=warps)
        return out

    def both() -> tuple[Tensor, Tensor]:
        out, grad = forward(), torch.empty_like(qkv)
        short_attention_backward[(images * heads,)](qkv, upper, grad, *sizes, num_warps=warps)
        return out, grad

    return forward, both


def kernels(qkv: Tensor, upper: Tensor, heads: int, variants: list[str]) -> Iterator[tuple[str, Forward, Both]]:
    """All implementations by name."""
    for name, backend in THEIRS.items():
        yield name, *theirs(backend, qkv, upper, heads)
    tokens = upper.shape[1]
    for tile, warps in [tuple(map(int, variant.split("x"))) for variant in variants] or [tile_size(tokens)]:
        if tile >= tokens - 1:
            yield f"ours {tile}x{warps}", *ours(tile, warps, qkv, upper, heads)


def relative_error(result: Tensor, expected: Tensor) -> str:
    """The relative distance of a tensor from the expected one."""
    return f"{float((result.double() - expected).norm() / expected.norm()):.1e}"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--variants", nargs="+", default=[])
    arguments = parser.parse_args()
    columns = "images", "heads", "tokens", "kernel", "forward_us", "both_us", "forward_off", "gradient_off"
    with arguments.out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        for shape in arguments.shapes:
            images, heads, tokens = map(int, shape.split("x"))
            torch.manual_seed(1)
            values = torch.randn(images, tokens, 4 * heads * arguments.width, device="cuda").bfloat16()
            qkv, upper = (part.contiguous() for part in values.tensor_split([3 * heads * arguments.width], 2))
            exact = qkv.double().requires_grad_()
            with sdpa_kernel(SDPBackend.MATH):
                expected = attend(exact, heads)
            (gradient,) = torch.autograd.grad(expected, exact, upper.double())
            for name, forward, both in kernels(qkv.requires_grad_(), upper, heads, arguments.variants):
                try:
                    out, grad = both()
                    times = microseconds(forward, REPEATS, REPLAYS), microseconds(both, REPEATS, REPLAYS)
                except RuntimeError as error:
                    print(f"{name} at {shape}: {str(error).splitlines()[0]}")
                    continue
                row = (
                    *(f"{duration:.1f}" for duration in times),
                    relative_error(out, expected.detach()),
                    relative_error(grad, gradient),
                )
                table.writerow((images, heads, tokens, name, *row))
                file.flush()
                print(shape, name, *row)


if __name__ == "__main__":
    main()
