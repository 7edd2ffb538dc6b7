# SPDX-License-Identifier: Apache-2.0
"""Comparison of two configurations on the same streams: paired differences over seeds, with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onea.errors import OneaError
from onea.research.record import Record
from onea.research.record_metrics import headline_metrics
from onea.research.report.aggregate import Group, configuration_names, settings
from onea.research.report.records import finished


@dataclass(frozen=True)
class Difference:
    """The difference in one metric on the seeds that both sides have.

    Attributes:
        name: heading of the metric.
        first: mean of the first side.
        second: mean of the second side.
        differences: second minus first, for each seed.
        interval: 95 % confidence interval of the mean difference by Student's t; None for a single seed.
        higher_is_better: whether higher values of the metric are better.
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
    """The differences in all metrics, with notes."""

    names: tuple[str, str]
    seeds: tuple[int, ...]
    rows: tuple[Difference, ...]
    notes: tuple[str, ...]


def compare(first: Sequence[Record], second: Sequence[Record]) -> Comparison:
    """Compare two sets of records, each one configuration over seeds, on the seeds that both have finished.

    Raises:
        OneaError: if a side has several configurations, there is no common seed, or data or streams differ.
    """
    from onea.metrics import t_interval  # imports numpy, which would slow down `onea --help`

    left, right = _only_configuration("first", first), _only_configuration("second", second)
    a, b = ({record["config"]["seed"]: record for record in side.done} for side in (left, right))
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        raise OneaError(
            f"The two sides share no finished seed (first: {_list(a) or 'none'}; second: {_list(b) or 'none'}); "
            "run both with the same seeds."
        )
    for seed in seeds:
        _check_same_stream(a[seed], b[seed], seed)
    rows = []
    for metric in headline_metrics([*a.values(), *b.values()], machine_dependent=False).values():
        pairs = [
            (x, y)
            for seed in seeds
            if (x := metric.value(a[seed])) is not None and (y := metric.value(b[seed])) is not None
        ]
        if len(pairs) < len(seeds):
            continue  # one task has no forgetting
        differences = tuple(float(y - x) for x, y in pairs)
        x, y = (float(sum(values)) / len(seeds) for values in zip(*pairs, strict=True))
        rows.append(Difference(metric.heading, x, y, differences, t_interval(differences), metric.higher_is_better))
    names = configuration_names([left.records[0], right.records[0]])
    return Comparison((names[0], names[1]), seeds, tuple(rows), tuple(_notes(left, right, seeds)))


def _only_configuration(side: str, records: Sequence[Record]) -> Group:
    if not records:
        raise OneaError(f"The {side} side has no record; give a run's folder or a folder of runs.")
    groups = [group for setting in settings(records) for group in setting.groups]
    if len(groups) > 1:
        names = "; ".join(f"{group.name} on {group.records[0]['data']['name']}" for group in groups[:4])
        raise OneaError(f"The {side} side has {len(groups)} configurations ({names}); give the folders of one of them.")
    return groups[0]


def _check_same_stream(a: Record, b: Record, seed: int) -> None:
    """Raise an error if two runs did not learn the same images in the same order."""
    for what, first, second in zip(_STREAM_FACTS, _stream_facts(a), _stream_facts(b), strict=True):
        if first != second:
            raise OneaError(
                f"The two runs of seed {seed} differ in {what} ({_brief(first)} and {_brief(second)}), so they do not "
                "compare the methods; run both on the same stream."
            )


_STREAM_FACTS = ("the dataset", "the test images", "the class order", "the task sizes", "the images per class")


def _stream_facts(record: Record) -> tuple[Any, ...]:
    data, stream = record["data"], record["stream"]
    dataset = f"{data['name']} {str(data.get('fingerprint'))[:8]}"
    images = stream.get("samples") or data.get("train_images")
    return dataset, record["total"], stream["class_order"], stream["sizes"], images


def _brief(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _notes(left: Group, right: Group, seeds: Sequence[int]) -> list[str]:
    notes = []
    if len(seeds) == 1:
        notes.append(f"One common seed ({seeds[0]}): a single difference has no interval; run more seeds.")
    for side, group in (("first", left), ("second", right)):
        if missing := {record["config"]["seed"] for record in group.records} - set(seeds):
            notes.append(f"Left out of the {side} side because not both have finished them: seeds {_list(missing)}.")
    networks = [group.records[0]["backbone"] for group in (left, right)]
    if networks[0].get("sha256") != networks[1].get("sha256"):
        notes.append(f"The two sides use different networks: {networks[0]['name']} and {networks[1]['name']}.")
    unfinished = sum(not finished(record) for group in (left, right) for record in group.records)
    if unfinished:
        notes.append(f"{unfinished} of the runs are not finished; the same `onea run` command continues them.")
    return notes


def _list(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))
