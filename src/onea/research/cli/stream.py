# SPDX-License-Identifier: Apache-2.0
"""``onea stream``: the tasks of a stream, as text, figures and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from onea.cli.options import Json, field_help
from onea.errors import OneaError
from onea.research.runs.config import RunConfig, make_config

if TYPE_CHECKING:
    from onea.data.dataset import Dataset
    from onea.research.streams import Kind, Order, Stream

_CLASSES, _TASKS = 100, 10
_IMAGES_PER_CLASS = 500  # of CIFAR-100, the paper's example
_MU = 0.1  # long tail of a figure without --long-tail
_BAR_WIDTH = 40  # characters


def stream(
    classes: Annotated[
        int | None,
        typer.Option(help="Number of classes.", show_default=f"{_CLASSES}, the sum of --sizes or those of --data"),
    ] = None,
    data: Annotated[str | None, typer.Option(help=f"Show the stream of a run. {field_help(RunConfig, 'data')}")] = None,
    root: Annotated[str | None, typer.Option(help=field_help(RunConfig, "root"))] = None,
    tasks: Annotated[
        int | None,
        typer.Option(help="Number of tasks.", show_default=f"{_TASKS}, or the number of --sizes or groups of --data"),
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
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write figures and the JSON to this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the number of classes of each task in a stream.

    The JSON also has the order of the classes and, with --data, the training and test images of each. It is for other
    people's code, and for `onea run --stream FILE.json`.
    """
    if balanced and sizes is not None:
        raise OneaError("--balanced and --sizes both set the task sizes; give one of them.")
    if data and classes is not None:
        raise OneaError("--classes has no effect with --data, whose classes are known; leave it out.")
    if root and not data:
        raise OneaError("--root has no effect without --data; give the dataset as well.")
    dataset, n_max = None, _IMAGES_PER_CLASS
    if data:
        values = {"data": data, "root": root, "tasks": tasks, "gamma": gamma, "sizes": sizes, "order": order}
        values |= {"seed": seed, "long_tail": long_tail, "stream": "balanced" if balanced else "auto"}
        result, dataset, n_max = _stream_of_data(values)
    else:
        result = _stream_of_numbers(classes, tasks, sizes, balanced, gamma, order, seed, long_tail)
    is_step = not (balanced or sizes or result.names)
    text = _json(result, seed, order or ("shuffled" if is_step else "given"), dataset)
    if as_json:
        typer.echo(text, nl=False)
    else:
        typer.echo(",".join(map(str, result.sizes)))
        _print_bars(result)
    if out:
        from onea.files import write_text
        from onea.research.report.stream_figures import draw_stream_figures

        paths = draw_stream_figures(result, out, n_max=n_max, mu=_MU if long_tail is None else long_tail)
        write_text(out / "stream.json", text)
        for path in (*paths, out / "stream.json"):
            typer.echo(str(path), err=as_json)


def _stream_of_numbers(
    classes: int | None,
    tasks: int | None,
    sizes: str | None,
    balanced: bool,
    gamma: float,
    order: str | None,
    seed: int,
    long_tail: float | None,
) -> Stream:
    """A stream of classes without a dataset."""
    from onea.research.streams import make_stream, parse_sizes

    task_sizes = None if sizes is None else parse_sizes(sizes, classes)
    kind: Kind = "sizes" if task_sizes else "balanced" if balanced else "step"
    return make_stream(
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


def _stream_of_data(values: dict[str, Any]) -> tuple[Stream, Dataset, int]:
    """The stream of a run with these options, its dataset, and the number of images of the most frequent class."""
    from collections import Counter

    from onea.research.runs.setup import load_run_dataset, stream_of_run

    config = make_config(values)
    dataset = load_run_dataset(config)
    return stream_of_run(config, dataset), dataset, max(Counter(dataset.train.labels.tolist()).values())


def _json(stream: Stream, seed: int, order: str, dataset: Dataset | None) -> str:
    import json

    from onea.research.runs.stream_file import export_stream

    rows: list[int] = []
    if dataset is not None:
        from onea.research.runs.setup import training_rows

        rows = training_rows(dataset, stream, seed)
    content = export_stream(stream, seed, order, dataset, rows)
    # One line per value: those with many images are read by programs, and the rest by people.
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()) + "\n}\n"


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
