# SPDX-License-Identifier: Apache-2.0
"""The network of the published One-A code as a baseline, imported from the user's checkout.

None of it is part of onea. It runs in its own process, because its modules have names such as ``backbone`` and
``utils``. It has random weights of the same shapes, in fp32 and eager, as published. Its batches are on the device
already: the time of its data loader is not included, which is to its advantage.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.errors import OneaError, truncate
from onea.files import check_path
from onea.learner.local_head import contrastive_loss, contrastive_weight
from onea.research.bench.config import CLASSES, BenchConfig
from onea.research.bench.results import OFFICIAL, Row, Timing, duration, rate, time_repeatedly
from onea.vit.frozen import FrozenViT

_NETWORK = Path("backbone") / "vit_onea.py"


def check_checkout(checkout: Path) -> None:
    """Raise an error for a folder that is not a checkout of the published code.

    Raises:
        OneaError: a file is missing.
    """
    check_path(checkout)
    if not (checkout / _NETWORK).is_file():
        raise OneaError(
            f"{checkout} does not look like the published One-A code: it has no {_NETWORK.as_posix()}; give the folder "
            "of its checkout."
        )


def official_rows(checkout: Path, config: BenchConfig, vit: FrozenViT, device: torch.device) -> list[Row]:
    """Times of the published network's training step and inference.

    Raises:
        OneaError: the code does not run on this machine.
    """
    check_checkout(checkout)
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
