# SPDX-License-Identifier: Apache-2.0
"""``onea run``: one method on one stream."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onea.cli.options import MaxMegapixels, field_help, options_of
from onea.data.pixel_limit import allow_megapixels
from onea.errors import OneaError
from onea.research.runs.config import NOT_OPTIONS, RunConfig, make_config, read_yaml

if TYPE_CHECKING:
    from onea.research.record import Record

_TRACKING = "Tracking"
_COMMAND_LINE_ONLY = ("config", "out", "track", "track_to", "try_rates", "max_megapixels")


@options_of(RunConfig, leave_out=NOT_OPTIONS)
def run(
    context: typer.Context,
    method: Annotated[str | None, typer.Argument(help=field_help(RunConfig, "method"))] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with options of the run, or JSON file of the toolbox LAMDA-PILOT.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the run.", show_default="a new one in runs/")
    ] = None,
    *,
    track: Annotated[
        list[str] | None,
        typer.Option(
            help="Also log to tensorboard, wandb, mlflow, ... (any tracker of Accelerate).", rich_help_panel=_TRACKING
        ),
    ] = None,
    track_to: Annotated[
        Path | None,
        typer.Option(help="Folder for the logs.", show_default="the folder of the run", rich_help_panel=_TRACKING),
    ] = None,
    try_rates: Annotated[
        bool,
        typer.Option("--try-rates", help="Only compare a few learning rates on held-out images of the first task."),
    ] = False,
    max_megapixels: MaxMegapixels = None,
    **options: Any,
) -> None:
    """Run one method on one stream. Put options of the method last; `onea methods NAME` lists them.

    Repeat the command to resume an interrupted run. A finished run is not repeated.
    """
    from onea.distributed import is_main_process
    from onea.options import parse_arguments
    from onea.research.cli.display import RunDisplay
    from onea.research.record import read_record
    from onea.research.runs.pilot import read_pilot
    from onea.research.runs.runner import run as start_run
    from onea.research.runs.tracking import Tracking
    from onea.runtime import CombinedProgress

    allow_megapixels(max_megapixels)
    if track_to and not track:
        raise OneaError("--track-to needs --track; add --track tensorboard, or leave out --track-to.")
    method_arguments = context.args
    if method and method.startswith("--"):  # click parses the first unknown option as the method
        method_arguments, method = [method, *method_arguments], None
    options |= {"method": method} if method else {}
    given = options | parse_arguments(method_arguments)
    pilot = read_pilot(config) if config else None
    ignored: tuple[str, ...] = ()
    if pilot:
        runs, ignored = _pilot_configs(pilot, given)
    else:
        runs = [make_config((_read_config(config) if config else {}) | given)]
    if len(runs) > 1 and (out or track_to or try_rates):
        raise OneaError(f"{config} has {len(runs)} seeds; choose one by --seed for --out, --track-to or --try-rates.")
    for sentence in ignored if is_main_process() else ():
        typer.echo(sentence, err=True)
    if try_rates:
        _try_rates(runs[0])
        return
    for settings in runs:
        folder = out or settings.folder()
        earlier = read_record(folder)
        with RunDisplay() as display, Tracking(track or (), folder, track_to) as tracking:
            record = start_run(settings, folder, CombinedProgress(display, tracking))
        if is_main_process():
            print_summary(record, folder)
            if earlier and earlier["status"] == "finished":
                print(f"already finished on {record['dates'].get('finished')}; delete {folder} to run it again")


def _read_config(path: Path) -> dict[str, Any]:
    """The options in a YAML file."""
    values = read_yaml(path)
    if unknown := next((name for name in values if name.replace("-", "_") in _COMMAND_LINE_ONLY), None):
        flag = f"--{unknown.replace('_', '-')}"
        raise OneaError(
            f"'{unknown}' in {path} is not an option of a run; remove it, and pass {flag} on the command line."
        )
    return values


def _pilot_configs(settings: dict[str, Any], given: dict[str, Any]) -> tuple[list[RunConfig], tuple[str, ...]]:
    """One configuration for each seed of a configuration of PILOT, and a sentence for each setting that is ignored."""
    from onea.research.runs.pilot import pilot_runs
    from onea.research.runs.setup import load_run_dataset

    runs = pilot_runs(settings, given)
    options = runs.options | given
    # Their stream depends on the number of classes, so the dataset is listed before the configurations are complete.
    dataset = load_run_dataset(make_config({name: options.get(name) for name in ("method", "data", "root")}))
    seeds = (int(given["seed"]),) if "seed" in given else runs.seeds
    configs = [make_config(options | {"seed": seed} | runs.stream_options(dataset, seed)) for seed in seeds]
    return configs, runs.ignored


def _try_rates(config: RunConfig) -> None:
    """Print the accuracy of each learning rate, and the option for the best one."""
    from rich.console import Console

    from onea.presentation.tables import Table, terminal
    from onea.research.runs.rate_trial import try_rates
    from onea.runtime import make_runtime

    trial = try_rates(config, make_runtime(config.device, config.precision, config.threads))
    rows = [("frozen", f"{trial.frozen_accuracy:.1f}")]
    rows += [(f"{rate:g}", f"{accuracy:.1f}") for rate, accuracy in sorted(trial.accuracy.items())]
    title = f"{config.method} on held-out images of the first task"
    Console().print(terminal(Table.from_texts(title, ("learning rate", "accuracy %"), rows)))
    print(f"--learning-rate {trial.best:g}")
    if trial.accuracy[trial.best] < trial.frozen_accuracy:
        print(
            "Every learning rate is worse than the frozen network: simplecil, slda or ranpac may be a better choice "
            "for these images."
        )


def print_summary(record: Record, folder: Path) -> None:
    """Print a table of the tasks and the final metrics of a run."""
    from rich.console import Console
    from rich.text import Text

    from onea.cli.display import shown
    from onea.presentation.tables import MISSING, Table, terminal
    from onea.research.record import record_path
    from onea.research.record_metrics import headline_metrics
    from onea.text import plural

    config, metrics, console = record["config"], record["metrics"], Console()
    columns = {"A_t %": metrics["A"], "class-balanced %": metrics["balanced_A"]}
    columns |= {"open-set AUROC %": record["open_set"]} if record.get("open_set") else {}
    rows = []
    for number, (task, *values) in enumerate(zip(record["tasks"], *columns.values(), strict=True), 1):
        name = f"{number}" if task["name"] == f"task {number}" else f"{number} {task['name']}"
        cells = (MISSING if value is None else f"{value:.2f}" for value in values)
        rows.append((name, str(task["classes"]), str(task["images"]), *cells))
    title = f"{config['method']} on {config['data']}, seed {config['seed']}, {record['backbone']['name']}"
    console.print(terminal(Table.from_texts(title, ("task", "classes", "images", *columns), rows)))
    final = headline_metrics([record], machine_dependent=False).values()
    console.print(Text("   ".join(f"{metric.title} {metric.text(record)}" for metric in final)), highlight=False)
    if skipped := record["data"].get("skipped"):
        images = plural(len(skipped), "unreadable image was", "unreadable images were")
        console.print(f"{images} skipped; see data.skipped in the record.", soft_wrap=True)
    console.print(shown(f"record: {record_path(folder)}"), soft_wrap=True)
