# SPDX-License-Identifier: Apache-2.0
"""Clients of the tests of the service wait as long as a loaded machine may need."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

PATIENCE = 120.0  # seconds, as `wait_for` has; httpx gives up after 5


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[float]:
    """The default of httpx, which all its functions and clients share; whoever gives a timeout has that one."""
    httpx = pytest.importorskip("httpx")
    default = inspect.signature(httpx.get).parameters["timeout"].default
    with pytest.MonkeyPatch.context() as patch:
        for phase in ("connect", "read", "write", "pool"):
            patch.setattr(default, phase, PATIENCE)
        yield PATIENCE
