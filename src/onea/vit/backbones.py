# SPDX-License-Identifier: Apache-2.0
"""Loading a backbone: an embedded one, a local safetensors file, or timm by its full name."""

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
from onea.vit.network_config import DEFAULT, EMBEDDED, NetworkConfig, check_image_size, embedded_file, full_name
from onea.vit.weight_files import (
    EXAMPLE_NAME,
    METADATA,
    build_network,
    build_untrained,
    cached_weights,
    load_config,
    missing_config,
    parse_config,
    pretrained_network,
    read_weights,
    split_file_name,
    timm_config,
)


def load_backbone(
    name: str = DEFAULT, image_size: int | None = None, config: str | None = None, depth: int = 0
) -> FrozenViT:
    """Load a frozen backbone.

    Args:
        name: ``vit_small_patch14_112`` or ``vit_small_d6_patch14_84``, also called ``fast`` (embedded, need no
            download), a path to a ``.safetensors`` file with timm's parameter names, in eight bits or not, or a timm
            model by its full ``architecture.tag`` name, for example ``vit_base_patch16_224.augreg_in21k``. A file that
            does not say what network it holds is named with it: ``ARCHITECTURE.TAG:FILE``, or ``plain:FILE`` for heads
            64 wide, GELU and ImageNet's statistics.
        image_size: side of the images in pixels, if not what the weights were made for; positions are resampled.
        config: what is known about the network in a file, as in timm's ``config.json``, instead of what the file says.
        depth: the number of its blocks that are used; 0 is all.
    """
    if image_size is not None:
        check_image_size(image_size)
    name = full_name(name)
    if name in EMBEDDED:
        vit = _from_file(embedded_file(name), name, NetworkConfig(licence="apache-2.0"))
        if vit.digest != EMBEDDED[name]:
            raise OneaError(f"The embedded backbone '{name}' is damaged; install onea again.")
    elif parts := split_file_name(name):
        told, path = parts
        known = parse_config(config, "what is noted about it") if config else None
        vit = _from_file(path, path.name, known, told)
    else:
        vit = _from_timm(name)
    vit = vit.truncate(depth)
    return vit.with_image_size(image_size) if image_size else vit


def save_backbone(vit: FrozenViT, path: Path) -> None:
    """Write a backbone as one file that says all about its network, for machines without the internet.

    Weights in eight bits are written as what they stand for.
    """
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in vit.vit.state_dict().items()}
    write_atomically(path, save(tensors, {METADATA: json.dumps(vit.config.to_json())}))


def why_frozen_only(name: str) -> str:
    """Why no hooks can take part in a backbone, as far as it can be told without fetching its weights; empty if so."""
    name = full_name(name)
    if name in EMBEDDED or split_file_name(name):
        return ""  # looked at when they are loaded, which costs nothing
    reason = block_ops_for(build_untrained(name, timm_config(name)))
    return reason if isinstance(reason, str) else ""


def nearest_with_hooks(name: str) -> str:
    """The name, most like this one, of weights of timm that hooks can take part in; found without fetching any."""
    import timm

    known = timm.list_models(["vit_*", "deit*", "eva*", "pe_*"], pretrained=True)
    close = [] if split_file_name(name) else difflib.get_close_matches(name, known, n=len(known), cutoff=0.4)
    return next((other for other in close if not why_frozen_only(other)), EXAMPLE_NAME)


def stamp_of_weights(name: str) -> str:
    """The stamp of the file that holds a backbone's weights on this machine; empty where there is none."""
    file = _weights_file(full_name(name))
    return file_stamp(file) if file else ""


def _weights_file(name: str) -> Path | None:
    if name in EMBEDDED:
        return embedded_file(name)
    parts = split_file_name(name)
    return parts[1] if parts else cached_weights(name)


def note_file(digest: str, path: Path) -> None:
    """Note in the cache of this machine where the weights of this digest are; models hold no paths."""
    note, content = _note(digest), {"file": str(path.resolve())}
    with suppress(OneaError):  # a cache that cannot be written to keeps nobody from working
        if not note.is_file() or read_json(note) != content:
            write_json(note, content)


def noted_file(digest: str) -> Path | None:
    """Where the weights of this digest were when they were last used on this machine, if they are still there."""
    with suppress(OneaError, LookupError, TypeError, ValueError):
        path = Path(read_json(_note(digest))["file"])
        return path if path.is_file() else None
    return None


def _note(name: str) -> Path:
    return cache_folder() / "backbones" / f"{name}.json"


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


def shortened(digest: str) -> str:
    """As much of a digest as tells it apart from another.

    >>> shortened("433135390d922457278113eaf6197d2e")
    '433135390d92…'
    """
    return f"{digest[:12]}…"


def _from_file(path: Path, name: str, config: NetworkConfig | None, told: str = "") -> FrozenViT:
    tensors = read_weights(path)
    digest = digest_of(tensors)
    config = config or load_config(path, told) or _known_by_digest(digest)
    if config is None:
        raise missing_config(path)
    return freeze(build_network(tensors, config, path), name, digest, config)


def _known_by_digest(digest: str) -> NetworkConfig | None:
    """The embedded networks, wherever a copy of them is."""
    return NetworkConfig() if digest in EMBEDDED.values() else None


def _from_timm(name: str) -> FrozenViT:
    config = timm_config(name)
    vit = pretrained_network(name, config)
    digest = digest_of(vit.state_dict())
    _check_unchanged(name, digest)
    return freeze(vit, name, digest, config)


def _check_unchanged(name: str, digest: str) -> None:
    """Refuse weights other than those that had this name before on this machine; the first ones are noted."""
    note = _note(name)
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
