# SPDX-License-Identifier: Apache-2.0
"""``onea methods``: methods, operators, classifiers, datasets, metrics and backbones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onea.research.runs.config import RunConfig

if TYPE_CHECKING:
    from onea.presentation.tables import Table


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Method whose options are listed; with --backbones, a backbone or a pattern.")
    ] = None,
    operators: Annotated[bool, typer.Option("--operators", help="List the merging operators instead.")] = False,
    classifiers: Annotated[bool, typer.Option("--classifiers", help="List the classifiers instead.")] = False,
    datasets: Annotated[bool, typer.Option("--datasets", help="List the datasets instead.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="List the metrics of a run instead.")] = False,
    backbones: Annotated[
        bool,
        typer.Option(
            "--backbones", help="Describe the backbone NAME instead, or list those that match, as in 'vit_*'."
        ),
    ] = False,
    preset: Annotated[str, typer.Option(help="With NAME: show the defaults of this preset.")] = RunConfig.preset,
    data: Annotated[str, typer.Option(help="With NAME: show the defaults for this dataset.")] = RunConfig.data,
) -> None:
    """List methods, or the options of one method.

    Also lists merging operators, classifiers, datasets, metrics and backbones.
    """
    from rich.console import Console

    from onea.presentation.tables import terminal

    tables = ((operators, _operators), (classifiers, _classifiers), (datasets, _datasets), (metrics, _metrics))
    chosen = [table for flag, table in (*tables, (backbones, lambda: _backbones(name))) if flag]
    for number, make_table in enumerate(chosen or [lambda: _options(name, preset, data) if name else _methods()]):
        table = make_table()
        console = Console(highlight=False)
        console.print(*[""] * (number > 0), terminal(table), *table.notes, sep="\n", markup=False)


def _methods() -> Table:
    from onea.research.methods import METHODS

    lines = []
    for name, method in METHODS.load_all().items():
        passes = ", ".join(f"{method.forward_passes(method.Options(), tasks):g}" for tasks in (1, 10, 40))
        title = f"{method.title}{'*' if method.in_paper else ''}{_link(method.paper)}"
        lines.append((name, f"{title}\ntrains {method.trains}\nstores {method.stores}", passes))
    notes = ("passes: forward passes per image, after 1, 10 and 40 tasks", "*: in the One-A paper's tables")
    return replace(_of_texts(("method", "description", "passes"), lines, left=2), notes=notes)


def _options(name: str, preset: str, data: str) -> Table:
    """The options of a method with their values in a run with this preset and dataset."""
    from onea.cli.options import meaning
    from onea.options import list_options
    from onea.research.methods import method_class
    from onea.research.paper.scale import option_values

    options = method_class(name).Options
    values = option_values(name, preset, data)
    names = [option for option, *_ in list_options(options)]
    lines = ((f"--{one.replace('_', '-')}", str(values[one]), meaning(options, one)) for one in names)
    return _of_texts(("option", "default", "meaning"), lines, f"options of {name}, preset {preset}, for {data}")


def _operators() -> Table:
    from onea.merging import OPERATORS

    return _with_options("operator", OPERATORS.load_all())


def _classifiers() -> Table:
    from onea.classifiers import CLASSIFIERS

    return _with_options("classifier", CLASSIFIERS.load_all())


def _with_options(heading: str, classes: Mapping[str, Any]) -> Table:
    from dataclasses import fields

    lines = []
    for name, each in classes.items():
        options = ", ".join(f"{field.name}={field.default}" for field in fields(each))
        lines.append((name, f"{each.title}{_link(each.paper)}" + (f"\n{options}" if options else "")))
    return _of_texts((heading, "description and options"), lines)


def _datasets() -> Table:
    from onea.research.data.sources import DATASETS

    return _of_texts(
        ("--data", "description"), ((info.usage, info.description) for info in DATASETS.load_all().values())
    )


def _backbones(name: str | None) -> Table:
    from onea.research.catalogue import describe, matching

    if name and "*" not in name:
        head, *lines = describe(name)
        return _of_texts(head, lines)
    return _of_texts(("backbone", "licence" if name else "description"), matching(name or ""))


def _metrics() -> Table:
    from onea.research.record_metrics import all_metrics

    lines = []
    for name, metric in all_metrics().items():
        better = "higher" if metric.higher_is_better else "lower"
        lines.append((name, metric.heading, metric.meaning.removesuffix(f"; {better} is better"), better))
    return _of_texts(("metric", "column title", "meaning", "better"), lines)


def _of_texts(heads: Sequence[str], lines: Iterable[Sequence[str]], title: str = "", left: int = 4) -> Table:
    from onea.presentation.tables import Table

    return Table.from_texts(title, heads, lines, left)


def _link(paper: str) -> str:
    return f", {paper.removeprefix('https://')}" if paper else ""
