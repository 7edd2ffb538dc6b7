# SPDX-License-Identifier: Apache-2.0
"""Random seeds derived from (run seed, task, purpose), so that resumed and uninterrupted runs are identical."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, task: int, purpose: str) -> int:
    """A 63-bit seed, the same on every machine.

    >>> derive(1, 0, "crops") == derive(1, 0, "crops") != derive(1, 0, "order")
    True
    """
    digest = hashlib.sha256(f"{seed}/{task}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, task: int, purpose: str) -> torch.Generator:
    """A random generator for a purpose and task, on the CPU so that results do not depend on the device."""
    import torch

    return torch.Generator().manual_seed(derive(seed, task, purpose))
