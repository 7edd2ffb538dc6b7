# SPDX-License-Identifier: Apache-2.0
"""PyTorch's compiler, imported on first use.

torchvision and timm import ``torch._dynamo`` for two functions that only compiled models call. This import takes
longer than all other imports of ``onea predict``.
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
    """From now on, import the compiler as placeholders, which load it on first use."""
    if _COMPILER not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Placeholder(ModuleType):
    """Stands for a module until an attribute of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by code that goes through all modules, such as inspect
            raise AttributeError(name)
        if (self.__name__, name) == (_COMPILER, "disable"):
            return _disable
        if (self.__name__, name) == (f"{_COMPILER}.utils", "is_compile_supported"):
            return lambda device: _import_real(f"{_COMPILER}.utils").is_compile_supported(device)
        return getattr(_import_real(self.__name__), name)


def _disable(function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """``torch._dynamo.disable`` (do not compile a function), applied on the first call of the function."""
    if not callable(function):
        return _import_real(_COMPILER).disable(function, *args, **kwargs)

    @functools.wraps(function)
    def disabled(*arguments: Any, **options: Any) -> Any:
        return _import_real(_COMPILER).disable(function, *args, **kwargs)(*arguments, **options)

    return disabled


def _import_real(name: str) -> ModuleType:
    """Remove all placeholders and import the module."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for deferred in _DEFERRED:
        if isinstance(sys.modules.get(deferred), _Placeholder):
            del sys.modules[deferred]
    return importlib.import_module(name)


class _Loaded(Loader):
    """Returns a module that has already been imported."""

    def __init__(self, module: ModuleType):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec, which the import replaced."""
        module.__spec__ = self._spec


class _Finder(MetaPathFinder, Loader):
    """Finds the placeholders. Importing any other module of the compiler imports the real ones."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A placeholder for a deferred module, the real module for one inside it, None for others."""
        if name in _DEFERRED:
            return importlib.util.spec_from_loader(name, self, is_package=name == _COMPILER)
        if name.startswith(f"{_COMPILER}."):
            return importlib.util.spec_from_loader(name, _Loaded(_import_real(name)))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The placeholder."""
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Load nothing yet."""
