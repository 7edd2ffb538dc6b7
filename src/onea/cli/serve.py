# SPDX-License-Identifier: Apache-2.0
"""``onea serve``: an HTTP service with a web page."""

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
    host: Annotated[str, typer.Option(help="Address to listen on; by default only this machine can connect.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 chooses a free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token that clients must send to change the model.",
            show_default="environment variable ONEA_TOKEN; without a token, the model cannot be changed",
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(help="Maximum number of images in a forward pass, across requests; 1 disables batching."),
    ] = Settings.batch_size,
    batch_wait: Annotated[float, typer.Option(help="Milliseconds that a request waits for others to join it.")] = (
        1000 * Settings.batch_wait
    ),
    max_upload: Annotated[
        int,
        typer.Option(help="Maximum size of a teaching request in MB; a prediction request may be an eighth of that."),
    ] = Limits.learn_bytes // MEGABYTE,
    max_megapixels: Annotated[
        int,
        typer.Option(
            help="Maximum megapixels of an image. The images of a prediction request may have 16 times as many in "
            "total, those of a teaching request 200 times."
        ),
    ] = Limits.pixels // MEGAPIXEL,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that clients may use, besides localhost (repeatable); * allows any name."),
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds allowed to finish requests and a training job after Ctrl-C or SIGTERM.")
    ] = Settings.grace,
    idle_training: Annotated[
        float,
        typer.Option(
            help="For models with memory: train this number of seconds after the last change, instead of within "
            "updates; 0 trains within updates."
        ),
    ] = Settings.idle_training,
    on: Annotated[
        str,
        typer.Option(
            help="Where to run: local, ray (on this machine) or ray:ADDRESS of a Ray cluster (host:port or auto). "
            "With Ray the service only predicts."
        ),
    ] = "local",
    replicas: Annotated[int, typer.Option(help="Number of processes with --on ray.")] = 1,
    unknown: UnknownRate = None,
    backbone: MovedBackbone = None,
    device: Device = MachineOptions.device,
    threads: Threads = MachineOptions.threads,
) -> None:
    """Serve a model over HTTP: a REST API and a web page.

    The web page is at /, the API reference at /docs. Clients with the token can also teach classes.
    """
    from onea.errors import OneaError, install_command

    try:
        from onea.serve.access import allowed_hosts, read_token
        from onea.serve.server import run, run_on_ray
    except ModuleNotFoundError as error:
        raise OneaError(f"Serving needs {error.name}; install it with: {install_command('serve')}") from error
    kind, _, cluster = on.partition(":")
    if kind not in ("local", "ray") or (kind == "local" and cluster):
        raise OneaError(f"--on is '{on}'; choose local, ray or ray:ADDRESS.")
    if kind == "local" and replicas != 1:
        raise OneaError("--replicas needs --on ray.")
    limits = Limits(
        predict_bytes=max_upload * MEGABYTE // 8,
        learn_bytes=max_upload * MEGABYTE,
        pixels=max_megapixels * MEGAPIXEL,
    )
    hosts, any_ip = allowed_hosts(host, allowed_host or [])
    settings = check_settings(
        Settings(
            read_token(token_file),
            limits,
            batch_size,
            batch_wait / 1000,
            grace,
            idle_training=idle_training,
            hosts=hosts,
            any_ip=any_ip,
        )
    )
    machine = {"backbone": backbone, "device": device, "threads": threads, "unknown": unknown}
    if kind == "ray":
        run_on_ray(model, settings, machine, host, port, replicas, cluster or None)
    else:
        run(model, settings, machine, host, port)
