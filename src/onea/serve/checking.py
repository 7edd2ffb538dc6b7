# SPDX-License-Identifier: Apache-2.0
"""The check of the present version: computed once, in a thread of its own, whoever asks for it and however often."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch

from onea.model.evaluation.check import check_model
from onea.model.state import State
from onea.serve.schemas import Checked


class Checks:
    """Checks of versions, one at a time; that of the latest one is kept as the bytes that are sent."""

    def __init__(self) -> None:
        threads = torch.get_num_threads()  # given to the thread for the reason that Batcher has
        self._thread = ThreadPoolExecutor(1, "onea-check", initializer=torch.set_num_threads, initargs=(threads,))
        self._id: str | None = None
        self._found: asyncio.Future[bytes] | None = None

    async def of(self, state: State) -> bytes:
        """The check of a version as JSON; who asks while it is computed waits for the same one."""
        if self._found is None or self._id != state.id or _failed(self._found):
            self._id = state.id
            self._found = asyncio.get_running_loop().run_in_executor(self._thread, _computed, state)
        return await asyncio.shield(self._found)  # a client that leaves does not end it for the others

    def close(self) -> None:
        """Compute nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _computed(state: State) -> bytes:
    return Checked.of(check_model(state)).model_dump_json().encode()


def _failed(found: asyncio.Future[bytes]) -> bool:
    return found.done() and (found.cancelled() or found.exception() is not None)
