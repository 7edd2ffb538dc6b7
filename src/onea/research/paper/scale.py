# SPDX-License-Identifier: Apache-2.0
"""An experiment on other data, another backbone or a smaller scale: which runs that makes, and what they will cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onea.errors import OneaError, truncate
from onea.research.data import data_name
from onea.research.paper.experiment import BACKBONE, DATASETS, Cell, Experiment, data_title
from onea.research.record import Record
from onea.vit.network_config import full_name

if TYPE_CHECKING:
    from onea.research.runs.config import RunConfig
    from onea.research.streams import Stream

MOST_SEEDS = 1_000
FEWEST_IMAGES = 2  # of a class, at any scale
_CHANGES = {"panel": "Changes to the experiment"}  # of the help


# how many images there are of each class


@dataclass(frozen=True)
class ImageCounts:
    """Counts of a dataset.

    Attributes:
        train: training images of each class.
        test: test images of each class.
        loaded: whether they were counted; otherwise they are the published ones, spread evenly over the classes.
        groups: how many natural tasks there are.
    """

    train: tuple[int, ...]
    test: tuple[int, ...]
    loaded: bool
    groups: int = 0

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.train)

    @property
    def per_class(self) -> float:
        """Training images of a class, on average."""
        return sum(self.train) / len(self.train)


def count_images(data: str, root: str | None) -> ImageCounts:
    """Count a dataset's images, or fall back on the published counts where it is one of the paper's and not here."""
    if data == "cifar100":  # the same wherever it is, and counting would first download it
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
        tuple(np.bincount(side.labels, minlength=len(dataset.classes)).tolist())
        for side in (dataset.train, dataset.test)
    )
    return ImageCounts(train, test, loaded=True, groups=len(dataset.groups))


class RecordedCounts:
    """Image counts from finished records, whose data need not be on this machine any more."""

    def __init__(self, records: Iterable[Record], root: str | None):
        self._root = root
        self._facts: dict[str, ImageCounts] = {}
        for record in records:
            config, total = record["config"], tuple(record["total"])
            images = record["data"].get("train_images")  # somebody may have taken it out
            if images is not None and config["per_class"] is None and config["holdout"] is None:
                self._facts[config["data"]] = ImageCounts(_evenly(images, len(total)), total, loaded=True)

    def facts(self, data: str) -> ImageCounts:
        """Counts of a dataset, from a record if there is one."""
        return self._facts.get(data) or count_images(data, self._root)


def published_counts(data: str, loaded: bool = True) -> ImageCounts:
    """The published counts of one of the datasets of the paper, shared out evenly among its classes."""
    known = DATASETS[data_name(data)]
    train, test = (_evenly(count, known.classes) for count in (known.train, known.test))
    return ImageCounts(train, test, loaded)


def _evenly(count: int, classes: int) -> tuple[int, ...]:
    each, left = divmod(count, classes)
    return (each + 1,) * left + (each,) * (classes - left)


Facts = Callable[[str], ImageCounts]


# the runs


@dataclass(frozen=True)
class Changes:
    """The changes that a user wants to an experiment of the paper.

    Attributes:
        data: some of the experiment's datasets, or other ones in their place (repeatable).
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
    """A cell as it is run here: the paper's, ours, and one run for each seed."""

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
        """Every run once."""
        return tuple({run.key(): run for planned in self.planned_cells for run in planned.runs}.values())


def make_plan(experiment: Experiment, changes: Changes, facts: Facts | None = None) -> ExperimentPlan:
    """The runs of an experiment with these changes; raises where they cannot be met.

    Args:
        experiment: a table or figure.
        changes: what is to be otherwise.
        facts: counts of a dataset by name; counted where they are not given.
    """

    count = facts or (lambda data: count_images(data, changes.root))
    _check(experiment, changes)
    replaced = substitute_data(experiment, changes.data)
    planned_cells: dict[tuple[str, tuple[tuple[str, str], ...]], PlannedCell] = {}
    known: dict[str, ImageCounts] = {}
    for paper in experiment.cells:
        data = str(paper.options["data"])
        if data not in replaced:
            continue
        cell = _with(paper, changes, replaced[data])
        if (mine := str(cell.options["data"])) not in known:
            known[mine] = count(mine)
        planned = PlannedCell(paper, cell, _runs(experiment, cell, changes, known[mine]))
        # Columns that have become the same are one.
        first = planned_cells.setdefault((cell.row, cell.headings()), planned)
        if first.runs != planned.runs:
            raise OneaError(f"Two datasets would both be called '{data_title(mine)}'; rename one of their folders.")
    return ExperimentPlan(experiment, changes, tuple(planned_cells.values()))


def substitute_data(experiment: Experiment, data: tuple[str, ...]) -> dict[str, str]:
    """Which of the experiment's datasets are used, each with what takes its place."""
    own = experiment.datasets
    if not data:
        return {name: name for name in own}
    if all(data_name(given) in own for given in data):
        chosen = {data_name(given): given for given in data}
        return {name: chosen[name] for name in own if name in chosen}
    if len(data) == 1:
        return dict.fromkeys(own, data[0])
    if len(data) == len(own):
        return dict(zip(own, data, strict=True))
    raise OneaError(
        f"{len(data)} datasets were given for the {len(own)} of {experiment.name} ({', '.join(own)}); "
        f"give one for all of them, one for each, or some of these."
    )


def preset_values(config: RunConfig, facts: ImageCounts) -> dict[str, Any]:
    """All options that the run's method has without being told otherwise, on the run's data."""
    from onea.research.methods import method_class
    from onea.research.methods.presets import preset_options
    from onea.research.runs.setup import dataset_size

    kind = method_class(config.method).Options
    chosen = preset_options(config.method, config.preset, dataset_size(config, stream_of(config, facts), facts.train))
    return {item.name: item.default for item in dataclasses.fields(kind)} | chosen


def option_values(method: str, preset: str, data: str) -> dict[str, Any]:
    """All options that a method has in a run that names a preset and a dataset and nothing else."""
    from onea.research.runs.config import make_config
    from onea.research.runs.setup import DEFAULT_TASKS

    config, facts = make_config({"method": method, "preset": preset, "data": data}), count_images(data, None)
    return preset_values(dataclasses.replace(config, tasks=facts.groups or min(DEFAULT_TASKS, facts.classes)), facts)


def scaled_options(config: RunConfig, scale: float, facts: ImageCounts) -> dict[str, Any]:
    """A run's options with every number of epochs at a smaller scale, at least one each.

    What agrees with the preset is left out: a run is known by its options, and one that appears in two tables, here
    by default and there as a row of an ablation, must not be made twice.
    """
    usual = preset_values(config, facts)
    values = preset_values(dataclasses.replace(config, per_class=None), facts) | config.options
    if scale != 1:
        scaled = [name for name in values if name.endswith("epochs") and values[name]]
        values |= {name: max(1, round(scale * values[name])) for name in scaled}
    return {name: value for name, value in values.items() if value != usual[name]}


def scaled_images(per_class: float, scale: float) -> int:
    """Images per class at a smaller scale.

    >>> scaled_images(500, 0.1), scaled_images(30, 0.01)
    (50, 2)
    """
    return max(FEWEST_IMAGES, round(scale * per_class))


def split_sizes(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Task sizes with every task cut into parts as equal as they can be, of at most so many classes.

    >>> split_sizes((14, 1, 3), 5)
    (5, 5, 4, 1, 3)
    """
    from onea.research.streams import balanced

    return tuple(part for size in sizes for part in balanced(size, -(-size // most)))


def _check(experiment: Experiment, changes: Changes) -> None:
    if not 0 < changes.scale <= 1:
        raise OneaError(f"scale is {changes.scale:g}; it must lie above 0 and be at most 1 (the paper's size).")
    if changes.seeds is not None and not 1 <= changes.seeds <= MOST_SEEDS:
        raise OneaError(f"seeds is {truncate(changes.seeds)}; ask for at least one and at most {MOST_SEEDS:,}.")
    if changes.tasks is not None and changes.tasks < 1:
        raise OneaError(f"tasks is {truncate(changes.tasks)}; ask for at least one.")
    if experiment.per_task and (changes.seeds or 1) > 1:
        raise OneaError(f"{experiment.name} shows one stream task by task, so all rows share one seed; drop --seeds.")


def _with(paper: Cell, changes: Changes, data: str) -> Cell:
    options = {**paper.options, "data": data}
    if changes.tasks is not None:
        options["tasks"] = changes.tasks
    if changes.backbone is not None and changes.backbone != BACKBONE:
        options["backbone"] = full_name(changes.backbone)
        del options["protocol"]  # other weights expect the pixels they were trained with
    else:  # the settings that the authors publish for the table's own dataset, or for any other
        own = str(paper.options["data"])
        options["preset"] = f"paper/{own}" if data_name(data) == own else "paper"
    return dataclasses.replace(paper, options=options)


def _runs(experiment: Experiment, cell: Cell, changes: Changes, facts: ImageCounts) -> tuple[RunConfig, ...]:
    tasks = int(cell.options["tasks"])
    if tasks > facts.classes:
        title = data_title(str(cell.options["data"]))
        raise OneaError(
            f"{title} has {facts.classes} classes, too few for the {tasks} tasks of {experiment.name}; "
            f"give --tasks {facts.classes} or fewer, or another --data."
        )
    seeds = range(1, 1 + (changes.seeds or experiment.seeds))
    return tuple(_run(cell, seed, changes, facts) for seed in seeds)


def _run(cell: Cell, seed: int, changes: Changes, facts: ImageCounts) -> RunConfig:
    from onea.research.runs.config import make_config

    values = {**cell.options, "seed": seed, "root": changes.root, "device": changes.device}
    if cell.split is not None:
        values |= _split(cell, seed, facts)
    if changes.scale != 1:
        values["per_class"] = scaled_images(facts.per_class, changes.scale)
    config = make_config(values)
    return dataclasses.replace(config, options=scaled_options(config, changes.scale, facts))


def _split(cell: Cell, seed: int, facts: ImageCounts) -> dict[str, Any]:
    """The cell's stream, cut smaller; the class order depends on the seed alone, so the classes arrive as before."""
    from onea.research.streams import make_stream

    options = cell.options
    whole = make_stream(classes=facts.classes, tasks=options["tasks"], gamma=options["gamma"], seed=seed)
    parts = split_sizes(whole.sizes, int(cell.split or 1))
    return {"stream": "sizes", "sizes": parts, "tasks": None}


@dataclass(frozen=True)
class Cost:
    """Image-steps of a run, estimated.

    Attributes:
        training: images forward and backward, once for each epoch.
        evaluation: images forward only, once for each pass that the method needs.
    """

    training: int
    evaluation: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.training + other.training, self.evaluation + other.evaluation)


def estimate(config: RunConfig, facts: ImageCounts) -> Cost:
    """What a run will cost, from its stream, its epochs and the dataset's counts."""
    from onea.research.methods import method_class
    from onea.research.runs.setup import dataset_size, images_per_task, options_of

    stream = stream_of(config, facts)
    images = images_per_task(config, stream, facts.train)
    kind = method_class(config.method)
    options = options_of(config, dataset_size(config, stream, facts.train))
    epochs = kind.epochs_per_task(options, stream.sizes)
    tested = accumulate(sum(facts.test[stream.class_order[p]] for p in stream.range_of(t)) for t in range(stream.tasks))
    return Cost(
        sum(count * times for count, times in zip(images, epochs, strict=True)),
        round(sum(count * kind.forward_passes(options, task + 1) for task, count in enumerate(tested))),
    )


def stream_of(config: RunConfig, facts: ImageCounts) -> Stream:
    """The stream of a run of this package, as the run itself will make it."""
    from onea.research.streams import make_stream, parse_sizes

    return make_stream(
        classes=facts.classes,
        tasks=config.tasks,
        kind="step" if config.stream == "auto" else config.stream,
        gamma=config.gamma,
        sizes=parse_sizes(config.sizes) if config.sizes else None,
        order=config.order,
        seed=config.seed,
        long_tail=config.long_tail,
        n_max=min(max(facts.train), config.per_class or max(facts.train)),
    )
