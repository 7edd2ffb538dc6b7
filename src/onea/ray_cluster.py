# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster: joined by address or started here; used by grids of runs and by a service with replicas."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from onea.errors import OneaError, import_extra


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Join or start a cluster, and leave it; one that the caller has joined already is used and kept."""
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        quiet["include_dashboard"] = False
    try:
        ray.init(address=address or "local", **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise OneaError(
            f"No Ray cluster answers at '{address}' ({reason}); start one with 'ray start --head'."
        ) from error
    except OSError as error:
        reason = " ".join(str(error).split())
        raise OneaError(f"Ray cannot start ({reason}); set RAY_TMPDIR to a short path that can be written.") from error
    try:
        yield
    finally:
        ray.shutdown()  # also ends the tasks that are left


def import_ray() -> Any:
    """Ray, or one sentence about how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is to be sent anywhere
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do by itself, without its warning
    return import_extra("ray", "ray")
