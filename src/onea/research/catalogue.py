# SPDX-License-Identifier: Apache-2.0
"""Backbones by name: size, compatible methods and licence. No weights are downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onea.errors import OneaError
from onea.research.methods.aper import layer_without_ssf
from onea.vit.backbones import load_backbone
from onea.vit.frozen import FrozenViT, freeze
from onea.vit.network_config import BUNDLED, BUNDLED_LICENCE, IMAGE_SIZE, licence_notice
from onea.vit.weight_files import build_untrained, split_file_name, timm_config

Row = tuple[str, str]


@dataclass(frozen=True)
class StrongNetwork:
    """A network in timm: megabytes that are downloaded on first use, and operations of one forward pass in billions."""

    megabytes: int
    gigaflops: float


STRONG_NETWORKS = {
    "vit_base_patch14_dinov2.lvd142m": StrongNetwork(346, 303.1),
    "vit_small_patch16_dinov3.lvd1689m": StrongNetwork(86, 12.49),
    "vit_base_patch16_dinov3.lvd1689m": StrongNetwork(343, 47.15),
    "vit_base_patch16_siglip_224.v2_webli": StrongNetwork(372, 35.42),
    "vit_pe_core_base_patch16_224.fb": StrongNetwork(372, 35.60),
    "vit_base_patch16_clip_quickgelu_224.openai": StrongNetwork(345, 35.13),
}
BUNDLED_GIGAFLOPS = 6.61  # at its default image size


def describe_backbone(name: str) -> Iterator[Row]:
    """Properties of a backbone and their values.

    Raises:
        OneaError: the backbone does not exist or cannot be used.
    """
    vit = _load(name)
    millions = sum(parameter.numel() for parameter in vit.parameters()) / 1e6
    yield "backbone", name
    yield "input", f"{vit.size} x {vit.size} pixels" + (f", {vit.tokens:,} tokens" if vit.tokens else "")
    yield (
        "features",
        f"{vit.width}" + (f", after {vit.depth} blocks" if vit.depth else "") + f"; {millions:,.1f} M weights",
    )
    yield "normalisation", f"mean {_numbers(vit.mean)}, standard deviation {_numbers(vit.std)}"
    yield "methods", _compatible_methods(vit)
    yield "licence", licence_notice(vit.config.licence)


def list_backbones(pattern: str) -> Iterator[Row]:
    """Names that match a pattern with asterisks, with their licences.

    For an empty pattern: the bundled network, some strong ones, and the kinds of names.
    """
    import timm
    from timm.models import get_pretrained_cfg

    if not pattern:
        yield BUNDLED, f"included in onea; {IMAGE_SIZE} pixels by default; {BUNDLED_LICENCE}"
        for name, network in STRONG_NETWORKS.items():
            config = get_pretrained_cfg(name)
            times = f"{network.gigaflops / BUNDLED_GIGAFLOPS:.0f} times the operations of the bundled one"
            yield name, f"download of {network.megabytes} MB; {config.input_size[-1]} pixels; {times}; {config.license}"
        count = len(timm.list_pretrained())
        yield (
            "ARCHITECTURE.TAG",
            f"one of {count:,} in timm; list some with a pattern: onea methods --backbones 'vit_*dinov3*'",
        )
        yield "FILE.safetensors", "a file; without metadata of its architecture, ARCHITECTURE.TAG:FILE or plain:FILE"
        return
    names = timm.list_pretrained(pattern)
    if not names:
        raise OneaError(f"timm has no weights whose name matches '{pattern}'; try 'vit_*' or 'convnext*'.")
    for name in names:
        yield name, getattr(get_pretrained_cfg(name), "license", None) or "licence unknown"


def _load(name: str) -> FrozenViT:
    if name == BUNDLED or split_file_name(name):
        return load_backbone(name)
    config = timm_config(name)
    return freeze(build_untrained(name, config), name, "", config)


def _compatible_methods(vit: FrozenViT) -> str:
    if vit.no_hooks_reason:
        return f"methods that train nothing (simplecil, slda, ranpac): {vit.no_hooks_reason}"
    obstacles = {"LoRA": vit.shares_keys, "SSF": layer_without_ssf(vit)}
    excluded = [technique for technique, obstacle in obstacles.items() if obstacle]
    return "all methods" + (f" except those with {' or '.join(excluded)}" if excluded else "")


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
