# SPDX-License-Identifier: Apache-2.0
"""What may be asked of the estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from onea.errors import OneaError
from onea.model.state import classifier_for
from onea.vit.embedded import DEFAULT
from onea.vit.network_config import check_image_size

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
