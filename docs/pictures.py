# SPDX-License-Identifier: Apache-2.0
"""The figures of concepts.md and one-a-plus.md, from committed records and the program's own code; no training.

python docs/pictures.py
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch

from onea.merging.fusion import Gate, fuse
from onea.record import read_record
from onea.report import style
from onea.report.analysis_figures import spectra_and_gates, update_strength
from onea.report.curves import accuracy_curves
from onea.report.matrices import accuracy_matrix

HERE = Path(__file__).parent
OUT = HERE / "pictures"
RUNS = HERE / "results" / "methods" / "runs"
ONE_A = RUNS / "one-a-cifar100-seed1-66c1552aa68b"
OTHERS = (
    RUNS / "running-mean-cifar100-seed1-1713c7f58a62",
    RUNS / "simplecil-cifar100-seed1-b30958b8a9df",
)
PLUS = HERE / "results" / "one-a-plus" / "runs" / "one-a-plus-cub200-seed1-19fa46c61172"
RIVALS = ("joint-cub200-seed1-8d233d6ff8db", "mos-cub200-seed1-a20c84f1ee27", "one-a-cub200-seed1-613b6bb31412")
CARRIED = HERE.parent / "benchmarks" / "carried-statistics.csv"
BIG_TASK = 4  # the fifth task, 36 classes: larger than all before it together


def record(folder: Path) -> dict[str, Any]:
    """The record of a run with its method's name as papers write it."""
    from onea.methods import method_class

    found: Any = read_record(folder)
    return found | {"title": method_class(found["config"]["method"]).title}


def alignment() -> Any:
    """A merge of 2 x 2 matrices whose base has one direction only: the result stays in it."""
    line = torch.tensor([2.0, 1.0], dtype=torch.float64) / 5**0.5
    base = torch.outer(line, torch.tensor([1.6, 0.9], dtype=torch.float64))
    align = torch.tensor([[0.3, 1.5], [1.3, -0.5]], dtype=torch.float64)
    merged = fuse(base[None], align[None], 0.4, Gate(gating=False)).merged[0]
    mean = fuse(base[None], align[None], 0.4, Gate(), alignment=False).merged[0]
    sides = (
        ("base (larger side)", base, style.PALETTE[0], "-"),
        ("align (smaller side)", align, style.PALETTE[5], "-"),
        ("weighted mean, no alignment", mean, style.MUTED, ":"),
        ("merged", merged, style.PALETTE[1], "-"),
    )
    with style.themed():
        figure = style.blank(7.4, 4.0)
        axes = figure.subplots()
        far = torch.stack([-0.4 * line, 2.1 * line])
        axes.plot(far[:, 0], far[:, 1], color=style.GRID, linewidth=9, solid_capstyle="round", zorder=0)
        for name, matrix, colour, dash in sides:
            for number, column in enumerate(matrix.T.tolist()):
                arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.2, "linestyle": dash, "shrinkA": 0}
                axes.annotate("", column, (0, 0), arrowprops=arrow | {"shrinkB": 0})
                axes.plot(*column, color=colour, label=name if number == 0 else None, linestyle=dash, linewidth=2.2)
        axes.set_xlim(-0.45, 2.0)
        axes.set_ylim(-0.65, 1.45)
        axes.set_aspect("equal")
        axes.set_title("Columns of two 2 × 2 matrices, and of their merge")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.text(0.95, 0.2, "the base's subspace", rotation=26.6, color=style.MUTED, fontsize=style.TICK_SIZE)
    return figure


def weights(run: dict[str, Any]) -> Any:
    """Who was the base in each merge, and the smaller side's share."""
    merges = [(index + 1, task["merge"]) for index, task in enumerate(run["tasks"]) if task.get("merge")]
    sizes = run["stream"]["sizes"]
    with style.themed():
        figure = style.blank(7.4, 3.6)
        axes = figure.subplots()
        for index, (side, name) in enumerate((("accumulated", "what is known is the base"), ("new", "the arrival is"))):
            chosen = [(task, merge["align_share"]) for task, merge in merges if merge["base"] == side]
            bars = axes.bar(*zip(*chosen, strict=True), color=style.PALETTE[index], label=name, width=0.7)
            axes.bar_label(bars, labels=[f"{share:.2f}" for _, share in chosen], fontsize=style.TICK_SIZE, padding=2)
        names = [f"{task}\n{sum(sizes[: task - 1])}+{sizes[task - 1]}" for task, _ in merges]
        axes.set_xticks([task for task, _ in merges], names)
        axes.set_ylim(0, 0.5)
        axes.set_xlabel("task, and classes known + new")
        axes.set_ylabel("share of the smaller side")
        axes.set_title("CIFAR-100, ten tasks")
        axes.grid(axis="y")
        axes.legend(loc="upper right")
    return figure


def network() -> Any:
    """One block of the embedded network with its adapter, and how many numbers are trained and kept."""
    from onea.vit.adapter import Adapters
    from onea.vit.backbones import load_backbone

    vit = load_backbone()
    adapters = Adapters(vit.depth, vit.width, rank=64, generator=torch.Generator())
    frozen, small = (sum(value.numel() for value in each.parameters()) / 1e6 for each in (vit, adapters))
    boxes = (  # text, left, bottom, colour
        ("attention", 1.3, 1.0, style.PALETTE[0]),
        ("MLP", 4.6, 1.0, style.PALETTE[0]),
        ("down", 4.0, 0.0, style.PALETTE[1]),
        ("up", 5.2, 0.0, style.PALETTE[1]),
    )
    arrows = (
        ((0.2, 1.25), (1.3, 1.25)),
        ((2.3, 1.25), (4.6, 1.25)),
        ((5.6, 1.25), (7.4, 1.25)),
        ((3.3, 1.25), (3.3, 1.9)),
        ((3.3, 1.25), (3.3, 0.25)),
        ((3.3, 0.25), (4.0, 0.25)),
        ((5.0, 0.25), (5.2, 0.25)),
        ((6.2, 0.25), (6.6, 0.25)),
        ((6.6, 0.25), (6.6, 1.17)),
        ((3.3, 1.9), (6.6, 1.9)),
        ((6.6, 1.9), (6.6, 1.33)),
    )
    with style.themed():
        figure = style.blank(7.4, 2.7)
        axes = figure.subplots()
        for start, stop in arrows:
            joint = stop in ((3.3, 1.9), (3.3, 0.25), (6.6, 0.25), (6.6, 1.9))
            look = {"arrowstyle": "-" if joint else "-|>", "color": style.MUTED, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", stop, start, arrowprops=look)
        for text, left, bottom, colour in boxes:
            box = {"boxstyle": "round,pad=0.02", "facecolor": style.tint(colour, 0.2), "edgecolor": colour}
            axes.add_patch(_rounded((left, bottom), 1.0, 0.5, **box))
            axes.text(left + 0.5, bottom + 0.25, text, ha="center", va="center")
        axes.plot(6.6, 1.25, "o", markersize=9, color="white", markeredgecolor=style.MUTED)
        axes.text(6.6, 1.25, "+", ha="center", va="center")
        words = {"size": style.TICK_SIZE, "va": "center"}
        axes.text(
            0.2,
            0.25,
            f"one of {vit.depth} blocks\n{frozen:.1f} M numbers in all, frozen",
            color=style.PALETTE[0],
            **words,
        )
        axes.text(4.0, -0.32, f"adapter, rank 64: {small:.2f} M numbers in all blocks", color=style.PALETTE[1], **words)
        axes.set_xlim(0, 7.5)
        axes.set_ylim(-0.5, 2.1)
        axes.set_axis_off()
    return figure


def _rounded(corner: tuple[float, float], width: float, height: float, **look: Any) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(corner, width, height, **look)


def prototypes() -> Any:
    """Test images of some embedded classes and their prototypes, in the plane that tells the prototypes apart best."""
    from onea.data.sources import load_dataset
    from onea.model.engine import Engine
    from onea.model.images import read_unlabelled
    from onea.vit.embedded import FAST
    from onea.vit.heads import cosine_scores
    from onea.vit.hooks import NO_HOOKS

    data, engine = load_dataset("glyphs-mini"), Engine(FAST, "cpu", "fp32", 1, mirror=False)
    classes = max(data.groups, key=lambda group: len(group.classes)).classes[:6]

    def features(split: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [row for row, label in enumerate(split.labels) if label in classes]
        pixels = read_unlabelled(split.pixels[rows], engine.side).pixels
        return engine.features(pixels, NO_HOOKS), torch.tensor([classes.index(split.labels[row]) for row in rows])

    (seen, labels), (asked, truth) = features(data.train), features(data.test)
    means = torch.stack([seen[labels == label].mean(0) for label in range(len(classes))])
    answers = cosine_scores(asked, means).argmax(1)
    centre, plane = means.mean(0), torch.linalg.svd(means - means.mean(0)).Vh[:2]
    points, stars = ((each - centre) @ plane.T for each in (asked, means))
    with style.themed():
        figure = style.blank(7.4, 4.4)
        axes = figure.subplots()
        for label, name in enumerate(data.classes[index] for index in classes):
            for right, mark in ((True, "o"), (False, "x")):
                chosen = points[(truth == label) & ((answers == truth) == right)]
                axes.scatter(*chosen.T, s=30, marker=mark, color=style.PALETTE[label], alpha=0.75)
            axes.scatter(*stars[label], s=230, marker="*", color=style.PALETTE[label], edgecolor="white", label=name)
        axes.set_xticks([])
        axes.set_yticks([])
        right = int((answers == truth).sum())
        axes.set_title(f"Frozen features of test images: {right} of {len(truth)} nearest to their own class")
        axes.set_xlabel("stars: prototypes; crosses: nearer to another class (in all dimensions)")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def carried() -> Any:
    """How far class means are from where all images would put them, and what that costs, task by task."""
    with CARRIED.open() as file:
        lines = list(csv.DictReader(file))
    looks = {"left": ("left where they were", style.PALETTE[1], "--"), "carried": ("carried", style.PALETTE[0], "-")}
    best = {"recomputed": ("of all images (not allowed)", style.MUTED, ":")}
    columns = {"mean": looks, "right": looks | best}
    data = list(dict.fromkeys(line["data"] for line in lines))
    with style.themed():
        figure = style.blank(7.4, 5.2)
        grid = figure.subplots(len(data), 2, squeeze=False)
        for row, (name, panels) in enumerate(zip(data, grid, strict=True)):
            for axes, (column, drawn) in zip(panels, columns.items(), strict=True):
                for kind, (label, colour, dash) in drawn.items():
                    own = [line for line in lines if (line["data"], line["statistics"]) == (name, kind)]
                    tasks = [int(line["task"]) for line in own]
                    values = [float(line[column]) * (100 if column == "right" else 1) for line in own]
                    axes.plot(tasks, values, dash, color=colour, label=f"statistics {label}", linewidth=1.6)
                for task in (int(line["task"]) for line in own if line["trained"] == "1"):
                    axes.axvline(task, color=style.GRID, linewidth=5, zorder=0)
                axes.set_title({"mean": f"{name}: error of old class means", "right": f"{name}: accuracy"}[column])
                axes.set_ylabel({"mean": "in deviations of an image", "right": "held out, %"}[column])
                if row == len(data) - 1:
                    axes.set_xlabel("task (bands: the adapter changed)")
        grid[0][1].legend(fontsize="small")
    return figure


def main() -> None:
    """Write all of them."""
    one_a = record(ONE_A)
    figures = {
        "network": network(),
        "prototypes": prototypes(),
        "alignment": alignment(),
        "weights": weights(one_a),
        "gates": spectra_and_gates(one_a, task=BIG_TASK),
        "updates": update_strength(one_a, task=BIG_TASK),
        "matrix": accuracy_matrix(one_a),
        "curves": accuracy_curves([one_a, *map(record, OTHERS)]),
        "one-a-plus": accuracy_curves([record(PLUS), *(record(RUNS / name) for name in RIVALS)]),
        "carried": carried(),
    }
    for name, figure in figures.items():
        print(style.save(figure, OUT / f"{name}.png"))


if __name__ == "__main__":
    main()
