# SPDX-License-Identifier: Apache-2.0
"""How a model trains its adapter: by One-A+, or by One-A as published where the paper's preset is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from onea.errors import OneaError
from onea.learner.merged_adapter import MergingOptions
from onea.learner.one_a import PUBLISHED, OneAOptions, OneAPlusOptions
from onea.options import build, upgraded
from onea.vit.frozen import FrozenViT

PRESETS = ("auto", "thorough", "paper")
# What differs from One-A+ in research runs, because a person waits: fewer epochs, and an update trains the adapter only
# if it brings as many classes as the adapter has seen, or more. Chosen on photos held out (docs/research.md).
_VIEWS = {"views": 3}
_THOROUGH = _VIEWS | {"epochs": 8, "min_share": 0.5}
# A fifth of that work: adapters in the upper blocks, whose input is computed once for each view, and half of
# the patches in a training step. It costs a point at most after many updates, and up to two where all classes come at
# once (docs/research.md). Crops help classes of few photos; with 50 each they only take time, with 150 they
# cost accuracy.
_AUTO = _THOROUGH | {"epochs": 3, "batch_size": 32, "patch_drop_rate": 0.5}
_AUTO |= {"views": 2, "cached_views": 2, "enough_images": 50}
_UPPER = 0.6  # share of the blocks: 7 of 12
_ELSEWHERE = {
    "carry": "follow_drift",
    "guard": "held_out",
    **dict.fromkeys(("classifier", "classifier_options", "compare_classifiers"), "readout"),
}


def choose_options(preset: str, given: Mapping[str, Any], vit: FrozenViT) -> MergingOptions:
    """Options of the training and the merge: those of the preset for a network, then what was given."""
    check_preset(preset)
    if preset == "paper":
        return _laid_over(OneAOptions, PUBLISHED[""] | _VIEWS, given, vit)
    ours = _THOROUGH if preset == "thorough" else _AUTO
    blocks = {} if preset == "thorough" else {"adapter_blocks": max(1, round(_UPPER * vit.depth))}
    return _laid_over(OneAPlusOptions, ours, blocks | upgraded(OneAPlusOptions, given), vit)


def change_options(noted: Mapping[str, Any], given: Mapping[str, Any], vit: FrozenViT) -> MergingOptions:
    """A model's options as it has noted them, then what was given."""
    before = options_of(noted)
    values = dataclasses.asdict(before)
    given = upgraded(type(before), given)
    changed = {name: given[name] for name in given if name in _ELSEWHERE or values.get(name) != given[name]}
    return _laid_over(type(before), values, changed, vit)


def _laid_over(
    kind: type[MergingOptions], values: Mapping[str, Any], given: Mapping[str, Any], vit: FrozenViT
) -> MergingOptions:
    """Values, then what was given; what depends on that follows it, unless it was given, too.

    Where all blocks have an adapter, missing patches ruin the features; and blocks that look up where each patch is
    need all of them.
    """
    given = upgraded(kind, given)
    for name, instead in _ELSEWHERE.items():
        if name in given:
            raise OneaError(f"options has '{name}', which research runs have; for a model, set {instead}.")
    options = build(kind, {**values, **_bounds(kind, given.get("epochs")), **given})
    if not {"views", "cached_views"}.isdisjoint(given) and "enough_images" not in given:
        options = dataclasses.replace(options, enough_images=0)  # so many were asked for
    every = vit.rotary or options.adapter_blocks in (0, vit.depth)
    if every and "adapter_blocks" in given and "patch_drop_rate" not in given:
        options = dataclasses.replace(options, patch_drop_rate=0.0)
    return options


def check_preset(preset: object) -> None:
    """Refuse a preset that models do not have."""
    if preset not in PRESETS:
        raise OneaError(f"preset is '{preset}'; choose {', '.join(PRESETS[:-1])} or {PRESETS[-1]}.")


def options_of(options: Mapping[str, Any]) -> MergingOptions:
    """A model's options as its method reads them.

    A model's classifier is its readout; whatever a folder's options say about others would only take memory.
    """
    kind = OneAPlusOptions if "new_votes" in options else OneAOptions
    return build(kind, {name: value for name, value in options.items() if name not in _ELSEWHERE})


def _bounds(kind: type[MergingOptions], epochs: Any) -> dict[str, int]:
    """Bounds of the epoch schedule that leave room for what was asked: half and twice of it. One-A+ finds its own."""
    if not isinstance(epochs, int):
        return {}
    least, most = (0, 0) if issubclass(kind, OneAPlusOptions) else (max(1, epochs // 2), 2 * epochs)
    return {"min_epochs": least, "max_epochs": most}
