"""What stands before every route: the closed door, limits on what comes in, headers on what goes out, the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onea.serve import metrics, problems
from onea.serve.problems import Problem
from onea.serve.settings import MEGABYTE, Limits

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_LINGER_SECONDS, _LINGER_BYTES = 2.0, 32 * MEGABYTE


class Guard:
    """ASGI middleware around the whole app.

    Args:
        app: what it protects.
        limits: what a request may cost.
        closing: whether the door is closed.
        counters: hear about every request.

    Attributes:
        active: requests that are being worked on.
    """

    def __init__(self, app: ASGIApp, limits: Limits, closing: Callable[[], bool], counters: metrics.Metrics) -> None:
        self._app, self._limits, self._closing, self._counters = app, limits, closing, counters
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watched = _Watched(send, scope["path"])
        started = time.perf_counter()
        if refusal := self._refusal(scope):
            if refusal.status == 413:
                await _linger(receive)
            await problems.response(refusal)(scope, receive, watched)
        else:
            self.active += 1
            try:
                await self._app(scope, _Limited(receive, self._limit(scope), self._limits.patience), watched)
            except Exception as error:
                problem = problems.unexpected(error)
                if not watched.status:
                    await problems.response(problem)(scope, receive, watched)
            finally:
                self.active -= 1
        self._note(scope, watched.status, time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> Problem | None:
        if self._closing():
            return Problem(
                503, "The service is being stopped; try again in a moment.", {"Retry-After": "5", "Connection": "close"}
            )
        if self.active >= self._limits.requests:
            return Problem(503, "The service is busy; try again in a moment.", {"Retry-After": "1"})
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > (limit := self._limit(scope)):
            return too_large(limit)
        return None

    def _limit(self, scope: Scope) -> int:
        return self._limits.learn_bytes if scope["path"] == "/learn" else self._limits.predict_bytes

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # Only addresses that exist become labels, or anyone could fill the memory with them.
        route = getattr(scope.get("route"), "path", "other")
        self._counters.count("onea_requests_total", "Requests answered.", route=route, status=str(status))
        self._counters.observe(
            "onea_request_seconds",
            "From the request's head to the end of its answer.",
            seconds,
            metrics.SECONDS,
            route=route,
        )


def too_large(limit: int) -> Problem:
    """What a client gets that sends too much."""
    return Problem(
        413, f"The request has more than {limit / MEGABYTE:g} MB; send less at a time.", {"Connection": "close"}
    )


class _Limited:
    """Receives a body piece by piece, and no more of it than allowed."""

    def __init__(self, receive: Receive, limit: int, patience: float) -> None:
        self._receive, self._limit, self._patience = receive, limit, patience
        self._bytes, self._complete = 0, False

    async def __call__(self) -> Message:
        if self._complete:  # from here on it waits for the client to leave, for however long
            return await self._receive()
        try:
            async with asyncio.timeout(self._patience):
                message = await self._receive()
        except TimeoutError:
            raise Problem(408, "The request stopped half-way; send it again.", {"Connection": "close"}) from None
        self._complete = not message.get("more_body", False)
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._limit:
            if not self._complete:
                await _linger(self._receive)
            raise too_large(self._limit)
        return message


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
