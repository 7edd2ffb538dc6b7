# SPDX-License-Identifier: Apache-2.0
"""The cost of One-A+'s classifier at inference: seconds with it and with One-A's prototypes, measured in turn.

    python benchmarks/speed/answering.py [--backbone vit_base_patch16_224] [--classes 200] [--device cuda]

The network has random weights and the classes random statistics: speed depends on neither. Prints a line of CSV for
each batch size; ``ratio`` is the time of One-A+ divided by that of One-A.
"""

from __future__ import annotations

import argparse
from typing import Any

import timm
import torch

from onea.learner.tasks import StreamPlan
from onea.research.bench.results import time_interleaved
from onea.research.methods import method_class
from onea.runtime import make_runtime
from onea.vit.backbones import load_backbone
from onea.vit.frozen import FrozenViT
from onea.vit.network_config import NetworkConfig

RANK = 64


def taught(name: str, vit: FrozenViT, classes: int, runtime: Any) -> Any:
    """A method with class statistics of 40 random features per class."""
    kind = method_class(name)
    method: Any = kind(vit, kind.Options(rank=RANK), runtime, StreamPlan(classes, 1))
    generator = torch.Generator().manual_seed(0)
    features, rows = torch.randn(40 * classes, vit.width, generator=generator), torch.arange(classes).repeat(40)
    for key, known in method.statistics.items():
        method.statistics[key] = known.add(features, rows).to(runtime.device)
    return method


def main() -> None:
    """Print seconds of both methods and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="vit_base_patch16_224", help="a timm architecture or .safetensors file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--classes", type=int, default=200)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    runtime = make_runtime(arguments.device, arguments.precision, 0)
    if arguments.backbone.endswith(".safetensors"):
        vit = load_backbone(arguments.backbone)
    else:
        network = timm.create_model(arguments.backbone, num_classes=0)
        vit = FrozenViT(network, arguments.backbone, "", NetworkConfig())
    vit.cast_matrices(runtime.dtype).to(runtime.device)
    methods = [taught(name, vit, arguments.classes, runtime) for name in ("one-a", "one-a-plus")]
    print("backbone,device,precision,classes,batch,one_a_s,one_a_plus_s,ratio")
    for batch in arguments.batches:
        images = torch.rand(batch, 3, vit.size, vit.size).to(runtime.device)
        actions = [lambda method=method: method.scores(images) for method in methods]  # noqa: B023 (called in this turn)
        plain, plus = (timing.seconds for timing in time_interleaved(actions, runtime.device, arguments.seconds))
        values = (arguments.backbone, runtime.device.type, runtime.precision, arguments.classes, batch)
        print(*values, f"{plain:.6f}", f"{plus:.6f}", f"{plus / plain:.4f}", sep=",", flush=True)


if __name__ == "__main__":
    main()
