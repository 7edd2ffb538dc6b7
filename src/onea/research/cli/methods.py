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
    name: Annotated[str | None, typer.Argument(help="List the options of this method, or see --backbones.")] = None,
    operators: Annotated[bool, typer.Option("--operators", help="List the merging operators instead.")] = False,
    classifiers: Annotated[bool, typer.Option("--classifiers", help="List the classifiers instead.")] = False,
    datasets: Annotated[bool, typer.Option("--datasets", help="List the datasets instead.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="List the metrics of a run instead.")] = False,
    backbones: Annotated[
        bool, typer.Option("--backbones", help="Tell about the backbone NAME instead, or list those that fit it.")
    ] = False,
    preset: Annotated[str, typer.Option(help="With NAME: defaults of this preset.")] = RunConfig.preset,
    data: Annotated[str, typer.Option(help="With NAME: defaults for this dataset.")] = RunConfig.data,
) -> None:
    """List the methods, the options of one, or what else has a name."""
    from rich.console import Console

    from onea.presentation.tables import terminal

    tables = ((operators, _operators), (classifiers, _classifiers), (datasets, _datasets), (metrics, _metrics))
    asked = [table for wanted, table in (*tables, (backbones, lambda: _backbones(name))) if wanted]
    for number, make in enumerate(asked or [lambda: _options(name, preset, data) if name else _methods()]):
        table = make()
        console = Console(highlight=False)
        console.print(*[""] * (number > 0), terminal(table), *table.notes, sep="\n", markup=False)


def _methods() -> Table:
    from onea.research.methods import METHODS

    lines = []
    for known, kind in METHODS.load_all().items():
        passes = ", ".join(f"{kind.forward_passes(kind.Options(), tasks):g}" for tasks in (1, 10, 40))
        title = f"{kind.title}{'*' if kind.in_paper else ''}{_link(kind.paper)}"
        lines.append((known, f"{title}\ntrains {kind.trains}\nkeeps {kind.stores}", passes))
    notes = ("passes: per image, after 1, 10 and 40 tasks", "*: in the One-A paper's tables")
    return replace(_of_texts(("method", "what it is", "passes"), lines, left=2), notes=notes)


def _options(name: str, preset: str, data: str) -> Table:
    """The options of a method with the values that a run with such a preset and dataset would have."""
    from onea.cli.options import meaning
    from onea.options import list_options
    from onea.research.methods import method_class
    from onea.research.paper.scale import option_values

    method_class(name)  # says what is wrong with the name
    values = option_values(name, preset, data)
    kind = method_class(name).Options
    names = [option for option, *_ in list_options(kind)]
    lines = ((f"--{one.replace('_', '-')}", str(values[one]), meaning(kind, one)) for one in names)
    return _of_texts(("option", "default", "meaning"), lines, f"options of {name}, preset {preset}, for {data}")


def _operators() -> Table:
    from onea.merging import OPERATORS

    return _with_options("operator", OPERATORS.load_all())


def _classifiers() -> Table:
    from onea.classifiers import CLASSIFIERS

    return _with_options("classifier", CLASSIFIERS.load_all())


def _with_options(what: str, kinds: Mapping[str, Any]) -> Table:
    from dataclasses import fields

    lines = []
    for known, kind in kinds.items():
        options = ", ".join(f"{field.name}={field.default}" for field in fields(kind))
        lines.append((known, f"{kind.title}{_link(kind.paper)}" + (f"\n{options}" if options else "")))
    return _of_texts((what, "what it is, and its options"), lines)


def _datasets() -> Table:
    from onea.research.data.sources import DATASETS

    return _of_texts(
        ("--data", "what it is"), ((info.usage, info.description) for info in DATASETS.load_all().values())
    )


def _backbones(name: str | None) -> Table:
    from onea.research.catalogue import describe, matching

    if name and "*" not in name:
        head, *lines = describe(name)
        return _of_texts(head, lines)
    return _of_texts(("backbone", "what it is" if not name else "licence"), matching(name or ""))


def _metrics() -> Table:
    from onea.research.record_metrics import all_metrics

    lines = []
    for known, metric in all_metrics().items():
        better = "higher" if metric.higher_is_better else "lower"
        lines.append((known, metric.heading, metric.meaning.removesuffix(f"; {better} is better"), better))
    return _of_texts(("metric", "in tables", "meaning", "better"), lines)


def _of_texts(heads: Sequence[str], lines: Iterable[Sequence[str]], title: str = "", left: int = 4) -> Table:
    from onea.presentation.tables import Table

    return Table.of_texts(title, heads, lines, left)


def _link(paper: str) -> str:
    return f", {paper.removeprefix('https://')}" if paper else ""
