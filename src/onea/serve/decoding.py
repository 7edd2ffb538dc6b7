# SPDX-License-Identifier: Apache-2.0
"""Images are decoded in turn: small requests before large ones, clients alike, nothing for a client that has gone."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from onea.serve.problems import busy
from onea.serve.settings import Limits

Result = TypeVar("Result")


@dataclass(frozen=True)
class DecodingJob(Generic[Result]):
    """Work on one image.

    Attributes:
        work: done in a thread; it cannot be stopped once it has begun.
        pixels: of the image, as a measure of the work.
    """

    work: Callable[[], Result]
    pixels: int


@dataclass(eq=False)
class _Request:
    """The jobs of a request that have not begun, each with its result to come."""

    client: Hashable
    pixels: int
    jobs: deque[tuple[DecodingJob[Any], asyncio.Future[Any]]]


class Decoders:
    """Threads that decode, and the requests that wait for them.

    A thread finishes what it has begun, so a few large images could keep everyone waiting. Therefore one thread never
    takes a large image, the pixels in work at the same time are limited, clients take turns, and of a client's requests
    the smallest comes first.
    """

    def __init__(self, limits: Limits, threads: int | None = None) -> None:
        self._limits, self._threads = limits, max(2, threads or os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="onea-decode")
        self._waiting: list[_Request] = []
        self._in_work: list[int] = []  # pixels
        self._turns, self._turn_of = itertools.count(1), dict[Hashable, int]()  # the last one of each client that waits

    def close(self) -> None:
        """Finish what has begun."""
        self._pool.shutdown()

    async def results(self, client: Hashable, jobs: Sequence[DecodingJob[Result]], most: int) -> list[Result]:
        """The results of the jobs of a request. Those that have not begun are dropped when one fails, and on cancel.

        Args:
            client: whose request it is.
            jobs: what to do.
            most: pixels that a client may wait for at the same time, unless they are of a single request.

        Raises:
            Problem: the client waits for too much, and this is the largest of its requests.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in jobs]
        request = _Request(client, sum(job.pixels for job in jobs), deque(zip(jobs, futures, strict=True)))
        self._waiting.append(request)
        try:
            self._make_room(client, most)
            self._begin()
            return await asyncio.gather(*futures)
        finally:
            self._waiting.remove(request)
            if all(other.client != client for other in self._waiting):
                self._turn_of.pop(client, None)
            for future in futures:
                future.cancel()

    def _make_room(self, client: Hashable, most: int) -> None:
        own = [request for request in self._waiting if request.client == client]
        while len(own) > 1 and sum(request.pixels for request in own) > most:
            largest = max(reversed(own), key=lambda request: request.pixels)  # of equal ones the newest
            own.remove(largest)
            while largest.jobs:
                _, future = largest.jobs.popleft()
                future.set_exception(busy("You wait for more megapixels than one client may; send less at a time."))

    def _begin(self) -> None:
        while len(self._in_work) < self._threads:
            ready = [request for request in self._waiting if request.jobs and self._may_begin(request.jobs[0][0])]
            if not ready:
                return
            chosen = min(ready, key=lambda request: (self._turn_of.get(request.client, 0), request.pixels))
            self._turn_of[chosen.client] = next(self._turns)
            self._start(chosen, *chosen.jobs.popleft())

    def _may_begin(self, job: DecodingJob[Any]) -> bool:
        large = sum(pixels > self._limits.large_pixels for pixels in self._in_work)
        if job.pixels > self._limits.large_pixels and large >= self._threads - 1:
            return False
        return not self._in_work or sum(self._in_work) + job.pixels <= self._limits.decoded_pixels

    def _start(self, request: _Request, job: DecodingJob[Any], future: asyncio.Future[Any]) -> None:
        self._in_work.append(job.pixels)

        def ended(done: asyncio.Future[Any]) -> None:
            self._in_work.remove(job.pixels)
            error = done.exception()
            if error:
                request.jobs.clear()
            if not future.done():  # or the client has gone
                if error:
                    future.set_exception(error)
                else:
                    future.set_result(done.result())
            self._begin()

        asyncio.get_running_loop().run_in_executor(self._pool, job.work).add_done_callback(ended)
