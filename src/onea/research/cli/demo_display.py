# SPDX-License-Identifier: Apache-2.0
"""What a person sees of the demo: a table that fills in while three methods learn, and the result."""

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

from onea.cli.display import OnScreen
from onea.presentation.tables import terminal, terminal_style
from onea.research.record import Record
from onea.research.report.aggregate import results_table
from onea.research.report.html import two_lines
from onea.runtime import Progress


class DemoDisplay(OnScreen, Progress):
    """A live table, methods by tasks, with what is going on below; plain lines where there is no terminal."""

    def __init__(self, titles: dict[str, str], names: Sequence[str], sizes: Sequence[int], console: Console):
        self._titles, self._names, self._sizes, self._console = titles, names, sizes, console
        self._seen = [0, *accumulate(sizes)]
        self._accuracies: dict[str, list[float]] = {method: [] for method in titles}
        self._method = self._title = self._where = self._doing = ""
        self._part = 0.0  # of the current task that has been trained
        self._born = time.perf_counter()
        super().__init__(Live(console=console, refresh_per_second=6, get_renderable=self._draw))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._where = self._doing = ""  # the last picture stays on screen, without an activity that is over
        super().__exit__(kind, error, trace)

    def start(self, method: str, earlier: Record | None) -> DemoDisplay:
        """A method begins or continues; show what an earlier run of the demo has already measured."""
        self._method, self._title, self._part = method, self._titles[method], 0.0
        self._accuracies[method] = list(earlier["metrics"]["A"]) if earlier else []
        self._where, self._doing = self._title, "preparing"
        self._first_task = len(self._accuracies[method])
        if self._first_task and not self._console.is_terminal:
            self._say(f"{self._title}: {self._first_task} of {len(self._sizes)} tasks were learned earlier")
        return self

    def start_task(self, task: int, tasks: int, name: str) -> None:
        """Say which task it is, and start the clock of the rest of this method with the first one."""
        if task == self._first_task:
            self._method_started = time.perf_counter()
        self._part = 0.0
        self._where = f"{self._title}, task {task + 1} of {tasks}: {name} (+{self._sizes[task]})"
        self._doing = "learning"

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """Count the images still to come; the first epoch starts the clock of the speed."""
        if epoch == 0:
            self._images, self._started = 0, time.perf_counter()
        self._epoch = f"epoch {epoch + 1}/{epochs}"
        self._left = (epochs - epoch) * images

    def step(self, images: int) -> None:
        """Say how fast, and how long still."""
        self._images += images
        self._left -= images
        self._part = self._images / max(self._images + self._left, 1)
        speed = self._images / max(time.perf_counter() - self._started, 1e-9)
        self._doing = f"{self._epoch}, {speed:,.0f} images/s, {self._left / speed:,.0f} s left in this task"

    def note(self, text: str) -> None:
        """Say what is going on besides training."""
        self._doing = text

    def end_task(self, task: int, accuracy: float) -> None:
        """Fill in the accuracy."""
        self._accuracies[self._method].append(accuracy)
        self._part = 0.0
        self._doing = "saving"
        if not self._console.is_terminal:
            self._say(
                f"{self._title:<12}  task {task + 1}/{len(self._sizes)}  "
                f"{self._names[task]:<10} +{self._sizes[task]:<3} A_t {accuracy:5.1f} %"
            )

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw(self) -> Group:
        blank = Text("")
        if not self._where:
            return Group(self._table(), blank)
        now = Text.assemble((self._where, "bold"), ("  " + self._doing, "dim"))
        return Group(self._table(), blank, now, self._clock())

    def _table(self) -> Table:
        table = Table(**terminal_style() | {"padding": 0})
        table.title = Text("Accuracy over all classes seen so far (A_t, %) after each task\n", "bold")
        table.add_column("task\nnew classes", style="bold", no_wrap=True)
        for name, size in zip(self._names, self._sizes, strict=True):
            table.add_column(Text(f"{name}\n+{size}"), justify="right", min_width=5, overflow="fold")
        for method, title in self._titles.items():
            table.add_row(title, *(self._cell(method, task) for task in range(len(self._sizes))))
        return table

    def _cell(self, method: str, task: int) -> Text:
        measured = self._accuracies[method]
        if task >= len(measured):
            running = self._where and method == self._method and task == len(measured)
            return Text("···" if running else "–", "yellow" if running else "dim")
        rivals = [values[task] for values in self._accuracies.values() if len(values) > task]
        best = len(rivals) > 1 and measured[task] == max(rivals)
        return Text(f"{measured[task]:.1f}", "bold green" if best else "")

    def _clock(self) -> Text:
        """Seconds so far and, once there is something to go by, an estimate for the rest of this method."""
        now, done = time.perf_counter(), len(self._accuracies[self._method])
        text = f"{now - self._born:,.0f} s so far"
        if done < len(self._sizes):
            # Classes measure the work well: each has as many images here, and larger tasks train longer.
            learned = self._seen[done] - self._seen[self._first_task] + self._part * self._sizes[done]
            left = self._seen[-1] - self._seen[self._first_task] - learned
            if learned > 1:
                text += f", about {(now - self._method_started) / learned * left:,.0f} s left for {self._title}"
        return Text(text, "dim")


def planned_tasks(data: str, seed: int, earlier: Sequence[Record | None]) -> tuple[list[str], list[int]]:
    """Names and sizes of the tasks to come: what an earlier run says, or else what the dataset's groups will be."""
    from onea.research.data.sources import load_dataset
    from onea.research.streams import make_stream

    if known := next((record["stream"] for record in earlier if record), None):
        return list(known["names"]), list(known["sizes"])
    dataset = load_dataset(data)
    stream = make_stream(classes=len(dataset.classes), kind="natural", groups=dataset.groups, seed=seed)
    return list(stream.names), list(stream.sizes)


def print_results(records: Sequence[Record], files: Sequence[Path], console: Console) -> None:
    """The results table, whoever wins, and where to look further."""
    found = results_table(records)
    star = not console.color_system  # in a file or a pipe, green says nothing
    table = terminal(found, star=star)
    table.title = Text("Result\n", "bold")
    table.columns[0].style, table.columns[0].no_wrap = "bold", True
    for column in table.columns[1:]:
        column.header, column.vertical = two_lines(str(column.header)), "bottom"
    console.print(table)
    for note in found.row_notes:
        console.print(Text(f"\n{note}", "dim"))
    console.print()
    for file in files:
        console.print(str(file), highlight=False, markup=False, soft_wrap=True)
