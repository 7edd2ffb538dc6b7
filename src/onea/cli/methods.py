# SPDX-License-Identifier: Apache-2.0
"""``onea methods``: methods, operators, classifiers, datasets, metrics and backbones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from onea.runs.config import RunConfig


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

    tables = ((operators, _operators), (classifiers, _classifiers), (datasets, _datasets), (metrics, _metrics))
    asked = [table for wanted, table in (*tables, (backbones, lambda: _backbones(name))) if wanted]
    for table in asked or [lambda: _options(name, preset, data) if name else _methods()]:
        Console().print(table())


def _methods() -> Any:
    from onea.methods import METHODS

    table = _grid()
    table.add_row("", "passes per image are after 1, 10 and 40 tasks; *: in the One-A paper's tables")
    for known, kind in METHODS.load_all().items():
        passes = ", ".join(f"{kind.passes(kind.Options(), tasks):g}" for tasks in (1, 10, 40))
        about = f"{kind.title}{'*' if kind.in_paper else ''}: {passes} passes{_link(kind.paper)}"
        table.add_row(f"[bold]{known}", f"{about}\n[dim]trains {kind.trains}\nkeeps {kind.stores}")
    return table


def _options(name: str, preset: str, data: str) -> Any:
    """The options of a method with the values that a run with such a preset and dataset would have."""
    from onea.cli.options import meaning
    from onea.methods import method_class
    from onea.options import describe
    from onea.paper.scale import option_values
    from onea.report.formats import terminal
    from onea.report.table import Table

    method_class(name)  # says what is wrong with the name
    values = option_values(name, preset, data)
    title = f"options of {name}, preset {preset}, for {data}"
    heads = ("option", "default", "meaning")
    kind = method_class(name).Options
    names = [option for option, *_ in describe(kind)]
    lines = ((f"--{one.replace('_', '-')}", str(values[one]), meaning(kind, one)) for one in names)
    return terminal(Table.of_texts(title, heads, lines, left=3))


def _operators() -> Any:
    from onea.merging import OPERATORS

    return _with_options(OPERATORS.load_all())


def _classifiers() -> Any:
    from onea.classifiers import CLASSIFIERS

    return _with_options(CLASSIFIERS.load_all())


def _with_options(kinds: Mapping[str, Any]) -> Any:
    from dataclasses import fields

    table = _grid()
    for known, kind in kinds.items():
        options = ", ".join(f"{field.name}={field.default}" for field in fields(kind))
        table.add_row(f"[bold]{known}", f"{kind.title}{_link(kind.paper)}" + (f"\n[dim]{options}" if options else ""))
    return table


def _datasets() -> Any:
    from onea.data.sources import DATASETS

    table = _grid()
    for info in DATASETS.load_all().values():
        table.add_row(f"[bold]{info.usage}", info.description)
    return table


def _backbones(name: str | None) -> Any:
    from onea.vit.catalogue import describe, matching

    table = _grid()
    for known, about in describe(name) if name and "*" not in name else matching(name or ""):
        table.add_row(f"[bold]{known}", about)
    return table


def _metrics() -> Any:
    from onea.record_metrics import all_metrics

    table = _grid()
    for known, metric in all_metrics().items():
        better = (
            "" if "is better" in metric.meaning else f"; {'higher' if metric.higher_is_better else 'lower'} is better"
        )
        table.add_row(f"[bold]{known}", f"{metric.heading}: {metric.meaning}{better}")
    return table


def _grid() -> Any:
    from rich.table import Table

    return Table.grid(padding=(0, 2))


def _link(paper: str) -> str:
    return f", {paper.removeprefix('https://')}" if paper else ""
