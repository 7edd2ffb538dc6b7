# SPDX-License-Identifier: Apache-2.0
"""Learn new classes in updates of any size with one adapter on a frozen vision transformer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onea.model.estimator import OneA, load

__version__ = "0.1.0"
__all__ = ["OneA", "__version__", "load"]

_LAZY = {"OneA": "onea.model.estimator", "load": "onea.model.estimator"}


def __getattr__(name: str) -> Any:
    """Import the estimator at its first use, so that importing onea stays fast."""
    if name not in _LAZY:
        raise AttributeError(f"module 'onea' has no attribute '{name}'")
    from importlib import import_module

    import_module("onea.cpu").set_passive_waiting()
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """Include the names that are imported lazily."""
    return sorted({*globals(), *_LAZY})
