# SPDX-License-Identifier: Apache-2.0
"""The display of ``onea demo``: a live table of accuracies, and the results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from onea.presentation.tables import MISSING, terminal, terminal_style
from onea.research.cli.run_display import OnScreen
from onea.research.record import Record
from onea.research.report.aggregate import results_table
from onea.research.report.html import two_lines
from onea.runtime import Progress


class DemoDisplay(OnScreen, Progress):
    """A live table of methods and tasks, with the current progress below; plain lines without a terminal."""

    def __init__(self, titles: dict[str, str], names: Sequence[str], sizes: Sequence[int], console: Console):
        self._titles, self._names, self._sizes, self._console = titles, names, sizes, console
        self._accuracies: dict[str, list[float]] = {method: [] for method in titles}
        self._method = self._title = self._current_task = self._activity = ""
        self._task_progress = 0.0  # trained fraction of the current task
        self._demo_started = time.perf_counter()
        super().__init__(Live(console=console, refresh_per_second=6, get_renderable=self._draw))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current_task = self._activity = ""  # the last frame stays on the screen
        super().__exit__(kind, error, trace)

    def start(self, method: str, earlier: Record | None) -> DemoDisplay:
        """Begin or resume a method, with the accuracies of an earlier run."""
        self._method, self._title, self._task_progress = method, self._titles[method], 0.0
        self._accuracies[method] = list(earlier["metrics"]["A"]) if earlier else []
        self._current_task, self._activity = self._title, "preparing"
        self._first_task = len(self._accuracies[method])
        if self._first_task:
            self._log(f"{self._title}: {self._first_task} of {len(self._sizes)} tasks were learned earlier")
        return self

    def start_task(self, task: int, tasks: int, name: str) -> None:
        """Show the task; the first one starts the clock of this method."""
        if task == self._first_task:
            self._method_started = time.perf_counter()
        self._task_progress = 0.0
        self._current_task = f"{self._title}, task {task + 1} of {tasks}: {name} (+{self._sizes[task]})"
        self._activity = "learning"

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """Count the images to train; the first epoch starts the clock of the speed."""
        if epoch == 0:
            self._images, self._started = 0, time.perf_counter()
        self._epoch = f"epoch {epoch + 1}/{epochs}"
        self._images_left = (epochs - epoch) * images

    def step(self, images: int) -> None:
        """Show the speed and the remaining time."""
        self._images += images
        self._images_left -= images
        self._task_progress = self._images / max(self._images + self._images_left, 1)
        speed = self._images / max(time.perf_counter() - self._started, 1e-9)
        self._activity = f"{self._epoch}, {speed:,.0f} images/s, {self._images_left / speed:,.0f} s left in this task"

    def note(self, text: str) -> None:
        """Show an activity other than training."""
        self._activity = text

    def end_task(self, task: int, accuracy: float) -> None:
        """Show the accuracy in the table."""
        self._accuracies[self._method].append(accuracy)
        self._task_progress = 0.0
        self._activity = "saving"
        self._log(
            f"{self._title:<12}  task {task + 1}/{len(self._sizes)}  "
            f"{self._names[task]:<10} +{self._sizes[task]:<3} A_t {accuracy:5.1f} %"
        )

    def _log(self, line: str) -> None:
        """Print a line where there is no terminal for the table."""
        if not self._console.is_terminal:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw(self) -> Group:
        table = Table(**terminal_style() | {"padding": 0})
        table.title = Text("Accuracy over all classes seen so far (A_t, %) after each task\n", "bold")
        table.add_column("task\nnew classes", style="bold", no_wrap=True)
        for name, size in zip(self._names, self._sizes, strict=True):
            table.add_column(Text(f"{name}\n+{size}"), justify="right", min_width=5, overflow="fold")
        for method, title in self._titles.items():
            table.add_row(title, *(self._cell(method, task) for task in range(len(self._sizes))))
        lines = [Text("")]
        if self._current_task:
            lines += [Text.assemble((self._current_task, "bold"), ("  " + self._activity, "dim")), self._clock()]
        return Group(table, *lines)

    def _cell(self, method: str, task: int) -> Text:
        measured = self._accuracies[method]
        if task >= len(measured):
            is_running = self._current_task and method == self._method and task == len(measured)
            return Text("···", "yellow") if is_running else Text(MISSING, "dim")
        accuracies = [values[task] for values in self._accuracies.values() if len(values) > task]
        best = len(accuracies) > 1 and measured[task] == max(accuracies)
        return Text(f"{measured[task]:.1f}", "bold green" if best else "")

    def _clock(self) -> Text:
        """Elapsed seconds and, after the first class, the estimated time left for this method."""
        now, done = time.perf_counter(), len(self._accuracies[self._method])
        text = f"{now - self._demo_started:,.0f} s so far"
        if done < len(self._sizes):
            # Training time is about proportional to classes, which all have the same number of images.
            seen, first = [0, *accumulate(self._sizes)], self._first_task
            learned = seen[done] - seen[first] + self._task_progress * self._sizes[done]
            left = seen[-1] - seen[first] - learned
            if learned > 1:
                text += f", about {(now - self._method_started) / learned * left:,.0f} s left for {self._title}"
        return Text(text, "dim")


def planned_tasks(data: str, seed: int, earlier: Sequence[Record | None]) -> tuple[list[str], list[int]]:
    """Names and sizes of the tasks, from an earlier run or from the dataset's groups."""
    from onea.research.data.sources import load_dataset
    from onea.research.streams import make_stream

    if recorded := next((record["stream"] for record in earlier if record), None):
        return list(recorded["names"]), list(recorded["sizes"])
    dataset = load_dataset(data)
    stream = make_stream(classes=len(dataset.classes), kind="natural", groups=dataset.groups, seed=seed)
    return list(stream.names), list(stream.sizes)


def print_results(records: Sequence[Record], files: Sequence[Path], console: Console) -> None:
    """Print the results table and the paths of the files."""
    results = results_table(records)
    table = terminal(results, star=not console.color_system)  # a star for the best value where there is no colour
    table.title = Text("Result\n", "bold")
    table.columns[0].style, table.columns[0].no_wrap = "bold", True
    for column in table.columns[1:]:
        column.header, column.vertical = two_lines(str(column.header)), "bottom"
    console.print(table)
    for note in results.row_notes:
        console.print(Text(f"\n{note}", "dim"))
    console.print()
    for file in files:
        console.print(str(file), highlight=False, markup=False, soft_wrap=True)
