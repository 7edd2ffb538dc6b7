# SPDX-License-Identifier: Apache-2.0
"""Loading a backbone: an embedded one, a local safetensors file, or timm by its full name."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from onea.errors import OneaError, nearest, short
from onea.files import check_path, default_cache, read_json, read_tensors, stamp_of, write_json
from onea.vit.eight_bits import expanded
from onea.vit.embedded import DEFAULT, EMBEDDED, file_of, full_name
from onea.vit.frozen import FrozenViT

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_HEAD_WIDTH = 64  # of every plain ViT; a file does not say


def load_backbone(name: str = DEFAULT) -> FrozenViT:
    """Load a frozen backbone.

    Args:
        name: ``vit_small_patch14_112`` or ``vit_small_d6_patch14_84``, also called ``fast`` (embedded, need no
            download), a path to a ``.safetensors`` file with timm's parameter names, in eight bits or not, or a timm
            model by its full ``architecture.tag`` name, for example ``vit_base_patch16_224.augreg_in21k``.
    """
    name = full_name(name)
    if name in EMBEDDED:
        vit = _from_file(file_of(name), name)
        if vit.digest != EMBEDDED[name].sha256:
            raise OneaError(f"The embedded backbone '{name}' is damaged; install onea again.")
        return vit
    if name.endswith(".safetensors"):
        return _from_file(Path(name).expanduser(), Path(name).name)
    return _from_timm(name)


def stamp_of_weights(name: str) -> str:
    """The stamp of the file that holds a backbone's weights on this machine; empty where there is none."""
    file = _weights_file(full_name(name))
    return stamp_of(file) if file else ""


def _weights_file(name: str) -> Path | None:
    if name in EMBEDDED:
        return file_of(name)
    return Path(name).expanduser() if name.endswith(".safetensors") else _downloaded(name)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes and values as they are stored, independent of file layout.

    Of weights in eight bits these are the whole numbers and their scales, which decide what is computed with.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def without_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What features are computed with: all but the classification head."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(("head.", "head_dist."))}


def shortened(digest: str) -> str:
    """As much of a digest as tells it apart from another.

    >>> shortened("433135390d922457278113eaf6197d2e")
    '433135390d92…'
    """
    return f"{digest[:12]}…"


def _from_file(path: Path, name: str) -> FrozenViT:
    from timm.models.vision_transformer import VisionTransformer

    check_path(path)
    if not path.is_file():
        raise OneaError(f'Backbone file {path} does not exist; check the path or use backbone="{DEFAULT}".')
    tensors = read_tensors(path, f"Backbone file {path}", "make it readable or fetch it again")
    digest = digest_of(tensors)
    try:
        weights = expanded(without_head(tensors))
        with torch.device("meta"):  # the sizes in a file may be anything, and only what is in it takes memory
            vit = VisionTransformer(**infer_architecture(weights), weight_init="skip")  # they are all given
        vit.load_state_dict(weights, assign=True)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = short((str(error).splitlines() or [type(error).__name__])[-1].strip())
        raise OneaError(f"Backbone file {path} does not hold a plain timm ViT: {reason}.") from error
    return FrozenViT(vit, name, digest, IMAGENET_MEAN, IMAGENET_STD)


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


def _from_timm(name: str) -> FrozenViT:
    import timm

    known = timm.list_models(["vit_*", "deit*"], pretrained=True)
    if name not in known:
        tagged = [full for full in known if full.split(".")[0] == name]
        if tagged:
            raise OneaError(
                f"Backbone '{name}' needs its tag, which says which weights are meant: {', '.join(tagged)}."
            )
        if not name.startswith(("vit", "deit")):
            raise OneaError(
                f"Unknown backbone '{name}'; only plain vision transformers of timm work, such as "
                "vit_base_patch16_224.augreg_in21k."
            )
        raise OneaError(f"Unknown backbone '{name}'; {nearest(name, [*EMBEDDED, *known])}")
    try:
        vit = timm.create_model(name, pretrained=True, num_classes=0, pretrained_cfg_overlay=_cached_weights(name))
    except (OSError, RuntimeError) as error:
        raise _unavailable(name, error) from error
    config, digest = vit.pretrained_cfg, digest_of(vit.state_dict())
    _check_unchanged(name, digest)
    return FrozenViT(vit, name, digest, tuple(config["mean"]), tuple(config["std"]))


def _check_unchanged(name: str, digest: str) -> None:
    """Refuse weights other than those that had this name before on this machine; the first ones are noted."""
    note = default_cache() / "backbones" / f"{name}.json"
    if note.is_file():
        known = read_json(note)
        if known != {"sha256": digest}:
            before = str(known.get("sha256")) if isinstance(known, dict) else "unreadable"
            raise OneaError(
                f"The weights of '{name}' are others (sha256 {shortened(digest)}) than when they were first used here "
                f"({shortened(before)}); fetch them again, or delete {note} if they were changed on purpose."
            )
    else:
        with suppress(OneaError):  # a cache that cannot be written to keeps nobody from working
            write_json(note, {"sha256": digest})


def _cached_weights(name: str) -> dict[str, str]:
    """Point timm at an earlier download when the hub cannot be reached, instead of retrying for a minute."""
    from huggingface_hub import constants

    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError as error:
        cached = _downloaded(name)
        if cached is None:
            raise _unavailable(name, error) from error
        return {"file": str(cached)}
    return {}


def _downloaded(name: str) -> Path | None:
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
