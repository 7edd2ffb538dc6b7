# SPDX-License-Identifier: Apache-2.0
"""Loading a backbone: the bundled one, a local safetensors file, or timm by its full name."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from onea.errors import OneaError
from onea.files import cache_folder, file_stamp, read_json, write_atomically, write_json
from onea.vit.blocks import block_ops_for
from onea.vit.frozen import FrozenViT, freeze
from onea.vit.network_config import (
    BUNDLED,
    BUNDLED_LICENCE,
    BUNDLED_SHA256,
    IMAGE_SIZE,
    PLAIN,
    NetworkConfig,
    bundled_file,
    check_image_size,
)
from onea.vit.weight_files import (
    EXAMPLE_NAME,
    METADATA,
    build_network,
    build_untrained,
    cached_weights,
    load_config,
    parse_config,
    pretrained_network,
    read_weights,
    split_file_name,
    timm_config,
)


def load_backbone(
    name: str = BUNDLED, image_size: int | None = None, config: str | None = None, depth: int = 0
) -> FrozenViT:
    """Load a frozen backbone.

    Args:
        name: ``vit_small_patch14_dinov2`` (bundled, no download); or the path of a ``.safetensors`` file with timm's
            parameter names, in floats or int8; or the full
            ``architecture.tag`` name of a timm model, for example ``vit_base_patch16_224.augreg_in21k``. If neither the
            metadata of a file nor a ``config.json`` beside it contains the architecture, give
            ``ARCHITECTURE.TAG:FILE``, or ``plain:FILE`` for a ViT with heads 64 wide, GELU and ImageNet statistics.
        image_size: side of the images in pixels, a multiple of the patch size; positions are resampled. By default
            ``IMAGE_SIZE`` for the bundled network, and that of the weights for others.
        config: JSON in the format of timm's ``config.json`` that replaces the configuration of a file.
        depth: the number of blocks to use; 0 is all.
    """
    if image_size is not None:
        check_image_size(image_size)
    if name == BUNDLED:
        vit = _from_file(bundled_file(), name, NetworkConfig(licence=BUNDLED_LICENCE))
        if vit.digest != BUNDLED_SHA256:
            raise OneaError("The bundled backbone is damaged; install onea again.")
    elif parts := split_file_name(name):
        architecture, path = parts
        network_config = parse_config(config, "the model") if config else None
        vit = _from_file(path, path.name, network_config, architecture)
    else:
        vit = _from_timm(name)
    if vit.digest == BUNDLED_SHA256:  # also a copy of the file
        image_size = image_size or IMAGE_SIZE
    vit = vit.truncate(depth)
    return vit.with_image_size(image_size) if image_size else vit


def save_backbone(vit: FrozenViT, path: Path) -> None:
    """Write a backbone as one file with its configuration, for machines without internet; int8 weights as floats."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in vit.vit.state_dict().items()}
    write_atomically(path, save(tensors, {METADATA: json.dumps(vit.config.to_json())}))


def no_hooks_reason(name: str) -> str:
    """Why a timm network does not support hooks, without a download; empty if it does support them, and for files."""
    if name == BUNDLED or split_file_name(name):
        return ""  # checked when they are loaded, without a download
    reason = block_ops_for(build_untrained(name, timm_config(name)))
    return reason if isinstance(reason, str) else ""


def nearest_with_hooks(name: str) -> str:
    """The most similar name of a pretrained timm network that supports hooks; nothing is downloaded."""
    import timm

    known = timm.list_models(["vit_*", "deit*", "eva*", "pe_*"], pretrained=True)
    close = [] if split_file_name(name) else difflib.get_close_matches(name, known, n=len(known), cutoff=0.4)
    return next((other for other in close if not no_hooks_reason(other)), EXAMPLE_NAME)


def weights_file_stamp(name: str) -> str:
    """The stamp of the local file with a backbone's weights; empty if there is none."""
    if name == BUNDLED:
        return file_stamp(bundled_file())
    parts = split_file_name(name)
    file = parts[1] if parts else cached_weights(name)
    return file_stamp(file) if file else ""


def remember_file(digest: str, path: Path) -> None:
    """Store the path of the weights with this digest in the cache, because models contain no paths."""
    entry, content = _cache_entry(digest), {"file": str(path.resolve())}
    with suppress(OneaError):  # works without a writable cache
        if not entry.is_file() or read_json(entry) != content:
            write_json(entry, content)


def remembered_file(digest: str) -> Path | None:
    """The last known file with the weights of this digest, if it still exists."""
    with suppress(OneaError, LookupError, TypeError, ValueError):
        path = Path(read_json(_cache_entry(digest))["file"])
        return path if path.is_file() else None
    return None


def _cache_entry(name: str) -> Path:
    return cache_folder() / "backbones" / f"{name}.json"


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, shapes and stored values, independent of the file layout; int8 weights are not dequantised."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def short_digest(digest: str) -> str:
    """The first digits of a digest, for messages.

    >>> short_digest("433135390d922457278113eaf6197d2e")
    '433135390d92…'
    """
    return f"{digest[:12]}…"


def _from_file(path: Path, name: str, config: NetworkConfig | None, architecture: str = "") -> FrozenViT:
    tensors = read_weights(path)
    digest = digest_of(tensors)
    config = config or load_config(path, architecture)
    if config is None and digest == BUNDLED_SHA256:  # a copy of the bundled network
        config = NetworkConfig(licence=BUNDLED_LICENCE)
    if config is None:
        raise OneaError(
            f"Backbone file {path} does not contain the number of heads, activation and normalisation of its network; "
            "put timm's config.json beside it, or name its architecture with "
            f'backbone="ARCHITECTURE.TAG:{path.name}", or choose backbone="{PLAIN}:{path.name}" for a ViT with heads '
            "64 wide, GELU and ImageNet's statistics."
        )
    return freeze(build_network(tensors, config, path), name, digest, config)


def _from_timm(name: str) -> FrozenViT:
    config = timm_config(name)
    vit = pretrained_network(name, config)
    digest = digest_of(vit.state_dict())
    _check_unchanged(name, digest)
    return freeze(vit, name, digest, config)


def _check_unchanged(name: str, digest: str) -> None:
    """Refuse weights that differ from those of the same name on first use, whose digest is in the cache."""
    entry = _cache_entry(name)
    if not entry.is_file():
        with suppress(OneaError):  # works without a writable cache
            write_json(entry, {"sha256": digest})
        return
    known = read_json(entry)
    if known != {"sha256": digest}:
        before = str(known.get("sha256")) if isinstance(known, dict) else "unreadable"
        raise OneaError(
            f"The weights of '{name}' (sha256 {short_digest(digest)}) differ from those when they were first used here "
            f"({short_digest(before)}); download them again, or delete {entry} if they were changed on purpose."
        )
