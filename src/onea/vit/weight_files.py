# SPDX-License-Identifier: Apache-2.0
"""Pretrained networks: from local safetensors files, or from timm by their full names."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from onea.errors import OneaError, did_you_mean, truncate
from onea.files import check_path, read_regular, read_tensors
from onea.tensors import Tensors
from onea.vit.network_config import BUNDLED, PLAIN, NetworkConfig

METADATA = "config"
"""Key of the ``NetworkConfig`` as JSON in the metadata of a safetensors file."""
INT8_SCALE = ".scale"
"""Suffix of the names of the scales of int8 weights, ``[rows, groups]``: one for each group of columns of a row.

A weight is its integer times its scale."""
_SUFFIX = ".safetensors"
_HEAD_WIDTH = 64  # of a plain ViT
_MAX_CONFIG_BYTES = 2**20
EXAMPLE_NAME = "vit_base_patch16_224.augreg_in21k"
_INVALID = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def split_file_name(name: str) -> tuple[str, Path] | None:
    """The architecture (possibly empty) and the path in a backbone's name; None for a name without a file.

    >>> architecture, path = split_file_name("vit_huge_patch14_224:big.safetensors")
    >>> architecture, path.name, split_file_name("vit_small_patch14_dinov2")
    ('vit_huge_patch14_224', 'big.safetensors', None)
    """
    if not name.endswith(_SUFFIX):
        return None
    architecture, colon, file = name.partition(":")
    if colon and re.fullmatch(r"[\w.]{2,}", architecture):
        return architecture, Path(file).expanduser()
    return "", Path(name).expanduser()


def read_weights(path: Path) -> Tensors:
    """All tensors of a file."""
    check_path(path)
    if not path.is_file():
        raise OneaError(f'Backbone file {path} does not exist; check the path or use backbone="{BUNDLED}".')
    return read_tensors(path, f"Backbone file {path}", "make it readable or fetch it again")


def load_config(path: Path, architecture: str) -> NetworkConfig | None:
    """The configuration of the network in a file: of ``architecture`` if given, else its metadata, else a JSON file."""
    if architecture == PLAIN:
        return NetworkConfig()
    if architecture:
        return _architecture_config(architecture, path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        stored = (file.metadata() or {}).get(METADATA)
    if stored is not None:
        return parse_config(stored, f"the metadata of {path}")
    for beside in (path.with_suffix(".json"), path.with_name("config.json")):
        if beside.is_file():
            text = read_regular(beside, _MAX_CONFIG_BYTES, follow=True).decode(errors="replace")
            return parse_config(text, str(beside))
    return None


def _architecture_config(name: str, path: Path) -> NetworkConfig:
    import timm

    architecture = name.split(".")[0]
    if not timm.is_model(architecture):
        hint = did_you_mean(name, [PLAIN, *timm.list_models()])
        raise OneaError(f"Unknown architecture '{name}' of {path.name}; {hint}")
    try:
        return NetworkConfig.from_timm(name)
    except (RuntimeError, ValueError) as error:
        tags = ", ".join(timm.list_pretrained(f"{architecture}.*"))
        raise OneaError(f"timm has no weights '{name}'; existing tags: {tags or 'none'}.") from error


def parse_config(text: str, source: str) -> NetworkConfig:
    """A configuration from JSON; ``source`` is for messages."""
    try:
        return NetworkConfig.from_json(json.loads(text))
    except (*_INVALID, RecursionError) as error:
        raise OneaError(
            f"The configuration of the backbone in {source} is invalid ({truncate(str(error))}); correct it."
        ) from error


def dequantise(tensors: Mapping[str, Tensor]) -> Tensors:
    """The weights in float32, in new memory; int8 weights are multiplied by their scales.

    Raises:
        ValueError: the scales do not fit the weights.
    """
    scales = {name + INT8_SCALE for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    result: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:  # integers times floats: one pass, without a copy in between
            scale = _scale_of(name, tensors)
            result[name] = (tensor.view(*scale.shape, -1) * scale[..., None].float()).view(tensor.shape)
        elif name not in scales:
            result[name] = tensor.to(torch.float32, copy=True)
    return result


def _scale_of(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    matrix, scale = tensors[name], tensors.get(name + INT8_SCALE)
    if scale is None:
        raise ValueError(f"there is no {name}{INT8_SCALE}")
    rows = scale.ndim == 2 and matrix.ndim > 1 and len(scale) == len(matrix)
    if not rows or not scale.is_floating_point() or not scale.shape[1] or matrix[0].numel() % scale.shape[1]:
        raise ValueError(f"{name}{INT8_SCALE} is not [rows, groups] of floats")
    if not scale.isfinite().all():
        raise ValueError(f"{name}{INT8_SCALE} is not finite")
    return scale


def build_network(tensors: Mapping[str, Tensor], config: NetworkConfig, path: Path) -> Any:
    """timm's network with these weights."""
    try:
        weights = dequantise(without_head(tensors, config.architecture))
        with torch.device("meta"):  # a configuration may declare any size; only the tensors of the file take memory
            network = _build(weights, config)
        network.load_state_dict(weights, assign=True)
        if any(buffer.is_meta for buffer in network.buffers()):  # such as rotary positions, which no file contains
            network = _build(weights, config)
            network.load_state_dict(weights, assign=True)
    except _INVALID as error:
        kind = "a plain timm ViT" if config.architecture == PLAIN else f"timm's {config.architecture}"
        reason = truncate((str(error).splitlines() or [type(error).__name__])[-1].strip())
        raise OneaError(f"Backbone file {path} does not contain {kind}: {reason}.") from error
    return network


def _build(weights: Mapping[str, Tensor], config: NetworkConfig) -> Any:
    is_plain = config.architecture == PLAIN
    arguments = infer_architecture(weights) | dict(config.model_args) if is_plain else config.build_args()
    depth = sum([arguments.get("depth", 0), *arguments.get("depths", ())])
    if depth > len(weights):  # before this many blocks are built
        raise ValueError(f"{depth} blocks in {len(weights)} tensors")
    if is_plain:
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(**arguments, weight_init="skip")
    import timm

    return timm.create_model(config.architecture, pretrained=False, **arguments)


def without_head(tensors: Mapping[str, Tensor], architecture: str = PLAIN) -> Tensors:
    """All tensors except those of the classification head."""
    names: str | tuple[str, ...] = ("head", "head_dist")
    if architecture != PLAIN:
        from timm.models import get_pretrained_cfg

        known = get_pretrained_cfg(architecture)
        names = known.classifier if known is not None and known.classifier else "head"
    prefixes = tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def infer_architecture(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of timm's ``VisionTransformer`` for these tensors; the width of its heads is assumed to be 64."""
    width, _, patch, _ = weights["patch_embed.proj.weight"].shape
    depth = 1 + max(int(match[1]) for key in weights if (match := re.match(r"blocks\.(\d+)\.", key)))
    prefix_tokens = int("cls_token" in weights) + (weights["reg_token"].shape[1] if "reg_token" in weights else 0)
    positions: int = weights["pos_embed"].shape[1]
    # The position table covers the patches, with or without the prefix tokens; the patches form a square grid.
    grids = {n: n < positions for n in (positions, positions - prefix_tokens) if n > 0 and round(n**0.5) ** 2 == n}
    if not grids:
        raise ValueError(f"{positions} positions do not form a square grid")
    patches, embeds_prefix = max(grids.items()) if prefix_tokens == 0 else min(grids.items())
    return {
        "img_size": round(patches**0.5) * patch,
        "patch_size": patch,
        "embed_dim": width,
        "depth": depth,
        "num_heads": width // _HEAD_WIDTH,
        "mlp_ratio": weights["blocks.0.mlp.fc1.weight"].shape[0] / width,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "qk_norm": "blocks.0.attn.q_norm.weight" in weights,
        "init_values": 1.0 if "blocks.0.ls1.gamma" in weights else None,
        "class_token": "cls_token" in weights,
        "reg_tokens": weights["reg_token"].shape[1] if "reg_token" in weights else 0,
        "no_embed_class": prefix_tokens > 0 and not embeds_prefix,
        "pre_norm": "norm_pre.weight" in weights,
        "global_pool": "token" if "cls_token" in weights else "avg",
        "num_classes": 0,
    }


def timm_config(name: str) -> NetworkConfig:
    """The configuration of timm's ``architecture.tag``, without a download.

    Raises:
        OneaError: it does not exist or cannot be used; the message suggests another.
    """
    import timm

    architecture = name.split(".")[0]
    known = timm.list_pretrained()
    if name not in known:
        tagged = [full for full in known if full.split(".")[0] == architecture]
        if tagged and "." not in name:
            raise OneaError(f"Backbone '{name}' needs the tag of its weights: {', '.join(tagged)}.")
        if timm.is_model(architecture) and not tagged:
            raise OneaError(
                f"timm has no weights for '{architecture}'; give a file of them, "
                f'backbone="{architecture}:FILE.safetensors", or choose another such as {EXAMPLE_NAME}.'
            )
        hint = did_you_mean(name, [BUNDLED, *(tagged or known)])
        if not hint.startswith("did you mean"):  # there are more than a thousand
            hint = f"choose {BUNDLED}, or one of timm's such as {EXAMPLE_NAME}."
        raise OneaError(f"Unknown backbone '{name}'; {hint}")
    try:
        return NetworkConfig.from_timm(name)
    except ValueError as error:
        raise OneaError(f"Backbone '{name}' cannot be used: {error}; choose another such as {EXAMPLE_NAME}.") from error


def build_untrained(name: str, config: NetworkConfig, *, device: str = "meta") -> Any:
    """A timm network with untrained weights, or without memory for weights on ``meta``."""
    import timm

    with torch.device(device):
        return timm.create_model(name, pretrained=False, **config.build_args())


def pretrained_network(name: str, config: NetworkConfig) -> Any:
    """A timm network with its weights, which are downloaded unless they are in the cache."""
    import timm

    overlay = _download_overlay(name)
    try:
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **config.build_args())
    except (OSError, RuntimeError) as error:
        raise _unavailable(name, error) from error


def _download_overlay(name: str) -> dict[str, str]:
    """Make timm use an earlier download if the hub cannot be reached, instead of retrying for a minute."""
    from huggingface_hub import constants

    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError as error:
        cached = cached_weights(name)
        if cached is None:
            raise _unavailable(name, error) from error
        return {"file": str(cached)}
    return {}


def cached_weights(name: str) -> Path | None:
    """The file of an earlier download of a timm backbone, if there is one."""
    from huggingface_hub import try_to_load_from_cache
    from timm.models import get_pretrained_cfg

    try:
        hub_id = getattr(get_pretrained_cfg(name), "hf_hub_id", None)
    except RuntimeError:  # no such tag, which is reported when the weights are loaded
        return None
    cached = try_to_load_from_cache(hub_id, "model.safetensors") if hub_id else None
    return Path(cached) if isinstance(cached, str) else None


def _unavailable(name: str, error: Exception) -> OneaError:
    return OneaError(
        f"The weights of '{name}' could not be downloaded ({type(error).__name__}); connect to the internet once, "
        f'or pass a local .safetensors file, or use backbone="{BUNDLED}".'
    )
