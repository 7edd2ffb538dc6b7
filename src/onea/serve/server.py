# SPDX-License-Identifier: Apache-2.0
"""The service as a process: an HTTP server on this machine with a graceful shutdown, or replicas on a Ray cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from onea.distributed import import_ray, ray_cluster
from onea.errors import OneaError, import_extra
from onea.model.storage.folder import read_manifest
from onea.serve import problems
from onea.serve.app import create_app
from onea.serve.problems import Problem
from onea.serve.service import Service
from onea.serve.settings import Limits, Settings

_POLL_SECONDS = 0.05
_EXIT_SECONDS = 5.0  # after the grace period, for abandoned work to end


class Connection(H11Protocol):
    """Uvicorn's connection with a deadline for the head of a request, for which uvicorn has no setting.

    The middleware has the deadline for the body.

    Args:
        limits: the deadline and the maximum number of connections.
        idle: shared by all connections: those without a request in progress, the longest idle one first.
        uvicorn_arguments: arguments of uvicorn's connection.
    """

    def __init__(
        self, *, limits: Limits, idle: dict[Connection, asyncio.TimerHandle], **uvicorn_arguments: Any
    ) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits, self._idle = limits, idle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline; close the longest idle connection if there are too many."""
        super().connection_made(transport)
        self._update_timer()
        if len(self.connections) > self._limits.connections:
            next(iter(self._idle)).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Start or stop the deadline."""
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        """Start the deadline for the next request."""
        super().on_response_complete()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with a problem document."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # a response has been started
            self.transport.close()
            return
        detail = "This is not HTTP/1.1, or its headers are too long; correct it and send it again."
        response = problems.response(Problem(400, detail, {"Connection": "close"}))
        for event in (
            h11.Response(status_code=400, headers=response.raw_headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _update_timer(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self not in self._idle or self.conn.their_state is h11.SEND_BODY:  # the rest of a refused request
            self._start_timer()

    def _start_timer(self) -> None:
        if timer := self._idle.get(self):
            timer.cancel()
        self._idle[self] = self.loop.call_later(self._limits.head_seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        if timer := self._idle.pop(self, None):
            timer.cancel()

    def _on_timeout(self) -> None:
        if self.transport.get_write_buffer_size():  # the client still reads the last response
            self._start_timer()
        else:
            self.transport.abort()


class Server(uvicorn.Server):
    """Uvicorn with a graceful shutdown: on the first signal it refuses new requests and finishes those in progress.

    On a second signal it stops at once. Even if a request or a training job hangs, the process ends soon after the
    grace period. The model folder is complete at every moment.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, service: Service) -> None:
        super().__init__(config)
        self._app, self._service = app, service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGINT or SIGTERM."""
        is_second, grace = self._service.closing, self._service.settings.grace
        self._service.close(0 if is_second else grace)
        # The interpreter itself would wait for threads that never end.
        timer = threading.Timer(self._service.seconds_left + _EXIT_SECONDS, os._exit, (0,))
        timer.daemon = True
        timer.start()
        if is_second:
            self._service.abandon()
            super().handle_exit(sig, frame)
        else:
            threading.Thread(target=self._drain, name="onea-drain", daemon=True).start()

    def _drain(self) -> None:
        if self._service.learning:
            seconds = self._service.settings.grace
            print(f"waiting up to {seconds:g} s for the training job; press Ctrl-C again to stop at once", flush=True)
        if not self._service.wait_for_job():
            print("the training job was abandoned; the model is unchanged", flush=True)
        while self._app.state.metrics.active and self._service.seconds_left:
            time.sleep(_POLL_SECONDS)
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address.

    Raises:
        OneaError: another program uses it, or the permission is missing.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError, ValueError) as error:  # ValueError: an invalid name
        reason = getattr(error, "strerror", None) or error
        raise OneaError(f"Cannot listen on {host} port {port} ({reason}); choose another --port or --host.") from error
    return bound


def create_server(service: Service, graceful: int = 3) -> Server:
    """The server of a service, not yet running; open connections are closed ``graceful`` seconds after its end."""
    app, limits = create_app(service), service.settings.limits
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(Connection, limits=limits, idle={})),
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


def run(path: Path, settings: Settings, machine: Mapping[str, Any], host: str, port: int) -> None:
    """Serve a model folder in this process until a signal stops it."""
    listener = bind(host, port)
    service = Service(path, settings, machine)
    state = service.current.state
    teaching = "teaching needs the token" if settings.token else "teaching is disabled (set ONEA_TOKEN to enable it)"
    listener.listen(socket.SOMAXCONN)  # before the address is printed, so that clients can connect at once
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    print(f"{path} (version {state.version}, {len(state.classes):,} classes) at http://{host}:{port}", flush=True)
    print(f"{teaching}; stop with Ctrl-C", flush=True)
    create_server(service).run([listener])
    if not service.wait_for_job():
        os._exit(0)  # Python may crash when it exits while a thread computes


def run_on_ray(
    path: Path,
    settings: Settings,
    machine: Mapping[str, Any],
    host: str,
    port: int,
    replicas: int,
    cluster: str | None = None,
) -> None:
    """Serve predictions by Ray Serve until a signal stops it, by several processes on one machine or many.

    Every node needs onea and the model folder under the same path. Each replica follows the folder: classes that
    ``onea teach`` adds are predicted seconds later.

    Raises:
        OneaError: Ray is not installed, the cluster cannot be reached, or there is no model.
    """
    if replicas < 1:
        raise OneaError(f"--replicas is {replicas}; it must be at least 1.")
    read_manifest(path)  # refuse a missing model here rather than in a replica that never starts
    import_ray()
    serve: Any = import_extra("ray.serve", "ray")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    folder, options = str(path.resolve()), dict(machine)
    settings = dataclasses.replace(settings, prediction_only=True, token=None)

    def build_app() -> FastAPI:
        return create_app(Service(Path(folder), settings, options))

    class Replica:
        """The app of one process."""

    deployment = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=settings.limits.requests,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(str(options.get("device", "")).startswith("cuda"))},
    )(serve.ingress(build_app)(Replica))
    stop = threading.Event()
    with ray_cluster(cluster):
        try:
            serve.start(http_options={"host": host, "port": port})
            serve.run(deployment.bind(), name="onea", route_prefix="/")
            for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has installed its own handlers
                signal.signal(number, lambda *_: stop.set())
            print(f"{path} on {replicas} Ray replicas at http://{host}:{port}; prediction only", flush=True)
            stop.wait()
        finally:
            serve.shutdown()
