# SPDX-License-Identifier: Apache-2.0
"""What ``onea paper`` prints: the list, the runs to come with their cost, and the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape

from onea.report.formats import terminal
from onea.report.table import NOTHING, Table
from onea.text import count

if TYPE_CHECKING:
    from onea.paper.cost import Cost
    from onea.paper.scale import Place, Plan


def print_experiments() -> None:
    """Every table and figure, with how many runs it takes."""
    from onea.paper.experiments import experiments

    lines = (
        (one.name, one.alias, one.title, str(len(one.cells) * one.seeds or NOTHING)) for one in experiments().values()
    )
    listed = Table.of_texts("", ("name", "or", "shows", "runs"), lines, left=3)
    table = terminal(listed, box=SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    console = Console()
    console.print(table)
    console.print("`onea paper NAME` makes one; `--dry-run` says first what it takes. Figure 3 is a drawing.")


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
    lines = []
    shown: set[str] = set()
    for place in plan.places:
        keys = [run.key() for run in place.runs]
        finished = str(sum(key in done for key in keys))
        if shown.issuperset(keys):  # two rows may be one configuration; it is run once
            numbers = ["as above", finished, "", ""]
        else:
            numbers = [str(len(keys)), finished]
            numbers += [
                f"{sum(costs[key].training for key in keys):,}",
                f"{sum(costs[key].evaluation for key in keys):,}",
            ]
        shown.update(keys)
        lines.append((place.cell.row, _column(place, plan), *numbers))
    table = Table.of_texts("", ("row", "column", "runs", "done", "training", "evaluation"), lines, left=2)
    console.print(terminal(table, no_wrap=True, box=SIMPLE_HEAD, pad_edge=False))
    left = [run for run in plan.configs if run.key() not in done]
    trained = once_per_training(left) if shared else left
    training = sum(costs[run.key()].training for run in trained)
    evaluation = sum(costs[run.key()].evaluation for run in left)
    console.print(
        f"{count(len(costs), 'run', 'runs')}, {len(costs) - len(left)} done. What is left trains on about {training:,} "
        f"images, each counted once an epoch, and evaluates about {evaluation:,}."
        if left
        else f"{count(len(costs), 'run', 'runs')}, all done."
    )
    if len(trained) < len(left):
        console.print(
            f"{len(left) - len(trained)} of them differ from another only in the merge and share its training."
        )
    for data in uncounted:
        console.print(f"{data} is not here; its cost is estimated from its published counts.", markup=False)


def print_result(table: Table | None, files: Sequence[Path], failures: Mapping[str, str]) -> None:
    """The table as far as it is known, where the files are, and what went wrong."""
    console = Console()
    if table:
        for note in table.notes:
            console.print(note, markup=False)
        console.print(terminal(table))
    for file in files:
        console.print(str(file), markup=False, soft_wrap=True)
    for key, why in failures.items():
        console.print(f"run {key} failed: {why}", markup=False, soft_wrap=True)


def _column(place: Place, plan: Plan) -> str:
    """The column of a place: its group, and its own name where the group alone does not tell it apart."""
    from onea.paper.names import data_title

    group, name = place.cell.headings()[0]
    if not group and "{" not in place.cell.columns[0][0]:  # all columns are of one stream, and named after metrics
        return f"{data_title(place.cell.options['data'])} (T={place.cell.options['tasks']})"
    alike = [
        other for other in plan.places if other.cell.row == place.cell.row and other.cell.headings()[0][0] == group
    ]
    return group if group and len(alike) == 1 else f"{group}, {name}" if group else name


def _costs(plan: Plan) -> tuple[dict[str, Cost], list[str]]:
    """The cost of every run by its key, and the datasets that could not be counted."""
    from onea.paper.cost import estimate
    from onea.paper.facts import data_facts

    facts = {data: data_facts(data, plan.changes.root) for data in dict.fromkeys(run.data for run in plan.configs)}
    costs = {run.key(): estimate(run, facts[run.data]) for run in plan.configs}
    return costs, [data for data, known in facts.items() if not known.loaded]
