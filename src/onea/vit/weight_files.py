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
from onea.vit.network_config import DEFAULT, EMBEDDED, PLAIN, NetworkConfig

METADATA = "config"
"""The key of a safetensors file's metadata that holds its ``NetworkConfig`` as JSON."""
INT8_SCALE = ".scale"
"""Suffix of the name of an int8 weight's scales, one float32 per row; a weight is its integer times its scale."""
_SUFFIX = ".safetensors"
_HEAD_WIDTH = 64  # of a plain ViT
_LONGEST_CONFIG = 2**20
_WRONG = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def split_file_name(name: str) -> tuple[str, Path] | None:
    """What a backbone's name says about its network, and its file; None for a name that is no file's.

    >>> told, path = split_file_name("vit_huge_patch14_224:big.safetensors")
    >>> told, path.name, split_file_name("fast")
    ('vit_huge_patch14_224', 'big.safetensors', None)
    """
    if not name.endswith(_SUFFIX):
        return None
    told, colon, file = name.partition(":")
    if colon and re.fullmatch(r"[\w.]{2,}", told):
        return told, Path(file).expanduser()
    return "", Path(name).expanduser()


def read_weights(path: Path) -> Tensors:
    """All tensors of a file."""
    check_path(path)
    if not path.is_file():
        raise OneaError(f'Backbone file {path} does not exist; check the path or use backbone="{DEFAULT}".')
    return read_tensors(path, f"Backbone file {path}", "make it readable or fetch it again")


def load_config(path: Path, told: str) -> NetworkConfig | None:
    """What is known about the network in a file: what the user tells, else its metadata, else a config beside it."""
    if told == PLAIN:
        return NetworkConfig()
    if told:
        return _told(told, path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        inside = (file.metadata() or {}).get(METADATA)
    if inside is not None:
        return parse_config(inside, f"the metadata of {path}")
    for beside in (path.with_suffix(".json"), path.with_name("config.json")):
        if beside.is_file():
            text = read_regular(beside, _LONGEST_CONFIG, follow=True).decode(errors="replace")
            return parse_config(text, str(beside))
    return None


def missing_config(path: Path) -> OneaError:
    """What to say about a file of which nothing but tensors is known."""
    return OneaError(
        f"Backbone file {path} does not say how many heads, which activation and which normalisation its network has; "
        f'put timm\'s config.json beside it, or name its architecture with backbone="ARCHITECTURE.TAG:{path.name}", or '
        f'say with backbone="{PLAIN}:{path.name}" that its heads are 64 wide, with GELU and ImageNet\'s statistics.'
    )


def dequantise(tensors: Mapping[str, Tensor]) -> Tensors:
    """The weights in float32, in new memory; int8 weights are multiplied by their scales.

    Raises:
        ValueError: the scales do not fit the weights.
    """
    quantised = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    scales = {name + INT8_SCALE for name in quantised}
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name in quantised:  # integers times floats: one pass, without a copy in between
            scale = _scale(name, tensors)
            result[name] = tensor * scale.view(-1, *(1,) * (tensor.ndim - 1))
        elif name not in scales:
            result[name] = tensor.to(torch.float32, copy=True)
    return result


def _scale(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    matrix, scale = tensors[name], tensors.get(name + INT8_SCALE)
    if scale is None:
        raise ValueError(f"there is no {name}{INT8_SCALE}")
    if scale.dtype != torch.float32 or scale.shape != matrix.shape[:1] or matrix.ndim == 0:
        raise ValueError(f"{name}{INT8_SCALE} is not one float32 for each row")
    if not scale.isfinite().all():
        raise ValueError(f"{name}{INT8_SCALE} is not finite")
    return scale


def build_network(tensors: Mapping[str, Tensor], config: NetworkConfig, path: Path) -> Any:
    """timm's network with these weights."""
    what = "a plain timm ViT" if config.architecture == PLAIN else f"timm's {config.architecture}"
    try:
        weights = dequantise(_without_classifier(tensors, config))
        return _assigned(weights, config)
    except _WRONG as error:
        reason = truncate((str(error).splitlines() or [type(error).__name__])[-1].strip())
        raise OneaError(f"Backbone file {path} does not hold {what}: {reason}.") from error


def _assigned(weights: Tensors, config: NetworkConfig) -> Any:
    with torch.device("meta"):  # the sizes in a file may be anything, and only what is in it takes memory
        network = _built(weights, config)
    network.load_state_dict(weights, assign=True)
    if any(buffer.is_meta for buffer in network.buffers()):  # such as rotary positions, which are in no file
        network = _built(weights, config)
        network.load_state_dict(weights, assign=True)
    return network


def _built(weights: Mapping[str, Tensor], config: NetworkConfig) -> Any:
    blocks = [config.model_args.get("depth", 0), *config.model_args.get("depths", ())]
    if (depth := sum(blocks)) > len(weights):  # before so many blocks are made
        raise ValueError(f"{depth} blocks in {len(weights)} tensors")
    if config.architecture == PLAIN:
        from timm.models.vision_transformer import VisionTransformer

        arguments = infer_architecture(weights) | dict(config.model_args)
        return VisionTransformer(**arguments, weight_init="skip")  # they are all given
    import timm

    return timm.create_model(config.architecture, pretrained=False, **config.build_args())


def _without_classifier(tensors: Mapping[str, Tensor], config: NetworkConfig) -> Tensors:
    """What features are computed with."""
    if config.architecture == PLAIN:
        return without_head(tensors)
    from timm.models import get_pretrained_cfg

    known = get_pretrained_cfg(config.architecture)
    names = known.classifier if known is not None and known.classifier else "head"
    prefixes = tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def without_head(tensors: Mapping[str, Tensor]) -> Tensors:
    """What a plain ViT computes features with: all but the classification head."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(("head.", "head_dist."))}


def _told(architecture: str, path: Path) -> NetworkConfig:
    import timm

    from onea.errors import did_you_mean

    if not timm.is_model(architecture.split(".")[0]):
        known = [PLAIN, *timm.list_models()]
        raise OneaError(f"Unknown architecture '{architecture}' of {path.name}; {did_you_mean(architecture, known)}")
    try:
        return NetworkConfig.of_timm(architecture)
    except (RuntimeError, ValueError) as error:
        tags = ", ".join(timm.list_pretrained(f"{architecture.split('.')[0]}.*"))
        raise OneaError(f"timm has no weights '{architecture}'; tags are: {tags or 'none'}.") from error


def parse_config(text: str, where: str) -> NetworkConfig:
    """What is known about a network, of JSON that was found somewhere."""
    try:
        return NetworkConfig.from_json(json.loads(text))
    except (*_WRONG, RecursionError) as error:
        raise OneaError(f"A backbone cannot be read by {where}: {truncate(str(error))}; correct it.") from error


def infer_architecture(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of timm's ``VisionTransformer`` that fit these tensors: their shapes say all but the head width."""
    width, _, patch, _ = weights["patch_embed.proj.weight"].shape
    depth = 1 + max(int(match[1]) for key in weights if (match := re.match(r"blocks\.(\d+)\.", key)))
    if depth > len(weights):  # before so many blocks are made
        raise ValueError(f"{depth} blocks in {len(weights)} tensors")
    prefix_tokens = int("cls_token" in weights) + (weights["reg_token"].shape[1] if "reg_token" in weights else 0)
    positions: int = weights["pos_embed"].shape[1]
    # The position table holds the patches, with or without the prefix tokens: whichever leaves a square grid.
    grids = {positions - extra: extra > 0 for extra in (0, prefix_tokens) if _is_square(positions - extra)}
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


def _is_square(number: int) -> bool:
    return number > 0 and round(number**0.5) ** 2 == number


EXAMPLE_NAME = "vit_base_patch16_224.augreg_in21k"


def timm_config(name: str) -> NetworkConfig:
    """What is known about timm's ``architecture.tag``, without its weights.

    Raises:
        OneaError: there is none, or it cannot be used; it says why, and names one that can.
    """
    import timm

    architecture = name.split(".")[0]
    known = timm.list_pretrained()
    if name not in known:
        tagged = [full for full in known if full.split(".")[0] == architecture]
        if tagged and "." not in name:
            raise OneaError(
                f"Backbone '{name}' needs its tag, which says which weights are meant: {', '.join(tagged)}."
            )
        if timm.is_model(architecture) and not tagged:
            raise OneaError(
                f"timm has no weights for '{architecture}'; give a file of them, "
                f'backbone="{architecture}:FILE.safetensors", or choose another such as {EXAMPLE_NAME}.'
            )
        hint = did_you_mean(name, [*EMBEDDED, *(tagged or known)])
        if not hint.startswith("did you mean"):  # there are more than a thousand
            hint = f"choose {' or '.join(EMBEDDED)}, or one of timm's such as {EXAMPLE_NAME}."
        raise OneaError(f"Unknown backbone '{name}'; {hint}")
    try:
        return NetworkConfig.of_timm(name)
    except ValueError as error:
        raise OneaError(f"Backbone '{name}' cannot be used: {error}; choose another such as {EXAMPLE_NAME}.") from error


def build_untrained(name: str, config: NetworkConfig, *, device: str = "meta") -> Any:
    """A network of timm without its weights; on ``meta`` it takes no memory."""
    import timm

    with torch.device(device):
        return timm.create_model(name, pretrained=False, **config.build_args())


def pretrained_network(name: str, config: NetworkConfig) -> Any:
    """A network of timm with its weights, fetched unless they were before."""
    import timm

    overlay = _download_overlay(name)
    try:
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **config.build_args())
    except (OSError, RuntimeError) as error:
        raise _unavailable(name, error) from error


def _download_overlay(name: str) -> dict[str, str]:
    """Point timm at an earlier download when the hub cannot be reached, instead of retrying for a minute."""
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
    """The file of an earlier download of a timm backbone."""
    from huggingface_hub import try_to_load_from_cache
    from timm.models import get_pretrained_cfg

    try:
        hub_id = getattr(get_pretrained_cfg(name), "hf_hub_id", None)
    except RuntimeError:  # no such tag, of which whoever loads the weights is told
        return None
    cached = try_to_load_from_cache(hub_id, "model.safetensors") if hub_id else None
    return Path(cached) if isinstance(cached, str) else None


def _unavailable(name: str, error: Exception) -> OneaError:
    return OneaError(
        f"The weights of '{name}' could not be downloaded ({type(error).__name__}); connect to the internet once, "
        f'or pass a local .safetensors file, or use backbone="{DEFAULT}".'
    )
