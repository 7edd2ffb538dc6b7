# SPDX-License-Identifier: Apache-2.0
"""The display of ``onea paper``: the list of experiments, the planned runs, their progress and the results."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table as TerminalTable
from rich.text import Text

from onea.presentation.tables import MISSING, Table, fit_terminal, terminal
from onea.research.cli.run_display import OnScreen
from onea.research.data import data_name
from onea.research.record import Record
from onea.research.runs.config import RunConfig
from onea.research.runs.grid import Failure, GridProgress
from onea.text import plural

if TYPE_CHECKING:
    from onea.research.paper.plan import ExperimentPlan, PlannedCell

_MAX_ROWS = 16  # of running runs


def print_experiments() -> None:
    """Print all tables and figures, with their number of runs."""
    from onea.research.paper.experiments import experiments

    rows = [
        (experiment.name, experiment.alias, experiment.title, str(len(experiment.cells) * experiment.seeds or MISSING))
        for experiment in experiments().values()
    ]
    table = terminal(Table.from_texts("", ("name", "alias", "content", "runs"), rows, left=3))
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
    table = Table.from_texts("", ("row", "column", "runs", "done", "training", "evaluation"), rows, left=2)
    console.print(fit_terminal(table, console))
    unfinished = [run for run in plan.configs if run.key() not in finished]
    trained = first_of_each_training(unfinished) if shared else unfinished
    total = plural(len(costs), "run", "runs")
    if unfinished:
        console.print(
            f"{total}, {len(costs) - len(unfinished)} done. The rest trains on about "
            f"{sum(costs[run.key()].training for run in trained):,} images, each counted once an epoch, and evaluates "
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


@dataclass
class _Progress:
    """The progress of a run in tasks; ``first`` is the number of tasks that were learned before this grid."""

    started: float
    tasks: int = 0  # 0 while it is prepared
    first: int = 0
    done: int = 0

    @property
    def work(self) -> float:
        """The fraction of the run that this grid has done."""
        return (self.done - self.first) / max(self.tasks, 1)

    @property
    def left(self) -> float:
        """The fraction of the run that is left."""
        return 1 - self.done / max(self.tasks, 1)


class GridDisplay(OnScreen, GridProgress):
    """A live progress bar with the running runs below; plain lines without a terminal. Failures stay on the screen."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = self._ended = self._failed = self._earlier = 0
        self._work = 0.0  # of this grid, in runs
        self._labels: dict[str, str] = {}
        self._running: dict[str, _Progress] = {}
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
        if not tasks:
            self._running[config.key()] = _Progress(time.perf_counter())
        elif run := self._running.get(config.key()):  # None for a late message of a run that has ended
            if not run.tasks:
                run.tasks, run.first = tasks, task
            run.done = task

    def end(self, config: RunConfig, result: Record | Failure) -> None:
        """Count the run and print its result."""
        self._ended += 1
        run = self._running.pop(config.key(), None)
        label, is_terminal = self._labels[config.key()], self._console.is_terminal
        if isinstance(result, Failure):
            self._failed += 1
            self._work += run.work if run else 0.0
            line = f"{label} failed: {result}"
        else:
            self._work += run.work + run.left if run else 1.0
            elapsed = duration(time.perf_counter() - run.started) if run else ""
            metrics = result["metrics"]
            line = f"{label}: A_T {metrics['A_T']:.2f} %, mean A {metrics['mean_A']:.2f} %, {elapsed}"
        if not is_terminal:
            self._print_line(f"{self._ended}/{self._total}  {line} ({self._clock()})")
        elif isinstance(result, Failure):
            self._print_line(line, "red")

    def _print_line(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)

    def _clock(self) -> str:
        """Elapsed time and, after some progress, the estimated time for the other runs."""
        elapsed = time.perf_counter() - self._started
        running = list(self._running.values())  # a copy, because another thread draws the display
        done = self._work + sum(run.work for run in running)
        left = self._total - self._ended - len(running) + sum(run.left for run in running)
        return f"{duration(elapsed)} so far" + (f", about {duration(elapsed / done * left)} left" if done > 0 else "")

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
            state = f"task {run.done + 1} of {run.tasks}" if run.tasks else "preparing"
            rows.add_row(Text(self._labels[key]), Text(state, "dim"))
        if len(running) > _MAX_ROWS:
            rows.add_row(Text(f"and {len(running) - _MAX_ROWS} more", "dim"))
        return Group(bar, rows)


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
    in_every_label = {"method", "data", "seed", "options"}
    values = {}
    for config in configs:
        identity = config.identity()
        others = {name: value for name, value in identity.items() if name not in in_every_label}
        values[config.key()] = others | identity["options"]
    names = dict.fromkeys(name for flat in values.values() for name in flat)
    varying = [name for name in names if len({repr(flat.get(name)) for flat in values.values()}) > 1]
    texts = {}
    for config in configs:
        flat = values[config.key()]
        parts = [f"{name} {flat[name]}" for name in varying if flat.get(name) is not None]
        texts[config.key()] = ", ".join([f"{config.method} {data_name(config.data)} seed {config.seed}", *parts])
    return texts
