# SPDX-License-Identifier: Apache-2.0
"""``onea run``: one method on one stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_STREAM, _INPUT, _MACHINE, _TRACK = "Stream", "Images and network", "Machine", "Tracking"

_NOT_SETTINGS = ("config", "out", "track", "track_to")  # they do not change what is computed


def run(
    context: typer.Context,
    method: Annotated[str | None, typer.Argument(help="A name that `onea methods` lists.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these options.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default one below runs/.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides class order, task order and every draw. [1]")] = None,
    preset: Annotated[str | None, typer.Option(help="Hyper-parameters: auto, paper or small.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="glyphs, glyphs-mini, cifar100, cub200, imagenet-a, imagenet-r, folder:PATH or list:TRAIN,TEST.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    root: Annotated[str | None, typer.Option(help="Folder of downloaded datasets.", rich_help_panel=_INPUT)] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="Embedded name, timm architecture.tag or .safetensors file.", rich_help_panel=_INPUT),
    ] = None,
    normalise: Annotated[str | None, typer.Option(help="backbone or none.", rich_help_panel=_INPUT)] = None,
    geometry: Annotated[str | None, typer.Option(help="direct or resize-crop.", rich_help_panel=_INPUT)] = None,
    protocol: Annotated[
        str | None, typer.Option(help="pilot: normalise none, resize-crop, as published.", rich_help_panel=_INPUT)
    ] = None,
    on_bad: Annotated[
        str | None, typer.Option(help="What an unreadable image does: fail or skip.", rich_help_panel=_INPUT)
    ] = None,
    per_class: Annotated[
        int | None, typer.Option(help="At most so many training images of a class.", rich_help_panel=_INPUT)
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(help="Evaluate on this share of the training images, held out.", rich_help_panel=_INPUT),
    ] = None,
    stream: Annotated[
        str | None, typer.Option(help="auto, step, balanced, sizes or natural.", rich_help_panel=_STREAM)
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="Number of tasks.", rich_help_panel=_STREAM)] = None,
    gamma: Annotated[
        float | None, typer.Option(help="Step imbalance: 1 is balanced. [0.01]", rich_help_panel=_STREAM)
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Classes of each task, such as 36,1,14.", rich_help_panel=_STREAM)
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="Of the tasks: shuffled, descending or given.", rich_help_panel=_STREAM)
    ] = None,
    long_tail: Annotated[
        float | None, typer.Option(help="Also make images per class long-tailed: 0.1.", rich_help_panel=_STREAM)
    ] = None,
    precision: Annotated[str | None, typer.Option(help="auto, bf16 or fp32.", rich_help_panel=_MACHINE)] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, ...", rich_help_panel=_MACHINE)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 0 is all.", rich_help_panel=_MACHINE)] = None,
    compile: Annotated[
        str | None, typer.Option(help="Compile the network: auto, yes or no.", rich_help_panel=_MACHINE)
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="auto, device, host, disk or exact.", rich_help_panel=_MACHINE)
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Gigabytes of memory the images may take.", rich_help_panel=_MACHINE)
    ] = None,
    cache_gb: Annotated[
        float | None,
        typer.Option(help="Gigabytes for test features of frozen parts; 0 is none.", rich_help_panel=_MACHINE),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Also log to tensorboard, wandb, mlflow, ... by Accelerate's names.", rich_help_panel=_TRACK),
    ] = None,
    track_to: Annotated[
        Path | None, typer.Option(help="Folder for logs of several runs. [the run's own]", rich_help_panel=_TRACK)
    ] = None,
) -> None:
    """Run one method on one stream. Options of the method itself (`onea methods NAME` lists them) go last.

    The same command again resumes an interrupted run and does not repeat a finished one.
    """
    from onea.cli.display import RunDisplay, print_summary
    from onea.options import from_arguments
    from onea.processes import is_first
    from onea.record import read_record
    from onea.runs.config import make_config, read_yaml
    from onea.runs.engine import run as run_one
    from onea.runs.tracking import Tracking
    from onea.runtime import Everyone

    named = {name: value for name, value in context.params.items() if name not in _NOT_SETTINGS}
    given = {name: value for name, value in named.items() if value is not None}
    settings = make_config((read_yaml(config) if config else {}) | given | from_arguments(context.args))
    folder = out or settings.folder()
    earlier = read_record(folder)
    with RunDisplay() as display, Tracking(track or (), folder, track_to) as tracking:
        record = run_one(settings, folder, Everyone(display, tracking))
    if is_first():  # of several processes that share the run, the first one speaks
        print_summary(record, folder)
        if earlier and earlier["status"] == "finished":
            print(f"finished on {record['dates']['finished']}, nothing was run; delete {folder} to run it again")
