# SPDX-License-Identifier: Apache-2.0
"""Old names of public functions, classes, methods and arguments, which work for one more version with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module, given its old names and ``module:name`` of the new ones."""

    def look_up(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        place, _, new = names[name].partition(":")
        _warn(f"{module}.{name}", f"{place}.{new}")
        return getattr(import_module(place), new)

    return look_up


class RenamedMethods:
    """Base of classes with renamed methods, which other packages override and call.

    ``class Method(RenamedMethods, old_names={"parts": "cacheable_modules"})``: a subclass that still defines ``parts``
    overrides ``cacheable_modules``, and ``parts`` can still be called.
    """

    _old_names: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, old_names: Mapping[str, str] | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls._old_names = {**cls._old_names, **(old_names or {})}
        for old, new in cls._old_names.items():
            if new in vars(cls) and old not in vars(cls):
                setattr(cls, old, _forwarding(f"{cls.__qualname__}.{old}", new, vars(cls)[new]))
            elif old in vars(cls) and new not in vars(cls):
                _warn(f"{cls.__module__}.{cls.__qualname__}.{old}", new)
                setattr(cls, new, vars(cls)[old])


def _forwarding(old: str, new: str, method: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(method)
    def forward(*args: P.args, **kwargs: P.kwargs) -> T:
        _warn(old, new)
        return method(*args, **kwargs)

    return forward


def renamed_attribute(new: str) -> Any:
    """A property under the old name of an attribute."""

    def value(self: object) -> Any:
        _warn("this attribute", new)
        return getattr(self, new)

    return property(value)


def renamed_arguments(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function also take arguments by their old names: ``@renamed_arguments(dealt="sharded")``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in names.keys() & kwargs.keys():
                _warn(f"the argument {old} of {function.__name__}", names[old], stacklevel=3)
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=stacklevel)
