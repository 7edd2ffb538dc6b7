# SPDX-License-Identifier: Apache-2.0
"""The plain PyTorch loop of published codes: the baseline, and an independent reference for onea's adapter.

Nothing here uses onea's network, adapter, images or training loop: a timm ViT with an adapter module in each block, PIL
images through torchvision's transforms one by one in DataLoader workers, full precision, eager, SGD. Where published
codes differ, the faster way is taken (images in memory instead of files, persistent workers, timm's fused attention),
so this is a strong baseline.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from onea.data.dataset import Pixels
from onea.data.transforms import Preprocess
from onea.errors import OneaError

Transform = Callable[[Image.Image], Tensor]
_CROP_SCALE = 0.05
_LONGEST_TEMP_PATH = 75  # bytes: Python adds 32 for a socket, and the limit of the system is 107


class PlainAdapter(nn.Module):
    """Down, ReLU, dropout, up, scale."""

    def __init__(self, width: int, rank: int, scale: float = 0.1, dropout: float = 0.1):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)
        self.relu, self.dropout, self.scale = nn.ReLU(), nn.Dropout(dropout), scale
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        """The update that is added to the tokens."""
        update: Tensor = self.up(self.dropout(self.relu(self.down(x)))) * self.scale
        return update


class PlainBlock(nn.Module):
    """A block of timm's ViT with an adapter beside its MLP."""

    def __init__(self, block: Any, adapter: PlainAdapter):
        super().__init__()
        self.block, self.adapter = block, adapter

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then MLP and adapter from the same tokens."""
        block = self.block
        x = x + block.ls1(block.attn(block.norm1(x)))
        update: Tensor = block.ls2(block.mlp(block.norm2(x)))
        beside: Tensor = self.adapter(x)
        return x + update + beside


def plain_network(vit: Any, rank: int) -> nn.Module:
    """A copy of timm's ViT with a new adapter in every block; only the adapters are trainable."""
    network = copy.deepcopy(vit).float().requires_grad_(False)
    network.blocks = nn.Sequential(
        *(PlainBlock(block, PlainAdapter(network.embed_dim, rank)) for block in network.blocks)
    )
    return network  # type: ignore[no-any-return]


def plain_transform(preprocess: Preprocess, *, training: bool) -> Transform:
    """torchvision's transforms for one PIL image, with the geometry of a run."""
    from torchvision import transforms as t

    size, mode = preprocess.size, t.InterpolationMode(preprocess.filter)
    geometry: list[Any]
    if training:
        geometry = [t.RandomResizedCrop(size, scale=(_CROP_SCALE, 1.0)), t.RandomHorizontalFlip()]
    elif preprocess.geometry == "direct":
        geometry = [t.Resize((size, size), mode)]
    else:
        geometry = [t.Resize(preprocess.resize, mode), t.CenterCrop(size)]
    transform: Transform = t.Compose([*geometry, t.ToTensor(), t.Normalize(preprocess.mean, preprocess.std)])
    return transform


class PlainImages(Dataset[tuple[Tensor, int]]):
    """Images in memory, transformed one by one."""

    def __init__(self, pixels: Pixels, labels: Tensor, transform: Transform):
        self.pixels, self.labels, self.transform = pixels.transpose(0, 2, 3, 1), labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


def loader(images: PlainImages, batch: int, workers: int, *, shuffle: bool) -> DataLoader[Any]:
    """A DataLoader with persistent workers."""
    folder = tempfile.gettempdir()
    if workers and len(os.fsencode(folder)) > _LONGEST_TEMP_PATH:  # the workers would wait forever
        raise OneaError(
            f"{folder} is too long a path for the sockets of worker processes; set TMPDIR to a shorter one."
        )
    return DataLoader(images, batch, shuffle=shuffle, num_workers=workers, persistent_workers=workers > 0)


def plain_epoch(network: nn.Module, batches: Iterable[Any], classes: int, device: torch.device) -> Callable[[], float]:
    """A function that trains for one epoch and returns the mean loss."""
    width: Any = network.embed_dim
    head = nn.Linear(width, classes).to(device)
    network.to(device)
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD([*trainable, *head.parameters()], lr=0.01, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()

    def epoch() -> float:
        network.train()
        losses: list[float] = []
        for images, labels in batches:
            loss = criterion(head(network(images.to(device))), labels.to(device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    return epoch


def plain_evaluation(network: nn.Module, batches: Iterable[Any], device: torch.device) -> Callable[[], None]:
    """A function that runs inference on all images."""
    network.to(device)

    @torch.no_grad()
    def evaluate() -> None:
        network.eval()
        for images, _ in batches:
            network(images.to(device))

    return evaluate


def plain_inference(network: nn.Module, images: PlainImages, batch: int, device: torch.device) -> Callable[[], None]:
    """A function that runs inference on one batch, in this process."""
    network.to(device)

    @torch.no_grad()
    def infer() -> None:
        network.eval()
        network(torch.stack([images[index][0] for index in range(batch)]).to(device))

    return infer
