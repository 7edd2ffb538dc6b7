# SPDX-License-Identifier: Apache-2.0
"""The runs of an experiment, as in the paper or on other data, another backbone or a smaller scale, and their cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from onea.errors import OneaError, truncate
from onea.research.data import data_name
from onea.research.paper.experiment import BACKBONE, DATASETS, Cell, Experiment, data_title
from onea.research.record import Record

if TYPE_CHECKING:
    from onea.research.runs.config import RunConfig
    from onea.research.streams import Kind, Stream

MAX_SEEDS = 1_000
MIN_IMAGES = 2  # per class, at any scale
_CHANGES = {"panel": "Changes to the experiment"}  # in `onea paper --help`


# image counts


@dataclass(frozen=True)
class ImageCounts:
    """Numbers of images in a dataset.

    Attributes:
        train: training images of each class.
        test: test images of each class.
        loaded: False if these are published counts of a dataset that could not be loaded.
        groups: number of natural tasks.
    """

    train: tuple[int, ...]
    test: tuple[int, ...]
    loaded: bool
    groups: int = 0

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.train)

    @property
    def per_class(self) -> float:
        """Mean number of training images per class."""
        return sum(self.train) / len(self.train)


def count_images(data: str, root: str | None) -> ImageCounts:
    """Count a dataset's images; for a dataset of the paper that cannot be loaded, return the published counts."""
    if data == "cifar100":  # its counts are known, and loading it may start a download
        return published_counts(data)
    import numpy as np

    from onea.files import cache_folder
    from onea.research.data.sources import load_dataset

    try:
        dataset = load_dataset(data, root=Path(root) if root else None, cache=cache_folder())
    except OneaError:
        if data in DATASETS:
            return published_counts(data, loaded=False)
        raise
    train, test = (
        tuple(np.bincount(split.labels, minlength=len(dataset.classes)).tolist())
        for split in (dataset.train, dataset.test)
    )
    return ImageCounts(train, test, loaded=True, groups=len(dataset.groups))


def recorded_counts(records: Iterable[Record], root: str | None) -> Callable[[str], ImageCounts]:
    """A function that takes the counts from a finished record if there is one, so that the dataset may be missing."""
    recorded = {}
    for record in records:
        config, total = record["config"], tuple(record["total"])
        images = record["data"].get("train_images")
        if images is not None and config["per_class"] is None and config["holdout"] is None:
            recorded[config["data"]] = ImageCounts(_evenly(images, len(total)), total, loaded=True)
    return lambda data: recorded.get(data) or count_images(data, root)


def published_counts(data: str, loaded: bool = True) -> ImageCounts:
    """The published counts of a dataset of the paper, divided evenly among its classes."""
    dataset = DATASETS[data_name(data)]
    return ImageCounts(_evenly(dataset.train, dataset.classes), _evenly(dataset.test, dataset.classes), loaded)


def _evenly(count: int, classes: int) -> tuple[int, ...]:
    quotient, remainder = divmod(count, classes)
    return (quotient + 1,) * remainder + (quotient,) * (classes - remainder)


# the runs


@dataclass(frozen=True)
class Changes:
    """Changes to an experiment of the paper.

    Attributes:
        data: dataset to use: one of the experiment's, or a replacement (repeatable).
        root: folder of downloaded datasets.
        backbone: another network, with its own preprocessing instead of the paper's.
        seeds: number of seeds.
        tasks: number of tasks of every stream.
        scale: factor on images per class and epochs.
        device: ``auto``, ``cpu``, ``cuda``, ...
    """

    data: tuple[str, ...] = field(default=(), metadata=_CHANGES)
    root: str | None = field(default=None, metadata=_CHANGES)
    backbone: str | None = field(default=None, metadata=_CHANGES)
    seeds: int | None = field(default=None, metadata=_CHANGES)
    tasks: int | None = field(default=None, metadata=_CHANGES)
    scale: float = field(default=1.0, metadata=_CHANGES)
    device: str | None = field(default=None, metadata={"panel": "Machine"})


@dataclass(frozen=True)
class PlannedCell:
    """A cell of the paper, the same cell with the changes, and its runs, one per seed."""

    paper: Cell
    cell: Cell
    runs: tuple[RunConfig, ...]


@dataclass(frozen=True)
class ExperimentPlan:
    """All runs of an experiment."""

    experiment: Experiment
    changes: Changes
    planned_cells: tuple[PlannedCell, ...]

    @property
    def configs(self) -> tuple[RunConfig, ...]:
        """The configurations of all runs, without repetitions."""
        return tuple({run.key(): run for planned in self.planned_cells for run in planned.runs}.values())


def make_plan(
    experiment: Experiment, changes: Changes, count: Callable[[str], ImageCounts] | None = None
) -> ExperimentPlan:
    """The runs of an experiment with these changes.

    Args:
        experiment: a table or figure.
        changes: the changes.
        count: function that returns the counts of a dataset; by default the dataset is loaded and counted.

    Raises:
        OneaError: if the changes do not fit the experiment or the data.
    """
    _check(experiment, changes)
    replaced = substitute_data(experiment, changes.data)
    counts = {
        data: count(data) if count else count_images(data, changes.root) for data in dict.fromkeys(replaced.values())
    }
    planned_cells: dict[tuple[str, tuple[tuple[str, str], ...]], PlannedCell] = {}
    for paper in experiment.cells:
        if (data := replaced.get(str(paper.options["data"]))) is None:
            continue
        cell = _changed(paper, changes, data)
        planned = PlannedCell(paper, cell, _runs(experiment, cell, changes, counts[data]))
        # The changes may have made columns equal, which are then shown once.
        if planned_cells.setdefault((cell.row, cell.headings()), planned).runs != planned.runs:
            raise OneaError(f"Two datasets would both be called '{data_title(data)}'; rename one of their folders.")
    return ExperimentPlan(experiment, changes, tuple(planned_cells.values()))


def substitute_data(experiment: Experiment, data: tuple[str, ...]) -> dict[str, str]:
    """The datasets of the experiment that are run, each mapped to its replacement."""
    names = experiment.datasets
    if not data:
        return {name: name for name in names}
    if all(data_name(source) in names for source in data):
        chosen = {data_name(source): source for source in data}
        return {name: chosen[name] for name in names if name in chosen}
    if len(data) == 1:
        return dict.fromkeys(names, data[0])
    if len(data) == len(names):
        return dict(zip(names, data, strict=True))
    raise OneaError(
        f"{len(data)} datasets were given for the {len(names)} of {experiment.name} ({', '.join(names)}); "
        f"give one for all of them, one for each, or some of these."
    )


def preset_values(config: RunConfig, counts: ImageCounts) -> dict[str, Any]:
    """All options of the run's method with the values of its preset."""
    from onea.research.methods import method_class
    from onea.research.methods.presets import preset_options
    from onea.research.runs.setup import dataset_size

    kind = method_class(config.method).Options
    size = dataset_size(config, stream_of(config, counts), counts.train)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return defaults | preset_options(config.method, config.preset, size)


def option_values(method: str, preset: str, data: str) -> dict[str, Any]:
    """All options of a method with the values of a preset on a dataset."""
    from onea.research.runs.config import make_config
    from onea.research.runs.setup import DEFAULT_TASKS

    config, counts = make_config({"method": method, "preset": preset, "data": data}), count_images(data, None)
    tasks = counts.groups or min(DEFAULT_TASKS, counts.classes)
    return preset_values(dataclasses.replace(config, tasks=tasks), counts)


def scaled_options(config: RunConfig, scale: float, counts: ImageCounts) -> dict[str, Any]:
    """A run's options with all numbers of epochs scaled, to at least one.

    Options that equal the preset are left out, because a run is identified by its options: the same run may have the
    defaults in one table and be a row of an ablation in another, and must not be repeated.
    """
    preset = preset_values(config, counts)
    values = preset_values(dataclasses.replace(config, per_class=None), counts) | config.options
    if scale != 1:
        scaled = [name for name in values if name.endswith("epochs") and values[name]]
        values |= {name: max(1, round(scale * values[name])) for name in scaled}
    return {name: value for name, value in values.items() if value != preset[name]}


def split_sizes(sizes: tuple[int, ...], max_size: int) -> tuple[int, ...]:
    """Task sizes with each task split evenly into tasks of at most ``max_size`` classes.

    >>> split_sizes((14, 1, 3), 5)
    (5, 5, 4, 1, 3)
    """
    from onea.research.streams import balanced_sizes

    return tuple(part for size in sizes for part in balanced_sizes(size, -(-size // max_size)))


def _check(experiment: Experiment, changes: Changes) -> None:
    if not 0 < changes.scale <= 1:
        raise OneaError(f"scale is {changes.scale:g}; it must be above 0 and at most 1 (the paper's size).")
    if changes.seeds is not None and not 1 <= changes.seeds <= MAX_SEEDS:
        raise OneaError(f"seeds is {truncate(changes.seeds)}; choose at least one and at most {MAX_SEEDS:,}.")
    if changes.tasks is not None and changes.tasks < 1:
        raise OneaError(f"tasks is {truncate(changes.tasks)}; choose at least one.")
    if experiment.per_task and (changes.seeds or 1) > 1:
        raise OneaError(
            f"{experiment.name} shows one stream task by task, so all rows share one seed; leave out --seeds."
        )


def _changed(paper: Cell, changes: Changes, data: str) -> Cell:
    options = {**paper.options, "data": data}
    if changes.tasks is not None:
        options["tasks"] = changes.tasks
    if changes.backbone is not None and changes.backbone != BACKBONE:
        options["backbone"] = changes.backbone
        del options["protocol"]  # another backbone has its own preprocessing
    else:  # the authors' settings for the cell's dataset, or for other data
        published = str(paper.options["data"])
        options["preset"] = f"paper/{published}" if data_name(data) == published else "paper"
    return dataclasses.replace(paper, options=options)


def _runs(experiment: Experiment, cell: Cell, changes: Changes, counts: ImageCounts) -> tuple[RunConfig, ...]:
    """One run per seed."""
    tasks = int(cell.options["tasks"])
    if tasks > counts.classes:
        title = data_title(str(cell.options["data"]))
        raise OneaError(
            f"{title} has {counts.classes} classes, too few for the {tasks} tasks of {experiment.name}; "
            f"give --tasks {counts.classes} or fewer, or another --data."
        )
    seeds = range(1, 1 + (changes.seeds or experiment.seeds))
    return tuple(_run(cell, seed, changes, counts) for seed in seeds)


def _run(cell: Cell, seed: int, changes: Changes, counts: ImageCounts) -> RunConfig:
    from onea.research.runs.config import make_config
    from onea.research.streams import make_stream

    options = cell.options
    values = {**options, "seed": seed, "root": changes.root, "device": changes.device}
    if cell.split is not None:  # the class order depends only on the seed, and stays the same
        stream = make_stream(classes=counts.classes, tasks=options["tasks"], gamma=options["gamma"], seed=seed)
        values |= {"stream": "sizes", "sizes": split_sizes(stream.sizes, cell.split), "tasks": None}
    if changes.scale != 1:
        values["per_class"] = max(MIN_IMAGES, round(changes.scale * counts.per_class))
    config = make_config(values)
    return dataclasses.replace(config, options=scaled_options(config, changes.scale, counts))


class Cost(NamedTuple):
    """Estimated cost of a run in images: in training counted once per epoch, in evaluation once per forward pass."""

    training: int
    evaluation: int


def estimate(config: RunConfig, counts: ImageCounts) -> Cost:
    """The cost of a run, from its stream, its epochs and the dataset's counts."""
    from onea.research.methods import method_class
    from onea.research.runs.setup import dataset_size, images_per_task, method_options

    stream = stream_of(config, counts)
    images = images_per_task(config, stream, counts.train)
    kind = method_class(config.method)
    options = method_options(config, dataset_size(config, stream, counts.train))
    epochs = kind.epochs_per_task(options, stream.sizes)
    tested = accumulate(
        sum(counts.test[stream.class_order[p]] for p in stream.range_of(t)) for t in range(stream.tasks)
    )
    return Cost(
        sum(count * times for count, times in zip(images, epochs, strict=True)),
        round(sum(count * kind.forward_passes(options, task + 1) for task, count in enumerate(tested))),
    )


def stream_of(config: RunConfig, counts: ImageCounts) -> Stream:
    """The stream of a run, as the run creates it."""
    from onea.research.streams import make_stream, parse_sizes

    return make_stream(
        classes=counts.classes,
        tasks=config.tasks,
        kind="step" if config.stream == "auto" else cast("Kind", config.stream),  # no experiment reads a file
        gamma=config.gamma,
        sizes=parse_sizes(config.sizes) if config.sizes else None,
        order=config.order,
        seed=config.seed,
        long_tail=config.long_tail,
        n_max=min(max(counts.train), config.per_class or max(counts.train)),
    )
