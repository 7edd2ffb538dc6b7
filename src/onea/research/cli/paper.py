# SPDX-License-Identifier: Apache-2.0
"""``onea paper``: reproduce the tables and figures of the paper."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onea.cli.options import options_of
from onea.presentation.tables import MISSING, Table, fit_terminal, terminal
from onea.research.paper.plan import Changes
from onea.text import plural

if TYPE_CHECKING:
    from onea.research.paper.plan import ExperimentPlan, PlannedCell
    from onea.research.runs.grid import Failure

_MACHINE = "Machine"


@options_of(Changes)
def paper(
    name: Annotated[str | None, typer.Argument(help="Table or figure; by default, all are listed.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs and the results.")] = Path("onea-paper"),
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

    Performs all missing runs. Repeat the command to resume; finished runs are not repeated.
    """
    from onea.files import check_no_model
    from onea.research.paper.experiments import find_experiment
    from onea.research.paper.page import write_experiment
    from onea.research.paper.plan import make_plan, recorded_counts
    from onea.research.runs.executors import choose_executor
    from onea.research.runs.grid import RecordStore, run_grid

    if name is None:
        print_experiments()
        return
    experiment = find_experiment(name)
    check_no_model(out)
    changes = Changes(**options | {"data": tuple(options.get("data", ()))})
    store, executor = RecordStore(out / "runs"), choose_executor(workers, on, share_training)
    if render_only:  # data and backbone are read from the records
        plan = make_plan(experiment, changes, recorded_counts(store.records(), changes.root))
    else:
        plan = make_plan(experiment, changes)
    if dry_run:
        print_plan(plan, {config.key() for config in plan.configs if store.find(config)}, executor.share_adapters)
        return
    failures: dict[str, Failure] = {}
    if render_only:  # a damaged record is a failure
        failures = {config.key(): failure for config in plan.configs if (failure := store.failure(config))}
    elif plan.configs:
        from onea.research.cli.display import GridDisplay

        with GridDisplay() as display:
            failures = dict(run_grid(plan.configs, store, executor, display).failures)
    # A finished run whose images have changed since has failed, and its record is not shown.
    valid = [config for config in plan.configs if config.key() not in failures]
    records = {config.key(): record for config in valid if (record := store.find(config))}
    table, files = write_experiment(plan, records, out / experiment.name)
    print_result(table, files, {key: str(failure) for key, failure in failures.items()})
    if failures and not render_only:
        raise typer.Exit(1)


def print_experiments() -> None:
    """Print all tables and figures, with their number of runs."""
    from rich.console import Console

    from onea.research.paper.experiments import experiments

    rows = [
        (experiment.name, experiment.alias, experiment.title, str(len(experiment.cells) * experiment.seeds or MISSING))
        for experiment in experiments().values()
    ]
    table = terminal(Table.from_texts("", ("name", "alias", "content", "runs"), rows, text_columns=3))
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    console = Console()
    console.print(table)
    console.print("`onea paper NAME` reproduces one; `--dry-run` prints its cost first. Figure 3 is a drawing.")


def print_plan(plan: ExperimentPlan, finished: Collection[str], shared: bool = False) -> None:
    """Print the runs, which of them are finished, and the cost of the others.

    Args:
        plan: the experiment.
        finished: keys of the finished runs.
        shared: whether runs that differ only in the merge share their training.
    """
    from rich.console import Console
    from rich.markup import escape

    from onea.research.paper.page import notes
    from onea.research.paper.plan import count_images, estimate
    from onea.research.runs.grid import first_of_each_training

    console = Console()
    console.print(f"{plan.experiment.name} ({plan.experiment.alias}): {escape(plan.experiment.title)}")
    for note in notes(plan):
        console.print(f"  {note}", markup=False)
    if not plan.configs:
        console.print("Nothing to run.")
        return
    counts = {data: count_images(data, plan.changes.root) for data in dict.fromkeys(run.data for run in plan.configs)}
    costs = {run.key(): estimate(run, counts[run.data]) for run in plan.configs}
    rows = []
    printed: set[str] = set()
    for planned in plan.planned_cells:
        keys = [run.key() for run in planned.runs]
        done = str(sum(key in finished for key in keys))
        if printed.issuperset(keys):  # several rows may have the same configuration, which is run once
            numbers = ["as above", done, "", ""]
        else:
            training = sum(costs[key].training for key in keys)
            evaluation = sum(costs[key].evaluation for key in keys)
            numbers = [str(len(keys)), done, f"{training:,}", f"{evaluation:,}"]
        printed.update(keys)
        rows.append((planned.cell.row, _column(planned, plan), *numbers))
    table = Table.from_texts("", ("row", "column", "runs", "done", "training", "evaluation"), rows, text_columns=2)
    console.print(fit_terminal(table, console))
    unfinished = [run for run in plan.configs if run.key() not in finished]
    trained = first_of_each_training(unfinished) if shared else unfinished
    total = plural(len(costs), "run", "runs")
    if unfinished:
        console.print(
            f"{total}, {len(costs) - len(unfinished)} done. The others train on about "
            f"{sum(costs[run.key()].training for run in trained):,} images, each counted once per epoch, and evaluate "
            f"about {sum(costs[run.key()].evaluation for run in unfinished):,}."
        )
    else:
        console.print(f"{total}, all done.")
    if len(trained) < len(unfinished):
        console.print(
            f"{len(unfinished) - len(trained)} of them differ from another only in the merge and share its training."
        )
    for data, images in counts.items():
        if not images.loaded:
            console.print(
                f"{data} has not been downloaded; its cost is estimated from its published counts.", markup=False
            )


def print_result(table: Table | None, files: Sequence[Path], failures: Mapping[str, str]) -> None:
    """Print the table, the paths of the files and the failures."""
    from rich.console import Console

    console = Console()
    if table:
        for note in table.notes:
            console.print(note, markup=False)
        console.print(terminal(table))
    for file in files:
        console.print(str(file), markup=False, soft_wrap=True)
    for key, reason in failures.items():
        console.print(f"run {key} failed: {reason}", markup=False, soft_wrap=True)


def _column(planned: PlannedCell, plan: ExperimentPlan) -> str:
    """The column of a cell: its group, and its name where the group alone is ambiguous."""
    from onea.research.paper.experiment import data_title

    cell = planned.cell
    group, name = cell.headings()[0]
    if not group:
        metrics_of_one_stream = "{" not in cell.columns[0][0]
        return f"{data_title(cell.options['data'])} (T={cell.options['tasks']})" if metrics_of_one_stream else name
    others = [other.cell for other in plan.planned_cells if other is not planned]
    ambiguous = any(other.row == cell.row and other.headings()[0][0] == group for other in others)
    return f"{group}, {name}" if ambiguous else group
