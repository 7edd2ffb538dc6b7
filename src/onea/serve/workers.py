# SPDX-License-Identifier: Apache-2.0
"""Threads that decode images, predict in batches, and check the model, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from onea.data.dataset import Pixels
from onea.model.answers import Answer, Snapshot
from onea.model.evaluation.check import check_model
from onea.model.learning.images import DecodedImages
from onea.model.state import State
from onea.serve.problems import busy
from onea.serve.schemas import CheckResponse
from onea.serve.settings import Limits

Result = TypeVar("Result")


def _torch_thread(name: str) -> ThreadPoolExecutor:
    """An executor of one thread that keeps PyTorch's number of threads, which decompositions change in their thread."""
    threads = torch.get_num_threads()
    return ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(threads,))


@dataclass(frozen=True)
class DecodingJob(Generic[Result]):
    """The decoding of one image.

    Attributes:
        work: function to run in a thread; it cannot be stopped once it has begun.
        pixels: number of pixels of the image, as a measure of the work.
    """

    work: Callable[[], Result]
    pixels: int


@dataclass(eq=False)
class _DecodingRequest:
    """The jobs of a request that have not begun, each with the future of its result."""

    client: Hashable
    pixels: int
    jobs: deque[tuple[DecodingJob[Any], asyncio.Future[Any]]]


class DecoderPool:
    """Threads that decode images, with fair scheduling between clients.

    A thread finishes what it has begun, so a few large images could block everyone. Therefore one thread never decodes
    large images, the pixels that are decoded at the same time are limited, clients take turns, and the smallest request
    of a client comes first.
    """

    def __init__(self, limits: Limits, threads: int | None = None) -> None:
        self._limits, self._threads = limits, max(2, threads or os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="onea-decode")
        self._queue: list[_DecodingRequest] = []
        self._running: list[int] = []  # pixels of each running job
        self._turns, self._last_turn = (
            itertools.count(1),
            dict[Hashable, int](),
        )  # counter, and the last turn of each waiting client

    def close(self) -> None:
        """Finish the running jobs."""
        self._pool.shutdown()

    async def run(self, client: Hashable, jobs: Sequence[DecodingJob[Result]], max_pixels: int) -> list[Result]:
        """The results of the jobs of a request. Jobs that have not begun are dropped on cancel and when one fails.

        Args:
            client: the client that sent the request.
            jobs: the jobs of the request.
            max_pixels: maximum for a client in the queue at the same time, unless it has a single request there.

        Raises:
            Problem: the client has too many pixels in the queue, and this is the largest of its requests.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in jobs]
        request = _DecodingRequest(client, sum(job.pixels for job in jobs), deque(zip(jobs, futures, strict=True)))
        self._queue.append(request)
        try:
            self._refuse_largest(client, max_pixels)
            self._start_jobs()
            return await asyncio.gather(*futures)
        finally:
            self._queue.remove(request)
            if all(other.client != client for other in self._queue):
                self._last_turn.pop(client, None)
            for future in futures:
                future.cancel()

    def _refuse_largest(self, client: Hashable, max_pixels: int) -> None:
        requests = [request for request in self._queue if request.client == client]
        while len(requests) > 1 and sum(request.pixels for request in requests) > max_pixels:
            largest = max(reversed(requests), key=lambda request: request.pixels)  # the newest of equal ones
            requests.remove(largest)
            while largest.jobs:
                _, future = largest.jobs.popleft()
                detail = "Your requests have more megapixels than one client may have waiting; send fewer at a time."
                future.set_exception(busy(detail))

    def _start_jobs(self) -> None:
        while len(self._running) < self._threads:
            ready = [request for request in self._queue if request.jobs and self._may_start(request.jobs[0][0])]
            if not ready:
                return
            request = min(ready, key=lambda request: (self._last_turn.get(request.client, 0), request.pixels))
            self._last_turn[request.client] = next(self._turns)
            self._start(request, *request.jobs.popleft())

    def _may_start(self, job: DecodingJob[Any]) -> bool:
        large = sum(pixels > self._limits.large_pixels for pixels in self._running)
        if job.pixels > self._limits.large_pixels and large >= self._threads - 1:
            return False
        return not self._running or sum(self._running) + job.pixels <= self._limits.decoded_pixels

    def _start(self, request: _DecodingRequest, job: DecodingJob[Any], future: asyncio.Future[Any]) -> None:
        self._running.append(job.pixels)

        def on_done(done: asyncio.Future[Any]) -> None:
            self._running.remove(job.pixels)
            error = done.exception()
            if error:
                request.jobs.clear()
            if not future.done():  # otherwise the client has disconnected
                if error:
                    future.set_exception(error)
                else:
                    future.set_result(done.result())
            self._start_jobs()

        asyncio.get_running_loop().run_in_executor(self._pool, job.work).add_done_callback(on_done)


@dataclass(frozen=True, eq=False)
class PredictionRequest:
    """The images of one request; one version of the model answers all of them.

    Attributes:
        images: decoded images.
        top: number of classes in each answer.
        answers: future of the answers.
    """

    images: DecodedImages
    top: int
    answers: asyncio.Future[list[Answer]] = field(repr=False)


def predict_batch(snapshot: Snapshot, requests: Sequence[PredictionRequest]) -> list[list[Answer]]:
    """The answers to several requests from one forward pass."""
    pixels: Pixels = np.concatenate([request.images.pixels for request in requests])
    names = tuple(name for request in requests for name in request.images.names)
    parts = snapshot.compute_scores(DecodedImages(pixels, None, names)).split(
        [len(request.images) for request in requests]
    )
    return [snapshot.answers_from(r.images, part, r.top) for r, part in zip(requests, parts, strict=True)]


class Batcher:
    """Dynamic batching: collects requests for a moment, or until a batch is full, and predicts them together.

    Requests queue up during a forward pass, so a busy service batches without waiting.

    Args:
        snapshot: returns the version of the model that answers; called for every batch.
        batch_size: images in a batch; a request with more is not split.
        wait: seconds that the first request waits for others.
        on_batch: called with the number of images of each batch.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        batch_size: int,
        wait: float,
        on_batch: Callable[[int], None] = lambda images: None,
    ) -> None:
        self._snapshot, self._batch_size, self._wait, self._on_batch = snapshot, batch_size, wait, on_batch
        self._queue: asyncio.Queue[PredictionRequest] = asyncio.Queue()
        self._next: PredictionRequest | None = None  # did not fit into the last batch
        self._thread = _torch_thread("onea-predict")

    async def predict(self, images: DecodedImages, top: int) -> list[Answer]:
        """The answers for the images of a request."""
        request = PredictionRequest(images, top, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(request)
        return await request.answers

    async def run(self) -> None:
        """Predict until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                requests = await self._collect()
                try:
                    answers = await loop.run_in_executor(self._thread, predict_batch, self._snapshot(), requests)
                except Exception as error:
                    for request in requests:
                        if not request.answers.done():
                            request.answers.set_exception(error)
                    continue
                self._on_batch(sum(len(request.images) for request in requests))
                for request, answer in zip(requests, answers, strict=True):
                    if not request.answers.done():  # otherwise the client has disconnected
                        request.answers.set_result(answer)
        finally:
            self._thread.shutdown(wait=False)

    async def _collect(self) -> list[PredictionRequest]:
        loop = asyncio.get_running_loop()
        first = self._next or await self._queue.get()
        self._next = None
        while first.answers.done():  # the client has disconnected
            first = await self._queue.get()
        requests, images, end = [first], len(first.images), loop.time() + self._wait
        while images < self._batch_size:
            try:
                if self._queue.empty():
                    request = await asyncio.wait_for(self._queue.get(), end - loop.time())
                else:
                    request = self._queue.get_nowait()
            except TimeoutError:
                break
            if request.answers.done():
                continue
            if images + len(request.images) > self._batch_size:
                self._next = request
                break
            requests.append(request)
            images += len(request.images)
        return requests


class CheckCache:
    """The check of the current version, computed once and cached as JSON."""

    def __init__(self) -> None:
        self._thread = _torch_thread("onea-check")
        self._id: str | None = None
        self._json: asyncio.Future[bytes] | None = None

    async def get(self, state: State) -> bytes:
        """The check of a version as JSON; concurrent requests wait for the same computation."""
        future = self._json
        failed = future is not None and future.done() and (future.cancelled() or future.exception() is not None)
        if future is None or failed or self._id != state.id:
            self._id = state.id
            future = self._json = asyncio.get_running_loop().run_in_executor(self._thread, _check_as_json, state)
        return await asyncio.shield(future)  # a client that disconnects does not cancel it for the others

    def close(self) -> None:
        """Start no more computations."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _check_as_json(state: State) -> bytes:
    return CheckResponse.of(check_model(state)).model_dump_json().encode()
