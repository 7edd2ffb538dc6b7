# SPDX-License-Identifier: Apache-2.0
"""Properties of this CPU: bf16 products, usable cores, and how OpenMP threads wait.

A CPU computes in bf16 if it has the instructions and they work. Some virtual machines report AMX, the newest matrix
instructions, and then kill a process that uses them ("illegal instruction"). This is tested once per machine by a small
matrix product in a separate process.

PyTorch includes GNU's OpenMP, whose threads spin while they wait. On a busy machine they block the cores of the threads
they wait for, and a prediction takes twenty times as long. ``OMP_WAIT_POLICY`` prevents that if it is set before torch
is imported. Afterwards, more OpenMP threads than cores help: threads of such a process spin only briefly."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from onea.errors import OneaError
from onea.files import cache_folder, write_json

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Environment variable of oneDNN, PyTorch's library for CPU kernels: the newest instruction set it may use."""

_CPUINFO = Path("/proc/cpuinfo")
_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_WITHOUT_AMX = ("AVX512_CORE_BF16", "AVX10_1_512", "AVX512_CORE_FP16")
_TEST_PRODUCT = (
    "import torch; x = torch.ones(128, 384).bfloat16(); print(float(torch.nn.functional.linear(x, x)[0, 0]))"
)
_EXPECTED = 384.0
_TIMEOUT = 120  # seconds; importing torch from a cold disk takes a while
_POLICY = "OMP_WAIT_POLICY"
_ELEMENTS = 100_000  # enough for torch to divide a sum between threads


@cache
def has_bf16() -> bool:
    """Whether bf16 is faster than fp32; without the instructions it is emulated."""
    return "avx512_bf16" in _flags() and _isa_limit() not in _WITHOUT_BF16 and not is_amx_broken()


@cache
def is_amx_broken() -> bool:
    """Whether bf16 products would kill the process."""
    if "amx_bf16" not in _flags() or _isa_limit() in (*_WITHOUT_BF16, *_WITHOUT_AMX):
        return False
    from onea import __version__

    machine = json.dumps([sorted(_flags()), platform.release(), _isa_limit(), __version__, sys.executable])
    cached = cache_folder() / f"amx-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return bool(json.loads(cached.read_bytes())["broken"])
    broken = not _product_works()
    with suppress(OneaError):  # without a writable cache, the next process tests again
        write_json(cached, {"broken": broken})
    return broken


def available_cores() -> int:
    """The number of cores this process may use, which containers and job schedulers limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _product_works() -> bool:
    if not sys.executable:
        return False
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TEST_PRODUCT], capture_output=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL
        )
        return done.returncode == 0 and float(done.stdout) == _EXPECTED
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return False


@cache
def _flags() -> frozenset[str]:
    lines = _CPUINFO.read_text(encoding="utf-8", errors="ignore").splitlines() if _CPUINFO.exists() else []
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def _isa_limit() -> str:
    return os.environ.get(ISA_VARIABLE, "").upper()


def set_passive_waiting() -> None:
    """Set ``OMP_WAIT_POLICY=PASSIVE``, unless torch is imported already or the user has set a policy."""
    if "torch" not in sys.modules:
        os.environ.setdefault(_POLICY, "PASSIVE")


@cache
def oversubscribe_threads() -> threading.Thread | None:
    """Start more OpenMP threads than cores, which sleep forever, if torch was imported without a policy.

    Changes PyTorch's thread count, which must be set afterwards.
    """
    if _POLICY in os.environ or sys.platform != "linux":
        return None
    import torch

    started = threading.Event()

    def start_and_sleep() -> None:
        torch.set_num_threads(max(2, os.cpu_count() or 1))
        torch.ones(_ELEMENTS).sum()
        started.set()
        threading.Event().wait()

    thread = threading.Thread(target=start_and_sleep, name="onea-openmp", daemon=True)
    thread.start()
    started.wait()
    return thread
