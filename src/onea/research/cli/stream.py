# SPDX-License-Identifier: Apache-2.0
"""``onea stream``: the task sizes of a stream, as text and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from onea.errors import OneaError
from onea.research.runs.config import RunConfig

if TYPE_CHECKING:
    from onea.research.streams import Kind, Order, Stream

_CLASSES, _TASKS = 100, 10
_IMAGES_PER_CLASS = 500  # of CIFAR-100, the paper's example
_MU = 0.1  # long tail of a figure without --long-tail
_BAR_WIDTH = 40  # characters


def stream(
    classes: Annotated[
        int | None, typer.Option(help="Number of classes.", show_default=f"{_CLASSES}, or the sum of --sizes")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(help="Number of tasks.", show_default=f"{_TASKS}, or the number of --sizes")
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
            help="Long-tailed images per class: ratio of the rarest class to the most frequent one.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write figures to this folder.")] = None,
) -> None:
    """Print the number of classes of each task in a stream."""
    from onea.research.streams import make_stream, parse_sizes

    if balanced and sizes is not None:
        raise OneaError("--balanced and --sizes both set the task sizes; give one of them.")
    task_sizes = None if sizes is None else parse_sizes(sizes, classes)
    kind: Kind = "sizes" if task_sizes else "balanced" if balanced else "step"
    result = make_stream(
        classes=(sum(task_sizes) if task_sizes else _CLASSES) if classes is None else classes,
        tasks=_TASKS if tasks is None and task_sizes is None else tasks,
        kind=kind,
        gamma=gamma,
        sizes=task_sizes,
        order=cast("Order | None", order),  # make_stream validates it
        seed=seed,
        long_tail=long_tail,
        n_max=_IMAGES_PER_CLASS,
    )
    typer.echo(",".join(map(str, result.sizes)))
    _print_bars(result)
    if out:
        from onea.research.report.stream_figures import draw_stream_figures

        for path in draw_stream_figures(
            result, out, n_max=_IMAGES_PER_CLASS, mu=_MU if long_tail is None else long_tail
        ):
            typer.echo(str(path))


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
        row = [str(task + 1), str(size), f"[cyan]{block * max(1, round(_BAR_WIDTH * size / max(stream.sizes)))}[/]"]
        if stream.samples:
            classes = stream.range_of(task)
            largest, smallest = stream.samples[classes[0]], stream.samples[classes[-1]]
            row.append(str(largest) if largest == smallest else f"{largest}-{smallest}")
        table.add_row(*row)
    console.print(table)
