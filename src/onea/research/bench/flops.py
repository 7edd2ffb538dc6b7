# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations: those of the network, counted while it runs, and those the chip could do at best."""

from __future__ import annotations

import torch

from onea.learner.adapter_training import blank_adapters
from onea.research.bench.timing import timed
from onea.research.methods.one_a import OneAMethod
from onea.research.runs.evaluation import count_flops
from onea.vit.fp8 import product, quantised

# Dense floating-point operations per second from the data sheets; the first name that occurs in the chip's is taken.
_NOMINAL: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"fp8": 4500e12, "bf16": 2250e12, "fp32": 75e12}),
    ("H200", {"fp8": 1979e12, "bf16": 989e12, "fp32": 67e12}),
    ("H100 PCIe", {"fp8": 1513e12, "bf16": 756e12, "fp32": 51e12}),
    ("H100", {"fp8": 1979e12, "bf16": 989e12, "fp32": 67e12}),
    ("A100", {"bf16": 312e12, "fp32": 19.5e12}),
    ("L40S", {"fp8": 733e12, "bf16": 362e12, "fp32": 91.6e12}),
    ("L4", {"fp8": 242e12, "bf16": 121e12, "fp32": 30.3e12}),
    ("A10", {"bf16": 125e12, "fp32": 31.2e12}),
)
_IMAGES = 2


def inference_flops(method: OneAMethod) -> float:
    """Operations per image of one pass with the adapter."""
    images = _images(method)
    return count_flops(lambda: method.features(images, method.kept)) / _IMAGES


def training_flops(method: OneAMethod) -> float:
    """Operations per image of one pass with the adapter and back to the adapter's gradients."""
    images = _images(method)
    adapters = blank_adapters(method.vit, method.options, seed=0).to(images.device)

    def step() -> None:
        with method.runtime.autocast():
            loss = method.vit(images, adapters).sum()
        loss.backward()

    return count_flops(step) / _IMAGES


def _images(method: OneAMethod) -> torch.Tensor:
    return torch.zeros(_IMAGES, 3, method.vit.size, method.vit.size, device=method.runtime.device)


def nominal_peak(chip: str, precision: str) -> float | None:
    """Dense operations per second from the data sheet, or None for a chip we do not know.

    >>> nominal_peak("NVIDIA H200", "bf16")
    989000000000000.0
    >>> nominal_peak("AMD EPYC", "bf16")
    """
    return next((peaks.get(precision) for name, peaks in _NOMINAL if name in chip), None)


def measured_peak(device: torch.device, precision: str, seconds: float) -> float:
    """Operations per second of one large square matrix product, at its best."""
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(side, side, device=device) for _ in range(2))
    if precision == "fp8":
        factors = (*quantised(left), *quantised(right))
        return 2 * side**3 / timed(lambda: product(*factors), device, seconds).best
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = left.to(dtype), right.to(dtype)
    return 2 * side**3 / timed(lambda: left @ right, device, seconds).best
