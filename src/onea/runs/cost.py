# SPDX-License-Identifier: Apache-2.0
"""What answering one image costs after some tasks, measured rather than claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from onea.data.store import Images
from onea.methods.contract import Method

MEASURED_AFTER = (1, 10, 40)  # tasks; and after the last one
_SAMPLE = 8  # images; some methods route each image its own way


def measure(method: Method, images: Images, tasks: int) -> dict[str, Any]:
    """Floating-point operations and passes per image, and bytes kept, after this many tasks."""
    rows = torch.arange(min(_SAMPLE, len(images)))
    batch = images.plain(rows)
    with method.vit.uncompiled():
        flops = count_flops(lambda: method.scores(batch))
    return {
        "tasks": tasks,
        "flops_per_image": flops // len(rows),
        "passes_per_image": method.passes(method.options, tasks),
        "state_bytes": sum(value.numel() * value.element_size() for value in method.state_dict().values()),
    }


def count_flops(action: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products in an action, as the mathematics needs them."""
    # Attention as plain products: the counter does not know every fused kernel.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        action()
    return int(counter.get_total_flops())
