# SPDX-License-Identifier: Apache-2.0
"""``onea paper``: reproduction of the tables and figures of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onea.cli.options import options_of
from onea.research.paper.plan import Changes

if TYPE_CHECKING:
    from onea.research.runs.grid import Executor, Failure

_MACHINE = "Machine"


@options_of(Changes)
def paper(
    name: Annotated[str | None, typer.Argument(help="Table or figure; without it, all are listed.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the runs and the results.")] = Path("onea-paper"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and their cost without running them.")
    ] = False,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Use only finished runs; missing results are marked.")
    ] = False,
    *,
    workers: Annotated[
        int | None, typer.Option(help="Parallel runs.", show_default="one per GPU", rich_help_panel=_MACHINE)
    ] = None,
    share_training: Annotated[
        bool | None,
        typer.Option(
            "--share-training/--no-share-training",
            help="Train adapters once for all runs that differ only in the merge.",
            show_default="with one worker",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    on: Annotated[
        str, typer.Option(help="local, ray (on this machine) or ray:ADDRESS.", rich_help_panel=_MACHINE)
    ] = "local",
    **options: Any,
) -> None:
    """Reproduce a table or figure of the paper, next to the published numbers.

    Makes all runs that are missing. Repeat the command to resume; finished runs are not repeated.
    """
    from onea.files import check_no_model
    from onea.research.cli.paper_display import GridDisplay, print_experiments, print_plan, print_result
    from onea.research.paper.experiments import find_experiment
    from onea.research.paper.page import write_experiment
    from onea.research.paper.plan import make_plan, recorded_counts
    from onea.research.runs.grid import RecordStore, run_grid

    if name is None:
        print_experiments()
        return
    experiment = find_experiment(name)
    check_no_model(out)
    changes = Changes(**options | {"data": tuple(options.get("data", ()))})
    store, executor = RecordStore(out / "runs"), _executor(on, workers, share_training)
    if render_only:  # data and backbone are read from the records
        plan = make_plan(experiment, changes, recorded_counts(store.records(), changes.root))
    else:
        plan = make_plan(experiment, changes)
    if dry_run:
        print_plan(plan, {config.key() for config in plan.configs if store.find(config)}, executor.share_adapters)
        return
    failures: dict[str, Failure] = {}
    if render_only:  # such as a damaged record
        failures = {config.key(): failure for config in plan.configs if (failure := store.failure(config))}
    elif plan.configs:
        with GridDisplay() as display:
            failures = dict(run_grid(plan.configs, store, executor, display).failures)
    # A finished run whose images have changed since has failed, and its record is not shown.
    valid = [config for config in plan.configs if config.key() not in failures]
    records = {config.key(): record for config in valid if (record := store.find(config))}
    table, files = write_experiment(plan, records, out / experiment.name)
    print_result(table, files, {key: str(failure) for key, failure in failures.items()})
    if failures and not render_only:
        raise typer.Exit(1)


def _executor(on: str, workers: int | None, share_training: bool | None) -> Executor:
    from onea.errors import OneaError
    from onea.research.runs.executors import choose_executor

    kind, _, address = on.partition(":")
    if kind not in ("local", "ray"):
        raise OneaError(f"--on is '{on}'; choose local, ray or ray:ADDRESS.")
    return choose_executor(workers, (address or "local") if kind == "ray" else None, share_training)
