# SPDX-License-Identifier: Apache-2.0
"""``onea methods``: methods, operators, classifiers, datasets, metrics and backbones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from onea.classifiers import CLASSIFIERS
from onea.merging import OPERATORS
from onea.presentation.tables import Table, terminal
from onea.research.runs.config import RunConfig


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
            "--backbones", help="Describe the backbone NAME instead, or list those that match a pattern like 'vit_*'."
        ),
    ] = False,
    preset: Annotated[str, typer.Option(help="With NAME: show the defaults of this preset.")] = RunConfig.preset,
    data: Annotated[str, typer.Option(help="With NAME: show the defaults for this dataset.")] = RunConfig.data,
) -> None:
    """List methods, or the options of one method.

    Also lists merging operators, classifiers, datasets, metrics and backbones.
    """
    from rich.console import Console

    tables = (
        (operators, lambda: _components("operator", OPERATORS.load_all())),
        (classifiers, lambda: _components("classifier", CLASSIFIERS.load_all())),
        (datasets, _datasets),
        (metrics, _metrics),
        (backbones, lambda: _backbones(name)),
    )
    chosen = [table for flag, table in tables if flag]
    for number, make_table in enumerate(chosen or [lambda: _options(name, preset, data) if name else _methods()]):
        table = make_table()
        console = Console(highlight=False)
        console.print(*[""] * (number > 0), terminal(table), *table.notes, sep="\n", markup=False)


def _methods() -> Table:
    from onea.research.methods import METHODS

    rows = []
    for name, method in METHODS.load_all().items():
        passes = ", ".join(f"{method.forward_passes(method.Options(), tasks):g}" for tasks in (1, 10, 40))
        title = f"{method.title}{'*' if method.in_paper else ''}{_link(method.paper)}"
        rows.append((name, f"{title}\ntrains {method.trains}\nstores {method.stores}", passes))
    notes = ("passes: forward passes per image, after 1, 10 and 40 tasks", "*: in the One-A paper's tables")
    return replace(Table.from_texts("", ("method", "description", "passes"), rows, text_columns=2), notes=notes)


def _options(name: str, preset: str, data: str) -> Table:
    """The options of a method with their values in a run with this preset and dataset."""
    from onea.cli.options import field_help
    from onea.options import list_options
    from onea.research.methods import method_class
    from onea.research.paper.plan import option_values

    kind, values = method_class(name).Options, option_values(name, preset, data)
    rows = [
        (f"--{option.replace('_', '-')}", str(values[option]), field_help(kind, option))
        for option, *_ in list_options(kind)
    ]
    title = f"options of {name}, preset {preset}, for {data}"
    related = method_class(name).related
    notes = ("related work:", *(f"- {work}{_link(link)}" for work, link in related.items())) if related else ()
    return replace(Table.from_texts(title, ("option", "default", "meaning"), rows, text_columns=3), notes=notes)


def _components(heading: str, classes: Mapping[str, Any]) -> Table:
    """Merging operators or classifiers, with the defaults of their options."""
    rows = []
    for name, kind in classes.items():
        options = ", ".join(f"{field.name}={field.default}" for field in fields(kind))
        rows.append((name, f"{kind.title}{_link(kind.paper)}" + (f"\n{options}" if options else "")))
    return Table.from_texts("", (heading, "description and options"), rows, text_columns=2)


def _datasets() -> Table:
    from onea.research.data.sources import DATASETS

    rows = ((info.usage, info.description) for info in DATASETS.load_all().values())
    return Table.from_texts("", ("--data", "description"), rows, text_columns=2)


def _backbones(name: str | None) -> Table:
    from onea.research.catalogue import describe_backbone, list_backbones

    if name and "*" not in name:
        heads, *rows = describe_backbone(name)
        return Table.from_texts("", heads, rows, text_columns=2)
    return Table.from_texts(
        "", ("backbone", "licence" if name else "description"), list_backbones(name or ""), text_columns=2
    )


def _metrics() -> Table:
    from onea.research.record_metrics import all_metrics

    rows = []
    for name, metric in all_metrics().items():
        better = "higher" if metric.higher_is_better else "lower"
        rows.append((name, metric.heading, metric.meaning.removesuffix(f"; {better} is better"), better))
    return Table.from_texts("", ("metric", "column title", "meaning", "better"), rows, text_columns=4)


def _link(paper: str) -> str:
    return f", {paper.removeprefix('https://')}" if paper else ""
