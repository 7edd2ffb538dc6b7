# SPDX-License-Identifier: Apache-2.0
"""One HTML page about an experiment or any set of records: self-contained, no script, light and dark, phone to desk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from onea.errors import OneaError
from onea.record import Record
from onea.report import analysis_figures, formats, html
from onea.report.aggregate import Setting, curve, grid_table, settings
from onea.report.experiment_figures import banded_curves, same_sizes, stream_bars
from onea.report.grid_table import GridTable
from onea.report.made import made
from onea.report.matrices import matrix_panels
from onea.report.sensitivity_figures import cost_scatter, inference_cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_MATRICES = 12  # of a setting; beyond, a page would weigh more than it tells


@dataclass(frozen=True)
class Picture:
    """A figure of a page.

    Attributes:
        heading: above it.
        draw: makes it; is called with nothing and, for phones, with ``width`` in inches.
        alt: what it shows, for those who do not see it.
        caption: how to read it.
    """

    heading: str
    draw: Callable[..., Figure]
    alt: str
    caption: str


def experiment_page(
    title: str,
    records: Sequence[Record],
    tables: Sequence[GridTable] = (),
    notes: Sequence[str] = (),
    pictures: Sequence[Picture] = (),
    leave_out: Collection[str] = (),
    closing: str = "",
    runs: int | None = None,
) -> str:
    """The page as text.

    Args:
        title: heading of the page.
        records: all runs it is about; on top of what a run writes, a record may carry a ``title`` and the ``group`` of
            results that it belongs to.
        tables: of the experiment; by default one for each setting that the records come from.
        notes: what a reader must know before any number, in the first lines.
        pictures: of the experiment itself; they come before those that every page has.
        leave_out: of ``curves``, ``updates`` and ``bases``, what the pictures show already.
        closing: the last line.
        runs: how many stand behind the tables, where the records are only some of them.
    """
    if not records and not tables and not pictures:
        raise OneaError("There is no record and no table to make a page of; give at least one.")
    found = settings(records)
    parts = [f"<h1>{html.symbols(title)}</h1>", formats.html_notes(notes)]
    waiting = any(value.wanted for table in tables for value in table.values.values())
    parts.append(_lead(found, runs) if found or waiting else "")
    if tables:
        parts += ["<h2>Results</h2>", *(formats.html(table) for table in tables), _legend() if waiting else ""]
    parts += [f"<h2>{html.symbols(p.heading)}</h2>{_drawn(p.draw, p.alt, p.caption)}" for p in pictures]
    for setting in found:
        parts += _setting(setting, not tables, leave_out)
    if found:
        parts.append(made([record for setting in found for record in setting.fixed()]))
    parts.append(f'<p class="soft">{escape(closing)}</p>' if closing else "")
    return html.document(title, parts)


def _lead(found: Sequence[Setting], runs: int | None) -> str:
    if not found:
        return '<p class="lead">Nothing has been run yet.</p>'
    runs = runs or sum(len(group.records) for setting in found for group in setting.groups)
    seeds = sorted({seed for setting in found for seed in setting.seeds})
    which = f"{len(seeds)} seeds ({', '.join(map(str, seeds))})" if len(seeds) > 1 else f"seed {seeds[0]}"
    where = html.count(len(found), "setting", "settings")
    return f'<p class="lead">{html.count(runs, "run", "runs")} with {which} in {where}.</p>'


def _legend() -> str:
    return (
        '<p class="soft">Mean ± sample deviation over seeds. Marked blue: the best of a column; grey: the second best, '
        "both among complete cells and as printed. Hatched: not all seeds have been run.</p>"
    )


def _setting(setting: Setting, with_table: bool, leave_out: Collection[str]) -> list[str]:
    fixed = setting.fixed()
    parts = [f'<h2 class="part">{escape(setting.name)}</h2>']
    seeds = html.count(len(setting.seeds), "seed", "seeds")
    if with_table:
        parts += [formats.html(grid_table(setting, f"Results over {seeds}")), _legend()]
    else:
        table = formats.html(grid_table(setting, f"Over {seeds}"))
        parts.append(f"<details><summary>Every metric of these runs</summary>{table}</details>")
    parts += [_curves(setting)] if "curves" not in leave_out else []
    parts += [_stream(fixed[0]), _matrices(fixed)]
    if analysed := [record for record in fixed if analysis_figures.has_analysis(record)]:
        gated = (record for record in analysed if _gates(record)[0] < _gates(record)[1])
        parts += _analysis(next(gated, analysed[0]), leave_out)
    if sum(inference_cost(group) is not None for group in setting.groups) > 1:
        parts.append(_cost(setting))
    return parts


def _curves(setting: Setting) -> str:
    lines = [f"{group.name}: {html.series(curve(group).mean)}" for group in setting.groups]
    alt = "Line chart, accuracy in percent over all classes seen after each task. " + ". ".join(lines) + "."
    bars = "Grey bars: how many classes each task brings"
    if not same_sizes(setting):
        bars += ", mean over seeds, which bring them in different orders"
    several = any(curve(group).std for group in setting.groups)
    lines_are = "Lines: mean over seeds; bands: one sample deviation to each side." if several else "One seed."
    caption = f"{lines_are} {bars}."
    return f"<h3>Accuracy as classes arrive</h3>{_drawn(lambda **w: banded_curves(setting, **w), alt, caption)}"


def _stream(record: Record) -> str:
    sizes = record["stream"]["sizes"]
    alt = f"Bar chart, classes of each task in order of arrival: {', '.join(map(str, sizes))}."
    caption = f"{html.count(sum(sizes), 'class', 'classes')} in {html.count(len(sizes), 'task', 'tasks')}."
    return f"<h3>The stream</h3>{_drawn(lambda **w: stream_bars(record, **w), alt, caption)}"


def _matrices(records: Sequence[Record]) -> str:
    shown = records[:MOST_MATRICES]
    ends = []
    for record in shown:
        last = [row[-1] for row in record["metrics"]["matrix"]]
        ends.append(f"{record['title']}: {html.series(last)}")
    alt = "Heat maps, accuracy of each task after each task. After the last one, by task: " + ". ".join(ends) + "."
    caption = (
        f"Seed {records[0]['config']['seed']}. Along a row: how well one task's test images are still recognised, "
        "among all classes seen by then."
    )
    if len(records) > len(shown):
        caption += f" The first {len(shown)} of {len(records)} configurations."
    return f"<h3>What is kept of each task</h3>{_drawn(lambda **w: matrix_panels(shown, **w), alt, caption)}"


def _analysis(record: Record, leave_out: Collection[str]) -> list[str]:
    name, analysis = analysis_figures.analysed_merge(record)
    whose = f"{record['title']}, seed {record['config']['seed']}, merge of {name}"
    low, high = _gates(record)
    pictures = {
        "spectra": Picture(
            "Spectra and gates per layer",
            lambda **w: analysis_figures.spectra_and_gates(record, **w),
            f"Line charts, normalised singular values and gates by layer; gates from {low:.2f} to {high:.2f}.",
            f"{whose}. The gate holds back the base's strongest directions, on the left, and lets the weaker follow.",
        ),
        "updates": Picture(
            "Update strength per direction",
            lambda **w: analysis_figures.update_strength(record, **w),
            f"Line charts, norm of the update along each singular direction of the base. {_mean_updates(analysis)}",
            f"{whose}. How far the merge moved the matrices along each singular direction of the base.",
        ),
        "bases": Picture(
            "Basis before and after",
            lambda **w: analysis_figures.basis_alignment(record, **w),
            f"Heat maps, overlap of the base's singular directions with those after the merge. {_diagonals(analysis)}",
            f"{whose}. A dark diagonal: the directions stayed where they were. Many directions are shown in blocks.",
        ),
    }
    shown = [picture for name, picture in pictures.items() if name not in leave_out]
    return [f"<h3>{escape(p.heading)}</h3>{_drawn(p.draw, p.alt, p.caption)}" for p in shown]


def _gates(record: Record) -> tuple[float, float]:
    """The lowest and the highest gate of the merge that is shown."""
    _, analysis = analysis_figures.analysed_merge(record)
    every = [analysis_figures.numbers(layer["gate"]) for kind in analysis.values() for layer in kind["layers"]]
    return min(map(min, every)), max(map(max, every))


def _mean_updates(analysis: dict[str, Any]) -> str:
    texts = []
    for kind, entry in analysis.items():
        lines = [analysis_figures.numbers(layer["update"]) for layer in entry["layers"]]
        ends = [sum(line[place] for line in lines) / len(lines) for place in (0, -1)]
        texts.append(f"{kind}: mean over layers {ends[0]:.3g} at the first direction, {ends[1]:.3g} at the last.")
    return " ".join(texts)


def _diagonals(analysis: dict[str, Any]) -> str:
    texts = []
    for kind, entry in analysis.items():
        table = analysis_figures.square(entry["overlap"])
        texts.append(f"{kind}: diagonal from {table[0][0]:.2f} at the first to {table[-1][-1]:.2f} at the last.")
    return " ".join(texts)


def _cost(setting: Setting) -> str:
    known = [(group.name, inference_cost(group)) for group in setting.groups]
    costs = ", ".join(f"{name} {cost / 1e9:.2f}" for name, cost in known if cost)
    alt = f"Scatter chart, last accuracy against GFLOPs for one image after the last task: {costs}."
    caption = "Measured by counting the operations of one prediction after the last task."
    return f"<h3>Accuracy and cost</h3>{_drawn(lambda **w: cost_scatter(setting.groups, **w), alt, caption)}"


def _drawn(draw: Callable[..., Any], alt: str, caption: str) -> str:
    return html.figure(lambda width: draw(**width), alt, caption)
