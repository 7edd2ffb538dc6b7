# SPDX-License-Identifier: Apache-2.0
"""Records grouped into configurations and comparable settings, and tables of their metrics over seeds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from onea.presentation.tables import Row, Table, TableColumn, Value
from onea.research.record import Record
from onea.research.record_metrics import Metric, headline_metrics
from onea.research.report.records import count_shared_adapters, finished, labels, run_title, shared_adapters_note

_STREAM_OPTIONS = {"order", "stream", "gamma", "tasks", "sizes", "long_tail", "seed", "stream_file"}
# Fields of a record's config that do not distinguish configurations: other fields hold their resolved values.
_RESOLVED_ELSEWHERE = _STREAM_OPTIONS | {"data", "backbone", "method", "options", "preset"}


@dataclass(frozen=True)
class Group:
    """The runs of one configuration: at most one record per seed, sorted by seed."""

    name: str
    records: tuple[Record, ...]

    @property
    def done(self) -> tuple[Record, ...]:
        """The finished runs."""
        return tuple(record for record in self.records if finished(record))

    def record_of_seed(self, seed: int) -> Record | None:
        """The record of a seed, if there is one."""
        return next((record for record in self.records if record["config"]["seed"] == seed), None)


@dataclass(frozen=True)
class Setting:
    """Comparable configurations: the same data, task sizes and backbone."""

    name: str
    groups: tuple[Group, ...]

    @property
    def seeds(self) -> list[int]:
        """All seeds of all configurations."""
        return sorted({record["config"]["seed"] for group in self.groups for record in group.records})

    def single_seed(self) -> list[Record]:
        """One record per configuration, titled by its name, all with the seed that most configurations have."""
        seed = max(self.seeds, key=lambda s: (sum(group.record_of_seed(s) is not None for group in self.groups), -s))
        records = [(group.name, group.record_of_seed(seed)) for group in self.groups]
        return [record | {"title": name} for name, record in records if record is not None]


def summarise(values: Sequence[float], wanted: int = 0) -> Value:
    """Mean and sample standard deviation.

    >>> summarise([1.0, 3.0], wanted=5)
    Value(mean=2.0, std=1.4142135623730951, seeds=2, wanted=5, reported=None, competes=True)
    """
    if not values:
        return Value(wanted=wanted)
    return Value(fmean(values), stdev(values) if len(values) > 1 else None, len(values), wanted)


def over_seeds(group: Group, metric: Metric, wanted: int = 0) -> Value:
    """A metric over the finished runs of a configuration."""
    return summarise([value for record in group.done if (value := metric.value(record)) is not None], wanted)


def curve(group: Group) -> list[Value]:
    """Accuracy after each task over the finished runs; if none is finished, over the tasks that all runs share."""
    accuracies = [record["metrics"]["A"] for record in group.done or group.records]
    return [summarise(values) for values in zip(*accuracies, strict=False)]


def settings(records: Sequence[Record]) -> list[Setting]:
    """Records grouped into settings and configurations, in order of first appearance.

    Of two records of the same run, the one with more tasks is used.
    """
    grouped: dict[str, dict[str, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        by_seed = grouped[_setting_key(record)][_configuration_key(record)]
        seed = record["config"]["seed"]
        if seed not in by_seed or _progress(record) > _progress(by_seed[seed]):
            by_seed[seed] = record
    runs = [[tuple(run for _, run in sorted(by_seed.items())) for by_seed in g.values()] for g in grouped.values()]
    return [
        Setting(name, tuple(map(Group, configuration_names([seeds[0] for seeds in groups]), groups)))
        for name, groups in zip(setting_names([groups[0][0] for groups in runs]), runs, strict=True)
    ]


def best_first(records: Sequence[Record]) -> list[Record]:
    """Records sorted by the mean accuracy of their configuration; One-A comes first, because curves emphasise it."""
    accuracies: dict[str, list[float]] = defaultdict(list)
    for record in records:
        accuracies[_setting_key(record) + _configuration_key(record)].append(record["metrics"]["A"][-1])

    def key(record: Record) -> tuple[bool, float]:
        mean = fmean(accuracies[_setting_key(record) + _configuration_key(record)])
        return record["config"]["method"] != "one-a", -mean

    return sorted(records, key=key)


def grid_metrics(setting: Setting) -> dict[str, Metric]:
    """The metrics of a setting by name; only those that a record has: a stream of one task has no forgetting."""
    records = [record for group in setting.groups for record in group.records]
    return {
        name: metric
        for name, metric in headline_metrics(records, machine_dependent=False).items()
        if any(metric.value(record) is not None for record in records)
    }


def grid_table(setting: Setting, title: str | None = None) -> Table:
    """The metrics of a setting's configurations; a configuration without a seed that others have is incomplete."""
    metrics = grid_metrics(setting).values()
    values = {
        (group.name, index): over_seeds(group, metric, len(setting.seeds))
        for group in setting.groups
        for index, metric in enumerate(metrics)
    }
    return Table.from_values(title or setting.name, [group.name for group in setting.groups], _columns(metrics), values)


def _columns(metrics: Iterable[Metric]) -> tuple[TableColumn, ...]:
    return tuple(TableColumn(m.heading, "", m.higher_is_better, m.digits) for m in metrics)


def results_table(records: Sequence[Record]) -> Table:
    """The headline metrics of all records; an unfinished run is never marked as best."""
    metrics = headline_metrics(records).values()
    when = "after the whole stream" if all(map(finished, records)) else "so far"
    rows = (
        Row(
            name,
            tuple(Value(metric.value(record), competes=_competes(metric, record, records)) for metric in metrics),
            note=_note(record),
            link=paper if (paper := str(record.get("paper") or "")).startswith("https://") else "",
            emphasised=index == 0,
        )
        for index, (name, record) in enumerate(zip(labels(records), records, strict=True))
    )
    return Table(
        title=f"Results {when}" + ("; the best of each column is marked." if len(records) > 1 else "."),
        columns=_columns(metrics),
        rows=tuple(rows),
        corner="method",
        mark_second=False,
    )


def _competes(metric: Metric, record: Record, records: Sequence[Record]) -> bool:
    if metric.machine_dependent and (count_shared_adapters(record) or len({_machine(other) for other in records}) > 1):
        return False  # the training time does not include all tasks, or the machines differ
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
    """A name for each configuration: its method and, among configurations of one method, the settings that differ."""
    titles = [run_title(record) for record in records]
    methods = [_without_classifier(name, record) for name, record in zip(titles, records, strict=True)]
    options = [_resolved_options(record) for record in records]
    names = []
    for index, (name, method) in enumerate(zip(titles, methods, strict=True)):
        others = [other for other, same in enumerate(methods) if same == method and other != index]
        classifier_in_title = any(titles[other] != method for other in (index, *others))
        details = [
            f"{key} {_short(value)}"
            for key, value in options[index].items()
            if any(options[other].get(key) != value for other in others)
            and not (classifier_in_title and key == "classifier")
        ]
        names.append(f"{name} ({', '.join(details)})" if details else name)
    return names


def _without_classifier(title: str, record: Record) -> str:
    """The method's part of a title such as ``One-A+, ncm``."""
    return title.removesuffix(f", {(record.get('options') or {}).get('classifier')}")


def setting_names(records: Sequence[Record]) -> list[str]:
    """A name for each setting, with a number where two are equal."""
    names = []
    for record in records:
        data = record["data"]["name"]
        group = str(record.get("group") or "")
        contained = _letters(data) in _letters(group)  # CIFAR100 (T=10) contains cifar100
        where = group if contained else f"{group}, {data}" if group else data
        names.append(f"{where}: {stream_name(record)}, {record['backbone']['name']}")
    repeated = {name for name in names if names.count(name) > 1}
    return [f"{name} (#{names[:i].count(name) + 1})" if name in repeated else name for i, name in enumerate(names)]


def stream_name(record: Record) -> str:
    """The stream in the name of a setting, such as ``10 tasks of 1 to 36 classes``."""
    sizes, config = record["stream"]["sizes"], record["config"]
    spread = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(sizes[0])
    listed = config.get("sizes") or (config.get("stream") == "file" and not record["stream"].get("names"))
    if listed and _order(record) == "given":
        spread = ", ".join(map(str, sizes[:4])) + (", ..." if len(sizes) > 4 else "")
    tasks = f"{len(sizes)} tasks of {spread} classes" if len(sizes) > 1 else "1 task"
    order = "" if _order(record) in ("shuffled", "given") else f", {_order(record)}"
    return f"{tasks}{order}{', long-tailed' if record['stream'].get('samples') else ''}"


def _letters(text: str) -> str:
    return text.lower().replace("-", "")


def _resolved_options(record: Record) -> dict[str, Any]:
    """The resolved settings in which two configurations may differ."""
    config = {name: value for name, value in record["config"].items() if name not in _RESOLVED_ELSEWHERE}
    from_preset = _options_from_preset(record)
    return {
        name: value
        for name, value in ((record.get("options") or {}) | config).items()
        if value is not None
        and name != "compare_classifiers"  # does not change the results of the run's own classifier
        and (name not in from_preset or value != from_preset[name])
    }


def _options_from_preset(record: Record) -> dict[str, Any]:
    """The options that the preset ``auto`` computed from the number of images of a long-tailed stream.

    That number depends on the seed, because it depends on which classes are in the tail.
    """
    if record["config"].get("preset") != "auto" or not record["stream"].get("samples"):
        return {}
    from onea.schedules import DatasetSize, training_defaults

    options, data, sizes = record["config"].get("options") or {}, record["data"], record["stream"]["sizes"]
    images = data.get("task_images") or data.get("train_images") or 0
    epochs = options.get("epochs")
    values = training_defaults(DatasetSize(images, sum(sizes), len(sizes)), epochs if isinstance(epochs, int) else None)
    return {name: value for name, value in values.items() if name not in options}


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _setting_key(record: Record) -> str:
    """Key of comparable runs. It has the sizes of the tasks without their order, which depends on the seed."""
    data, stream = record["data"], record["stream"]
    images = sorted(stream["samples"]) if stream.get("samples") else None
    inputs = (data["name"], data.get("fingerprint"), data.get("train_images"), data.get("test_images"))
    network = (record["backbone"]["name"], record["backbone"].get("sha256"))
    return json.dumps([inputs, sorted(stream["sizes"]), _order(record), images, network])


def _order(record: Record) -> str:
    config = record["config"]
    if config.get("order"):
        return str(config["order"])
    fixed = record["stream"].get("names") or config.get("sizes") or config.get("stream") in ("balanced", "sizes")
    return "given" if fixed else "shuffled"


def _configuration_key(record: Record) -> str:
    return json.dumps([record["config"]["method"], record.get("title"), _resolved_options(record)], sort_keys=True)


def _progress(record: Record) -> tuple[bool, int]:
    return finished(record), len(record["metrics"]["A"])
