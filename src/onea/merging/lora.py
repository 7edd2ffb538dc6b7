# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA folders as named update matrices, and back; only safetensors, never a pickle."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from onea.errors import OneaError
from onea.files import read_json
from onea.merging.operator import check_held
from onea.tensors import Tensors, svd

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NULL = 1e-7  # singular values below this share of the largest are rounding
# Fields that make an adapter more than B A on a linear layer; all must be off.
_FORBIDDEN = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
_LARGEST = 1e9  # rank or alpha
_ATOM = re.compile(r"(\\[.dw-]|\[\^?(?:[\w.-]|\\[.dw-])+\]|[\w.-])([*+?]?)")  # a character of a name, and how often
_PATTERN = re.compile(rf"\^?({_ATOM.pattern})*\$?")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # starts that also change the base model's weights


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter: its configuration, the type of its factors and ``B A`` times its scale, by module."""

    config: dict[str, Any]
    dtype: torch.dtype
    deltas: Tensors


def read_lora(folder: Path, tensors: Tensors) -> Lora:
    """The adapter in a folder, whose weights have been read; refuses what is more than low-rank linear updates."""
    config = _checked_config(folder)
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name)
        if not match or tensor.dim() != 2 or not tensor.is_floating_point():
            raise OneaError(f"{folder} holds '{name}', which is no LoRA factor of a linear layer; it cannot be merged.")
        factors.setdefault(match[1], {})[match[2]] = tensor
    deltas = {module: _delta(folder, config, module, pair) for module, pair in factors.items()}
    if not deltas:
        raise OneaError(f"{folder} holds no LoRA factors; there is nothing to merge.")
    return Lora(config, next(iter(tensors.values())).dtype, deltas)


def check_alike(first: Lora, other: Lora, names: tuple[str, str]) -> None:
    """Refuse adapters of different networks or modules."""
    bases = [lora.config.get("base_model_name_or_path") for lora in (first, other)]
    if all(bases) and bases[0] != bases[1]:
        raise OneaError(
            f"{names[0]} adapts '{bases[0]}' and {names[1]} adapts '{bases[1]}'; if these are the same network, make "
            f"base_model_name_or_path in {CONFIG} equal."
        )
    for side, here, there in ((1, other, first), (0, first, other)):
        odd = sorted(here.deltas.keys() - there.deltas.keys())
        if odd:
            raise OneaError(
                f"Only {names[side]} adapts '{odd[0]}'; both need the same target_modules, on the same network."
            )


def write_lora(like: Lora, deltas: Tensors, rank: int | None) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of an adapter with these updates, and what the factorisation lost, relative to each update's norm.

    All modules get one rank, the largest that any of them needs unless ``rank`` says otherwise; factors of modules that
    need less are padded with zeros. Alpha equals the rank, so that the scale is 1.
    """
    most = max(max(delta.shape) for delta in deltas.values())
    if rank is not None and rank > most:
        raise OneaError(f"rank is {rank:,}, and no module has a side longer than {most:,}; ask for at most that.")
    parts = {module: svd(delta) for module, delta in deltas.items()}
    needed = max(int((spectrum > _NULL * spectrum[0]).sum()) for _, spectrum, _ in parts.values())
    common = rank or max(needed, 1)
    factors, losses = {}, {}
    for module, (left, spectrum, right) in parts.items():
        kept = min(common, len(spectrum))
        root = spectrum[:kept].sqrt()
        padding = (0, common - kept)
        up = torch.nn.functional.pad(left[:, :kept] * root, padding).to(like.dtype).contiguous()
        down = torch.nn.functional.pad((root[:, None] * right[:kept]).T, padding).T.to(like.dtype).contiguous()
        factors[f"{module}.lora_A.weight"], factors[f"{module}.lora_B.weight"] = down, up
        norm = float(spectrum.norm())
        losses[module] = float((up.double() @ down.double() - deltas[module]).norm()) / norm if norm else 0.0
    check_held(factors)
    config = like.config | {
        "r": common,
        "lora_alpha": common,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    files = {WEIGHTS: save(factors, {"format": "pt"}), CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    truncation = {"max": max(losses.values()), "mean": sum(losses.values()) / len(losses), "by_tensor": losses}
    return files, {"rank": common, "truncation_error": truncation}


def _checked_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(folder / CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise OneaError(f"{folder} is a PEFT adapter of type {kind}; only LORA can be merged.")
    for name in _FORBIDDEN:
        if config.get(name):
            raise OneaError(f"{folder} uses {name}, which is more than a low-rank update; it cannot be merged.")
    if config.get("bias", "none") != "none":
        raise OneaError(f"{folder} also trained biases (bias = {config['bias']}); only bias = none can be merged.")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise OneaError(
            f"{folder} was started by {start}, which changes the base model; convert it to a plain LoRA first (PEFT's "
            "save_pretrained has path_initial_model_for_weight_conversion)."
        )
    for name in ("r", "lora_alpha"):
        if not _is_number(config.get(name)):
            raise OneaError(f"{folder / CONFIG} has no number '{name}'; without it the scale is unknown.")
    _check_patterns(folder, config)
    return config


def _delta(folder: Path, config: Mapping[str, Any], module: str, pair: Mapping[str, Tensor]) -> Tensor:
    """``B A`` times alpha / r (or alpha / sqrt(r) where the adapter is rank-stabilised), in float64."""
    if len(pair) != 2:
        raise OneaError(f"{folder} has only one of the two factors of '{module}'; fetch it again.")
    down, up = pair["A"].double(), pair["B"].double()
    rank = _for_module(config, "rank_pattern", module, config["r"])
    alpha = _for_module(config, "alpha_pattern", module, config["lora_alpha"])
    if not 0 < len(down) == up.shape[1] == rank:
        raise OneaError(
            f"{folder}: the factors of '{module}' have ranks {len(down)} and {up.shape[1]}, but {CONFIG} says {rank}; "
            "without the true rank the scale is unknown."
        )
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return scale * (up @ down)


def _for_module(config: Mapping[str, Any], pattern: str, module: str, default: float) -> float:
    """The value that a pattern of the configuration gives a module: the whole name or its end matches, as in PEFT."""
    name = module.removeprefix("base_model.model.")
    for key, value in (config.get(pattern) or {}).items():
        if matches(key, name):
            return float(value)
    return default


def matches(key: str, name: str) -> bool:
    r"""Whether a regular expression without groups matches a module's name, or what follows one of its dots.

    The file may come from anybody, and Python's matcher can be kept busy for years by a few characters. So all places
    in the name that could have been reached are followed at once, which takes the time of length times length.

    >>> matches("q_proj", "layers.0.q_proj"), matches("_proj", "layers.0.q_proj"), matches("^q_proj", "layers.0.q_proj")
    (True, False, False)
    >>> matches(r"layers\.[0-3]\..*proj", "model.layers.2.attn.q_proj")
    True
    """
    starts = {0} if key.startswith("^") else {0} | {place + 1 for place, char in enumerate(name) if char == "."}
    for atom, times in _ATOM.findall(key.removeprefix("^").removesuffix("$")):
        alike = re.compile(atom)
        places = starts if times in ("", "?") else _spread(starts, alike, name)
        after = {place + 1 for place in places if place < len(name) and alike.fullmatch(name[place])}
        starts = after if times in ("", "+") else starts | after
    return len(name) in starts


def _spread(starts: set[int], alike: re.Pattern[str], name: str) -> set[int]:
    """The places that can be reached from these over characters that are alike."""
    reached = set(starts)
    for place, char in enumerate(name):
        if place in reached and alike.fullmatch(char):
            reached.add(place + 1)
    return reached


def _check_patterns(folder: Path, config: Mapping[str, Any]) -> None:
    for pattern in ("rank_pattern", "alpha_pattern"):
        given = config.get(pattern) or {}
        if not isinstance(given, dict) or not all(map(_is_number, given.values())):
            raise OneaError(f"{folder / CONFIG}: {pattern} must give a number for each name.")
        for key in given:
            try:
                if not _PATTERN.fullmatch(key):
                    raise re.error("more than characters and how often they come")
                matches(key, "")
            except re.error as error:
                raise OneaError(
                    f"{folder / CONFIG}: {pattern} has {key!r:.80}, which is not understood ({error}); write out the "
                    "names of the modules."
                ) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
