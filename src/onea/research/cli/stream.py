# SPDX-License-Identifier: Apache-2.0
"""``onea stream``: the task sizes of a stream, as text and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from onea.errors import OneaError
from onea.research.runs.config import RunConfig

if TYPE_CHECKING:  # numpy, rich and matplotlib are loaded by the command, not by `onea --help`
    from onea.research.streams import Kind, Order, Stream

CLASSES = 100
TASKS = 10
N_MAX = 500  # CIFAR-100's training images per class, the paper's example
MU = 0.1
BAR = 40  # characters of the longest bar


def stream(
    classes: Annotated[
        int | None, typer.Option(help="Number of classes.", show_default=f"{CLASSES}, or the sum of --sizes")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(help="Number of tasks.", show_default=f"{TASKS}, or as many as --sizes has")
    ] = None,
    gamma: Annotated[
        float, typer.Option(help="Step imbalance: size of the smallest task relative to the largest; 1 is balanced.")
    ] = RunConfig.gamma,
    seed: Annotated[int, typer.Option(help="Random seed of the class order and the task order.")] = RunConfig.seed,
    order: Annotated[
        str | None,
        typer.Option(
            help="Task order: shuffled, descending (largest first) or given (not shuffled).",
            show_default="shuffled; given with --balanced or --sizes",
        ),
    ] = None,
    balanced: Annotated[bool, typer.Option("--balanced", help="Tasks of equal size.")] = False,
    sizes: Annotated[str | None, typer.Option(help="Number of classes of each task, such as 36,1,14.")] = None,
    long_tail: Annotated[
        float | None,
        typer.Option(
            metavar="MU",
            help="Long-tailed images per class: those of the rarest class relative to the most frequent one.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write figures to this folder.")] = None,
) -> None:
    """Print the number of classes of each task in a stream."""
    made = _make_stream(classes, tasks, gamma, seed, order, balanced, sizes, long_tail)
    typer.echo(",".join(map(str, made.sizes)))
    _print_bars(made)
    if out:
        for path in _draw(made, out, MU if long_tail is None else long_tail):
            typer.echo(str(path))


def _make_stream(
    classes: int | None,
    tasks: int | None,
    gamma: float,
    seed: int,
    order: str | None,
    balanced: bool,
    sizes: str | None,
    long_tail: float | None,
) -> Stream:
    from onea.research.streams import make_stream, parse_sizes

    if balanced and sizes is not None:
        raise OneaError("--balanced and --sizes both decide the task sizes; give one of them.")
    task_sizes = None if sizes is None else parse_sizes(sizes, classes)
    kind: Kind = "sizes" if task_sizes else "balanced" if balanced else "step"
    if classes is None:
        classes = sum(task_sizes) if task_sizes else CLASSES
    if tasks is None and task_sizes is None:
        tasks = TASKS
    return make_stream(
        classes=classes,
        tasks=tasks,
        kind=kind,
        gamma=gamma,
        sizes=task_sizes,
        order=cast("Order | None", order),  # make_stream validates it
        seed=seed,
        long_tail=long_tail,
        n_max=N_MAX,
    )


def _print_bars(stream: Stream) -> None:
    from rich.console import Console
    from rich.table import Table

    from onea.presentation.tables import terminal_style

    console = Console(highlight=False)
    block = "#" if console.options.ascii_only else "█"
    table = Table(**terminal_style())
    table.add_column("task", justify="right", style="dim")
    table.add_column("classes", justify="right")
    table.add_column("", no_wrap=True, overflow="crop")
    if stream.samples:
        table.add_column("images per class", justify="right", style="dim")
    for task, size in enumerate(stream.sizes):
        bar = f"[cyan]{block * max(1, round(BAR * size / max(stream.sizes)))}[/]"
        table.add_row(str(task + 1), str(size), bar, *_images_per_class(stream, task))
    console.print(table)


def _images_per_class(stream: Stream, task: int) -> list[str]:
    """The largest and the smallest number of images per class of a task; empty for a stream without a long tail."""
    if not stream.samples:
        return []
    positions = stream.range_of(task)
    most, fewest = stream.samples[positions[0]], stream.samples[positions[-1]]
    return [str(most) if most == fewest else f"{most}-{fewest}"]


def _draw(stream: Stream, folder: Path, mu: float) -> list[Path]:
    from onea.research.report.stream_figures import draw_stream_figures

    return draw_stream_figures(stream, folder, n_max=N_MAX, mu=mu)
