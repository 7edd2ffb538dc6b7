# SPDX-License-Identifier: Apache-2.0
"""Learning as it goes on: one line in a terminal or a notebook, and nothing anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from onea.runtime import Progress


class LearningBar(Progress):
    """A bar over all epochs of an update, with the time left and what is going on."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        notebook = console.is_jupyter
        if notebook:  # as in a terminal: one line that is written over; rich's own way needs widgets to be installed
            console = Console(force_jupyter=False, force_terminal=True, width=100)
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            refresh_per_second=2 if notebook else 10,  # a notebook keeps every line that was written
            transient=not notebook,  # a notebook cannot take a line back
            disable=not console.is_terminal,
        )
        self._bar = self._bars.add_task("loading the network", total=None, note="")

    def __enter__(self) -> Self:
        if not self._bars.disable:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._bars.disable:
            if error is None:
                self.note("learned")
            self._bars.stop()

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """The first epoch sets the length of the bar."""
        if epoch == 0:
            self._bars.reset(self._bar, total=epochs * images, description="training")
        self._bars.update(self._bar, note=f"epoch {epoch + 1}/{epochs}")

    def step(self, images: int) -> None:
        """Advance."""
        self._bars.update(self._bar, advance=images)

    def note(self, text: str) -> None:
        """Say what is going on besides training."""
        self._bars.update(self._bar, description=text, note="")
