# SPDX-License-Identifier: Apache-2.0
"""The paper's names of methods, datasets and backbone, and ours."""

from __future__ import annotations

from dataclasses import dataclass

from onea.research.data import data_name

BACKBONE = "vit_base_patch16_224.augreg_in21k"
BACKBONE_TITLE = "ViT-B/16 pretrained on ImageNet-21K"


@dataclass(frozen=True)
class PaperData:
    """A dataset of the paper, as published.

    Attributes:
        title: the paper's name of it.
        classes: how many.
        train: training images in all.
        test: test images in all.
    """

    title: str
    classes: int
    train: int
    test: int


DATASETS: dict[str, PaperData] = {
    "cifar100": PaperData("CIFAR100", 100, 50_000, 10_000),
    "cub200": PaperData("CUB", 200, 5_994, 5_794),
    "imagenet-a": PaperData("ImageNet-A", 200, 6_000, 1_500),
    "imagenet-r": PaperData("ImageNet-R", 200, 24_000, 6_000),
}

# Methods by the paper's name, in the order of its tables.
METHODS: dict[str, str] = {
    "L2P": "l2p",
    "DualPrompt": "dualprompt",
    "CODA-Prompt": "coda-prompt",
    "Aper-adapter": "aper-adapter",
    "EASE": "ease",
    "InfLoRA": "inflora",
    "SEMA": "sema",
    "ACMap": "acmap",
    "CL-LoRA": "cl-lora",
    "Per-task adapter": "per-task",
    "MOS": "mos",
    "One-A": "one-a",
}


def data_title(data: str) -> str:
    """What a heading calls a dataset.

    >>> data_title("cub200"), data_title("folder:/shop/hats")
    ('CUB', 'hats')
    """
    name = data_name(data)
    return DATASETS[name].title if name in DATASETS else name
