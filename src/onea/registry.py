# SPDX-License-Identifier: Apache-2.0
"""Names that stand for classes or objects: our own, and those that installed packages add by entry point."""

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
    """Classes or objects by name, imported when asked for.

    Attributes:
        kind: what is registered, as messages call it.
        group: entry-point group where third parties register theirs.
        own: name to ``module:attribute``, or to the object itself.
    """

    kind: str
    group: str
    own: Mapping[str, Any]

    @cached_property
    def names(self) -> dict[str, Any]:
        """Every known name and where its object is; a third party cannot replace one of ours."""
        found = dict(self.own)
        for point in entry_points(group=self.group):
            if point.name in found:
                warnings.warn(
                    f"{self.kind} '{point.name}' of {point.value} is ignored: the name is taken", stacklevel=2
                )
            else:
                found[point.name] = point.value
        return found

    def register(self, name: str, thing: Any) -> None:
        """Add a class or object of this process alone, such as one of a notebook; a package has entry points.

        One that was registered so can be replaced, since cells are run again; what was installed cannot.

        >>> shapes = Registry("shape", "onea.shapes", {"disc": "my_package:Disc"})
        >>> shapes.register("square", object())
        >>> list(shapes.names)
        ['disc', 'square']
        """
        if isinstance(self.names.get(name, thing), str):
            raise OneaError(f"The {self.kind} '{name}' is there already; choose another name.")
        self.names[name] = thing

    def load(self, name: str) -> Any:
        """The class or object behind a name."""
        if name not in self.names:
            raise OneaError(f"Unknown {self.kind} '{name}'; {did_you_mean(name, self.names)}")
        place = self.names[name]
        if not isinstance(place, str):
            return place
        module, _, attribute = place.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except Exception as error:  # whatever somebody else's module may raise when it is imported
            if name in self.own:
                raise
            reason = f"{type(error).__name__}: {truncate(error)}"
            raise OneaError(
                f"The {self.kind} '{name}' of {place} cannot be loaded ({reason}); repair or uninstall its package."
            ) from error

    def load_all(self) -> dict[str, Any]:
        """Every class or object by name; those of other packages that cannot be loaded are left out with a warning."""
        found = {}
        for name in self.names:
            try:
                found[name] = self.load(name)
            except OneaError as error:
                warnings.warn(str(error), stacklevel=2)
        return found
