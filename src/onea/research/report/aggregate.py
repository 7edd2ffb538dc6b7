# SPDX-License-Identifier: Apache-2.0
"""Runs that differ in their seed alone, put together, and tables of runs: mean and deviation of every metric."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from onea.presentation.tables import Row, Table, TableColumn, Value
from onea.research.record import Record
from onea.research.record_metrics import Metric, headline_metrics
from onea.research.report.records import count_shared_adapters, finished, labels, shared_adapters_note

# Recorded elsewhere as resolved: the stream, the inputs, and the options of a preset.
_STREAM = ("order", "stream", "gamma", "tasks", "sizes", "long_tail", "seed")
_NOT_CONFIGURATION = (*_STREAM, "data", "backbone", "method", "options", "preset")
_NO_EFFECT = "compare_classifiers"  # an option: what else was scored changes nothing


@dataclass(frozen=True)
class Group:
    """One configuration over its seeds; at most one record a seed, in order of the seeds."""

    name: str
    records: tuple[Record, ...]

    @property
    def done(self) -> tuple[Record, ...]:
        """The finished runs."""
        return tuple(record for record in self.records if finished(record))


@dataclass(frozen=True)
class Setting:
    """Configurations that meet the same classes in the same sizes on the same network, and so may be compared."""

    name: str
    groups: tuple[Group, ...]

    @property
    def seeds(self) -> list[int]:
        """All seeds that any of them ran with."""
        return sorted({record["config"]["seed"] for group in self.groups for record in group.records})

    def fixed(self) -> list[Record]:
        """A record of each configuration under its name, all of the one seed that most of them have."""
        seed = max(self.seeds, key=lambda s: (sum(_of_seed(g, s) is not None for g in self.groups), -s))
        found = [(group, _of_seed(group, seed)) for group in self.groups]
        return [record | {"title": group.name} for group, record in found if record is not None]


@dataclass(frozen=True)
class Curve:
    """A_t over the tasks: the mean over seeds, and the deviation where there is more than one."""

    mean: tuple[float, ...]
    std: tuple[float, ...] | None
    seeds: int


def summarise(values: Sequence[float], wanted: int = 0) -> Value:
    """Mean and sample deviation.

    >>> summarise([1.0, 3.0], wanted=5)
    Value(mean=2.0, std=1.4142135623730951, seeds=2, wanted=5, reported=None, competes=True)
    """
    if not values:
        return Value(wanted=wanted)
    return Value(fmean(values), stdev(values) if len(values) > 1 else None, len(values), wanted)


def over_seeds(group: Group, metric: Metric, wanted: int = 0) -> Value:
    """A metric over the finished runs of a configuration."""
    values = map(metric.value, group.done)
    return summarise([value for value in values if value is not None], wanted)


def curve(group: Group) -> Curve:
    """Accuracy after every task over the finished runs or, while there is none, over what all have reached."""
    lines = [record["metrics"]["A"] for record in group.done or group.records]
    steps = list(zip(*lines, strict=False))
    spread = tuple(stdev(step) for step in steps) if len(lines) > 1 else None
    return Curve(tuple(fmean(step) for step in steps), spread, len(lines))


def settings(records: Sequence[Record]) -> list[Setting]:
    """Records sorted into comparable settings and, in each, into configurations, in order of first appearance."""
    found: dict[str, dict[str, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        seeds = found[_setting(record)][_configuration(record)]
        seed = record["config"]["seed"]
        if seed not in seeds or _progress(record) > _progress(seeds[seed]):
            seeds[seed] = record
    groups = [[tuple(runs[s] for s in sorted(runs)) for runs in inside.values()] for inside in found.values()]
    names = setting_names([inside[0][0] for inside in groups])
    return [
        Setting(name, tuple(map(Group, configuration_names([runs[0] for runs in inside]), inside)))
        for name, inside in zip(names, groups, strict=True)
    ]


def best_first(records: Sequence[Record]) -> list[Record]:
    """Records of One-A first, which curves emphasise, then the most accurate over its seeds."""
    last: dict[str, list[float]] = defaultdict(list)
    for record in records:
        last[_setting(record) + _configuration(record)].append(record["metrics"]["A"][-1])
    mean = {key: fmean(values) for key, values in last.items()}
    return sorted(records, key=lambda r: (r["config"]["method"] != "one-a", -mean[_setting(r) + _configuration(r)]))


def grid_table(setting: Setting, title: str | None = None) -> Table:
    """The metrics of a setting's configurations; a seed that others have run and one has not is a gap."""
    wanted, rows = len(setting.seeds), tuple(group.name for group in setting.groups)
    # A metric that no record has is no column (one task forgets nothing); one that some have is a gap elsewhere.
    known = [record for group in setting.groups for record in group.records]
    shown = [
        metric
        for metric in headline_metrics(known, machine_dependent=False).values()
        if any(metric.value(record) is not None for record in known)
    ]
    values = {
        (group.name, index): over_seeds(group, metric, wanted)
        for group in setting.groups
        for index, metric in enumerate(shown)
    }
    columns = tuple(TableColumn(metric.heading, "", metric.higher_is_better, metric.digits) for metric in shown)
    return Table.from_values(title or setting.name, rows, columns, values)


def results_table(records: Sequence[Record]) -> Table:
    """The headline numbers of all records; a run that is still going on is shown but never marked as best."""
    metrics = headline_metrics(records).values()
    when = "after the whole stream" if all(map(finished, records)) else "so far"
    rows = (
        Row(
            name,
            tuple(Value(metric.value(record), competes=_may_win(metric, record, records)) for metric in metrics),
            note=_note(record),
            link=paper if (paper := str(record.get("paper") or "")).startswith("https://") else "",
            emphasised=index == 0,
        )
        for index, (name, record) in enumerate(zip(labels(records), records, strict=True))
    )
    return Table(
        title=f"Results {when}" + ("; the best of each column is marked." if len(records) > 1 else "."),
        columns=tuple(TableColumn(m.heading, "", m.higher_is_better, m.digits) for m in metrics),
        rows=tuple(rows),
        corner="method",
        mark_second=False,
    )


def _may_win(metric: Metric, record: Record, records: Sequence[Record]) -> bool:
    if metric.machine_dependent and (count_shared_adapters(record) or len({_machine(other) for other in records}) > 1):
        return False  # seconds of another run or of another machine do not compare
    return finished(record)


def _machine(record: Record) -> tuple[Any, ...]:
    runtime, environment = record.get("runtime", {}), record.get("environment", {})
    return (*(runtime.get(name) for name in ("device", "precision", "threads")), environment.get("processor"))


def _note(record: Record) -> str:
    notes = [str(record["note"])] if record.get("note") else []
    done, tasks = len(record["metrics"]["A"]), len(record["stream"]["sizes"])
    if not finished(record):
        notes.append(f"still running: {done} of {tasks} tasks")
    if count_shared_adapters(record):
        notes.append(shared_adapters_note(record))
    if skipped := sum(task.get("trained") is False for task in record["tasks"]):
        notes.append(f"{skipped} of {done} tasks not trained")
    return "; ".join(notes)


def configuration_names(records: Sequence[Record]) -> list[str]:
    """A name for each configuration: its method and, where two share one, the settings in which they differ."""
    titles = [str(record.get("title") or record["config"]["method"]) for record in records]
    methods = [_without_classifier(title, record) for title, record in zip(titles, records, strict=True)]
    names = []
    for index, (title, method, record) in enumerate(zip(titles, methods, records, strict=True)):
        same_method = [other for other, name in enumerate(methods) if name == method and other != index]
        settings, others = _flat(record), [_flat(records[other]) for other in same_method]
        has_classifier = title != method or any(titles[other] != method for other in same_method)
        keys = [key for key in settings if any(other.get(key) != settings[key] for other in others)]
        keys = [key for key in keys if not (has_classifier and key == "classifier")]
        detail = ", ".join(f"{key} {_short(settings[key])}" for key in keys)
        names.append(f"{title} ({detail})" if detail else title)
    return names


def _without_classifier(title: str, record: Record) -> str:
    """The method's part of a title such as ``One-A+, ncm``."""
    return title.removesuffix(f", {(record.get('options') or {}).get('classifier')}")


def setting_names(records: Sequence[Record]) -> list[str]:
    """A name for each setting, with a number where two would be the same."""
    names = []
    for record in records:
        sizes, data = record["stream"]["sizes"], record["data"]["name"]
        spread = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(sizes[0])
        if record["config"].get("sizes") and _order(record) == "given":
            spread = ", ".join(map(str, sizes[:4])) + (", ..." if len(sizes) > 4 else "")
        tasks = f"{len(sizes)} tasks of {spread} classes" if len(sizes) > 1 else "1 task"
        tail = ", long-tailed" if record["stream"].get("samples") else ""
        order = "" if _order(record) in ("shuffled", "given") else f", {_order(record)}"
        group = str(record.get("group") or "")
        contained = _letters(data) in _letters(group)  # CIFAR100 (T=10) contains cifar100
        where = group if contained else f"{group}, {data}" if group else data
        names.append(f"{where}: {tasks}{order}{tail}, {record['backbone']['name']}")
    repeated = {name for name in names if names.count(name) > 1}
    return [f"{name} (#{names[:i].count(name) + 1})" if name in repeated else name for i, name in enumerate(names)]


def _letters(text: str) -> str:
    return text.lower().replace("-", "")


def _flat(record: Record) -> dict[str, Any]:
    """The settings in which two configurations may differ, options as they were resolved."""
    config: dict[str, Any] = {k: v for k, v in record["config"].items() if k not in _NOT_CONFIGURATION}
    flat, ruled = ((record.get("options") or {}) | config).items(), _ruled(record)
    return {
        name: value
        for name, value in flat
        if value is not None and name != _NO_EFFECT and (name not in ruled or value != ruled[name])
    }


def _ruled(record: Record) -> dict[str, Any]:
    """The options of a run on a long tail that the rule of its preset has made of the number of its images.

    Where classes are uneven, that number depends on which of them are in the tail, and so on the seed.
    """
    if record["config"].get("preset") != "auto" or not record["stream"].get("samples"):
        return {}
    from onea.schedules import DatasetSize, training_defaults

    options, data, sizes = record["config"].get("options") or {}, record["data"], record["stream"]["sizes"]
    images = data.get("task_images") or data.get("train_images") or 0
    epochs = options.get("epochs")
    found = training_defaults(DatasetSize(images, sum(sizes), len(sizes)), epochs if isinstance(epochs, int) else None)
    return {name: value for name, value in found.items() if name not in options}


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _setting(record: Record) -> str:
    """Key of comparable runs; class and task order follow the seed, so only the sizes count, not their order."""
    data, stream = record["data"], record["stream"]
    images = sorted(stream["samples"]) if stream.get("samples") else None
    inputs = (data["name"], data.get("fingerprint"), data.get("train_images"), data.get("test_images"))
    network = (record["backbone"]["name"], record["backbone"].get("sha256"))
    return json.dumps([inputs, sorted(stream["sizes"]), _order(record), images, network])


def _order(record: Record) -> str:
    config = record["config"]
    if config.get("order"):
        return str(config["order"])
    given = record["stream"].get("names") or config.get("sizes") or config.get("stream") in ("balanced", "sizes")
    return "given" if given else "shuffled"


def _configuration(record: Record) -> str:
    return json.dumps([record["config"]["method"], record.get("title"), _flat(record)], sort_keys=True)


def _progress(record: Record) -> tuple[bool, int]:
    return finished(record), len(record["metrics"]["A"])


def _of_seed(group: Group, seed: int) -> Record | None:
    return next((record for record in group.records if record["config"]["seed"] == seed), None)
