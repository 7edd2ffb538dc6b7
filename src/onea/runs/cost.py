"""What answering one image costs after some tasks, measured rather than claimed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from onea.data.store import Images
from onea.methods.contract import Method

MEASURED_AFTER = (1, 10, 40)  # tasks; and after the last one
_SAMPLE = 8  # images; some methods route each image its own way


def measure(method: Method, images: Images, tasks: int) -> dict[str, Any]:
    """Floating-point operations and passes per image, and bytes kept, after this many tasks."""
    rows = torch.arange(min(_SAMPLE, len(images)))
    batch = images.plain(rows)
    with method.vit.uncompiled(), FlopCounterMode(display=False) as counter:
        method.scores(batch)
    return {
        "tasks": tasks,
        "flops_per_image": counter.get_total_flops() // len(rows),
        "passes_per_image": method.passes(tasks),
        "state_bytes": sum(value.numel() * value.element_size() for value in method.state_dict().values()),
    }
