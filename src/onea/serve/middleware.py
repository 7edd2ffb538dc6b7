# SPDX-License-Identifier: Apache-2.0
"""Middleware before every route: limits on requests, headers of responses, counters, and refusals while it stops."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onea.serve import metrics, problems
from onea.serve.access import client_address, goes_by
from onea.serve.problems import Problem, busy
from onea.serve.settings import MEGABYTE, Limits, Settings

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # no text ever becomes markup
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_CLOSE = {"Connection": "close"}
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 32 * MEGABYTE
_TAUGHT = ("/learn", "/background")  # where a request may be large
_UNCOUNTED = ("/healthz", "/metrics")  # whoever operates the service asks them, above all when it is busy


class ServiceMiddleware:
    """ASGI middleware around the whole app: limits, headers and counters.

    Args:
        app: the app.
        settings: what a request may cost, and which names the service goes by.
        closing: whether the service is being stopped.
        counters: hear about every request.

    Attributes:
        active: requests that have begun.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, closing: Callable[[], bool], counters: metrics.Metrics
    ) -> None:
        self._app, self._settings, self._closing, self._counters = app, settings, closing, counters
        self._limits = settings.limits
        self._uploads: set[_Upload] = set()
        self._worked_on: Counter[str] = Counter()  # requests that have come whole, of each client
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as monitors ask; the server leaves the body out
            scope = {**scope, "method": "GET"}
        watched = _Watched(send, scope["path"])
        started = time.perf_counter()
        self.active += 1
        try:
            if refusal := self._refusal(scope):
                if refusal.status == 413 and self.active <= self._limits.requests:  # in a crowd nobody lingers
                    await _linger(receive)
                raise refusal
            if scope["path"] in _UNCOUNTED:
                await self._app(scope, receive, watched)
            else:
                await self._counted(scope, receive, watched)
        except Exception as error:
            problem = error if isinstance(error, Problem) else problems.unexpected(error)
            if not watched.status:
                await problems.response(problem)(scope, receive, watched)
        finally:
            self.active -= 1
        self._note(scope, watched.status, time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        if not goes_by(headers.get("host", ""), self._settings):
            return Problem(421, "This service does not go by that name; its operator can add it with --allowed-host.")
        if self._closing():
            return Problem(503, "The service is being stopped; try again in a moment.", _CLOSE | {"Retry-After": "5"})
        if _head_bytes(scope) > self._limits.head_bytes:  # which the server sees only where it comes in several pieces
            most = self._limits.head_bytes // 1024
            return Problem(431, f"The head of the request has more than {most} KB; shorten its address and headers.")
        if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
            # A proxy in front may go by the other of the two, and take the end of the body for another request.
            return Problem(400, "The length of the request is ambiguous; send Content-Length alone.", _CLOSE)
        length = headers.get("content-length", "")
        if length.isdecimal() and float(length) > (limit := self._limit(scope)):
            return too_large(limit)
        return None

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that counts as an upload until it has come whole, and from then on as worked on."""
        with ExitStack() as held:

            def work() -> None:
                self._uploads.discard(upload)
                held.enter_context(self._working_for(client_address(scope)))

            upload = _Upload(receive, self._limit(scope), self._limits, work)
            if _has_body(Headers(scope=scope)):
                self._make_room()
                self._uploads.add(upload)
                held.callback(self._uploads.discard, upload)
                await self._app(scope, upload, send)
            else:
                work()
                await self._app(scope, receive, send)

    @contextmanager
    def _working_for(self, client: str) -> Iterator[None]:
        if self._worked_on.total() >= self._limits.requests or self._worked_on[client] >= self._limits.client_requests:
            raise busy()
        self._worked_on[client] += 1
        try:
            yield
        finally:
            self._worked_on -= Counter([client])  # which also forgets a client that has none left

    def _make_room(self) -> None:
        """Let the slowest upload give way to a new one, or a crowd of slow clients would keep everyone out."""
        if len(self._uploads) >= self._limits.uploads:
            slowest = min(self._uploads, key=lambda upload: upload.deadline)
            self._uploads.remove(slowest)
            slowest.give_way()

    def _limit(self, scope: Scope) -> int:
        return self._limits.learn_bytes if scope["path"] in _TAUGHT else self._limits.predict_bytes

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # Only addresses that exist become labels, or anyone could fill the memory with them.
        route = getattr(scope.get("route"), "path", "other")
        self._counters.requests.labels(route, str(status)).inc()
        self._counters.request_seconds.labels(route).observe(seconds)


def too_large(limit: int) -> Problem:
    """The problem of a request that is too large."""
    return Problem(413, f"The request has more than {limit / MEGABYTE:g} MB; send less at a time.", _CLOSE)


def _head_bytes(scope: Scope) -> int:
    parts = [scope.get("raw_path") or b"", scope["query_string"], *(part for pair in scope["headers"] for part in pair)]
    return sum(map(len, parts))


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


class _Upload:
    """Receives a body piece by piece: no more of it than allowed, and no slower.

    Args:
        receive: the next piece.
        limit: bytes that it may have.
        limits: how long it may take.
        complete: called once it has come whole.
    """

    def __init__(self, receive: Receive, limit: int, limits: Limits, complete: Callable[[], None]) -> None:
        self._receive, self._limit, self._limits, self._complete = receive, limit, limits, complete
        self._bytes, self._whole, self._gives_way = 0, False, False
        self._started = asyncio.get_running_loop().time()
        self._timeout: asyncio.Timeout | None = None

    @property
    def deadline(self) -> float:
        """When it must have come whole, or have moved on; every byte puts it off."""
        return self._started + self._limits.patience + self._bytes / self._limits.rate

    def give_way(self) -> None:
        """End it now."""
        self._gives_way = True
        if self._timeout and not self._timeout.expired():
            self._timeout.reschedule(0)

    async def __call__(self) -> Message:
        if self._whole:  # from here on it waits for the client to leave, for however long
            return await self._receive()
        pause = asyncio.get_running_loop().time() + self._limits.patience
        try:
            async with asyncio.timeout_at(0 if self._gives_way else min(pause, self.deadline)) as self._timeout:
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow() from None
        finally:
            self._timeout = None
        self._bytes += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._bytes > self._limit:
            if not self._whole:
                await _linger(self._receive)
            raise too_large(self._limit)
        if self._whole:
            self._complete()
        return message

    def _too_slow(self) -> Problem:
        if self._gives_way:
            return busy("The service is busy and your request comes slowly; send it again in a moment.", _CLOSE)
        return Problem(408, "The request came too slowly or stopped half-way; send it again.", _CLOSE)


async def _linger(receive: Receive) -> None:
    """Let a client send on for a moment: one whose connection is closed while it sends does not hear why."""
    heard = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while heard < _LINGER_BYTES:
                message = await receive()
                heard += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


class _Watched:
    """Sends a response with the headers that every response has, and remembers its status."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self.status = send, 0
        self._caching = "no-cache" if path.startswith("/static/") else "no-store"  # no-cache: asks whether it changed

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", self._caching)
        await self._send(message)
