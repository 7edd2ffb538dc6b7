# SPDX-License-Identifier: Apache-2.0
"""Examples of every command, for its ``--help`` and the reference."""

from __future__ import annotations

from collections.abc import Iterable

EXAMPLES: dict[str, tuple[str, ...]] = {
    "teach": (
        "onea teach shop.onea photos/monday",
        "onea teach shop.onea photos/tuesday --name papaya",
        "onea teach shop.onea photos/wednesday --memory 10",
        "onea teach shop.onea --background photos/background",
    ),
    "predict": ("onea predict shop.onea photo.jpg", "onea predict shop.onea new --json"),
    "evaluate": ("onea evaluate shop.onea photos/test", "onea evaluate shop.onea photos/test --wrong"),
    "check": ("onea check shop.onea", "onea check shop.onea photos/monday"),
    "refresh": ("onea refresh shop.onea photos", "onea refresh shop.onea"),
    "info": ("onea info shop.onea",),
    "classes": ("onea classes shop.onea",),
    "history": ("onea history shop.onea",),
    "undo": ("onea undo shop.onea",),
    "forget": ("onea forget shop.onea Papaya", "onea forget shop.onea Papaya --everywhere"),
    "rename": ("onea rename shop.onea Papaya Pawpaw", "onea rename shop.onea Pawpaw Papaya --merge"),
    "export": ("onea export shop.onea --to onnx", "onea export shop.onea --to torch"),
    "serve": ("onea serve shop.onea", "onea serve shop.onea --port 8080 --token-file token.txt"),
    "tour": ("onea tour", "onea tour --out demo"),
    "demo": ("onea demo", "onea demo --seed 2 --out demo-2"),
    "run": (
        "onea run one-a-plus --data folder:photos --tasks 10",
        "onea run one-a --data glyphs --no-gating --kappa 5",
        "onea run one-a --config run.yaml --seed 2",
        "onea run one-a --data folder:photos --stream streams/stream.json",
        "onea run --config pilot.json --root data",
    ),
    "methods": ("onea methods", "onea methods one-a", "onea methods --operators"),
    "stream": (
        "onea stream --classes 100 --tasks 10 --gamma 0.01 --seed 1",
        "onea stream --sizes 36,1,14 --out pictures",
        "onea stream --data folder:photos --tasks 10 --json",
    ),
    "paper": (
        "onea paper",
        "onea paper ablation --dry-run",
        "onea paper ablation --data folder:photos --backbone vit_small_patch14_dinov2 --scale 0.1",
    ),
    "report": (
        "onea report runs",
        "onea report 'runs/one-a-*' --out report",
        "onea report runs --results published.csv --out report",
    ),
    "compare": ("onea compare runs/A runs/B", "onea compare 'runs/one-a-*' 'runs/simplecil-*'"),
    "merge": (
        "onea merge A.safetensors B.safetensors --classes 40,5 -o merged.safetensors",
        "onea merge lora-a lora-b --classes 40,5 -o merged-lora --rank 4",
        "onea merge A.safetensors B.safetensors --classes 40,5 --with ties -o ties.safetensors --density 0.3",
    ),
    "bench": ("onea bench", "onea bench --device cpu"),
}

START = tuple(EXAMPLES[name][0] for name in ("teach", "predict", "tour"))  # for ``onea --help``


def epilog(examples: Iterable[str]) -> str:
    """The examples as the epilog of a help text."""
    return "\n\n".join(["Examples:", *(f"  $ {line}" for line in examples)])
