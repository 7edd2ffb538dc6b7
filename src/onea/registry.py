# SPDX-License-Identifier: Apache-2.0
"""Registries of classes or objects by name: built in, or from entry points of installed packages."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from onea.errors import OneaError, did_you_mean, truncate


@dataclass(frozen=True)
class Registry:
    """Classes or objects by name, imported on first use.

    Attributes:
        kind: what is registered, for error messages.
        group: entry-point group of third-party packages.
        builtin: ``module:attribute``, or the object itself, by name.
    """

    kind: str
    group: str
    builtin: Mapping[str, Any]

    @cached_property
    def names(self) -> dict[str, Any]:
        """All registered names with ``module:attribute`` or object; entry points cannot replace built-in names."""
        names = dict(self.builtin)
        for point in entry_points(group=self.group):
            if point.name in names:
                warnings.warn(
                    f"{self.kind} '{point.name}' of {point.value} is ignored: the name is taken", stacklevel=2
                )
            else:
                names[point.name] = point.value
        return names

    def register(self, name: str, value: Any) -> None:
        """Add a class or object in this process only, for example in a notebook; packages use entry points.

        Registering a name again replaces the object, unless the name is built in or from an installed package.

        >>> shapes = Registry("shape", "onea.shapes", {"disc": "my_package:Disc"})
        >>> shapes.register("square", object())
        >>> list(shapes.names)
        ['disc', 'square']
        """
        if isinstance(self.names.get(name, value), str):
            raise OneaError(f"The {self.kind} '{name}' already exists; choose another name.")
        self.names[name] = value

    def load(self, name: str) -> Any:
        """The class or object of this name."""
        if name not in self.names:
            raise OneaError(f"Unknown {self.kind} '{name}'; {did_you_mean(name, self.names)}")
        target = self.names[name]
        if not isinstance(target, str):
            return target
        module, _, attribute = target.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except Exception as error:  # importing third-party code may raise anything
            if name in self.builtin:
                raise
            reason = f"{type(error).__name__}: {truncate(error)}"
            raise OneaError(
                f"The {self.kind} '{name}' from {target} cannot be loaded ({reason}); fix or uninstall that package."
            ) from error

    def load_all(self) -> dict[str, Any]:
        """Every class or object by name; third-party ones that cannot be imported are skipped with a warning."""
        loaded = {}
        for name in self.names:
            try:
                loaded[name] = self.load(name)
            except OneaError as error:
                warnings.warn(str(error), stacklevel=2)
        return loaded
