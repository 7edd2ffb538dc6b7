# SPDX-License-Identifier: Apache-2.0
"""Parameters of the estimator: defaults, validation, and training presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from onea.errors import OneaError
from onea.learner.memory import parse_memory
from onea.learner.merged_adapter import MemoryOptions, MergingOptions
from onea.learner.one_a import PUBLISHED, OneAOptions, OneAPlusOptions
from onea.model.state import classifier_for
from onea.options import make_options, normalise_names
from onea.vit.frozen import FrozenViT
from onea.vit.network_config import ACCURATE_IMAGE_SIZE, BUNDLED, check_image_size

# Parameters that are options of training and merge.
OPTIONS = ("epochs", "learning_rate", "batch_size", "rank", "single_class", "views")
NETWORK = ("backbone", "depth", "image_size", "mirror")
FIXED = (*NETWORK, "readout", *OPTIONS, "options", "preset")  # cannot change after the first update
MACHINE = ("device", "precision", "threads", "verbose")  # not stored with a model
_INTEGERS, _SWITCHES = ("seed", "threads", "memory_mb"), ("mirror", "follow_drift")


@dataclass(kw_only=True, eq=False, repr=False)
class Parameters:
    """The parameters of ``onea.OneA``, which documents them."""

    backbone: str = BUNDLED
    depth: int = 0
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
    memory: int | Literal["pending"] = 0
    memory_mb: int = 256
    mirror: bool = True
    options: Mapping[str, Any] | None = None
    device: str = "auto"
    precision: str = "auto"
    threads: int = 0
    verbose: bool = True
    seed: int = 0

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of each parameter."""
        return {field.name: field.default for field in fields(cls)}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters, as in scikit-learn."""
        return {name: getattr(self, name) for name in self.defaults()}

    def __repr__(self) -> str:
        defaults = self.defaults()
        changed = ", ".join(f"{n}={v!r}" for n, v in self.get_params().items() if v != defaults[n])
        return f"{type(self).__name__}({changed})"


def check_params(params: Mapping[str, Any], max_rate: float = 0.5) -> None:
    """Refuse the first value that has the wrong type or is out of range."""
    params = to_python(params)
    _check_types(params)
    for name in ("held_out", "unknown", "keep"):
        if not isinstance(params[name], int | float) and not (name == "unknown" and params[name] is None):
            raise OneaError(f"{name} is {params[name]!r}; it must be a number.")
    if not 0 <= params["held_out"] <= 0.5:
        raise OneaError(f"held_out is {params['held_out']}; it must lie between 0 and 0.5.")
    if params["unknown"] is not None and not 0 <= params["unknown"] <= max_rate:
        raise OneaError(f"unknown is {params['unknown']}; it must lie between 0 (never) and {max_rate:g}.")
    if type(params["depth"]) is not int or params["depth"] < 0:
        raise OneaError(f"depth is {params['depth']!r}; give the number of blocks to use, or 0 for all.")
    if params.get("image_size") is not None:
        check_image_size(params["image_size"])
    options = params["options"]
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise OneaError(f"options is {options!r:.80}; give a mapping of names to values, such as {{'min_share': 0.5}}.")
    classifier_for(params["readout"])
    if params["keep"] < 0:
        raise OneaError(f"keep is {params['keep']}; it must not be negative.")
    if parse_memory(params["memory"]) != 0 and params["preset"] == "fast":
        raise OneaError("memory is given, but preset fast trains nothing; leave it out, or choose preset auto.")
    if params["memory_mb"] < 1:
        raise OneaError(f"memory_mb is {params['memory_mb']}; give the largest number of megabytes of stored copies.")


def _check_types(params: Mapping[str, Any]) -> None:
    """Check types that would otherwise be checked only on saving, after hours of training."""
    if not isinstance(params["backbone"], str):
        raise OneaError(f"backbone is {params['backbone']!r:.80}; give the name of a network or file, as text.")
    for name in _INTEGERS:
        value = params.get(name, 0)
        if not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
            raise OneaError(f"{name} is {value!r:.80}; it needs a whole number.")
    for name in _SWITCHES:
        if not isinstance(params[name], int | float) or params[name] not in (0, 1):
            raise OneaError(f"{name} is {params[name]!r:.80}; it must be True or False.")
    if isinstance(params["keep"], float):
        raise OneaError(f"keep is {params['keep']}; it needs a whole number.")


def to_python(value: Any) -> Any:
    """Convert NumPy numbers in a parameter, or in a mapping of parameters, to Python numbers, for JSON.

    >>> to_python({"seed": np.int64(3), "options": {"views": np.int64(2)}})
    {'seed': 3, 'options': {'views': 2}}
    """
    if isinstance(value, Mapping):
        return {name: to_python(item) for name, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def option_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are options of training and merge."""
    params = to_python(params)
    return {name: params[name] for name in OPTIONS if params.get(name) is not None} | dict(params.get("options") or {})


PRESETS = ("auto", "fast", "accurate", "paper")
_VIEWS = {"views": 3}
# Differences from One-A+ in research runs, to save time: adapters in the upper blocks, whose input is computed once for
# each view, half of the patches in a training step, and fewer epochs. Random crops improve classes of few photos; with
# 50 photos per class they do not. An update trains the adapter only if it has at least as many classes as the adapter
# was trained on before. Chosen on held-out photos (research/README.md).
_MODEL = {"epochs": 2, "learning_rate": 0.1, "batch_size": 32, "patch_drop_rate": 0.5, "min_share": 0.5}
_MODEL |= {"views": 2, "cached_views": 2, "enough_images": 50}
_UPPER_BLOCKS = 0.6  # share of the blocks: 7 of 12
_FAST = {"train": False, "views": 1}
_TRAINING = ("epochs", "learning_rate", "batch_size", "rank")
_RESEARCH_OPTIONS = {
    **dict.fromkeys(("carry", "carry_options"), "follow_drift"),
    "guard": "held_out",
    "memory": "memory",
    **dict.fromkeys(("classifier", "classifier_options", "compare_classifiers"), "readout"),
}


def choose_options(preset: str, overrides: Mapping[str, Any], vit: FrozenViT) -> MergingOptions:
    """Options of training and merge: those of the preset for this network, except for overrides."""
    check_preset(preset)
    if preset == "paper":
        return _combine_options(OneAOptions, PUBLISHED[""] | _VIEWS, overrides, vit)
    values = _MODEL | (_FAST if preset == "fast" else {})
    if preset == "fast" and (unused := [name for name in _TRAINING if name in overrides]):
        raise OneaError(f"{unused[0]} is given, but preset fast trains nothing; leave it out, or choose preset auto.")
    blocks = {"adapter_blocks": max(1, round(_UPPER_BLOCKS * vit.depth))}
    return _combine_options(OneAPlusOptions, values, blocks | normalise_names(overrides), vit)


def choose_image_size(params: Mapping[str, Any]) -> int | None:
    """The side of the network's input in pixels; None is the default of the network."""
    size: int | None = to_python(params["image_size"])
    accurate = params["preset"] == "accurate" and params["backbone"] == BUNDLED
    return ACCURATE_IMAGE_SIZE if size is None and accurate else size


def change_options(stored: Mapping[str, Any], overrides: Mapping[str, Any], vit: FrozenViT) -> MergingOptions:
    """The stored options of a model, except for overrides."""
    before = merging_options(stored)
    values = dataclasses.asdict(before)
    overrides = normalise_names(overrides)
    changed = {
        name: value for name, value in overrides.items() if name in _RESEARCH_OPTIONS or values.get(name) != value
    }
    return _combine_options(type(before), values, changed, vit)


def _combine_options(
    kind: type[MergingOptions], values: Mapping[str, Any], overrides: Mapping[str, Any], vit: FrozenViT
) -> MergingOptions:
    """Options with overrides; other options that depend on an override are adjusted.

    Patches can be dropped only if some blocks have no adapter, and not with rotary position embeddings.
    """
    overrides = normalise_names(overrides)
    for name, replacement in _RESEARCH_OPTIONS.items():
        if name in overrides:
            raise OneaError(f"options has '{name}', which is for research runs only; for a model, set {replacement}.")
    options = make_options(kind, {**values, **_epoch_bounds(kind, overrides.get("epochs")), **overrides})
    if not {"views", "cached_views"}.isdisjoint(overrides) and "enough_images" not in overrides:
        options = dataclasses.replace(options, enough_images=0)  # the number of views is the same in every update
    all_patches = vit.rotary or options.adapter_blocks in (0, vit.depth)
    if all_patches and "adapter_blocks" in overrides and "patch_drop_rate" not in overrides:
        options = dataclasses.replace(options, patch_drop_rate=0.0)
    return options


def check_preset(preset: object) -> None:
    """Refuse an unknown preset."""
    if preset not in PRESETS:
        raise OneaError(f"preset is '{preset}'; choose {', '.join(PRESETS[:-1])} or {PRESETS[-1]}.")


def merging_options(options: Mapping[str, Any]) -> MemoryOptions:
    """The stored options of a model as options of its method, without those for research runs only."""
    kind: type[MemoryOptions] = OneAPlusOptions if "new_votes" in options else OneAOptions
    return make_options(kind, {name: value for name, value in options.items() if name not in _RESEARCH_OPTIONS})


def _epoch_bounds(kind: type[MergingOptions], epochs: Any) -> dict[str, int]:
    """Bounds of the epoch schedule: half and twice the number of epochs; zeros for One-A+, which computes them."""
    if not isinstance(epochs, int):
        return {}
    bounds = (0, 0) if issubclass(kind, OneAPlusOptions) else (max(1, epochs // 2), 2 * epochs)
    return dict(zip(("min_epochs", "max_epochs"), bounds, strict=True))
