# SPDX-License-Identifier: Apache-2.0
"""The display of ``onea paper``: the list of experiments, the planned runs, their progress and the results."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table as TerminalTable
from rich.text import Text

from onea.cli.display import OnScreen
from onea.presentation.tables import MISSING, Table, fit_terminal, terminal
from onea.research.data import data_name
from onea.research.record import Record
from onea.research.runs.config import RunConfig
from onea.research.runs.grid import Failure, GridProgress
from onea.text import plural

if TYPE_CHECKING:
    from onea.research.paper.scale import Cost, ExperimentPlan, PlannedCell

_MAX_ROWS = 16  # of running runs


def print_experiments() -> None:
    """Print all tables and figures, with their number of runs."""
    from onea.research.paper.experiments import experiments

    lines = (
        (one.name, one.alias, one.title, str(len(one.cells) * one.seeds or MISSING)) for one in experiments().values()
    )
    table = terminal(Table.from_texts("", ("name", "alias", "content", "runs"), lines, left=3))
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    console = Console()
    console.print(table)
    console.print("`onea paper NAME` reproduces one; `--dry-run` prints its cost first. Figure 3 is a drawing.")


def print_plan(plan: ExperimentPlan, done: Collection[str], shared: bool = False) -> None:
    """Print the runs, which of them are done, and the cost of the rest."""
    from onea.research.paper.page import notes
    from onea.research.runs.grid import first_of_each_training

    console = Console()
    console.print(f"{plan.experiment.name} ({plan.experiment.alias}): {escape(plan.experiment.title)}")
    for note in notes(plan):
        console.print(f"  {note}", markup=False)
    if not plan.configs:
        console.print("Nothing to run.")
        return
    costs, uncounted = _costs(plan)
    lines = []
    printed: set[str] = set()
    for planned in plan.planned_cells:
        keys = [run.key() for run in planned.runs]
        finished = str(sum(key in done for key in keys))
        if printed.issuperset(keys):  # several rows may have the same configuration, which is run once
            numbers = ["as above", finished, "", ""]
        else:
            numbers = [str(len(keys)), finished]
            numbers += [
                f"{sum(costs[key].training for key in keys):,}",
                f"{sum(costs[key].evaluation for key in keys):,}",
            ]
        printed.update(keys)
        lines.append((planned.cell.row, _column(planned, plan), *numbers))
    table = Table.from_texts("", ("row", "column", "runs", "done", "training", "evaluation"), lines, left=2)
    console.print(fit_terminal(table, console))
    left = [run for run in plan.configs if run.key() not in done]
    trained = first_of_each_training(left) if shared else left
    training = sum(costs[run.key()].training for run in trained)
    evaluation = sum(costs[run.key()].evaluation for run in left)
    console.print(
        f"{plural(len(costs), 'run', 'runs')}, {len(costs) - len(left)} done. The rest trains on about {training:,} "
        f"images, each counted once an epoch, and evaluates about {evaluation:,}."
        if left
        else f"{plural(len(costs), 'run', 'runs')}, all done."
    )
    if len(trained) < len(left):
        console.print(
            f"{len(left) - len(trained)} of them differ from another only in the merge and share its training."
        )
    for data in uncounted:
        console.print(f"{data} is not here; its cost is estimated from its published counts.", markup=False)


def print_result(table: Table | None, files: Sequence[Path], failures: Mapping[str, str]) -> None:
    """Print the table, the paths of the files and the failures."""
    console = Console()
    if table:
        for note in table.notes:
            console.print(note, markup=False)
        console.print(terminal(table))
    for file in files:
        console.print(str(file), markup=False, soft_wrap=True)
    for key, why in failures.items():
        console.print(f"run {key} failed: {why}", markup=False, soft_wrap=True)


def _column(planned: PlannedCell, plan: ExperimentPlan) -> str:
    """The column of a cell: its group, and its name where the group alone is ambiguous."""
    from onea.research.paper.experiment import data_title

    group, name = planned.cell.headings()[0]
    if not group and "{" not in planned.cell.columns[0][0]:  # all columns are metrics of one stream
        return f"{data_title(planned.cell.options['data'])} (T={planned.cell.options['tasks']})"
    same_group = [
        other
        for other in plan.planned_cells
        if other.cell.row == planned.cell.row and other.cell.headings()[0][0] == group
    ]
    return group if group and len(same_group) == 1 else f"{group}, {name}" if group else name


def _costs(plan: ExperimentPlan) -> tuple[dict[str, Cost], list[str]]:
    """The cost of every run by its key, and the datasets that could not be counted."""
    from onea.research.paper.scale import count_images, estimate

    facts = {data: count_images(data, plan.changes.root) for data in dict.fromkeys(run.data for run in plan.configs)}
    costs = {run.key(): estimate(run, facts[run.data]) for run in plan.configs}
    return costs, [data for data, of_data in facts.items() if not of_data.loaded]


@dataclass
class _Running:
    """The progress of a run in tasks; ``first`` is the number of tasks that were learned before this grid."""

    first: int
    done: int
    tasks: int
    started: float

    @property
    def work(self) -> float:
        """The fraction of the run that this grid has done."""
        return (self.done - self.first) / self.tasks if self.tasks else 0.0

    @property
    def left(self) -> float:
        """The fraction of the run that is left."""
        return 1 - self.done / self.tasks if self.tasks else 1.0


class GridDisplay(OnScreen, GridProgress):
    """A live progress bar with the running runs below; plain lines without a terminal. Failures stay on the screen."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = self._ended = self._failed = self._earlier = 0
        self._work = 0.0  # of this grid, in runs
        self._labels: dict[str, str] = {}
        self._running: dict[str, _Running] = {}
        self._started = time.perf_counter()
        super().__init__(Live(console=self._console, refresh_per_second=4, get_renderable=self._draw, transient=True))

    def start(self, configs: Sequence[RunConfig], finished: Sequence[RunConfig]) -> None:
        """Print the number of runs and start the clock."""
        self._labels = labels(configs)
        self._total, self._ended, self._earlier = len(configs), len(finished), len(finished)
        self._started = time.perf_counter()
        earlier = f", {self._earlier} of them finished earlier" if self._earlier else ""
        self._print_line(f"{self._total} runs{earlier}")

    def advance(self, config: RunConfig, task: int, tasks: int) -> None:
        """Show the progress of a run."""
        key = config.key()
        run = self._running.get(key)
        if tasks == 0 or run is None:  # it begins or is tried again
            self._running[key] = _Running(task, task, tasks, time.perf_counter())
        elif run.tasks == 0:
            run.first, run.done, run.tasks = task, task, tasks
        else:
            run.done = task

    def end(self, config: RunConfig, result: Record | Failure) -> None:
        """Count the run and print its result."""
        self._ended += 1
        run = self._running.pop(config.key(), None)
        elapsed = duration(time.perf_counter() - run.started) if run else ""
        label, live = self._labels[config.key()], self._console.is_terminal
        if isinstance(result, Failure):
            self._failed += 1
            self._work += run.work if run else 0.0
            line = f"{label} failed: {result}"
        else:
            self._work += run.work + run.left if run else 1.0
            line = (
                f"{label}: A_T {result['metrics']['A_T']:.2f} %, mean A {result['metrics']['mean_A']:.2f} %, {elapsed}"
            )
        if not live:
            self._print_line(f"{self._ended}/{self._total}  {line} ({self._clock()})")
        elif isinstance(result, Failure):
            self._print_line(line, "red")

    def _print_line(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)

    def _clock(self) -> str:
        elapsed = time.perf_counter() - self._started
        running = list(self._running.values())  # a copy, because another thread draws the display
        waiting = self._total - self._ended - len(running)
        left = time_left(
            elapsed, self._work + sum(run.work for run in running), waiting + sum(run.left for run in running)
        )
        return f"{duration(elapsed)} so far" + (f", about {duration(left)} left" if left is not None else "")

    def _draw(self) -> Group:
        bar = TerminalTable.grid(padding=(0, 2))
        counts = Text(f"{self._ended} of {self._total} runs")
        if self._failed:
            counts.append(f"  {self._failed} failed", "red")
        if self._earlier:
            counts.append(f"  {self._earlier} finished earlier", "dim")
        bar.add_row(ProgressBar(total=max(self._total, 1), completed=self._ended, width=28), counts, self._clock())
        rows = TerminalTable.grid(padding=(0, 2))
        running = list(self._running.items())
        for key, run in running[:_MAX_ROWS]:
            where = f"task {run.done + 1} of {run.tasks}" if run.tasks else "preparing"
            rows.add_row(Text(self._labels[key]), Text(where, "dim"))
        if (more := len(running) - _MAX_ROWS) > 0:
            rows.add_row(Text(f"and {more} more", "dim"))
        return Group(bar, rows)


def time_left(elapsed: float, done: float, left: float) -> float | None:
    """Estimated seconds for ``left`` runs at the pace of the ``done`` ones; None before any progress.

    >>> time_left(60, 2, 4)
    120.0
    >>> time_left(60, 0, 4)
    """
    return elapsed / done * left if done > 0 else None


def duration(seconds: float) -> str:
    """A duration in a suitable unit.

    >>> duration(47.2), duration(600), duration(9000)
    ('47 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def labels(configs: Sequence[RunConfig]) -> dict[str, str]:
    """A label for each configuration, by key: method, data, seed, and all values that differ within the grid."""
    in_every_label = ("method", "data", "seed", "options")
    flat = {}
    for config in configs:
        identity = config.identity()
        flat[config.key()] = {name: value for name, value in identity.items() if name not in in_every_label} | identity[
            "options"
        ]
    names = dict.fromkeys(name for values in flat.values() for name in values)
    varying = [name for name in names if len({repr(values.get(name)) for values in flat.values()}) > 1]
    return {config.key(): _label(config, flat[config.key()], varying) for config in configs}


def _label(config: RunConfig, values: dict[str, Any], varying: Sequence[str]) -> str:
    extra = [f"{name} {values[name]}" for name in varying if values.get(name) is not None]
    return ", ".join([f"{config.method} {data_name(config.data)} seed {config.seed}", *extra])
