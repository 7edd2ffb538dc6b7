# SPDX-License-Identifier: Apache-2.0
"""``onea run``: one method on one stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onea.cli.options import meaning, options_of
from onea.runs.config import RunConfig, make_config, read_yaml

_TRACK = "Tracking"


@options_of(RunConfig, leave_out=["options"])
def run(
    context: typer.Context,
    method: Annotated[str | None, typer.Argument(help=meaning(RunConfig, "method"))] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these options.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default one below runs/.")] = None,
    *,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Also log to tensorboard, wandb, mlflow, ... by Accelerate's names.", rich_help_panel=_TRACK),
    ] = None,
    track_to: Annotated[
        Path | None,
        typer.Option(help="Folder for logs of several runs.", show_default="the run's own", rich_help_panel=_TRACK),
    ] = None,
    **given: Any,
) -> None:
    """Run one method on one stream. Options of the method itself (`onea methods NAME` lists them) go last.

    The same command again resumes an interrupted run and does not repeat a finished one.
    """
    from onea.cli.display import RunDisplay, print_summary
    from onea.options import from_arguments
    from onea.processes import is_first
    from onea.record import read_record
    from onea.runs.runner import run as run_one
    from onea.runs.tracking import Tracking
    from onea.runtime import CombinedProgress

    given |= {"method": method} if method else {}
    settings = make_config((read_yaml(config) if config else {}) | given | from_arguments(context.args))
    folder = out or settings.folder()
    earlier = read_record(folder)
    with RunDisplay() as display, Tracking(track or (), folder, track_to) as tracking:
        record = run_one(settings, folder, CombinedProgress(display, tracking))
    if is_first():  # of several processes that share the run, the first one speaks
        print_summary(record, folder)
        if earlier and earlier["status"] == "finished":
            print(f"finished on {record['dates']['finished']}, nothing was run; delete {folder} to run it again")
