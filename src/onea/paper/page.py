# SPDX-License-Identifier: Apache-2.0
"""An experiment's files: its table as Markdown, LaTeX and CSV, its pictures, and one HTML page of all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from onea.files import write_atomically
from onea.paper.names import METHODS
from onea.paper.pictures import pictures
from onea.paper.render import Records, grid_table
from onea.record import Record

if TYPE_CHECKING:
    from onea.paper.scale import Plan
    from onea.report.page import Picture
    from onea.report.table import Table
    from onea.runs.config import RunConfig

# What a kind of figure shows itself, so that the page need not show it again.
_DRAWN_ALREADY = {"curves": ("curves",), "directions": ("updates",), "alignment": ("bases",)}


def write_experiment(plan: Plan, records: Records, folder: Path) -> tuple[Table | None, list[Path]]:
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
    written.append(_write(folder / f"{name}.html", page(plan, table, drawn, records)))
    return table, written


def page(plan: Plan, table: Table | None, drawn: list[Picture], records: Records) -> str:
    """One page that stands on its own; what the runs differ in from the paper's is its first line."""
    from onea.report.experiment_page import experiment_page

    experiment = plan.experiment
    return experiment_page(
        experiment.heading,
        detailed(plan, records),
        [dataclasses.replace(table, notes=())] if table else [],
        table.notes if table else (),
        drawn,
        leave_out=_DRAWN_ALREADY.get(experiment.kind, ()) if drawn else (),
        closing=_origin(plan),
        runs=len(records),
    )


def detailed(plan: Plan, records: Records) -> list[Record]:
    """The finished runs that the page shows in detail, under the names of their rows; the full One-A first.

    Of a heat map's many runs these are the best and the worst of each panel.
    """
    found: dict[str, list[Record]] = {}
    for place in sorted(plan.places, key=lambda place: not is_full_one_a(place.runs[0])):
        group = place.cell.headings()[0][0]
        for run in place.runs:
            record = records.get(run.key(), {})
            if record.get("status") == "finished":
                found.setdefault(group, []).append(record | {"title": place.cell.row, "group": group})
    if plan.experiment.kind == "heatmap":
        by_accuracy = (sorted(group, key=lambda record: -record["metrics"]["A_T"]) for group in found.values())
        return [record for group in by_accuracy for record in (group[0], *group[1:][-1:])]
    return [record for group in found.values() for record in group]


def is_full_one_a(run: RunConfig) -> bool:
    """Whether a run is the method as published, whatever the scale."""
    return run.method == METHODS["One-A"] and all(name.endswith("epochs") for name in run.options)


def _origin(plan: Plan) -> str:
    which = plan.experiment.heading.split(":")[0]
    where = f"“One Adapter for All” (arXiv 2603.10237, {plan.experiment.label})"
    return f"{which} of {where}; made here by `onea paper {plan.experiment.alias}`."


def _write(path: Path, text: str) -> Path:
    write_atomically(path, text.encode())
    return path
