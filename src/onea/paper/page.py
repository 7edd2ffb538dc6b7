"""An experiment's files: its table as Markdown, LaTeX and CSV, its pictures, and one HTML page of all."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onea.files import write_atomically
from onea.paper.pictures import Picture, pictures
from onea.paper.render import Records, grid_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from onea.paper.scale import Plan
    from onea.report.grid_table import GridTable


def write_experiment(plan: Plan, records: Records, folder: Path) -> tuple[GridTable | None, list[Path]]:
    """Write everything that can be told so far; returns the table, where there is one, and the files."""
    from onea.report import formats, style

    name = plan.experiment.name
    table = None if plan.experiment.kind == "streams" else grid_table(plan, records)
    drawn = pictures(plan, table, records)
    written = []
    if table:
        for suffix, text in (
            ("md", formats.markdown(table)),
            ("tex", formats.latex(table)),
            ("csv", formats.csv_text(table)),
        ):
            written.append(_write(folder / f"{name}.{suffix}", text))
    written += [style.save(picture.draw(), folder / f"{picture.name}.png") for picture in drawn]
    written.append(_write(folder / f"{name}.html", page(plan, table, drawn)))
    return table, written


def page(plan: Plan, table: GridTable | None, drawn: list[Picture]) -> str:
    """One page that stands on its own; what the runs differ in from the paper's is its first line."""
    from onea.report import formats, html

    experiment = plan.experiment
    title = experiment.heading
    figures = [html.figure(_with_width(picture), picture.caption, picture.caption) for picture in drawn]
    return html.document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            formats.html(table) if table else "",
            *figures,
            f'<p class="soft">{escape(_origin(plan))}</p>',
        ],
    )


def _origin(plan: Plan) -> str:
    where = f"{plan.experiment.label} of “One Adapter for All” (arXiv 2603.10237)"
    return f"After {where}, made by `onea paper {plan.experiment.alias}`."


def _with_width(picture: Picture) -> Callable[[dict[str, Any]], Figure]:
    return lambda given: picture.draw(**given)


def _write(path: Path, text: str) -> Path:
    write_atomically(path, text.encode())
    return path
