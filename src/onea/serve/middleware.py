# SPDX-License-Identifier: Apache-2.0
"""Middleware around the app: limits on requests, response headers, metrics, and refusals during a shutdown."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import prometheus_client as prometheus
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onea.serve import problems
from onea.serve.access import client_address, is_allowed_host
from onea.serve.problems import Problem, busy
from onea.serve.settings import MEGABYTE, Limits, Settings

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # text is never parsed as HTML
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_CLOSE = {"Connection": "close"}
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 32 * MEGABYTE
_LEARN_PATHS = ("/learn", "/background")  # paths of requests that may be large
_UNLIMITED_PATHS = ("/healthz", "/metrics")  # monitoring must work when the service is busy


class Metrics:
    """Prometheus metrics of one service; thread-safe.

    Attributes:
        active: number of requests in progress, for the shutdown; not a Prometheus metric.
    """

    def __init__(self) -> None:
        self.active = 0
        # Not the default registry, which all services of a process would share.
        self._registry = registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter("onea_requests", "Requests.", ["route", "status"], registry=registry)
        self.request_seconds = prometheus.Histogram(
            "onea_request_seconds", "Seconds from the head of a request to the end of its response.", ["route"],
            registry=registry,
        )  # fmt: skip
        self.images = prometheus.Counter("onea_images", "Images predicted.", registry=registry)
        self.unknown = prometheus.Counter("onea_unknown", "Images predicted 'unknown'.", registry=registry)
        self.jobs = prometheus.Counter("onea_training_jobs", "Training jobs started.", registry=registry)
        self.batch_images = prometheus.Histogram(
            "onea_batch_images", "Images in a forward pass.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self.model_version = prometheus.Gauge("onea_model_version", "Current version.", registry=registry)
        self.model_classes = prometheus.Gauge(
            "onea_model_classes", "Classes of the current version.", registry=registry
        )
        self.learning = prometheus.Gauge("onea_learning", "1 during a training job.", registry=registry)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return prometheus.generate_latest(self._registry)


class ServiceMiddleware:
    """ASGI middleware: limits, headers and metrics."""

    def __init__(self, app: ASGIApp, settings: Settings, is_closing: Callable[[], bool], metrics: Metrics) -> None:
        self._app, self._settings, self._is_closing, self._metrics = app, settings, is_closing, metrics
        self._limits = settings.limits
        self._uploads: set[_Upload] = set()
        self._processing: Counter[str] = Counter()  # completely received requests by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # used by monitoring; the server omits the body
            scope = {**scope, "method": "GET"}
        sender = _ResponseSender(send, scope["path"])
        started = time.perf_counter()
        self._metrics.active += 1
        try:
            if refusal := self._refusal(scope):
                if refusal.status == 413 and self._metrics.active <= self._limits.requests:
                    await _linger(receive)
                raise refusal
            if scope["path"] in _UNLIMITED_PATHS:
                await self._app(scope, receive, sender)
            else:
                await self._answer_within_limits(scope, receive, sender)
        except Exception as error:
            problem = error if isinstance(error, Problem) else problems.unexpected(error)
            if not sender.status:
                await problems.response(problem)(scope, receive, sender)
        finally:
            self._metrics.active -= 1
        # Only existing routes become labels; otherwise clients could fill the memory with them.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.requests.labels(route, str(sender.status)).inc()
        self._metrics.request_seconds.labels(route).observe(time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        if not is_allowed_host(headers.get("host", ""), self._settings):
            return Problem(421, "This host name is not allowed; the operator can add it with --allowed-host.")
        if self._is_closing():
            return Problem(503, "The service is shutting down; try again in a moment.", _CLOSE | {"Retry-After": "5"})
        if _head_bytes(scope) > self._limits.head_bytes:  # uvicorn checks only heads that arrive in several pieces
            kilobytes = self._limits.head_bytes // 1024
            return Problem(431, f"The URL and the headers exceed {kilobytes} KB in total; shorten them.")
        if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
            # Request smuggling: a proxy may use the other length and treat the end of the body as another request.
            return Problem(400, "The length of the request is ambiguous; send only Content-Length.", _CLOSE)
        length = headers.get("content-length", "")
        if length.isdecimal() and float(length) > (limit := self._max_bytes(scope)):
            return request_too_large(limit)
        return None

    async def _answer_within_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that counts as an upload until it was received, and from then on as being processed."""
        with ExitStack() as stack:

            def process() -> None:
                self._uploads.discard(upload)
                stack.enter_context(self._processing_slot(client_address(scope)))

            upload = _Upload(receive, self._max_bytes(scope), self._limits, on_complete=process)
            headers = Headers(scope=scope)
            if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
                self._stop_slowest_upload()
                self._uploads.add(upload)
                stack.callback(self._uploads.discard, upload)
                await self._app(scope, upload, send)
            else:
                process()
                await self._app(scope, receive, send)

    @contextmanager
    def _processing_slot(self, client: str) -> Iterator[None]:
        if (
            self._processing.total() >= self._limits.requests
            or self._processing[client] >= self._limits.client_requests
        ):
            raise busy()
        self._processing[client] += 1
        try:
            yield
        finally:
            self._processing -= Counter([client])  # which also removes a client without requests

    def _stop_slowest_upload(self) -> None:
        """Make room for a new upload; otherwise many slow clients would block everyone."""
        if len(self._uploads) >= self._limits.uploads:
            slowest = min(self._uploads, key=lambda upload: upload.deadline)
            self._uploads.remove(slowest)
            slowest.stop()

    def _max_bytes(self, scope: Scope) -> int:
        return self._limits.learn_bytes if scope["path"] in _LEARN_PATHS else self._limits.predict_bytes


def request_too_large(limit: int) -> Problem:
    """The problem of a request that is too large."""
    return Problem(413, f"The request is larger than {limit / MEGABYTE:g} MB; send less at a time.", _CLOSE)


def _head_bytes(scope: Scope) -> int:
    parts = [scope.get("raw_path") or b"", scope["query_string"], *(part for pair in scope["headers"] for part in pair)]
    return sum(map(len, parts))


class _Upload:
    """Receives the body of a request, with limits on its size and duration, and calls ``on_complete`` at its end."""

    def __init__(self, receive: Receive, max_bytes: int, limits: Limits, on_complete: Callable[[], None]) -> None:
        self._receive, self._max_bytes, self._limits, self._on_complete = receive, max_bytes, limits, on_complete
        self._bytes, self._is_complete, self._is_stopped = 0, False, False
        self._started = asyncio.get_running_loop().time()
        self._timeout: asyncio.Timeout | None = None

    @property
    def deadline(self) -> float:
        """When the body must be complete; every received byte extends it."""
        return self._started + self._limits.pause_seconds + self._bytes / self._limits.min_rate

    def stop(self) -> None:
        """Refuse the rest of the body."""
        self._is_stopped = True
        if self._timeout and not self._timeout.expired():
            self._timeout.reschedule(0)

    async def __call__(self) -> Message:
        if self._is_complete:  # next comes the disconnect of the client, without a deadline
            return await self._receive()
        pause_end = asyncio.get_running_loop().time() + self._limits.pause_seconds
        deadline = 0 if self._is_stopped else min(pause_end, self.deadline)
        try:
            async with asyncio.timeout_at(deadline) as self._timeout:
                message = await self._receive()
        except TimeoutError:
            if self._is_stopped:
                raise busy("The service is busy and this request is slow; send it again in a moment.", _CLOSE) from None
            raise Problem(408, "The request was too slow or stopped half-way; send it again.", _CLOSE) from None
        finally:
            self._timeout = None
        self._bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._bytes > self._max_bytes:
            if not self._is_complete:
                await _linger(self._receive)
            raise request_too_large(self._max_bytes)
        if self._is_complete:
            self._on_complete()
        return message


async def _linger(receive: Receive) -> None:
    """Receive more for a moment: a client whose connection is closed while it sends does not read the response."""
    received = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while received < _LINGER_BYTES:
                message = await receive()
                received += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


class _ResponseSender:
    """Adds the headers that all responses have, and remembers the status."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self.status = send, 0
        self._cache_control = "no-cache" if path.startswith("/static/") else "no-store"

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", self._cache_control)
        await self._send(message)
