# SPDX-License-Identifier: Apache-2.0
"""Methods that train an adapter per task and merge it into the one that is kept; they differ in the operator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from onea.classifiers.carrying import feature_map
from onea.merging.operator import Operator, Sizes, merge
from onea.methods.adapter_training import AdapterTraining, TrainedAdapter, blank_adapters, train_adapter
from onea.methods.classification import ClassifierOptions, FeatureClassification
from onea.methods.fixed_views import FixedViews
from onea.methods.guard import fallen, held_out_accuracy, held_out_images
from onea.methods.merge_statistics import diagonal_fisher, gram_matrices
from onea.methods.options import tuned
from onea.methods.state import part_of, prefixed
from onea.options import BelowOne, ZeroToOne
from onea.renamed import renamed
from onea.runtime import Runtime
from onea.tasks import StreamPlan, Task
from onea.tensors import Tensors, cast_like, to_float64
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT
from onea.vit.hooks import BlockHooks

_KEPT, _MEMORY, _START, _ORIGIN = "adapter.", "operator.", "start.", "origin."
_RANDOM = ("fresh", "shared")  # starts that do not depend on earlier tasks
_COMMON = ("shared", "first", "previous")  # starts from which the deltas of all tasks can be measured


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

    @abstractmethod
    def operator(self) -> Operator:
        """The operator that merges a new adapter into the kept one."""

    def drawn_views(self, images: int, classes: int) -> int:
        """How many views of each image are fixed for a task, where training takes fixed ones; statistics share them."""
        return 1 if self.enough(images, classes) else max(self.fixed_views, self.views)

    def trains(self, classes: int, share: float) -> bool:
        """Whether a task of so many classes, which are this share of those in the merge, trains an adapter."""
        return not (self.single_class == "skip" and classes == 1) and share >= self.min_share


def _recipe(rate: float, decay: float, batch: int, rank: int, epochs: tuple[int, int, int]) -> dict[str, Any]:
    reference, smallest, largest = epochs
    return {
        "learning_rate": rate,
        "weight_decay": decay,
        "batch_size": batch,
        "rank": rank,
        "epochs": reference,
        "min_epochs": smallest,
        "max_epochs": largest,
    }


# One-A's table of hyper-parameters, with the epoch bounds of its published configurations.
PUBLISHED: dict[str, dict[str, Any]] = {
    "cifar100": _recipe(0.01, 5e-4, 128, 128, (25, 20, 40)),
    "cub200": _recipe(0.07, 5e-4, 16, 128, (10, 5, 20)),
    "imagenet-a": _recipe(0.08, 3e-3, 64, 128, (40, 20, 50)),
    "imagenet-r": _recipe(0.03, 5e-3, 24, 64, (30, 30, 50)),
    "": _recipe(0.01, 5e-4, 128, 128, (25, 20, 40)),
}


class AdapterMerging(FeatureClassification):
    """One adapter, merged task by task, and statistics of each class. Inference is one pass, for ever.

    The options name the operator. One that is made for deltas gets the difference from the common start: the random
    weights that all tasks share, or those of the first task where tasks start from one another (MagMax). With
    ``--start fresh`` or ``merged`` there is no common start, and it gets the weights as they are. Fisher merging and
    RegMean get their statistics from one more pass over the task's images.
    """

    options: MergingOptions
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = PUBLISHED
    small: ClassVar[Mapping[str, Mapping[str, Any]]] = tuned(0.28, 0.2)

    def __init__(
        self,
        vit: FrozenViT,
        options: MergingOptions,
        runtime: Runtime,
        plan: StreamPlan | None = None,
        adapter_cache: AdapterCache | None = None,
    ):
        super().__init__(vit, options, runtime, plan)
        self.adapter_cache = adapter_cache
        blank = blank_adapters(vit, options, seed=0)
        self.kept: Adapters = blank.requires_grad_(False).eval().to(runtime.device)
        self.merged_classes = 0
        self.merged_samples = 0
        self.operator = options.operator()
        self.memory: Tensors = {}
        self.start: Tensors = {}  # the weights that the next task is trained from, where they are an earlier task's
        self.origin: Tensors = {}  # the weights that deltas are measured from, if any

    @classmethod
    def epochs(cls, options: MergingOptions, sizes: Sequence[int]) -> list[int]:
        """More for larger tasks, none for those that are not trained on."""
        plan, merged, epochs = StreamPlan(sum(sizes), len(sizes)), 0, []
        for classes in sizes:
            trained = options.trains(classes, classes / (classes + merged))
            epochs.append(options.epochs_for(classes, plan) if trained else 0)
            merged += classes * trained
        return epochs

    @property
    def start_rule(self) -> str:
        """The weights that a task is trained from: as the options say, or as the operator was made for."""
        asked = self.options.start
        return asked if asked != "auto" else str(getattr(self.operator, "starts_from", "fresh"))

    def learn(self, task: Task) -> dict[str, Any]:
        """Train an adapter, merge it into the kept one and add the task's images to what is known of its classes."""
        held_out, views = self._held_out(task), self._fixed_views(task)
        guarded, carries = bool(held_out.any()), self.options.carry and self.known_classes > 0
        look = partial(self.features_of, task, self.kept, views=views)
        before = look() if guarded or carries else None
        earlier = {name: value.clone() for name, value in self.state_dict().items()} if guarded else {}
        report = self.adapt(task.only(~held_out), views=views, held_out=task.only(held_out))
        self.runtime.progress.note("prototypes")
        after = before if before is not None and not report["trained"] else look()
        by = feature_map(before, after) if carries and before is not None and before is not after else None
        if guarded and report["trained"] and before is not None:
            name, classifier = next(iter(self.classifiers.items()))
            known, images = self.known(name), int(held_out.sum())
            then = held_out_accuracy(classifier, known, before, task.labels, held_out)
            known = known if by is None else known.carry(by)
            now = held_out_accuracy(classifier, known, after, task.labels, held_out)
            report["guard"] = {"before": then, "after": now, "images": images}
            if fallen(then, now, images):
                self.load_state_dict(earlier)
                report["trained"], after, by = False, before, None
        self.observe(task, after, by, views)
        return report

    def _fixed_views(self, task: Task) -> FixedViews | None:
        """Views that training takes in turn and statistics are made of, if the task is trained on and so asked."""
        options = self.options
        if not options.fixed_views or not self._trains(task):
            return None
        count = options.drawn_views(len(task), len(task.classes))
        return FixedViews.drawn(self.vit, self.runtime, task, count, options.crop_scale, self.kept)

    def _held_out(self, task: Task) -> Tensor:
        """Which images of a task are held out of its training, ``bool [N]``."""
        if not self.options.guard or not self._trains(task):
            return torch.zeros(len(task), dtype=torch.bool)
        return held_out_images(task, self.options.guard)

    def _trains(self, task: Task) -> bool:
        """Whether an adapter is trained on a task whose classes are all new."""
        return self.options.trains(len(task.classes), self._sizes(task).new_share)

    @property
    def known_classes(self) -> int:
        """The number of classes in the statistics."""
        return next(iter(self.statistics.values())).classes

    def hooks(self) -> BlockHooks:
        """The kept adapter."""
        return self.kept

    def adapt(
        self,
        task: Task,
        sizes: Sizes | None = None,
        views: FixedViews | None = None,
        held_out: Task | None = None,
    ) -> dict[str, Any]:
        """Train an adapter on a task and merge it into the kept one; the prototypes stay as they are.

        Args:
            task: whose images are trained on.
            sizes: those of the merge where classes come again; by default all classes of the task are new.
            views: of its images, held out or not, fixed ones, where there are some.
            held_out: the same task with the images that are held out.
        """
        sizes = sizes or self._sizes(task)
        report: dict[str, Any] = {"trained": self.options.trains(len(task.classes), sizes.new_share)}
        if report["trained"]:
            new = self._trained(task, views, held_out)
            self._remember(new, task)
            report |= new.report
            report["merge"] = self._absorb(new.tensors, sizes)
        return report

    def _sizes(self, task: Task) -> Sizes:
        """The sizes of a merge where all classes of the task are new."""
        return Sizes(self.merged_classes, len(task.classes), self.merged_samples, len(task))

    def state_dict(self) -> Tensors:
        """The kept adapter, the statistics, the counts of what was merged, the operator's state, next start, origin."""
        return {
            **super().state_dict(),
            **prefixed(_KEPT, self.kept.state_dict()),
            **prefixed(_MEMORY, self.memory),
            **prefixed(_START, self.start),
            **prefixed(_ORIGIN, self.origin),
            "merged": torch.tensor([self.merged_classes, self.merged_samples]),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state)
        self.restore(part_of(_KEPT, state), *state["merged"].tolist())
        self.memory, self.start = part_of(_MEMORY, state), part_of(_START, state)
        self.origin = part_of(_ORIGIN, state)

    def restore(self, adapter: Tensors, classes: int, samples: int) -> None:
        """Continue with an adapter that so many classes and images have been merged into."""
        self.kept.load_state_dict(adapter)
        self.merged_classes, self.merged_samples = classes, samples

    def _trained(self, task: Task, views: FixedViews | None = None, held_out: Task | None = None) -> TrainedAdapter:
        """The task's adapter, trained here or by another run that differs only in the merge."""
        names = AdapterTraining.__dataclass_fields__.keys() - {"start"}  # the rule it stands for counts
        options = self.training_options(task)
        training = tuple(getattr(options, name) for name in sorted(names))
        fixed = views and views.count  # with enough images there are fewer views than the options of training say
        key = (task.seed, task.index, task.classes, len(task), training, fixed, self.start_rule, self.plan)
        # An adapter that starts from an earlier task's depends on how that one was merged, and is nobody else's; and
        # Fisher information needs the head, which is not kept.
        adapter_cache = self.adapter_cache if self.start_rule in _RANDOM and self._needs != "fisher" else None
        if adapter_cache is not None and key in adapter_cache:
            tensors, report = adapter_cache[key]
            here = {name: value.to(self.runtime.device, copy=True) for name, value in tensors.items()}
            return TrainedAdapter(here, report | {"training_shared": True})
        trained = self._train(task, views, held_out)
        if adapter_cache is not None:
            kept = {name: value.to("cpu", copy=True) for name, value in trained.tensors.items()}
            adapter_cache[key] = (kept, trained.report)
        return trained

    def _train(self, task: Task, views: FixedViews | None, held_out: Task | None) -> TrainedAdapter:
        adapters = self.new_adapter(task)
        if self.start_rule == "merged" and self.merged_classes:
            adapters.load_state_dict(self.kept.state_dict())
        elif self.start:
            adapters.load_state_dict(self.start)
        options = self.training_options(task)
        return train_adapter(self.vit, adapters, task, options, self.runtime, self.plan, views, held_out)

    def training_options(self, task: Task) -> AdapterTraining:
        """How the adapter of a task is trained."""
        return self.options

    def new_adapter(self, task: Task) -> Adapters:
        """A random adapter for a task, or the one that all tasks share."""
        index = 0 if self.start_rule == "shared" else task.index
        return blank_adapters(self.vit, self.options, task.seed, index)

    @property
    def _needs(self) -> str:
        return str(getattr(self.operator, "needs", ""))

    def _remember(self, new: TrainedAdapter, task: Task) -> None:
        """Keep what later tasks start from and are measured from, and the statistics that the operator asks for."""
        first = not self.merged_classes
        if self.start_rule == "previous" or (self.start_rule == "first" and first):
            self.start = new.tensors
        if first and self.start_rule in _COMMON and getattr(self.operator, "on_deltas", False):
            self.origin = dict(self.new_adapter(task).state_dict())
        prefix = "" if first else "new_"
        self.memory |= {prefix + name: value for name, value in self._statistics(new, task).items()}

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

    def _absorb(self, new: Tensors, sizes: Sizes) -> dict[str, Any]:
        """Merge an adapter into the kept one; deltas are taken before and undone after."""
        self.runtime.progress.note("merging")
        report: dict[str, Any] = {}
        if self.merged_classes:
            accumulated = dict(self.kept.state_dict())
            origin = {name: to_float64(value).to(accumulated[name].device) for name, value in self.origin.items()}
            old, joining = (
                {name: to_float64(value) - origin[name] for name, value in side.items()} if origin else side
                for side in (accumulated, new)
            )
            result = merge(self.operator, old, joining, sizes, self.memory)
            self.memory, report, new = result.state, result.report(), result.tensors
            if origin:
                new = {name: cast_like(origin[name] + new[name], value) for name, value in accumulated.items()}
        self.kept.load_state_dict(new)
        self.merged_classes = round(sizes.accumulated_classes + sizes.new_classes)
        self.merged_samples = sizes.accumulated_samples + sizes.new_samples
        return report


__getattr__ = renamed(__name__, {"AdapterMemo": "onea.methods.adapter_merging:AdapterCache"})
