# SPDX-License-Identifier: Apache-2.0
"""A connection that nobody can keep open for nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from onea.serve import problems
from onea.serve.problems import Problem
from onea.serve.settings import Limits

Idle = dict["Connection", asyncio.TimerHandle]


class Connection(H11Protocol):
    """Uvicorn's connection with a deadline for the head of a request; the middleware has one for the rest.

    Args:
        limits: the deadline, and the number of connections.
        idle: shared by all connections: those on which no request is under way, since the longest time first.
        given: what uvicorn gives to a connection.
    """

    def __init__(self, *, limits: Limits, idle: Idle, **given: Any) -> None:
        super().__init__(**given)
        self._limits, self._idle = limits, idle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Someone has connected."""
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self._limits.connections:
            next(iter(self._idle)).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes have come, of the head of a request or of the rest."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """A request has been answered."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._busy()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP with a problem document."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is on its way already
            self.transport.close()
            return
        problem = Problem(
            400, "This is not HTTP/1.1, or its head is too long; send it again, shorter.", {"Connection": "close"}
        )
        answer = problems.response(problem)
        for event in (
            h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._busy()
        elif self not in self._idle or self.conn.their_state is h11.SEND_BODY:  # the rest of what was refused
            self._start_clock()

    def _start_clock(self) -> None:
        if timer := self._idle.get(self):
            timer.cancel()
        self._idle[self] = self.loop.call_later(self._limits.head_seconds, self._give_up)

    def _busy(self) -> None:
        if timer := self._idle.pop(self, None):
            timer.cancel()

    def _give_up(self) -> None:
        if self.transport.get_write_buffer_size():  # the client still reads its last answer
            self._start_clock()
        else:
            self.transport.abort()
