# SPDX-License-Identifier: Apache-2.0
"""The progress bars of ``onea run``, and what is drawn only on a terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from onea.runtime import Progress
from onea.text import printable


class OnScreen:
    """Context manager that shows progress bars or a live table on a terminal, and nothing elsewhere."""

    def __init__(self, drawn: Bars | Live):
        self._drawn = drawn

    def __enter__(self) -> Self:
        if self._drawn.console.is_terminal:
            self._drawn.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn.console.is_terminal:
            self._drawn.stop()


class RunDisplay(OnScreen, Progress):
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

    def note(self, text: str) -> None:
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
            took = self._durations[-1]
            self._plain.print(f"task {task + 1}/{total:g}: A {accuracy:.2f} %, {took:.1f} s", highlight=False)
