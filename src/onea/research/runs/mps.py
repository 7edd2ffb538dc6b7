# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Multi-Process Service for the time of a grid: without it, processes on one GPU take turns.

It is a convenience that nobody has to know about: where it is missing, does not work, or somebody has set it up
already, runs go on as they would have.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_PROGRAM = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_USUAL_PLACE = Path("/tmp/nvidia-mps")  # where a service of the whole machine listens
_SECONDS = 30
# The least that a run will do: become a client of the service. Without it, every run would fail instead.
_TRIAL = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
raise SystemExit(1 if failed or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) else 0)
"""


@contextlib.contextmanager
def multi_process_service(wanted: bool = True) -> Iterator[Mapping[str, str]]:
    """Run the service, and give the environment of its clients; an empty one where there is none of our own."""
    program = shutil.which(_PROGRAM)
    if not wanted or program is None or _PIPES in os.environ or (_USUAL_PLACE / "control").exists():
        yield {}
        return
    place = Path(tempfile.mkdtemp(prefix="onea-mps-"))
    clients = {_PIPES: str(place / "pipe"), _LOGS: str(place / "log")}
    # Of the service itself: it would count the GPUs that it may see anew, and clients name them as we do.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | clients
    try:
        for folder in clients.values():
            Path(folder).mkdir()
        started = _succeeds([program, "-d"], environment)
        try:
            yield clients if started and _succeeds([sys.executable, "-c", _TRIAL], environment) else {}
        finally:
            if started:
                _succeeds([program], environment, said="quit\n")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _succeeds(command: list[str], environment: Mapping[str, str], said: str = "") -> bool:
    """Whether a command ends well, and in time."""
    try:
        # Into nothing, not a pipe: the service stays, and would keep a pipe open for ever.
        done = subprocess.run(
            command,
            env=dict(environment),
            input=said,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            start_new_session=True,  # Ctrl-C is for us, who then tell it to quit
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
