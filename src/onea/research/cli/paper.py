# SPDX-License-Identifier: Apache-2.0
"""``onea paper``: every table and figure of the paper by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onea.cli.options import options_of
from onea.research.paper.scale import Changes

if TYPE_CHECKING:
    from onea.research.paper.scale import ExperimentPlan
    from onea.research.runs.grid import Executor, Failure, RecordStore

_MACHINE = "Machine"


@options_of(Changes)
def paper(
    name: Annotated[str | None, typer.Argument(help="A table or figure; without one, all are listed.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the runs and the results.")] = Path("onea-paper"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and their cost; run nothing.")] = False,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Run nothing; show what is there, with the gaps marked.")
    ] = False,
    *,
    workers: Annotated[
        int | None, typer.Option(help="Runs at a time.", show_default="one per GPU", rich_help_panel=_MACHINE)
    ] = None,
    share_training: Annotated[
        bool | None,
        typer.Option(
            "--share-training/--no-share-training",
            help="Train once for runs that differ only in the merge.",
            show_default="with one worker",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    on: Annotated[
        str, typer.Option(help="local, ray, or ray:ADDRESS of a cluster.", rich_help_panel=_MACHINE)
    ] = "local",
    **given: Any,
) -> None:
    """Make a table or figure of the paper: run what is missing, then write our numbers beside the reported ones.

    The same command again continues where it was stopped and repeats nothing.
    """
    from onea.files import check_no_model
    from onea.research.cli.paper_display import print_experiments, print_plan, print_result
    from onea.research.paper.experiments import find_experiment
    from onea.research.paper.page import write_experiment
    from onea.research.paper.scale import Recorded, make_plan
    from onea.research.runs.grid import RecordStore

    if name is None:
        print_experiments()
        return
    experiment = find_experiment(name)
    check_no_model(out)
    changes = Changes(**given | {"data": tuple(given.get("data", ()))})
    store, executor = RecordStore(out / "runs"), _executor(on, workers, share_training)
    if render_only:  # the records know what their data and backbone were
        known = Recorded(store.records(), changes.root)
        plan = make_plan(experiment, changes, known.facts)
    else:
        plan = make_plan(experiment, changes)
    if dry_run:
        print_plan(plan, {config.key() for config in plan.configs if store.find(config)}, executor.share_adapters)
        return
    if render_only:  # gaps that have a reason, such as a damaged record
        failures = {config.key(): why for config in plan.configs if (why := store.failure(config))}
    else:
        failures = dict(_run(plan, store, executor)) if plan.configs else {}
    # What was finished with other images than those of now is not what was asked for.
    wanted = [config for config in plan.configs if config.key() not in failures]
    records = {config.key(): record for config in wanted if (record := store.find(config))}
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


def _run(plan: ExperimentPlan, store: RecordStore, executor: Executor) -> Mapping[str, Failure]:
    from onea.research.cli.paper_display import GridDisplay
    from onea.research.runs.grid import run_grid

    with GridDisplay() as display:
        return run_grid(plan.configs, store, executor, display).failures
