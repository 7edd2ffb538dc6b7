# SPDX-License-Identifier: Apache-2.0
"""Two configurations on the same streams: paired differences over seeds, with their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onea.errors import OneaError
from onea.research.record import Record
from onea.research.record_metrics import headline_metrics
from onea.research.report.aggregate import Group, configuration_names, settings
from onea.research.report.records import finished


@dataclass(frozen=True)
class Difference:
    """One metric of two sides over their common seeds.

    Attributes:
        name: of the metric, as a reader sees it.
        first: mean of the first side.
        second: mean of the second side.
        differences: second minus first, by seed.
        interval: of the mean difference, 95 % by Student's t; None for a single seed.
        higher_is_better: whether a positive difference speaks for the second side.
    """

    name: str
    first: float
    second: float
    differences: tuple[float, ...]
    interval: tuple[float, float] | None
    higher_is_better: bool

    @property
    def mean(self) -> float:
        """The mean difference."""
        return sum(self.differences) / len(self.differences)


@dataclass(frozen=True)
class Comparison:
    """All metrics of two sides, with notes."""

    names: tuple[str, str]
    seeds: tuple[int, ...]
    rows: tuple[Difference, ...]
    notes: tuple[str, ...]


def compare(first: Sequence[Record], second: Sequence[Record]) -> Comparison:
    """Compare two sets of records, each one configuration over seeds, on the seeds that both have finished.

    Raises:
        OneaError: if a side holds several configurations, no seed is common, or data or streams differ.
    """
    left, right = _one("first", first), _one("second", second)
    a, b = ({record["config"]["seed"]: record for record in side.done} for side in (left, right))
    from onea.metrics import t_interval  # loads numpy, which the commands need not

    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        raise OneaError(
            f"The two sides share no finished seed (first: {_list(a) or 'none'}; second: {_list(b) or 'none'}); "
            "run both with the same seeds."
        )
    for seed in seeds:
        _check_alike(a[seed], b[seed], seed)
    rows = []
    for metric in headline_metrics([*a.values(), *b.values()], machine_dependent=False).values():
        read = [(metric.value(a[seed]), metric.value(b[seed])) for seed in seeds]
        pairs = [(x, y) for x, y in read if x is not None and y is not None]
        if len(pairs) < len(read):
            continue  # one task forgets nothing
        gaps = tuple(float(y - x) for x, y in pairs)
        x, y = (float(sum(values)) / len(seeds) for values in zip(*pairs, strict=True))
        rows.append(Difference(metric.heading, x, y, gaps, t_interval(gaps), metric.higher_is_better))
    names = configuration_names([left.records[0], right.records[0]])
    return Comparison((names[0], names[1]), seeds, tuple(rows), tuple(_notes(left, right, seeds)))


def _one(which: str, records: Sequence[Record]) -> Group:
    """The only configuration of a side."""
    if not records:
        raise OneaError(f"The {which} side has no record; give a run's folder or a folder of runs.")
    groups = [group for setting in settings(records) for group in setting.groups]
    if len(groups) > 1:
        names = "; ".join(f"{group.name} on {group.records[0]['data']['name']}" for group in groups[:4])
        raise OneaError(
            f"The {which} side holds {len(groups)} configurations ({names}); give the folders of one of them."
        )
    return groups[0]


def _check_alike(a: Record, b: Record, seed: int) -> None:
    """Raise an error for runs that did not have the same images in the same order."""
    checks: tuple[tuple[str, Any, Any], ...] = (
        ("the dataset", _data(a), _data(b)),
        ("the test images", a["total"], b["total"]),
        ("the class order", a["stream"]["class_order"], b["stream"]["class_order"]),
        ("the task sizes", a["stream"]["sizes"], b["stream"]["sizes"]),
        ("the images per class", _images(a), _images(b)),
    )
    for what, first, second in checks:
        if first != second:
            raise OneaError(
                f"The two runs of seed {seed} differ in {what} ({_brief(first)} and {_brief(second)}), so their "
                "difference is not one of methods; run both on the same stream."
            )


def _data(record: Record) -> str:
    data = record["data"]
    return f"{data['name']} {str(data.get('fingerprint'))[:8]}"


def _images(record: Record) -> Any:
    return record["stream"].get("samples") or record["data"].get("train_images")


def _brief(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _notes(left: Group, right: Group, seeds: Sequence[int]) -> list[str]:
    notes = []
    if len(seeds) == 1:
        notes.append(f"One common seed ({seeds[0]}): a difference of one run has no interval; run more seeds.")
    alone = {
        side: sorted({r["config"]["seed"] for r in group.records} - set(seeds))
        for side, group in (("first", left), ("second", right))
    }
    notes += [f"Left out of the {side} side, not finished by both: seeds {_list(s)}." for side, s in alone.items() if s]
    networks = [group.records[0]["backbone"] for group in (left, right)]
    if networks[0].get("sha256") != networks[1].get("sha256"):
        notes.append(f"The two sides use different networks: {networks[0]['name']} and {networks[1]['name']}.")
    unfinished = sum(not finished(record) for group in (left, right) for record in group.records)
    if unfinished:
        notes.append(f"{unfinished} of the runs are not finished; the same `onea run` command continues them.")
    return notes


def _list(seeds: Any) -> str:
    return ", ".join(map(str, sorted(seeds)))
