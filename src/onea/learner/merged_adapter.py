# SPDX-License-Identifier: Apache-2.0
"""The one adapter that is kept, and the learner that trains an adapter on a task and merges it into the kept one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from onea.learner.adapter_training import AdapterTraining, TrainedAdapter, blank_adapters, train_adapter
from onea.learner.fixed_views import FixedViews
from onea.learner.merge_statistics import diagonal_fisher, gram_matrices
from onea.learner.options import ClassifierOptions
from onea.learner.tasks import StreamPlan, Task
from onea.merging import make_operator
from onea.merging.operator import Operator, Sizes
from onea.options import parse_pairs
from onea.runtime import Runtime
from onea.schema import BelowOne, ZeroToOne
from onea.tensors import Tensors, cast_like, to_float64
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT

_RANDOM = ("fresh", "shared")  # starts that do not depend on earlier tasks
_COMMON = ("shared", "first", "previous")  # starts from which the deltas of all tasks can be measured


@dataclass(frozen=True)
class MergedAdapter:
    """The adapter that is kept between tasks, and what later merges need.

    Attributes:
        tensors: its weights.
        classes: the number of classes merged into it.
        samples: the number of images merged into it.
        memory: tensors that the operator needs at the next merge.
        start: weights that the next task is trained from, where they are an earlier task's.
        origin: weights that deltas are measured from, if any.
    """

    tensors: Tensors
    classes: int = 0
    samples: int = 0
    memory: Tensors = field(default_factory=dict)
    start: Tensors = field(default_factory=dict)
    origin: Tensors = field(default_factory=dict)

    def sizes_with(self, task: Task) -> Sizes:
        """The sizes of a merge where all classes of the task are new."""
        return Sizes(self.classes, len(task.classes), self.samples, len(task))


class AdapterCache(dict[tuple[Any, ...], tuple[Tensors, dict[str, Any]]]):
    """Adapters already trained in this process, and their reports, for methods that differ only in how they merge them.

    They are kept in the host's memory: those of a long stream would fill a GPU.
    """


@dataclass(frozen=True)
class MergingOptions(ClassifierOptions, AdapterTraining, ABC):
    """Options of a method that trains and merges adapters.

    Attributes:
        single_class: what a task of one class does to the adapter: ``train`` (train and merge it like any other) or
            ``skip`` (neither trained nor merged, nor counted; its prototype is still learned).
        min_share: a task with a smaller share of the classes merged with it is skipped likewise: the merge would hear
            little of it, and the old prototypes would have to follow. 0 trains every task (the paper).
        carry: whether what is known of old classes follows the adapter, by the linear map of features that the new
            images show (off: the paper).
        guard: share of the images of a task, at most about 200 in all, that are held out of its training; if fewer of
            them are answered right after it than before, by more than chance, the adapter is taken back. 0 holds out
            none (the paper).
    """

    single_class: Literal["train", "skip"] = "train"
    min_share: ZeroToOne = 0.0
    carry: bool = False
    guard: BelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.operator()  # refuses what makes no sense now, not after the first task

    def training_for(self, classes: int, images: int) -> AdapterTraining:
        """How the adapter of a task of so many classes and images is trained."""
        return self

    @abstractmethod
    def operator(self) -> Operator:
        """The operator that merges a new adapter into the kept one."""

    def drawn_views(self, images: int, classes: int) -> int:
        """How many views of each image are fixed for a task, where training takes fixed ones; statistics share them."""
        return 1 if self.enough(images, classes) else max(self.fixed_views, self.views)

    def trains(self, classes: int, share: float) -> bool:
        """Whether a task of so many classes, which are this share of those in the merge, trains an adapter."""
        return not (self.single_class == "skip" and classes == 1) and share >= self.min_share


@dataclass(frozen=True)
class MergedAdapterOptions(MergingOptions):
    """Options of the training, and which merge follows it.

    Attributes:
        merge: the operator: one-a, running-mean, weighted-mean, newest, task-arithmetic, ties, dare, fisher, regmean,
            knots, knots-ties, tsv, iso-c, opcm, magmax, acmap, or one that an installed package adds.
        merge_options: options of the operator, such as density=0.2,scale=0.6.
    """

    merge: str = "one-a"
    merge_options: str = ""

    def operator(self) -> Operator:
        """The operator that these options name."""
        return make_operator(self.merge, **parse_pairs(self.merge_options, "merge_options"))


class AdapterLearner:
    """Trains an adapter on a task and merges it into the kept one, which it replaces and never changes.

    An operator that is made for deltas gets the difference from the common start: the random weights that all tasks
    share, or those of the first task where tasks start from one another (MagMax). With ``start`` ``fresh`` or
    ``merged`` there is no common start, and it gets the weights as they are. Fisher merging and RegMean get their
    statistics from one more pass over the task's images.

    Args:
        vit: the frozen network.
        options: of the training and the merge.
        runtime: where to compute.
        plan: of the stream, if there is one.
        cache: of adapters that were trained for methods which differ only in the merge.
    """

    def __init__(
        self,
        vit: FrozenViT,
        options: MergingOptions,
        runtime: Runtime,
        plan: StreamPlan | None = None,
        cache: AdapterCache | None = None,
    ):
        self.vit, self.options, self.runtime, self.plan, self.cache = vit, options, runtime, plan, cache
        self.operator = options.operator()

    def adapt(
        self,
        merged: MergedAdapter,
        task: Task,
        sizes: Sizes | None = None,
        views: FixedViews | None = None,
        held_out: Task | None = None,
    ) -> tuple[MergedAdapter, dict[str, Any]]:
        """Train an adapter on a task and merge it into the kept one.

        Args:
            merged: the kept one.
            task: whose images are trained on.
            sizes: those of the merge where classes come again; by default all classes of the task are new.
            views: of its images, held out or not, fixed ones, where there are some.
            held_out: the same task with the images that are held out.

        Returns:
            The new kept adapter, and a JSON object about training and merge.
        """
        sizes = sizes or merged.sizes_with(task)
        new = self._trained(merged, task, views, held_out)
        ready = self._prepared(merged, new, task)
        result, report = self._merge(ready, new.tensors, sizes)
        return result, new.report | {"merge": report}

    @property
    def start_rule(self) -> str:
        """The weights that a task is trained from: as the options say, or as the operator was made for."""
        asked = self.options.start
        return asked if asked != "auto" else str(getattr(self.operator, "starts_from", "fresh"))

    def blank(self, seed: int = 0, index: int = 0) -> Adapters:
        """A random adapter, which leaves the network's output as it is; or the one that all tasks share."""
        return blank_adapters(self.vit, self.options, seed, 0 if self.start_rule == "shared" else index)

    def _trained(
        self, merged: MergedAdapter, task: Task, views: FixedViews | None, held_out: Task | None
    ) -> TrainedAdapter:
        """The task's adapter, trained here or by another run that differs only in the merge."""
        names = AdapterTraining.__dataclass_fields__.keys() - {"start"}  # the rule it stands for counts
        options = self.options.training_for(len(task.classes), len(task))
        training = tuple(getattr(options, name) for name in sorted(names))
        fixed = views and views.count  # with enough images there are fewer views than the options of training say
        key = (task.seed, task.index, task.classes, len(task), training, fixed, self.start_rule, self.plan)
        # An adapter that starts from an earlier task's depends on how that one was merged, and is nobody else's; and
        # Fisher information needs the head, which is not kept.
        cache = self.cache if self.start_rule in _RANDOM and self._needs != "fisher" else None
        if cache is not None and key in cache:
            tensors, report = cache[key]
            here = {name: value.to(self.runtime.device, copy=True) for name, value in tensors.items()}
            return TrainedAdapter(here, report | {"training_shared": True})
        adapters = self.blank(task.seed, task.index)
        if self.start_rule == "merged" and merged.classes:
            adapters.load_state_dict(merged.tensors)
        elif merged.start:
            adapters.load_state_dict(merged.start)
        trained = train_adapter(self.vit, adapters, task, options, self.runtime, self.plan, views, held_out)
        if cache is not None:
            kept = {name: value.to("cpu", copy=True) for name, value in trained.tensors.items()}
            cache[key] = (kept, trained.report)
        return trained

    @property
    def _needs(self) -> str:
        return str(getattr(self.operator, "needs", ""))

    def _prepared(self, merged: MergedAdapter, new: TrainedAdapter, task: Task) -> MergedAdapter:
        """The kept adapter with what later tasks start from and are measured from, and the operator's statistics."""
        first = not merged.classes
        starts = self.start_rule == "previous" or (self.start_rule == "first" and first)
        measured = first and self.start_rule in _COMMON and getattr(self.operator, "on_deltas", False)
        prefix = "" if first else "new_"
        statistics = {prefix + name: value for name, value in self._statistics(new, task).items()}
        return replace(
            merged,
            start=new.tensors if starts else merged.start,
            origin=dict(self.blank(task.seed, task.index).state_dict()) if measured else merged.origin,
            memory={**merged.memory, **statistics},
        )

    def _statistics(self, new: TrainedAdapter, task: Task) -> Tensors:
        if not self._needs:
            return {}
        self.runtime.progress.note("statistics")
        adapters = blank_adapters(self.vit, self.options, task.seed).eval().to(self.runtime.device)
        adapters.load_state_dict(new.tensors)
        if self._needs == "gram":
            return gram_matrices(self.vit, adapters, task, self.runtime)
        assert new.head is not None  # adapters of others, which have none, are not taken for Fisher information
        return diagonal_fisher(self.vit, adapters, new.head, task, self.runtime)

    def _merge(self, kept: MergedAdapter, new: Tensors, sizes: Sizes) -> tuple[MergedAdapter, dict[str, Any]]:
        """Merge an adapter into the kept one; deltas are taken before and undone after."""
        self.runtime.progress.note("merging")
        report: dict[str, Any] = {}
        memory = kept.memory
        if kept.classes:
            accumulated = {name: value.to(self.runtime.device) for name, value in kept.tensors.items()}
            origin = {name: to_float64(value).to(accumulated[name].device) for name, value in kept.origin.items()}
            old, joining = (
                {name: to_float64(value) - origin[name] for name, value in side.items()} if origin else side
                for side in (accumulated, new)
            )
            result = self.operator(old, joining, sizes, memory)
            memory, report, new = result.state, result.report(), result.tensors
            if origin:
                new = {name: cast_like(origin[name] + new[name], value) for name, value in accumulated.items()}
        classes = round(sizes.accumulated_classes + sizes.new_classes)
        samples = sizes.accumulated_samples + sizes.new_samples
        return replace(kept, tensors=new, classes=classes, samples=samples, memory=memory), report
