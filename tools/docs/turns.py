# SPDX-License-Identifier: Apache-2.0
"""An old commit and today's code, taking turns on one GPU: the table of speed.md, from what gpu_turns.py wrote."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).parents[2] / "benchmarks/speed"
_LATER, _WHOLE = "training, later epochs", "training, 20 epochs with the first"
_TIMM = "one image, {}, ours / timm"
_TODAY = ("-frozen", "-stream")  # the runs of today's code; the others measured what it was then
_TRAIN, _ALL = "training, ViT-B/16, {}, images/s".format, "all 20 epochs, the first included"
_INFER, _SMALL = "inference, ViT-B/16, batch 256, images/s", "training, small network, images/s"
_ONE = "one image, {}, not compiled: time, timm's = 1"
_STREAM, _MEMORY = "CIFAR-100's stream, small network, 16 epochs (E0), s", "memory of fp32 training, GB"
_LAST = "adapters in the last 7 blocks, tokens kept, half of the patches"
_FROZEN = "all blocks for a fifth of the epochs, then the last 8, tokens kept, half of the patches"


class Row(NamedTuple):
    """A line of the table, and where its figures are: file (after ``gpu_turns-nvidia-h200``), section, figure, side."""

    words: str
    way: str
    file: str
    section: str
    what: str
    side: str = "new"
    unit: float = 1.0


ROWS = (
    Row(_TRAIN("later epochs"), "", "-frozen", "train", _LATER),
    Row(_TRAIN("later epochs"), "FP8", "-frozen", "train", _LATER, "new fp8"),
    Row(_TRAIN("later epochs"), _LAST, "-last-7", "train", _LATER, "new last 7, cached"),
    Row(_TRAIN(_ALL), "", "-frozen", "train", _WHOLE),
    Row(_TRAIN(_ALL), "FP8", "-frozen", "train", _WHOLE, "new fp8"),
    Row(_TRAIN(_ALL), _LAST, "-last-7", "train", _WHOLE, "new last 7, cached"),
    Row(_TRAIN(_ALL), _FROZEN, "-frozen", "train", _WHOLE, "new last 8 after 20%, cached"),
    Row(_TRAIN(_ALL), f"{_FROZEN}, FP8", "-frozen", "train", _WHOLE, "new last 8 after 20%, cached, fp8"),
    Row(_INFER, "", "-fp8", "infer", "inference"),
    Row(_INFER, "FP8", "-fp8", "infer", "inference", "new fp8"),
    Row(_SMALL, "", "", "small", _LATER),
    Row(_SMALL, "adapter as one parameter", "", "small", _LATER, "new one parameter"),
    Row(_STREAM, "", "-stream", "stream", "stream, learned and evaluated"),
    Row(_ONE.format("bf16"), "", "", "one", _TIMM.format("bf16")),
    Row(_ONE.format("fp32"), "", "", "one", _TIMM.format("fp32")),
    Row(_MEMORY, "", "", "memory", "peak memory, reserved", unit=1000),
    Row(_MEMORY, "plain loop", "", "memory", "peak memory, reserved", "plain", 1000),
)


def median(file: str, section: str, what: str, side: str) -> float:
    """A figure of one side."""
    with (BENCHMARKS / f"gpu_turns-nvidia-h200{file}.csv").open(encoding="utf-8") as lines:
        (found,) = (
            float(line["value"])
            for line in csv.DictReader(lines)
            if (line["section"], line["what"], line["side"], line["turn"]) == (section, what, side, "median")
        )
    return found


def cells() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows."""
    rows: list[tuple[str, ...]] = []
    for row in ROWS:
        old, new = (median(row.file, row.section, row.what, side) / row.unit for side in ("old", row.side))
        way = ", ".join(filter(None, ("today's" if row.file in _TODAY else "earlier run", row.way)))
        rows.append((row.words, way, _shown(old), _shown(new), f"{new / old:.2f}"))
    return ("what", "way", "old commit", "this way", "ratio"), rows


def _shown(value: float) -> str:
    """Three digits, or thousands.

    >>> _shown(4972.97), _shown(64.182), _shown(1.487)
    ('4,973', '64.2', '1.49')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 5 else f"{value:.2f}"
