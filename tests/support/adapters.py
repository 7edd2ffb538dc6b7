# SPDX-License-Identifier: Apache-2.0
"""Adapters on disk: bare matrices, and LoRA folders as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from onea.merging import OPERATORS, operator_class

CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "some/network",
    "r": 3,
    "lora_alpha": 6,
    "target_modules": ["query", "value"],
    "bias": "none",
    "lora_dropout": 0.1,
}
MODULES = {"base_model.model.layer.0.query": (7, 5), "base_model.model.layer.1.value": (4, 6)}


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write_matrices(path: Path, seed: int, dtype: torch.dtype = torch.float32, **more: Tensor) -> Path:
    tensors = {"down.weight": random((4, 9), seed).to(dtype), "down.bias": random((4,), seed + 50).to(dtype)}
    save_file(tensors | more, path)
    return path


def write_lora(folder: Path, seed: int, ranks: dict[str, int] | None = None, **config: object) -> Path:
    folder.mkdir()
    values = CONFIG | config
    tensors = {}
    for index, (module, (rows, columns)) in enumerate(MODULES.items()):
        rank = (ranks or {}).get(module, values["r"])
        tensors[f"{module}.lora_A.weight"] = random((rank, columns), 100 * seed + index)
        tensors[f"{module}.lora_B.weight"] = random((rows, rank), 100 * seed + 50 + index)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


BARE_OPERATORS = sorted(name for name in OPERATORS.builtin if not operator_class(name).needs)
