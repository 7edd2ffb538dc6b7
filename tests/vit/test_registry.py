# SPDX-License-Identifier: Apache-2.0
"""Every transformer of timm, at toy size: features with hooks, or a reason from the list below."""

from __future__ import annotations

import re
from typing import Any

import pytest
import timm
import torch
from support.toys import randomised

from onea.errors import OneaError
from onea.vit.frozen import FrozenFeatures, FrozenViT, freeze
from onea.vit.network_config import NetworkConfig

ARCHITECTURES = sorted(
    {name for pattern in ("vit_*", "deit*", "eva*", "beit*", "pe_*") for name in timm.list_models(pattern)}
    | {name for module in ("vision_transformer", "deit", "eva", "beit") for name in timm.list_models(module=module)}
    | set(timm.list_models(module="vision_transformer_hybrid"))
)
_MODULES = (*("vision_transformer", "deit", "eva", "beit", "vision_transformer_hybrid", "vision_transformer_relpos"),)
_SIZES = ("img_size", "patch_size", "depth", "embed_dim", "num_heads", "num_kv_heads")
# The architectures that do not support hooks, and why.
FROZEN_ONLY = {
    r"beit(v2)?_.*": "it is timm's Beit",
    r"vit_s?relpos_.*": "it is timm's VisionTransformerRelPos",
    r"vit_(base|small)_patch16_18x2_224": "its blocks are timm's ParallelThingsBlock",
    r"vit_(base|large|huge)_patch1[46]_xp_224|vit_pwee_.*": "its blocks are timm's ParallelScalingBlock",
    r"vit_dpwee_.*": "its blocks are timm's DiffParallelScalingBlock",
    r"vit_d(wee|little)_.*": "its attention is timm's DiffAttention",
}


def is_listed(name: str, reason: str) -> bool:
    listed = next((reason for pattern, reason in FROZEN_ONLY.items() if re.fullmatch(pattern, name)), "")
    return reason.startswith(listed) if listed else not reason


def arguments(name: str) -> dict[str, Any]:
    """Arguments of a toy network: two blocks, a few channels, a few patches."""
    size = next(patch * 2 for patch in (14, 16, 32, 8) if f"patch{patch}" in name or patch == 8)
    given: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 0, "img_size": size}
    if timm.models.is_model_in_modules(name, ("vision_transformer_hybrid",)):
        given["img_size"] = 64
    if "mci" in name:  # its convolutions determine the width
        given |= {"embed_dim": 768}
    if "giant_patch14" in name:  # the two halves of its gated MLP must have the same width
        given["mlp_ratio"] = 4.0
    if "sapiens2" in name:
        given["num_kv_heads"] = (3, 1)
    return given


def variants() -> dict[str, list[str]]:
    """Architectures by the first one that timm builds with the same arguments."""
    asked: list[tuple[Any, ...]] = []

    def build(kind: type, variant: str, pretrained: bool, **kwargs: Any) -> None:
        asked.append((kind, sorted((key, repr(value)) for key, value in kwargs.items() if key not in _SIZES)))

    groups: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patched:
        for module in _MODULES:
            patched.setattr(f"timm.models.{module}.build_model_with_cfg", build)
        for name in ARCHITECTURES:
            timm.model_entrypoint(name)(pretrained=False, **arguments(name))
            groups.setdefault(repr(asked[-1]), []).append(name)
    return {names[0]: names for names in groups.values()}


def check(name: str) -> str:
    """Compare the features of an architecture with timm's; returns why it does not support hooks."""
    network = randomised(timm.create_model(name, **arguments(name)))
    size = arguments(name)["img_size"]
    vit = freeze(network, name, "", NetworkConfig(input_size=size))
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(images), pre_logits=True)
        found = vit(images)
    assert found.shape == (2, vit.width), name
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5, name
    assert isinstance(vit, FrozenFeatures) == bool(vit.no_hooks_reason)
    return vit.no_hooks_reason


def test_architectures_of_timm():
    """Architectures have timm's features up to 1e-5, and support hooks unless they are listed above."""
    groups = variants()
    assert sum(map(len, groups.values())) == len(ARCHITECTURES) > 250
    for name, alike in groups.items():
        if timm.models.is_model_in_modules(name, ("vision_transformer_hybrid",)) and name != "vit_tiny_r_s16_p8_224":
            continue  # their convolutions are slow; the slow test builds all of them
        reason = check(name)
        for other in alike:
            assert is_listed(other, reason), (other, reason)


# One network of each file of timm. Those of two files cannot be used, or not be tested without memory.
REFUSED = {"vision_transformer_sam": "not one vector"}
NEEDS_MEMORY = {"gemma4_vit"}
FILES = sorted(set(timm.list_modules()) - NEEDS_MEMORY)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_architectures_by_file_of_timm(part):
    """On the meta device: features have the declared width, or the network is refused."""
    for file in FILES[part::4]:
        named = timm.list_models(module=file)
        name = min(named, key=lambda name: (not name.startswith("test_"), "_s" not in name, len(name), name))
        with torch.device("meta"):
            network = timm.create_model(name, num_classes=0)
            if file in REFUSED:
                with pytest.raises(OneaError, match=REFUSED[file]):
                    features_of(freeze(network, name, "", NetworkConfig()))
            else:
                vit = freeze(network, name, "", NetworkConfig())
                assert features_of(vit).shape == (2, vit.width), name


def features_of(vit: FrozenViT) -> torch.Tensor:
    with torch.no_grad():
        return vit(torch.zeros(2, 3, vit.size, vit.size, device="meta"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name):
    assert is_listed(name, check(name))
