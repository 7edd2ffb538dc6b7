# SPDX-License-Identifier: Apache-2.0
"""PyTorch's compiler, loaded when something compiles instead of whenever timm is imported.

torchvision and timm import ``torch._dynamo`` for two functions that only compiled models call. That takes longer than
all else that a command needs to answer about a photo.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_DEFERRED = (_COMPILER, f"{_COMPILER}.utils")


def defer_compiler() -> None:
    """From now on, importing the compiler only promises it; the first use of it loads it."""
    if _COMPILER not in sys.modules and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Promise(ModuleType):
    """A module that is loaded when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever goes through all modules, such as inspect, wants nothing of this one
            raise AttributeError(name)
        if (self.__name__, name) == (_COMPILER, "disable"):
            return _disable
        if (self.__name__, name) == (f"{_COMPILER}.utils", "is_compile_supported"):
            return lambda device: _real(f"{_COMPILER}.utils").is_compile_supported(device)
        return getattr(_real(self.__name__), name)


def _disable(function: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Any:
    """``torch._dynamo.disable``, which marks a function that is not to be compiled, on its first call."""
    if not callable(function):
        return _real(_COMPILER).disable(function, *how, **more)

    @functools.wraps(function)
    def disabled(*arguments: Any, **options: Any) -> Any:
        return _real(_COMPILER).disable(function, *how, **more)(*arguments, **options)

    return disabled


def _real(name: str) -> ModuleType:
    """The module itself; all that was promised is replaced."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for each in _DEFERRED:
        if isinstance(sys.modules.get(each), _Promise):
            del sys.modules[each]
    return importlib.import_module(name)


class _Loaded(Loader):
    """Gives a module that has been loaded already, as it is."""

    def __init__(self, module: ModuleType):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has been run; only its description was replaced."""
        module.__spec__ = self._spec


class _Finder(MetaPathFinder, Loader):
    """Finds promises, and keeps them as long as nobody imports more of the compiler."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A promise of the modules that are deferred; nothing else, and whatever is inside them needs the real ones."""
        if name in _DEFERRED:
            return importlib.util.spec_from_loader(name, self, is_package=name == _COMPILER)
        if name.startswith(f"{_COMPILER}."):
            return importlib.util.spec_from_loader(name, _Loaded(_real(name)))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The promise."""
        return _Promise(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing, for now."""
