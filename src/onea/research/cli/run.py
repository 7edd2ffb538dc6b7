# SPDX-License-Identifier: Apache-2.0
"""``onea run``: one method on one stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from onea.cli.display import shown
from onea.cli.options import MaxMegapixels, meaning, options_of
from onea.data.pixel_limit import allow_megapixels
from onea.errors import OneaError
from onea.presentation.formats import terminal
from onea.presentation.table import NOTHING, Table
from onea.research.record import Record, record_path
from onea.research.record_metrics import headline_metrics
from onea.research.runs.config import RunConfig, make_config, read_yaml
from onea.text import plural

_TRACK = "Tracking"
_ON_THE_COMMAND_LINE = ("config", "out", "track", "track_to", "try_rates", "max_megapixels")  # and not in a file


@options_of(RunConfig, leave_out=["options"])
def run(
    context: typer.Context,
    method: Annotated[str | None, typer.Argument(help=meaning(RunConfig, "method"))] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with options that say what is run.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the run; by default one below runs/.")
    ] = None,
    *,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Also log to tensorboard, wandb, mlflow, ... by Accelerate's names.", rich_help_panel=_TRACK),
    ] = None,
    track_to: Annotated[
        Path | None,
        typer.Option(help="Folder for logs of several runs.", show_default="the run's own", rich_help_panel=_TRACK),
    ] = None,
    try_rates: Annotated[
        bool,
        typer.Option("--try-rates", help="Only try a few learning rates on held-out images of the first task."),
    ] = False,
    max_megapixels: MaxMegapixels = None,
    **given: Any,
) -> None:
    """Run one method on one stream. Options of the method itself (`onea methods NAME` lists them) go last.

    The same command again resumes an interrupted run and does not repeat a finished one.
    """
    from onea.cli.display import RunDisplay
    from onea.distributed import is_main_process
    from onea.options import parse_arguments
    from onea.research.record import read_record
    from onea.research.runs.runner import run as run_one
    from onea.research.runs.tracking import Tracking
    from onea.runtime import CombinedProgress

    allow_megapixels(max_megapixels)
    if track_to and not track:
        raise OneaError("--track-to says where --track logs to; give --track tensorboard too, or leave it out.")
    loose = context.args
    if method and method.startswith("--"):  # click takes the first option that it does not know for the method
        loose, method = [method, *loose], None
    given |= {"method": method} if method else {}
    noted = read_yaml(config) if config else {}
    if wrong := next((name for name in noted if name.replace("-", "_") in _ON_THE_COMMAND_LINE), None):
        flag = f"--{wrong.replace('_', '-')}"
        raise OneaError(f"'{wrong}' in {config} does not say what is run; leave it out and give {flag} to the command.")
    settings = make_config(noted | given | parse_arguments(loose))
    if try_rates:
        _try_rates(settings)
        return
    folder = out or settings.folder()
    earlier = read_record(folder)
    with RunDisplay() as display, Tracking(track or (), folder, track_to) as tracking:
        record = run_one(settings, folder, CombinedProgress(display, tracking))
    if is_main_process():  # of several processes that share the run, the first one speaks
        print_summary(record, folder)
        if earlier and earlier["status"] == "finished":
            print(f"finished on {record['dates']['finished']}, nothing was run; delete {folder} to run it again")


def _try_rates(settings: RunConfig) -> None:
    """Say what a trial found, and which option would take it."""
    from rich.console import Console

    from onea.presentation.formats import terminal
    from onea.presentation.table import Table
    from onea.research.runs.rate_trial import try_rates
    from onea.runtime import make_runtime

    found = try_rates(settings, make_runtime(settings.device, settings.precision, settings.threads))
    lines = [(f"{rate:g}", f"{right:.1f}") for rate, right in sorted(found.accuracy.items())]
    title = f"{settings.method} on held-out images of the first task"
    Console().print(
        terminal(Table.of_texts(title, ("learning rate", "right %"), [("frozen", f"{found.frozen:.1f}"), *lines]))
    )
    print(f"--learning-rate {found.best:g}")
    if found.accuracy[found.best] < found.frozen:
        print("Every rate is worse than the network as it is: simplecil, slda or ranpac may be the better choice here.")


def print_summary(record: Record, folder: Path) -> None:
    """One table: what each task brought and where the run ended."""
    metrics, console = record["metrics"], Console()
    steps = {"A_t %": metrics["A"], "class-balanced %": metrics["balanced_A"]}
    steps |= {"open-set AUROC %": record["open_set"]} if record.get("open_set") else {}
    heads, lines = ("task", "classes", "images", *steps), []
    for number, (task, *values) in enumerate(zip(record["tasks"], *steps.values(), strict=True), 1):
        name = f"{number}" if task["name"] == f"task {number}" else f"{number} {task['name']}"
        shares = (NOTHING if value is None else f"{value:.2f}" for value in values)
        lines.append((name, str(task["classes"]), str(task["images"]), *shares))
    console.print(terminal(Table.of_texts(_title(record), heads, lines)))
    shown_metrics = headline_metrics([record], machine_dependent=False).values()
    numbers = (f"{metric.title} {metric.text(record)}" for metric in shown_metrics)
    console.print(Text("   ".join(numbers)), highlight=False)
    if skipped := record["data"].get("skipped"):
        left_out = plural(len(skipped), "image that cannot be read was", "images that cannot be read were")
        console.print(f"{left_out} left out; the record names {'it' if len(skipped) == 1 else 'them'}.", soft_wrap=True)
    console.print(shown(f"record: {record_path(folder)}"), soft_wrap=True)


def _title(record: Record) -> str:
    config = record["config"]
    return f"{config['method']} on {config['data']}, seed {config['seed']}, {record['backbone']['name']}"
