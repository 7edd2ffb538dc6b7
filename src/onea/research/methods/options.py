# SPDX-License-Identifier: Apache-2.0
"""Learning rates by dataset, for presets that are asked for by name."""

from __future__ import annotations

from typing import Any


def tuned(cifar100: float, others: float, **everywhere: Any) -> dict[str, dict[str, Any]]:
    """The ``small`` presets: the learning rate for CIFAR-100, that for any other dataset, and options for all of them.

    Rates come from trials with ``vit_small_patch14_112`` on held-out training images, those for other datasets on
    CUB-200 (benchmarks/small-preset-trials.csv). Nothing takes them unless they are asked for by name.
    """
    return {"cifar100": {"learning_rate": cifar100, **everywhere}, "": {"learning_rate": others, **everywhere}}
