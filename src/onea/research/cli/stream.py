# SPDX-License-Identifier: Apache-2.0
"""``onea stream``: draw up a stream of tasks, print it and picture it."""

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
    gamma: Annotated[float, typer.Option(help="Smallest task's weight relative to the largest.")] = RunConfig.gamma,
    seed: Annotated[int, typer.Option(help="Seed of the class order and the shuffle.")] = RunConfig.seed,
    order: Annotated[
        str | None,
        typer.Option(
            help="How tasks arrive: shuffled, descending or given.",
            show_default="shuffled; given with --balanced or --sizes",
        ),
    ] = None,
    balanced: Annotated[bool, typer.Option("--balanced", help="Tasks of equal size.")] = False,
    sizes: Annotated[str | None, typer.Option(help="Your own task sizes, such as 36,1,14.")] = None,
    long_tail: Annotated[
        float | None, typer.Option(metavar="MU", help="Rarest class's share of the commonest one's images.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also draw figures, into this folder.")] = None,
    no_figures: Annotated[bool, typer.Option("--no-figures", hidden=True)] = False,  # earlier ones had to be told
) -> None:
    """Show a stream: how many classes arrive with each task."""
    made = _make(classes, tasks, gamma, seed, order, balanced, sizes, long_tail)
    typer.echo(",".join(map(str, made.sizes)))
    _print_bars(made)
    if out and not no_figures:
        for path in _draw(made, out, MU if long_tail is None else long_tail):
            typer.echo(str(path))


def _make(
    classes: int | None,
    tasks: int | None,
    gamma: float,
    seed: int,
    order: str | None,
    even: bool,
    sizes: str | None,
    long_tail: float | None,
) -> Stream:
    from onea.research.streams import make_stream, parse_sizes

    if even and sizes is not None:
        raise OneaError("--balanced and --sizes both decide the task sizes; give one of them.")
    own = None if sizes is None else parse_sizes(sizes, classes)
    kind: Kind = "sizes" if own else "balanced" if even else "step"
    if classes is None:
        classes = sum(own) if own else CLASSES
    if tasks is None and own is None:
        tasks = TASKS
    return make_stream(
        classes=classes,
        tasks=tasks,
        kind=kind,
        gamma=gamma,
        sizes=own,
        order=cast("Order | None", order),  # make_stream checks it and says what it could be
        seed=seed,
        long_tail=long_tail,
        n_max=N_MAX,
    )


def _print_bars(made: Stream) -> None:
    from rich.console import Console
    from rich.table import Table

    from onea.presentation.tables import terminal_style

    console = Console(highlight=False)
    block = "#" if console.options.ascii_only else "█"
    table = Table(**terminal_style())
    table.add_column("task", justify="right", style="dim")
    table.add_column("classes", justify="right")
    table.add_column("", no_wrap=True, overflow="crop")
    if made.samples:
        table.add_column("images per class", justify="right", style="dim")
    for task, size in enumerate(made.sizes):
        bar = f"[cyan]{block * max(1, round(BAR * size / max(made.sizes)))}[/]"
        table.add_row(str(task + 1), str(size), bar, *_images(made, task))
    console.print(table)


def _images(made: Stream, task: int) -> list[str]:
    """A long-tailed task's most and fewest images; nothing when all classes have as many."""
    if not made.samples:
        return []
    positions = made.range_of(task)
    most, fewest = made.samples[positions[0]], made.samples[positions[-1]]
    return [str(most) if most == fewest else f"{most}-{fewest}"]


def _draw(made: Stream, folder: Path, mu: float) -> list[Path]:
    from onea.research.report.stream_figures import draw_stream_figures

    return draw_stream_figures(made, folder, n_max=N_MAX, mu=mu)
