# SPDX-License-Identifier: Apache-2.0
"""``onea serve``: a model behind HTTP, with a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onea.cli.options import Device, Model, MovedBackbone, Threads, UnknownRate
from onea.data.pixel_limit import MEGAPIXEL
from onea.options import MachineOptions
from onea.serve.settings import MEGABYTE, Limits, Settings, check_settings


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; by default only this machine can reach it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that allows teaching and undo; by default ONEA_TOKEN, else nobody may."),
    ] = None,
    batch: Annotated[
        int, typer.Option(help="Images of different requests in one pass; 1: no batching.")
    ] = Settings.batch,
    wait: Annotated[float, typer.Option(help="Milliseconds that a request waits for others to share its pass.")] = (
        1000 * Settings.wait
    ),
    max_upload: Annotated[int, typer.Option(help="Megabytes of a request to learn; an eighth of it to predict.")] = (
        Limits.learn_bytes // MEGABYTE
    ),
    max_megapixels: Annotated[
        int, typer.Option(help="Of one image; 16 times as many in a request to predict, 200 times to learn.")
    ] = Limits.pixels // MEGAPIXEL,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Name under which clients ask for the service, besides localhost; repeatable, * is any."),
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds that requests and the training job have to finish on Ctrl-C.")
    ] = Settings.grace,
    on: Annotated[str, typer.Option(help="Where to run: here, or ray (prediction only).")] = "here",
    replicas: Annotated[int, typer.Option(help="With --on ray: how many processes answer.")] = 1,
    address: Annotated[
        str | None, typer.Option(help="With --on ray: host:port of a cluster, or auto; by default one is started here.")
    ] = None,
    unknown: UnknownRate = None,
    backbone: MovedBackbone = None,
    device: Device = MachineOptions.device,
    threads: Threads = MachineOptions.threads,
) -> None:
    """Serve a model over HTTP: predictions, teaching for whoever has the token, and a page.

    The page is at /, what the service can do at /docs.
    """
    from onea.errors import OneaError, install_command

    try:
        from onea.serve.access import names_for, read_token
        from onea.serve.service import Service
    except ModuleNotFoundError as error:
        raise OneaError(f"Serving needs {error.name}; install it with: {install_command('serve')}") from error
    if on not in ("here", "ray"):
        raise OneaError(f"--on is '{on}'; choose here or ray.")
    if on == "here" and (replicas != 1 or address is not None):
        given = "--replicas" if replicas != 1 else "--address"
        raise OneaError(f"{given} has no effect on a service of one process; add --on ray, or leave it out.")
    limits = Limits(
        predict_bytes=max_upload * MEGABYTE // 8,
        learn_bytes=max_upload * MEGABYTE,
        pixels=max_megapixels * MEGAPIXEL,
    )
    hosts, addresses = names_for(host, allowed_host or [])
    settings = check_settings(
        Settings(read_token(token_file), limits, batch, wait / 1000, grace, hosts=hosts, addresses=addresses)
    )
    machine = {"backbone": backbone, "device": device, "threads": threads, "unknown": unknown}
    if on == "ray":
        from onea.serve.on_ray import run_on_ray

        run_on_ray(model, settings, machine, replicas, host, port, address)
        return
    import os
    import socket

    from onea.serve.server import bind, server_of

    opened = bind(host, port)
    service = Service(model, settings, machine)
    state = service.present.state
    teaching = "teaching needs the token" if settings.token else "teaching is off (set ONEA_TOKEN to allow it)"
    opened.listen(socket.SOMAXCONN)  # whoever reads the address below may ask at once, and waits its turn
    where, port = opened.getsockname()[:2]
    shown = f"[{where}]" if ":" in where else where
    print(f"{model} (version {state.version}, {len(state.classes):,} classes) at http://{shown}:{port}", flush=True)
    print(f"{teaching}; stop with Ctrl-C", flush=True)
    server_of(service).run([opened])
    if not service.settle():
        os._exit(0)  # an interpreter that is taken down below a thread that computes may crash
