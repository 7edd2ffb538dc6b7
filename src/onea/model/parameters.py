# SPDX-License-Identifier: Apache-2.0
"""Arguments of the estimator: their defaults, their checks, and the training presets that they choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from onea.errors import OneaError
from onea.learner.merged_adapter import MergingOptions
from onea.learner.one_a import PUBLISHED, OneAOptions, OneAPlusOptions
from onea.model.state import classifier_for
from onea.options import make_options, normalise_names
from onea.vit.frozen import FrozenViT
from onea.vit.network_config import DEFAULT, check_image_size

OPTIONS = ("epochs", "learning_rate", "batch_size", "rank", "single_class", "views")  # of the training and the merge
NETWORK = ("backbone", "depth", "image_size", "mirror")
FIXED = (*NETWORK, "readout", *OPTIONS, "options", "preset")  # once a class has been taught
MACHINE = ("device", "precision", "threads", "verbose")  # belong to where a model runs, not to the model
_WHOLE, _SWITCHES = ("seed", "threads"), ("mirror", "follow_drift")


@dataclass(kw_only=True, eq=False, repr=False)
class Parameters:
    """The arguments of the estimator and their defaults; ``onea.OneA`` says what each one means."""

    backbone: str = DEFAULT
    depth: int | None = None
    image_size: int | None = None
    unknown: float | None = 0.05
    held_out: float = 0.1
    keep: int = 5
    preset: str = "auto"
    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    rank: int | None = None
    single_class: Literal["skip", "train"] = "skip"
    readout: str = "rgda"
    views: int | None = None
    follow_drift: bool = True
    mirror: bool = True
    options: Mapping[str, Any] | None = None
    device: str = "auto"
    precision: str = "auto"
    threads: int = 0
    verbose: bool = True
    seed: int = 0

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Every parameter with its default."""
        return {field.name: field.default for field in fields(cls)}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments this estimator was made with."""
        return {name: getattr(self, name) for name in self.defaults()}

    def __repr__(self) -> str:
        defaults = self.defaults()
        changed = ", ".join(f"{n}={v!r}" for n, v in self.get_params().items() if v != defaults[n])
        return f"{type(self).__name__}({changed})"


def check_params(params: Mapping[str, Any], highest_rate: float = 0.5) -> None:
    """Complain about the first value that is out of its range, or could not be saved."""
    params = plain(params)
    _check_kinds(params)
    for name in ("held_out", "unknown", "keep"):
        if not isinstance(params[name], int | float) and not (name == "unknown" and params[name] is None):
            raise OneaError(f"{name} is {params[name]!r}; it must be a number.")
    if not 0 <= params["held_out"] <= 0.5:
        raise OneaError(f"held_out is {params['held_out']}; it must lie between 0 and 0.5.")
    if params["unknown"] is not None and not 0 <= params["unknown"] <= highest_rate:
        raise OneaError(f"unknown is {params['unknown']}; it must lie between 0 (never) and {highest_rate:g}.")
    if params["depth"] is not None and (type(params["depth"]) is not int or params["depth"] < 0):
        raise OneaError(f"depth is {params['depth']!r}; give the number of blocks to use, or 0 for all.")
    if params.get("image_size") is not None:
        check_image_size(params["image_size"])
    options = params["options"]
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise OneaError(f"options is {options!r:.80}; give a mapping of names to values, such as {{'min_share': 0.5}}.")
    classifier_for(params["readout"])
    if params["keep"] < 0:
        raise OneaError(f"keep is {params['keep']}; it must not be negative.")


def _check_kinds(params: Mapping[str, Any]) -> None:
    """Complain about what nothing else looks at before hours of training end in a model that cannot be saved."""
    if not isinstance(params["backbone"], str):
        raise OneaError(f"backbone is {params['backbone']!r:.80}; give text, the name of a network or of its file.")
    for name in _WHOLE:
        value = params.get(name, 0)
        if not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
            raise OneaError(f"{name} is {value!r:.80}; it needs a whole number.")
    for name in _SWITCHES:
        if not isinstance(params[name], int | float) or params[name] not in (0, 1):
            raise OneaError(f"{name} is {params[name]!r:.80}; it is True or False.")
    if isinstance(params["keep"], float):
        raise OneaError(f"keep is {params['keep']}; it needs a whole number.")


def plain(value: Any) -> Any:
    """A parameter, or a mapping of them, with numbers of numpy's as Python's own, which a file can hold.

    >>> plain({"seed": np.int64(3), "options": {"views": np.int64(2)}})
    {'seed': 3, 'options': {'views': 2}}
    """
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def options_among(params: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the training and the merge among parameters."""
    params = plain(params)
    return {name: params[name] for name in OPTIONS if params.get(name) is not None} | dict(params.get("options") or {})


PRESETS = ("auto", "thorough", "paper")
# What differs from One-A+ in research runs, because a person waits: fewer epochs, and an update trains the adapter only
# if it brings as many classes as the adapter has seen, or more. Chosen on photos held out (research/README.md).
_VIEWS = {"views": 3}
_THOROUGH = _VIEWS | {"epochs": 8, "min_share": 0.5}
# A fifth of that work: adapters in the upper blocks, whose input is computed once for each view, and half of
# the patches in a training step. It costs a point at most after many updates, and up to two where all classes come at
# once (research/README.md). Crops help classes of few photos; with 50 each they only take time, with 150 they
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
    return _laid_over(OneAPlusOptions, ours, blocks | normalise_names(given), vit)


def change_options(noted: Mapping[str, Any], given: Mapping[str, Any], vit: FrozenViT) -> MergingOptions:
    """A model's options as it has noted them, then what was given."""
    before = merging_options(noted)
    values = dataclasses.asdict(before)
    given = normalise_names(given)
    changed = {name: given[name] for name in given if name in _ELSEWHERE or values.get(name) != given[name]}
    return _laid_over(type(before), values, changed, vit)


def _laid_over(
    kind: type[MergingOptions], values: Mapping[str, Any], given: Mapping[str, Any], vit: FrozenViT
) -> MergingOptions:
    """Values, then what was given; what depends on that follows it, unless it was given, too.

    Where all blocks have an adapter, missing patches ruin the features; and blocks that look up where each patch is
    need all of them.
    """
    given = normalise_names(given)
    for name, instead in _ELSEWHERE.items():
        if name in given:
            raise OneaError(f"options has '{name}', which research runs have; for a model, set {instead}.")
    options = make_options(kind, {**values, **_bounds(kind, given.get("epochs")), **given})
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


def merging_options(options: Mapping[str, Any]) -> MergingOptions:
    """A model's options as its method reads them.

    A model's classifier is its readout; whatever a folder's options say about others would only take memory.
    """
    kind = OneAPlusOptions if "new_votes" in options else OneAOptions
    return make_options(kind, {name: value for name, value in options.items() if name not in _ELSEWHERE})


def _bounds(kind: type[MergingOptions], epochs: Any) -> dict[str, int]:
    """Bounds of the epoch schedule that leave room for what was asked: half and twice of it. One-A+ finds its own."""
    if not isinstance(epochs, int):
        return {}
    least, most = (0, 0) if issubclass(kind, OneAPlusOptions) else (max(1, epochs // 2), 2 * epochs)
    return {"min_epochs": least, "max_epochs": most}
