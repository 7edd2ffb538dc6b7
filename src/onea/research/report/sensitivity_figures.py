# SPDX-License-Identifier: Apache-2.0
"""Pictures of grids: accuracy over the gate's two parameters, over the rank, and against what inference costs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onea.errors import OneaError
from onea.presentation import style
from onea.presentation.style import blues
from onea.presentation.table import Value
from onea.research.record import Record
from onea.research.record_metrics import metric
from onea.research.report.aggregate import Group, over_seeds, settings, summarise
from onea.research.report.curves import MARKERS, NARROW, legend_columns, spread
from onea.research.report.tables import finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.4
LEAST_RANGE = 2.0  # points; runs of one configuration differ by about half of that
FILLS = ("full", "none", "bottom")


def by_options(records: Sequence[Record], names: Sequence[str], value: str = "A_T") -> dict[tuple[Any, ...], Value]:
    """A metric over seeds for every combination of some options that occurs in finished runs."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for record in records:
        options = record.get("options", {})
        if finished(record) and all(name in options for name in names):
            found[tuple(options[name] for name in names)].append(record["metrics"][value])
    return {key: summarise(found[key]) for key in sorted(found)}


def colour_range(cells: Sequence[Value]) -> tuple[float, float]:
    """The values of the palest and of the darkest colour: what is drawn, and at least four deviations or two points.

    So a map of nothing but noise looks even.

    >>> colour_range([Value(mean=70.7), Value(mean=71.1)]), colour_range([Value(mean=60.0), Value(mean=80.0)])
    ((69.9, 71.9), (60.0, 80.0))
    """
    means = [cell.mean for cell in cells if cell.mean is not None]
    noise = max([LEAST_RANGE, *(4 * cell.std for cell in cells if cell.std is not None)])
    low, high = min(means), max(means)
    short = max(0.0, noise - (high - low)) / 2
    return round(low - short, 9), round(high + short, 9)


def gate_heat_map(records: Sequence[Record], width: float = WIDTH, value: str = "A_T") -> Figure:
    """A metric over the gate's sharpness (columns) and quantile (rows); what has not been run stays blank."""
    cells = by_options(records, ("kappa", "quantile"), value)
    if not cells:
        raise OneaError("No finished record has the options kappa and quantile; run one-a with several of them.")
    kappas, quantiles = (sorted({key[place] for key in cells}) for place in (0, 1))
    means = {key: cell.mean for key, cell in cells.items() if cell.mean is not None}
    low, high = colour_range(list(cells.values()))
    table = [[means.get((kappa, quantile), float("nan")) for kappa in kappas] for quantile in quantiles]
    with style.themed():
        figure = style.blank(width, 1.5 + 0.62 * len(quantiles))
        axes = figure.subplots()
        image = axes.imshow(table, cmap=blues(), vmin=low - 0.15 * (high - low + 0.1), vmax=high + 0.1, aspect="auto")
        for (kappa, quantile), cell in cells.items():
            _write(axes, kappas.index(kappa), quantiles.index(quantile), cell, (low, high), width)
        for kappa in kappas:
            for quantile in quantiles:
                if (kappa, quantile) not in cells:
                    place = (kappas.index(kappa), quantiles.index(quantile))
                    axes.text(*place, "not run", ha="center", va="center", color=style.MUTED, fontsize=7)
        axes.set_xticks(range(len(kappas)), [f"{kappa:g}" for kappa in kappas])
        axes.set_yticks(range(len(quantiles)), [f"{quantile:g}" for quantile in quantiles])
        axes.set(xlabel="kappa: sharpness of the gate", ylabel="quantile q")
        axes.set_title(f"{_symbol(value)} over the gate's parameters")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, format="%.1f")
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
    return figure


def rank_curves(records: Sequence[Record], width: float = WIDTH, value: str = "A_T") -> Figure:
    """A metric over the adapter's rank, a line for each setting, with the deviation over seeds."""
    lines = _by_rank(records, value)
    if not lines:
        raise OneaError("No finished record has the option rank; run a method with adapters of several ranks.")
    ticks = sorted({rank for cells in lines.values() for rank in cells})
    with style.themed():
        figure = style.blank(width, 3.8)
        axes = figure.subplots()
        for index, (name, cells) in enumerate(lines.items()):
            ranks = list(cells)
            axes.errorbar(
                ranks,
                [cell.mean or 0.0 for cell in cells.values()],
                yerr=[cell.std or 0.0 for cell in cells.values()],
                color=style.PALETTE[index % len(style.PALETTE)],
                marker=MARKERS[index % len(MARKERS)],
                linewidth=2,
                capsize=3,
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{rank:g}" for rank in ticks])
        axes.minorticks_off()
        axes.set(xlabel="rank of the adapter", ylabel=f"{_symbol(value)} (%)")
        axes.set_title("Accuracy over the rank")
        axes.grid(axis="y")
        for text in figure.legend(loc="outside lower left", ncols=1).get_texts():
            text.set_parse_math(False)
    return figure


def cost_scatter(groups: Sequence[Group], width: float = WIDTH, value: str = "A_T") -> Figure:
    """A metric against the floating-point operations that one image takes after the last task, a point a method."""
    known = [(group, inference_cost(group), over_seeds(group, metric(value))) for group in groups]
    points = [(group, cost, cell) for group, cost, cell in known if cost and cell.mean is not None]
    if not points:
        raise OneaError("No finished record tells what inference costs; run again with this version.")
    costs, heights = [cost / 1e9 for _, cost, _ in points], [cell.mean or 0.0 for _, _, cell in points]
    with style.themed():
        listed = width < NARROW or len(points) > 8
        columns, room = legend_columns([group.name for group, _, _ in points], width)
        figure = style.blank(width, 4.2 + room if listed else 4.2)
        axes = figure.subplots()
        for index, (group, _, cell) in enumerate(points):
            colour, marker = style.PALETTE[index % len(style.PALETTE)], MARKERS[index % len(MARKERS)]
            filled = FILLS[index // len(style.PALETTE) % len(FILLS)]  # colours start again
            look: dict[str, Any] = {"color": colour, "marker": marker, "fillstyle": filled, "markersize": 8}
            look |= {"linestyle": "none", "capsize": 3, "zorder": 100 - index}  # the first one lies on top
            axes.errorbar(costs[index], heights[index], yerr=cell.std, label=group.name, **look)
        if max(costs) > 4 * min(costs):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("{x:g}")
            axes.margins(x=0.12)
        else:
            axes.set_xlim(0, 1.25 * max(costs))  # from zero, or a few percent would look like a gulf
        axes.margins(y=0.12)
        axes.set(xlabel="GFLOPs for one image after the last task", ylabel=f"{_symbol(value)} (%)")
        axes.set_title("Accuracy and the cost of inference")
        axes.grid()
        if listed:
            for text in figure.legend(loc="outside lower left", ncols=columns).get_texts():
                text.set_parse_math(False)
        else:
            _name_points(axes, [group.name for group, _, _ in points], costs, heights)
    return figure


def inference_cost(group: Group) -> float | None:
    """Floating-point operations per image after the last task, as the finished runs measured them."""
    costs = [record["cost"][-1]["flops_per_image"] for record in group.done if record.get("cost")]
    return sum(costs) / len(costs) if costs else None


def _by_rank(records: Sequence[Record], value: str) -> Mapping[str, dict[float, Value]]:
    found: dict[str, dict[float, Value]] = {}
    for setting in settings(records):
        every = [record for group in setting.groups for record in group.records]
        methods = dict.fromkeys(str(record.get("title") or record["config"]["method"]) for record in every)
        for method in methods:
            mine = [r for r in every if str(r.get("title") or r["config"]["method"]) == method]
            cells = by_options(mine, ("rank",), value)
            if cells:
                name = f"{method}, {setting.name}"
                found[name] = {float(rank): cell for (rank,), cell in cells.items()}
    return found


def _write(axes: Any, x: int, y: int, cell: Value, ends: tuple[float, float], width: float) -> None:
    low, high = ends
    dark = cell.mean is not None and cell.mean > low + 0.7 * (high - low)
    spread_text = f"\n± {cell.std:.2f}" if cell.std is not None else ""
    size = 7.0 if width < NARROW else 8.5
    ink = "white" if dark else style.INK
    axes.text(x, y, f"{cell.mean:.2f}{spread_text}", ha="center", va="center", color=ink, fontsize=size)


def _name_points(axes: Any, names: Sequence[str], xs: Sequence[float], ys: Sequence[float]) -> None:
    low, high = axes.get_ylim()
    for name, x, y, place in zip(names, xs, ys, spread(ys, 0.07 * (high - low)), strict=True):
        left = x > (min(xs) + max(xs)) / 2 and max(xs) > min(xs)
        axes.annotate(
            name,
            (x, place),
            (-9 if left else 9, 0),
            textcoords="offset points",
            va="center",
            ha="right" if left else "left",
            parse_math=False,
            color=style.INK if abs(place - y) < 1e-9 else style.MUTED,
        )


def _symbol(value: str) -> str:
    return re.sub(r"\bA(_T)?\b", lambda found: f"${found[0]}$", metric(value).title)
