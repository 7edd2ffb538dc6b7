# SPDX-License-Identifier: Apache-2.0
"""The live displays of ``onea run``, ``onea demo`` and ``onea paper``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onea.presentation.tables import MISSING, terminal_style
from onea.research.data import data_name
from onea.research.record import Record
from onea.research.runs.config import RunConfig
from onea.research.runs.grid import Failure, GridProgress
from onea.runtime import Progress
from onea.text import printable

_MAX_ROWS = 16  # runs in progress that are shown


class TerminalDisplay:
    """Context manager that shows progress bars or a live table on a terminal, and nothing elsewhere."""

    def __init__(self, live: Bars | Live):
        self._live = live

    def __enter__(self) -> Self:
        if self._live.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live.console.is_terminal:
            self._live.stop()


class RunDisplay(TerminalDisplay, Progress):
    """Two bars: tasks of the stream, and images of the current epoch with the speed and the current step."""

    def __init__(self, console: Console | None = None, title: str = "tasks") -> None:
        console = console or Console(stderr=True)
        self._plain = None if console.is_terminal else console  # one line per task instead of bars
        self._bars = Bars(
            TextColumn("{task.description:<24}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
            disable=self._plain is not None,
        )
        super().__init__(self._bars)
        self._stream = self._bars.add_task(title, total=None, note="")
        self._epoch = self._bars.add_task("preparing", total=None, note="")
        self._task = self._images = 0
        self._task_started = self._started = time.perf_counter()
        self._durations: list[float] = []

    def start_task(self, task: int, tasks: int, name: str) -> None:
        """Show the task."""
        self._task, self._task_started = task, time.perf_counter()
        self._bars.update(self._stream, total=tasks, completed=task)
        self._bars.update(self._epoch, description=printable(name), completed=0, total=None, note="")

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """Restart the lower bar; the first epoch also restarts the clock of the speed."""
        if epoch == 0:
            self._images, self._started = 0, time.perf_counter()
        self._images_left = (epochs - epoch) * images
        self._label = f"epoch {epoch + 1}/{epochs}"
        self._bars.reset(self._epoch, total=images, completed=0)

    def step(self, images: int) -> None:
        """Advance the bar, and show the speed and the time left."""
        self._images += images
        self._images_left -= images
        speed = self._images / max(time.perf_counter() - self._started, 1e-9)
        note = f"{self._label}  {speed:,.0f} images/s  {self._images_left / speed:,.0f} s left in this task"
        self._bars.update(self._epoch, advance=images, note=note)

    def start_phase(self, text: str) -> None:
        """Show a step other than training."""
        self._bars.update(self._epoch, note=text)

    def remark(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def end_task(self, task: int, accuracy: float) -> None:
        """Show the accuracy and, once some tasks are done, an estimate for the rest."""
        self._durations.append(time.perf_counter() - self._task_started)
        total = self._bars.tasks[0].total or task + 1
        remaining = (total - task - 1) * sum(self._durations) / len(self._durations)
        self._bars.update(self._stream, completed=task + 1, note=f"A {accuracy:.1f} %  about {remaining:,.0f} s left")
        if self._plain:
            self._plain.print(self._line(task, f"{total:g}", accuracy), highlight=False, markup=False, soft_wrap=True)

    def _line(self, task: int, tasks: str, accuracy: float) -> str:
        return f"task {task + 1}/{tasks}: A {accuracy:.2f} %, {self._durations[-1]:.1f} s"


class DemoDisplay(RunDisplay):
    """A live table of accuracies above the bars of the current method; plain lines without a terminal."""

    def __init__(self, titles: dict[str, str], console: Console):
        super().__init__(console)
        self._titles = titles
        self._tasks: list[tuple[str, int]] = []  # name and number of classes
        self._accuracies: dict[str, list[float]] = {method: [] for method in titles}
        self._method = ""
        self._live = Live(console=console, refresh_per_second=6, get_renderable=self._draw)

    def __exit__(self, *error: object) -> None:
        self._method = ""  # the last frame stays on the screen, without bars
        super().__exit__(*error)

    def start(self, method: str, earlier: Record | None) -> DemoDisplay:
        """Begin or resume a method, with the accuracies of an earlier run."""
        self._method, self._durations = method, []
        self._bars.reset(self._stream, description=self._titles[method], note="")
        self._bars.reset(self._epoch, description="preparing", note="")
        if earlier:
            self.begin(earlier)
            if self._plain:
                learned = f"{len(self._accuracies[method])} of {len(self._tasks)} tasks were learned earlier"
                self._plain.print(f"{self._titles[method]}: {learned}", highlight=False)
        return self

    def begin(self, record: Record) -> None:
        """Show the tasks and the accuracies of a record."""
        self._tasks = list(zip(record["stream"]["names"], record["stream"]["sizes"], strict=True))
        self._accuracies[self._method] = list(record["metrics"].get("A", ()))

    def end_task(self, task: int, accuracy: float) -> None:
        """Show the accuracy in the table."""
        self._accuracies[self._method].append(accuracy)
        super().end_task(task, accuracy)

    def _line(self, task: int, tasks: str, accuracy: float) -> str:
        name, classes = self._tasks[task]
        title = self._titles[self._method]
        return f"{title:<12}  task {task + 1}/{tasks}  {name:<10} +{classes:<3} A_t {accuracy:5.1f} %"

    def _draw(self) -> Group:
        table = Table(**terminal_style() | {"padding": 0})
        table.title = Text("Accuracy over all classes seen so far (A_t, %) after each task\n", "bold")
        table.add_column("task\nnew classes", style="bold", no_wrap=True)
        for name, classes in self._tasks:
            table.add_column(Text(f"{name}\n+{classes}"), justify="right", min_width=5, overflow="fold")
        for method, title in self._titles.items():
            table.add_row(title, *(self._cell(method, task) for task in range(len(self._tasks))))
        parts: list[RenderableType] = [table, Text("")] if self._tasks else []
        return Group(*parts, *([self._bars] if self._method else []))

    def _cell(self, method: str, task: int) -> Text:
        measured = self._accuracies[method]
        if task >= len(measured):
            is_running = method == self._method and task == len(measured)
            return Text("···", "yellow") if is_running else Text(MISSING, "dim")
        accuracies = [values[task] for values in self._accuracies.values() if len(values) > task]
        is_best = len(accuracies) > 1 and measured[task] == max(accuracies)
        return Text(f"{measured[task]:.1f}", "bold green" if is_best else "")


@dataclass
class _Progress:
    """The progress of a run in tasks; ``resumed_at`` is the number of tasks that were learned before this grid."""

    started: float
    tasks: int = 0  # 0 while the run is being prepared
    resumed_at: int = 0
    done: int = 0

    @property
    def work(self) -> float:
        """The fraction of the run that this grid has done."""
        return (self.done - self.resumed_at) / max(self.tasks, 1)

    @property
    def left(self) -> float:
        """The fraction of the run that is left."""
        return 1 - self.done / max(self.tasks, 1)


class GridDisplay(TerminalDisplay, GridProgress):
    """A live progress bar above the runs in progress; plain lines without a terminal. Failures stay on the screen."""

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
                run.tasks, run.resumed_at = tasks, task
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
        bar = Table.grid(padding=(0, 2))
        counts = Text(f"{self._ended} of {self._total} runs")
        if self._failed:
            counts.append(f"  {self._failed} failed", "red")
        if self._earlier:
            counts.append(f"  {self._earlier} finished earlier", "dim")
        bar.add_row(ProgressBar(total=max(self._total, 1), completed=self._ended, width=28), counts, self._clock())
        rows = Table.grid(padding=(0, 2))
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
    common = {"method", "data", "seed", "options"}
    values = {}
    for config in configs:
        identity = config.identity()
        others = {name: value for name, value in identity.items() if name not in common}
        values[config.key()] = others | identity["options"]
    names = dict.fromkeys(name for flat in values.values() for name in flat)
    varying = [name for name in names if len({repr(flat.get(name)) for flat in values.values()}) > 1]
    texts = {}
    for config in configs:
        flat = values[config.key()]
        parts = [f"{name} {flat[name]}" for name in varying if flat.get(name) is not None]
        texts[config.key()] = ", ".join([f"{config.method} {data_name(config.data)} seed {config.seed}", *parts])
    return texts
