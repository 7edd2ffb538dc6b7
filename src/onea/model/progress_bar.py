# SPDX-License-Identifier: Apache-2.0
"""Progress bars: one line in a terminal or a notebook, and no output anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from onea.runtime import Progress

MIN_IMAGES = 100  # with fewer, predictions show no progress bar


class LearningBar(Progress):
    """A progress bar over all epochs of an update, with the time left and the current step."""

    _finished = "learned"

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        notebook = console.is_jupyter
        if notebook:  # overwrite one line as in a terminal, because rich's notebook output needs widgets
            console = Console(force_jupyter=False, force_terminal=True, width=100)
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            refresh_per_second=2 if notebook else 10,  # a notebook stores every line
            transient=not notebook,  # a notebook cannot clear a line
            disable=not console.is_terminal,
        )
        self._bar = self._bars.add_task("loading the network", total=None, note="")
        self._shown = False

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            if error is None:
                self.start_phase(self._finished)
            self._bars.stop()

    def start_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """Show the epoch; the first one sets the length of the bar."""
        if epoch == 0:
            self._bars.reset(self._bar, total=epochs * images, description="training")
        self._bars.update(self._bar, note=f"epoch {epoch + 1}/{epochs}")

    def start_images(self, text: str, images: int) -> None:
        """Restart the bar, for this number of images."""
        self._bars.reset(self._bar, total=images, description=text, note="")

    def step(self, images: int) -> None:
        """Advance by this number of images."""
        self._bars.update(self._bar, advance=images)

    def start_phase(self, text: str) -> None:
        """Show the name of a step other than training."""
        self._bars.update(self._bar, description=text, note="")

    def _show(self) -> None:
        if not self._bars.disable:
            self._bars.start()
            self._shown = True


class PredictionBar(LearningBar):
    """A progress bar over many images: first while they are read, then while features are computed."""

    _finished = "done"

    def __enter__(self) -> Self:
        return self

    def start_images(self, text: str, images: int) -> None:
        """Show the bar if there are many images."""
        if images >= MIN_IMAGES:
            super().start_images(text, images)
            self._show()
