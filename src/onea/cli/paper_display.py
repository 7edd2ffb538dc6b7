"""What ``onea paper`` prints: the list, the runs to come with their cost, and the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

if TYPE_CHECKING:
    from onea.paper.cost import Cost
    from onea.paper.scale import Plan
    from onea.report.grid_table import GridTable


def print_experiments() -> None:
    """Every table and figure, with what it takes."""
    from onea.paper.experiments import experiments
    from onea.paper.names import data_title

    table = Table(Column("name", no_wrap=True), Column("or", no_wrap=True), "shows", "data", "cells", "seeds")
    for one in experiments().values():
        counts = (str(len(one.cells)), str(one.seeds)) if one.cells else ("–", "–")
        table.add_row(one.name, one.alias, escape(one.title), ", ".join(map(data_title, one.datasets)), *counts)
    console = Console()
    console.print(table)
    console.print("`onea paper NAME` makes one, `--dry-run` says first what it takes; figure 3 is a drawing.")


def print_plan(plan: Plan, done: Collection[str], shared: bool = False) -> None:
    """The runs, what is done, and what the rest costs; less where runs share their training."""
    from onea.paper.render import notes
    from onea.runs.sharing import once_per_training

    console = Console()
    console.print(f"{plan.experiment.name} ({plan.experiment.alias}): {escape(plan.experiment.title)}")
    for note in notes(plan):
        console.print(f"  {note}", markup=False)
    if not plan.configs:
        console.print("Nothing to run.")
        return
    costs, uncounted = _costs(plan)
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("training", "evaluation"))
    table = Table("row", "column", "seed", Column("run", no_wrap=True), *numbers, "state")
    shown: set[str] = set()
    for place in plan.places:
        group, column = place.cell.headings()[0]
        for run in place.runs:
            key = run.key()
            cost, state = costs[key], "done" if key in done else "again" if key in shown else ""
            shown.add(key)
            table.add_row(
                escape(place.cell.row),
                escape(group or column),
                str(run.seed),
                key,
                f"{cost.training:,}",
                f"{cost.evaluation:,}",
                state,
            )
    console.print(table)
    left = [run for run in plan.configs if run.key() not in done]
    trained = once_per_training(left) if shared else left
    training = sum(costs[run.key()].training for run in trained)
    evaluation = sum(costs[run.key()].evaluation for run in left)
    console.print(
        f"{len(costs)} runs, {len(costs) - len(left)} done; {len(left)} left cost about "
        f"{training:,} image-steps of training and {evaluation:,} of evaluation."
    )
    if len(trained) < len(left):
        console.print(
            f"{len(left) - len(trained)} of them differ from another only in the merge and share its training."
        )
    for data in uncounted:
        console.print(f"{data} is not here; its cost is estimated from its published counts.", markup=False)


def print_result(table: GridTable | None, files: Sequence[Path], failures: Mapping[str, str]) -> None:
    """The table as far as it is known, where the files are, and what went wrong."""
    from onea.report.formats import gap_text, number_text

    console = Console()
    if table:
        shown = Table("", *(escape(f"{c.group}\n{c.name}".strip()) for c in table.columns), title=escape(table.title))
        for row in table.rows:
            values = [table.values.get((row, index)) for index in range(len(table.columns))]
            texts = [
                "\n".join(
                    part
                    for part in (
                        number_text(value, column.digits),
                        gap_text(value),
                        f"paper {value.reported}" if value.reported else "",
                    )
                    if part
                )
                if value
                else "–"
                for value, column in zip(values, table.columns, strict=True)
            ]
            shown.add_row(escape(row), *map(escape, texts))
        for note in table.notes:
            console.print(note, markup=False)
        console.print(shown)
    for file in files:
        console.print(str(file), markup=False, soft_wrap=True)
    for key, why in failures.items():
        console.print(f"run {key} failed: {why}", markup=False, soft_wrap=True)


def _costs(plan: Plan) -> tuple[dict[str, Cost], list[str]]:
    """The cost of every run by its key, and the datasets that could not be counted."""
    from onea.paper.cost import estimate
    from onea.paper.facts import data_facts

    facts = {data: data_facts(data, plan.changes.root) for data in dict.fromkeys(run.data for run in plan.configs)}
    costs = {run.key(): estimate(run, facts[run.data]) for run in plan.configs}
    return costs, [data for data, known in facts.items() if not known.loaded]
