# SPDX-License-Identifier: Apache-2.0
"""Old names of public functions, which work for one more version with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module, given its old names and ``module:name`` of the new ones."""

    def look_up(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        place, _, new = names[name].partition(":")
        warnings.warn(f"{module}.{name} is now {place}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(place), new)

    return look_up
