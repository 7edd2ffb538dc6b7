# SPDX-License-Identifier: Apache-2.0
"""The baselines of benchmarks: a plain PyTorch loop, timm's network, and the network of the published One-A code.

The plain loop is also an independent reference for onea's adapter. It uses neither onea's network, adapter, images nor
training loop: a timm ViT with an adapter module in each block, PIL images through torchvision's transforms one by one
in DataLoader workers, full precision, eager, SGD. Where published codes differ, this loop does what is faster (images
in memory instead of files, persistent workers, timm's fused attention), so it is a strong baseline.

The published code is imported from the user's checkout; none of it is part of onea. It runs in a separate process,
because its modules have names such as ``backbone`` and ``utils``. It has random weights of the same shapes, in fp32 and
eager, as published. Its batches are already on the device: the time of its data loader is not included, which is
to its advantage.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from onea.data.dataset import Pixels
from onea.data.transforms import Preprocess
from onea.errors import OneaError, truncate
from onea.files import check_path
from onea.learner.local_head import contrastive_loss, contrastive_weight
from onea.research.bench.config import CLASSES, BenchConfig
from onea.research.bench.measure import InferenceFunction, Workload
from onea.research.bench.results import OFFICIAL, Row, Timing, duration, rate, time_repeatedly, timm_column
from onea.vit.fp8 import from_fp8
from onea.vit.frozen import FrozenViT
from onea.vit.heads import cosine_scores

Transform = Callable[[Image.Image], Tensor]
_CROP_SCALE = 0.05
_MAX_TEMP_PATH = 75  # bytes: Python adds 32 for a socket, and the limit of the system is 107


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
        adapted: Tensor = self.adapter(x)
        return x + update + adapted


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
    if workers and len(os.fsencode(folder)) > _MAX_TEMP_PATH:  # the workers would wait forever
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


class TimmBaseline:
    """timm's forward pass with the weights, precision and input pipeline of a workload."""

    def __init__(self, workload: Workload, compiled: bool):
        self.workload = workload
        self.name = timm_column(workload.runtime.precision, compiled)
        network: Any = copy.deepcopy(workload.method.vit.vit)
        from_fp8(network)
        if compiled:  # with the options of onea's own network
            network = torch.compile(network, dynamic=False, fullgraph=True, mode="reduce-overhead")
        self.network: Any = network

    def inference(self, batch: int) -> InferenceFunction:
        """A function that computes the scores of stored images, with onea's classifier."""
        images, rows = self.workload.prepared.test.images, torch.arange(batch)
        prototypes = self.workload.method.prototypes

        def scores() -> Tensor:
            pixels = images.test_views(rows)
            with torch.no_grad(), self.workload.runtime.autocast():
                features: Tensor = self.network(pixels)
            return cosine_scores(features.float(), prototypes)

        return scores


# the published network

_NETWORK = Path("backbone") / "vit_onea.py"


def check_official_code(checkout: Path) -> None:
    """Check that a folder is a checkout of the published code.

    Raises:
        OneaError: a file is missing.
    """
    check_path(checkout)
    if not (checkout / _NETWORK).is_file():
        raise OneaError(
            f"{checkout} is not a checkout of the published One-A code: it has no {_NETWORK.as_posix()}; give "
            "the folder of a checkout."
        )


def official_rows(checkout: Path, config: BenchConfig, vit: FrozenViT, device: torch.device) -> list[Row]:
    """Times of the published network's training step and inference.

    Raises:
        OneaError: the code does not run on this machine.
    """
    check_official_code(checkout)
    settings = {
        "network": {
            "img_size": vit.size,
            "patch_size": vit.vit.patch_embed.patch_size[0],
            "embed_dim": vit.width,
            "depth": vit.depth,
            "num_heads": vit.heads,
        },
        "rank": config.rank,
        "batch": config.batch,
        "batches": config.batches,
        "device": str(device),
        "seconds": config.seconds,
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "timings.json"
        command = [sys.executable, "-m", __name__, str(checkout.resolve()), json.dumps(settings), str(output)]
        process = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if process.returncode or not output.exists():
            reason = truncate((process.stderr.strip().splitlines() or ["no error message"])[-1])
            raise OneaError(f"The published code in {checkout} could not be timed ({reason}); leave --official out.")
        timings = {name: Timing(*values) for name, values in json.loads(output.read_text(encoding="utf-8")).items()}
    rows = [rate("training", f"batch {config.batch}", OFFICIAL, config.batch, timings["training"])]
    for batch in config.batches:
        timing = timings[f"batch {batch}"]
        rows.append(duration("inference", f"batch {batch}", OFFICIAL, timing))
        rows.append(rate("inference", f"batch {batch}", OFFICIAL, batch, timing))
    return rows


def _measure(checkout: str, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Timings of the network of a checkout, by name."""
    sys.path.insert(0, checkout)
    published: Any = importlib.import_module("backbone.vit_onea")
    torch.set_num_threads(settings["threads"])
    device, seconds = torch.device(settings["device"]), settings["seconds"]
    width, size, batch = settings["network"]["embed_dim"], settings["network"]["img_size"], settings["batch"]
    tuning = SimpleNamespace(  # as in its configurations
        ffn_adapt=True,
        ffn_option="parallel",
        ffn_adapter_layernorm_option="none",
        ffn_adapter_init_option="lora",
        ffn_adapter_scalar="0.1",
        ffn_num=settings["rank"],
        d_model=width,
        vpt_on=False,
        vpt_num=0,
        _device=device,
    )
    network: Any = published.VisionTransformer(
        **settings["network"], num_classes=0, global_pool=False, tuning_config=tuning
    ).to(device)
    network.requires_grad_(False)
    network.cur_adapter.requires_grad_(True)
    head = nn.Linear(width, CLASSES).to(device)
    optimiser = torch.optim.SGD(
        [*network.cur_adapter.parameters(), *head.parameters()], lr=0.01, momentum=0.9, weight_decay=5e-4
    )
    labels, weight = torch.arange(batch, device=device) % CLASSES, contrastive_weight(CLASSES)

    def images(count: int) -> Tensor:
        return torch.randn(count, 3, size, size, device=device)

    def step(batch_images: Tensor) -> float:
        network.train()
        features = network(batch_images, False)
        loss = (1 - weight) * F.cross_entropy(head(features), labels) + weight * contrastive_loss(features, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return float(loss)  # the published code reads the loss of every step

    @torch.no_grad()
    def infer(batch_images: Tensor) -> None:
        network.eval()
        network(batch_images, True)

    timings = {"training": time_repeatedly(partial(step, images(batch)), device, seconds)}
    network.add_adapter_to_list()  # after a task, inference uses the stored adapter
    for count in settings["batches"]:
        timings[f"batch {count}"] = time_repeatedly(partial(infer, images(count)), device, seconds)
    return {name: [timing.seconds, timing.spread, timing.best] for name, timing in timings.items()}


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(_measure(sys.argv[1], json.loads(sys.argv[2]))), encoding="utf-8")
