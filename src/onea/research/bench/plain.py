# SPDX-License-Identifier: Apache-2.0
"""The plain PyTorch loop that published codes use: the baseline, and an independent reference for our adapter.

Nothing here uses the product's network, adapter, images or training loop: a timm ViT whose blocks hold an adapter
module each, PIL images through torchvision's transforms one by one in DataLoader workers, full precision, eager, SGD.
Where published codes differ, the faster way is taken (images in memory instead of files, workers that stay, timm's
fused attention), so the baseline is on the strong side.
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
_LONGEST_PLACE = 75  # bytes: Python adds 32, and the system allows a socket 107


class PlainAdapter(nn.Module):
    """Down, ReLU, dropout, up, scale."""

    def __init__(self, width: int, rank: int, scale: float = 0.1, dropout: float = 0.1):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)
        self.relu, self.dropout, self.scale = nn.ReLU(), nn.Dropout(dropout), scale
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the tokens."""
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
    """A copy of timm's ViT with a fresh adapter in every block; only the adapters want gradients."""
    network = copy.deepcopy(vit).float().requires_grad_(False)
    network.blocks = nn.Sequential(
        *(PlainBlock(block, PlainAdapter(network.embed_dim, rank)) for block in network.blocks)
    )
    return network  # type: ignore[no-any-return]


def plain_transform(preprocess: Preprocess, *, training: bool) -> Transform:
    """torchvision's transforms for one PIL image, the same geometry as ours."""
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
    """Batches from worker processes that stay between epochs."""
    place = tempfile.gettempdir()
    if workers and len(os.fsencode(place)) > _LONGEST_PLACE:  # they would wait for each other for ever
        raise OneaError(f"{place} is too long a path for the sockets of worker processes; set TMPDIR to a shorter one.")
    return DataLoader(images, batch, shuffle=shuffle, num_workers=workers, persistent_workers=workers > 0)


def plain_epoch(network: nn.Module, batches: Iterable[Any], classes: int, device: torch.device) -> Callable[[], float]:
    """One epoch of plain training as an action; returns the mean loss."""
    width: Any = network.embed_dim
    head = nn.Linear(width, classes).to(device)
    network.to(device)
    wanted = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD([*wanted, *head.parameters()], lr=0.01, momentum=0.9, weight_decay=5e-4)
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
    """One pass over all images as an action."""
    network.to(device)

    @torch.no_grad()
    def once() -> None:
        network.eval()
        for images, _ in batches:
            network(images.to(device))

    return once


def plain_inference(network: nn.Module, images: PlainImages, batch: int, device: torch.device) -> Callable[[], None]:
    """The answer to one request of so many images, in this process, as an action."""
    network.to(device)

    @torch.no_grad()
    def answer() -> None:
        network.eval()
        network(torch.stack([images[index][0] for index in range(batch)]).to(device))

    return answer
