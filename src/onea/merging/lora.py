# SPDX-License-Identifier: Apache-2.0
"""Convert PEFT's LoRA folders to named update matrices and back; reads safetensors only, never a pickle."""

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
from onea.merging.operator import check_no_overflow
from onea.tensors import Tensors, svd

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CUTOFF = 1e-7  # singular values below this share of the largest are rounding errors
# Fields that make an adapter more than B A on a linear layer; all must be off.
_UNSUPPORTED = (
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
_MAX_NUMBER = 1e9  # rank or alpha
_ATOM = re.compile(r"(\\[.dw-]|\[\^?(?:[\w.-]|\\[.dw-])+\]|[\w.-])([*+?]?)")  # a character class and its repetition
_PATTERN = re.compile(rf"\^?({_ATOM.pattern})*\$?")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that also change the base weights


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter: its configuration, the dtype of its factors, and its scaled products ``B A`` by module."""

    config: dict[str, Any]
    dtype: torch.dtype
    deltas: Tensors


def read_lora(folder: Path, tensors: Tensors) -> Lora:
    """The adapter from the configuration in a folder and its weights; refuses all but low-rank linear updates."""
    config = _read_config(folder)
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name)
        if not match or tensor.dim() != 2 or not tensor.is_floating_point():
            raise OneaError(
                f"{folder} has '{name}', which is not a LoRA factor of a linear layer; it cannot be merged."
            )
        factors.setdefault(match[1], {})[match[2]] = tensor
    deltas = {module: _delta(folder, config, module, pair) for module, pair in factors.items()}
    if not deltas:
        raise OneaError(f"{folder} contains no LoRA factors; there is nothing to merge.")
    return Lora(config, next(iter(tensors.values())).dtype, deltas)


def check_compatible(first: Lora, other: Lora, names: tuple[str, str]) -> None:
    """Refuse adapters of different networks or modules."""
    bases = [lora.config.get("base_model_name_or_path") for lora in (first, other)]
    if all(bases) and bases[0] != bases[1]:
        raise OneaError(
            f"{names[0]} adapts '{bases[0]}' and {names[1]} adapts '{bases[1]}'; if these are the same network, make "
            f"base_model_name_or_path in {CONFIG} equal."
        )
    for name, modules, others in ((names[1], other.deltas, first.deltas), (names[0], first.deltas, other.deltas)):
        if extra := sorted(modules.keys() - others.keys()):
            raise OneaError(f"Only {name} adapts '{extra[0]}'; both need the same target_modules, on the same network.")


def write_lora(like: Lora, deltas: Tensors, rank: int | None) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of an adapter with these updates, and the truncation error relative to each update's norm.

    All modules get the same rank, by default the largest rank of an update; smaller factors are padded with zeros.
    Alpha equals the rank, so that the scale is 1.
    """
    max_rank = max(max(delta.shape) for delta in deltas.values())
    if rank is not None and rank > max_rank:
        raise OneaError(f"rank is {rank:,}, but no module is wider than {max_rank:,}; choose {max_rank:,} or less.")
    decompositions = {module: svd(delta) for module, delta in deltas.items()}
    if rank is None:
        rank = max(1, *(int((spectrum > _CUTOFF * spectrum[0]).sum()) for _, spectrum, _ in decompositions.values()))
    factors, errors = {}, {}
    for module, (left, spectrum, right) in decompositions.items():
        kept = min(rank, len(spectrum))
        root = spectrum[:kept].sqrt()
        padding = (0, rank - kept)
        up = torch.nn.functional.pad(left[:, :kept] * root, padding).to(like.dtype).contiguous()
        down = torch.nn.functional.pad((root[:, None] * right[:kept]).T, padding).T.to(like.dtype).contiguous()
        factors[f"{module}.lora_A.weight"], factors[f"{module}.lora_B.weight"] = down, up
        norm = float(spectrum.norm())
        errors[module] = float((up.double() @ down.double() - deltas[module]).norm()) / norm if norm else 0.0
    check_no_overflow(factors)
    config = like.config | {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    files = {WEIGHTS: save(factors, {"format": "pt"}), CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    truncation = {"max": max(errors.values()), "mean": sum(errors.values()) / len(errors), "by_tensor": errors}
    return files, {"rank": rank, "truncation_error": truncation}


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(folder / CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise OneaError(f"{folder} is a PEFT adapter of type {kind}; only LORA can be merged.")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise OneaError(f"{folder} uses {name}, which is more than a low-rank update; it cannot be merged.")
    if config.get("bias", "none") != "none":
        raise OneaError(f"{folder} also trained biases (bias = {config['bias']}); only bias = none can be merged.")
    initialisation = str(config.get("init_lora_weights", True)).lower()
    if initialisation.startswith(_CHANGES_BASE):
        raise OneaError(
            f"{folder} was initialised by {initialisation}, which changes the base model; convert it to a plain LoRA "
            "first (PEFT's save_pretrained has path_initial_model_for_weight_conversion)."
        )
    for name in ("r", "lora_alpha"):
        if not _is_number(config.get(name)):
            raise OneaError(f"{folder / CONFIG} has no number '{name}'; without it the scale is unknown.")
    _check_patterns(folder, config)
    return config


def _delta(folder: Path, config: Mapping[str, Any], module: str, pair: Mapping[str, Tensor]) -> Tensor:
    """``B A`` times alpha / r (alpha / sqrt(r) if rank-stabilised), in float64."""
    if len(pair) != 2:
        raise OneaError(f"{folder} has only one of the two factors of '{module}'; download it again.")
    down, up = pair["A"].double(), pair["B"].double()
    rank = _module_value(config, "rank_pattern", module, config["r"])
    alpha = _module_value(config, "alpha_pattern", module, config["lora_alpha"])
    if not 0 < len(down) == up.shape[1] == rank:
        raise OneaError(
            f"{folder}: the factors of '{module}' have ranks {len(down)} and {up.shape[1]}, but {CONFIG} has {rank}; "
            "without the true rank the scale is unknown."
        )
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return scale * (up @ down)


def _module_value(config: Mapping[str, Any], pattern: str, module: str, default: float) -> float:
    name = module.removeprefix("base_model.model.")
    for key, value in (config.get(pattern) or {}).items():
        if matches(key, name):
            return float(value)
    return default


def matches(pattern: str, name: str) -> bool:
    r"""Whether a regular expression without groups matches a module's name, or its end after a dot, as in PEFT.

    The configuration may be malicious, and a few characters can make Python's matcher backtrack for years. This one
    follows all reachable positions in the name at once, in quadratic time.

    >>> matches("q_proj", "layers.0.q_proj"), matches("_proj", "layers.0.q_proj"), matches("^q_proj", "layers.0.q_proj")
    (True, False, False)
    >>> matches(r"layers\.[0-3]\..*proj", "model.layers.2.attn.q_proj")
    True
    """
    positions = {0} if pattern.startswith("^") else {0} | {index + 1 for index, char in enumerate(name) if char == "."}
    for character_class, repetition in _ATOM.findall(pattern.removeprefix("^").removesuffix("$")):
        regex = re.compile(character_class)
        is_match = [bool(regex.fullmatch(char)) for char in name]
        reachable = set(positions)
        if repetition in ("*", "+"):
            for index, matched in enumerate(is_match):
                if matched and index in reachable:
                    reachable.add(index + 1)
        after = {index + 1 for index in reachable if index < len(name) and is_match[index]}
        positions = after if repetition in ("", "+") else positions | after
    return len(name) in positions


def _check_patterns(folder: Path, config: Mapping[str, Any]) -> None:
    for pattern in ("rank_pattern", "alpha_pattern"):
        values = config.get(pattern) or {}
        if not isinstance(values, dict) or not all(map(_is_number, values.values())):
            raise OneaError(f"{folder / CONFIG}: {pattern} must have a number for each name.")
        for key in values:
            try:
                if not _PATTERN.fullmatch(key):
                    raise re.error("only characters, character classes and *, + or ? are supported")
                matches(key, "")
            except re.error as error:
                raise OneaError(
                    f"{folder / CONFIG}: {pattern} has {key!r:.80}, which is not supported ({error}); write the full "
                    "names of the modules."
                ) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER
