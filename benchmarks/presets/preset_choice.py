# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the trials of tune_presets.py: rows, scores, and the base rate of each method."""

from __future__ import annotations

import csv
import inspect
import math
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onea.learner.options import TrainingOptions
from onea.research.methods import METHODS
from onea.research.methods.contract import Method

TRIALS = Path(__file__).with_name("trials.csv")
SIX_RATES = frozenset(("one-a-plus", "one-a", "joint", "mos", "ranpac-first"))  # other methods have three
STEPS = {3: 2.5, 6: 1.8}  # from one rate to the next, by their number
EXTENSIONS = 3  # maximum number of rates that are added one by one
FLOOR = 10.0  # percentage points below a method's best rate; lower scores are raised to it
COLUMNS = (
    *("data", "method", "learning_rate", "draw", "batch_size", "epochs", "held_out_A_T", "frozen_A_T", "seconds"),
    *("task_sizes", "train_images", "held_out_images", "error"),
)


def trained_methods() -> dict[str, type[Method]]:
    """The methods that have a learning rate, by name."""
    return {name: kind for name, kind in METHODS.load_all().items() if issubclass(kind.Options, TrainingOptions)}


def number_of_rates(method: str) -> int:
    """The initial number of rates, before any beyond the edges."""
    return 6 if method in SIX_RATES else 3


def first_rates(method: str, centre: float) -> list[float]:
    """Rates around a central one, at equal ratios.

    >>> first_rates("ease", 0.01), first_rates("one-a", 0.1)
    ([0.004, 0.01, 0.025], [0.02301, 0.04141, 0.07454, 0.1342, 0.2415, 0.4347])
    """
    number = number_of_rates(method)
    return [float(f"{centre * STEPS[number] ** (place - (number - 1) / 2):.4g}") for place in range(number)]


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows; a last line that is incomplete after a kill is ignored."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def mean_scores(rows: Iterable[dict[str, str]], method: str, draws: int | None = None) -> dict[float, float]:
    """Mean held-out accuracy of a method with each rate that was tried on the first draw of all datasets.

    Further draws count if all these rates were tried on all datasets; ``draws`` is the maximum number of draws, by
    default all. A rate that diverged, or is much worse than the best one, counts as ten points below it, because the
    size of such a loss is irrelevant for the choice.
    """
    by_draw: dict[int, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["method"] == method and (row["held_out_A_T"] or "loss" in row["error"]):
            value = float(row["held_out_A_T"] or 0)
            rate, draw = float(row["learning_rate"]), int(row["draw"])
            by_draw[draw][row["data"]][rate] = value if math.isfinite(value) else 0.0
    first = list(by_draw[0].values())
    common = set.intersection(*map(set, first)) if first else set()
    if not common:
        return {}
    streams = [
        accuracies
        for draw in sorted(by_draw)[:draws]
        if set(by_draw[draw]) == set(by_draw[0]) and all(common <= set(rates) for rates in by_draw[draw].values())
        for accuracies in by_draw[draw].values()
    ]
    floors = [max(accuracies.values()) - FLOOR for accuracies in streams]
    return {
        rate: statistics.fmean(max(stream[rate], floor) for stream, floor in zip(streams, floors, strict=True))
        for rate in sorted(common)
    }


def smoothed(scores: dict[float, float]) -> list[float]:
    """Scores in the order of the rates, each averaged with its two neighbours; an edge counts as its own neighbour.

    >>> smoothed({0.1: 40.0, 0.2: 60.0, 0.4: 40.0})
    [45.0, 50.0, 45.0]
    """
    raw = [scores[rate] for rate in sorted(scores)]
    padded = [raw[0], *raw, raw[-1]]
    return [(left + 2 * centre + right) / 4 for left, centre, right in zip(padded, raw, padded[2:], strict=False)]


def best_index(scores: dict[float, float]) -> int:
    """The index of the best of the sorted rates by smoothed scores."""
    smooth = smoothed(scores)
    return max(range(len(smooth)), key=lambda index: smooth[index])


def choose(scores: dict[float, float]) -> float:
    """The rate with the highest smoothed score, interpolated by a parabola.

    >>> choose({0.1: 50.0, 0.2: 60.0, 0.4: 70.0, 0.8: 60.0, 1.6: 50.0})
    0.4
    """
    rates, smooth, top = sorted(scores), smoothed(scores), best_index(scores)
    log_rate = math.log(rates[top])
    if 0 < top < len(rates) - 1:
        left, centre, right = smooth[top - 1 : top + 2]
        curvature = left - 2 * centre + right
        shift = 0.5 * (left - right) / curvature if curvature < 0 else 0.0
        log_rate += shift * (math.log(rates[top + 1]) - math.log(rates[top - 1])) / 2
    return float(f"{math.exp(log_rate):.2g}")


def next_rate(scores: dict[float, float], first: int) -> float | None:
    """A further rate if the best one is the first or the last, up to a maximum number.

    Args:
        scores: the scores so far.
        first: the initial number of rates.
    """
    if not first <= len(scores) < first + EXTENSIONS:
        return None
    rates, top = sorted(scores), best_index(scores)
    wanted = rates[0] / STEPS[first] if top == 0 else rates[-1] * STEPS[first] if top == len(rates) - 1 else None
    return None if wanted is None else float(f"{wanted:.4g}")


def append(path: Path, row: dict[str, Any]) -> None:
    """Append a line and flush it to disk."""
    before = path.read_bytes() if path.exists() else b""
    new = not before
    with path.open("a", newline="", encoding="utf-8") as file:
        if before and not before.endswith(b"\n"):  # the last line is incomplete after a kill
            file.write("\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def print_rates(trials_file: Path, write: bool) -> None:
    """Print the rate of each method, and write the rates into the classes on request."""
    rows = read_rows(trials_file)
    trials = Counter(row["method"] for row in rows)
    print(f"{'method':22} {'rate':>9} {'now':>9} {'A_T':>6} {'frozen':>6} {'trials':>6}")
    for name, kind in trained_methods().items():
        scores = mean_scores(rows, name)
        if len(scores) < (needed := number_of_rates(name)):
            print(f"{name:22} has {len(scores)} rates that were tried on every dataset, but needs {needed}")
            continue
        rate, edge = choose(scores), best_index(scores) in (0, len(scores) - 1)
        streams = {(row["data"], row["draw"]): float(row["frozen_A_T"]) for row in rows if row["method"] == name}
        frozen = statistics.fmean(streams.values())
        print(
            f"{name:22} {rate:9.2g} {kind.base_learning_rate or 0:9.2g} {max(scores.values()):6.2f} {frozen:6.2f} "
            f"{trials[name]:6}{'  at an edge' if edge else ''}"
        )
        if write:
            write_rate(kind, rate)


def write_rate(kind: type[Method], rate: float) -> None:
    """Write a base rate into the class of its method."""
    file = Path(inspect.getfile(kind))
    before, header, body = file.read_text("utf-8").partition(f"\nclass {kind.__name__}(")
    assignment = r"(    base_learning_rate = ).*"
    changed, times = re.subn(assignment, rf"\g<1>{rate!r}", body, count=1)
    if times != 1 or "base_learning_rate" not in vars(kind):
        raise SystemExit(f"{kind.__name__} does not define base_learning_rate")
    file.write_text(before + header + changed, "utf-8")
