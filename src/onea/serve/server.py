# SPDX-License-Identifier: Apache-2.0
"""The service on this machine, from an open port to an orderly end."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from functools import partial
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI

from onea.errors import OneaError
from onea.serve.app import create_app
from onea.serve.connection import Connection, Idle
from onea.serve.service import Service

_TICK = 0.05
_EXIT_SECONDS = 5.0  # after the grace, for an orderly end of what was abandoned


class Server(uvicorn.Server):
    """Uvicorn that, asked to stop, first refuses new requests politely while it finishes what has begun.

    Asked a second time it stops at once. Whatever a training job or a request does, the process ends soon after the
    grace: a model folder is complete at every moment.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, service: Service) -> None:
        super().__init__(config)
        self._onea, self._service = app, service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop."""
        again, grace = self._service.closing, self._service.settings.grace
        self._service.close(0 if again else grace)
        self._exit_after(self._service.seconds_left + _EXIT_SECONDS)
        if again:
            self._service.abandon()
            super().handle_exit(sig, frame)
        else:
            threading.Thread(target=self._drain, name="onea-drain", daemon=True).start()

    def _drain(self) -> None:
        if self._service.learning:
            seconds = self._service.settings.grace
            print(f"finishing the training job, for at most {seconds:g} s; once more stops at once", flush=True)
        if not self._service.settle():
            print(
                "the training job does not stop; the process ends without it and the model stays the same", flush=True
            )
        while self._onea.state.active() and self._service.seconds_left:
            time.sleep(_TICK)
        self.should_exit = True

    def _exit_after(self, seconds: float) -> None:
        """End the process after so long: the interpreter itself would wait for threads that never end."""
        timer = threading.Timer(seconds, os._exit, (0,))
        timer.daemon = True
        timer.start()


def bind(host: str, port: int) -> socket.socket:
    """An open port.

    Raises:
        OneaError: another program has it, or it is not ours to take.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        opened = socket.socket(family, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except (OSError, OverflowError, ValueError) as error:  # ValueError: what no name can be
        reason = getattr(error, "strerror", None) or error
        raise OneaError(f"Cannot listen on {host} port {port} ({reason}); choose another --port or --host.") from error
    return opened


def server_of(service: Service, graceful: int = 3) -> Server:
    """The server of a service, not yet running; ``graceful`` seconds are left to open connections in the end."""
    app, limits = create_app(service), service.settings.limits
    idle: Idle = {}
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(Connection, limits=limits, idle=idle)),
        h11_max_incomplete_event_size=limits.head_bytes,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=graceful,
        lifespan="on",
    )
    return Server(config, app, service)
