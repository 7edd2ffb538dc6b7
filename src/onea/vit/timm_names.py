# SPDX-License-Identifier: Apache-2.0
"""Networks of timm by their full names: which there are, what is wrong with the others, and their weights."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from onea.errors import OneaError, nearest
from onea.vit.embedded import DEFAULT, EMBEDDED
from onea.vit.network_config import NetworkConfig

EXAMPLE = "vit_base_patch16_224.augreg_in21k"


def check_name(name: str) -> NetworkConfig:
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
                f'backbone="{architecture}:FILE.safetensors", or choose another such as {EXAMPLE}.'
            )
        hint = nearest(name, [*EMBEDDED, *(tagged or known)])
        if not hint.startswith("did you mean"):  # there are more than a thousand
            hint = f"choose {' or '.join(EMBEDDED)}, or one of timm's such as {EXAMPLE}."
        raise OneaError(f"Unknown backbone '{name}'; {hint}")
    try:
        return NetworkConfig.of_timm(name)
    except ValueError as error:
        raise OneaError(f"Backbone '{name}' cannot be used: {error}; choose another such as {EXAMPLE}.") from error


def blank_network(name: str, config: NetworkConfig, *, device: str = "meta") -> Any:
    """A network of timm without its weights; on ``meta`` it takes no memory."""
    import timm

    with torch.device(device):
        return timm.create_model(name, pretrained=False, **config.build_args())


def pretrained_network(name: str, config: NetworkConfig) -> Any:
    """A network of timm with its weights, fetched unless they were before."""
    import timm

    overlay = _cached_weights(name)
    try:
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **config.build_args())
    except (OSError, RuntimeError) as error:
        raise _unavailable(name, error) from error


def _cached_weights(name: str) -> dict[str, str]:
    """Point timm at an earlier download when the hub cannot be reached, instead of retrying for a minute."""
    from huggingface_hub import constants

    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError as error:
        cached = downloaded(name)
        if cached is None:
            raise _unavailable(name, error) from error
        return {"file": str(cached)}
    return {}


def downloaded(name: str) -> Path | None:
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
