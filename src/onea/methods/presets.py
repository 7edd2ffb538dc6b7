"""Named hyper-parameters: ``paper``, as published for ViT-B/16, and ``small``, ours for smaller backbones."""

from __future__ import annotations

from typing import Any

_PAPER_WIDTH = 768  # ViT-B, the paper's backbone


def _recipe(rate: float, decay: float, batch: int, rank: int, epochs: tuple[int, int, int]) -> dict[str, Any]:
    reference, smallest, largest = epochs
    return {
        "learning_rate": rate,
        "weight_decay": decay,
        "batch_size": batch,
        "rank": rank,
        "epochs": reference,
        "min_epochs": smallest,
        "max_epochs": largest,
    }


# One-A's table of hyper-parameters, with the epoch bounds of its published configurations.
_PAPER = {
    "cifar100": _recipe(0.01, 5e-4, 128, 128, (25, 20, 40)),
    "cub200": _recipe(0.07, 5e-4, 16, 128, (10, 5, 20)),
    "imagenet-a": _recipe(0.08, 3e-3, 64, 128, (40, 20, 50)),
    "imagenet-r": _recipe(0.03, 5e-3, 24, 64, (30, 30, 50)),
}

_SMALL_COMMON = {"head": "cosine", "head_scale": 16.0, "crop_scale": 0.3}
_SMALL = {
    "cifar100": _SMALL_COMMON | _recipe(0.2, 5e-4, 128, 64, (8, 4, 12)),
    "cub200": _SMALL_COMMON | _recipe(0.1, 5e-4, 32, 64, (15, 8, 25)),
    "": _SMALL_COMMON | _recipe(0.1, 5e-4, 32, 64, (15, 8, 25)),
}


def choose_preset(preset: str, width: int) -> str:
    """The preset that ``auto`` means for a backbone of this width."""
    if preset != "auto":
        return preset
    return "paper" if width >= _PAPER_WIDTH else "small"


def preset_options(preset: str, data: str) -> dict[str, Any]:
    """Hyper-parameters of a preset for a dataset; one that the paper does not use gets CIFAR-100's."""
    if preset == "paper":
        return _PAPER.get(data, _PAPER["cifar100"])
    return _SMALL.get(data, _SMALL[""])
