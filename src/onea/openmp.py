# SPDX-License-Identifier: Apache-2.0
"""How OpenMP's threads wait for each other: asleep, or a shared machine comes to a crawl.

PyTorch brings GNU's OpenMP, whose threads spin while they wait. On a busy machine they take the cores from those that
they wait for, and an answer takes twenty times as long. ``OMP_WAIT_POLICY`` forbids it, if it is set before torch is
loaded. Later, one thing helps: while a process has more OpenMP threads than cores, they spin for a moment only.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache

_POLICY = "OMP_WAIT_POLICY"
_ELEMENTS = 100_000  # of a sum that torch divides between threads


def sleep_while_waiting() -> None:
    """Set the policy, where that is not too late and nobody has set another."""
    if "torch" not in sys.modules:
        os.environ.setdefault(_POLICY, "PASSIVE")


@cache
def outnumber_cores() -> threading.Thread | None:
    """Have more OpenMP threads than cores, most of them asleep for ever, where torch was loaded without a policy.

    Changes PyTorch's number of threads, which is to be set afterwards.
    """
    if _POLICY in os.environ or sys.platform != "linux":
        return None
    import torch

    started = threading.Event()

    def hold() -> None:
        torch.set_num_threads(max(2, os.cpu_count() or 1))
        torch.ones(_ELEMENTS).sum()
        started.set()
        threading.Event().wait()

    thread = threading.Thread(target=hold, name="onea-openmp", daemon=True)
    thread.start()
    started.wait()
    return thread
