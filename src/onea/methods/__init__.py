"""Class-incremental methods on one contract; looked up by name, imported when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from onea.errors import OneaError, nearest

if TYPE_CHECKING:
    from onea.methods.contract import Method

METHODS: dict[str, str] = {
    "one-a": "onea.methods.one_a:OneAMethod",
    "simplecil": "onea.methods.simplecil:SimpleCIL",
    "running-mean": "onea.methods.running_mean:RunningMeanOfAdapters",
}


def method_class(name: str) -> type[Method]:
    """The class of a method."""
    if name not in METHODS:
        raise OneaError(f"Unknown method '{name}'; {nearest(name, METHODS)}")
    module, attribute = METHODS[name].split(":")
    found: type[Method] = getattr(import_module(module), attribute)
    return found
