# SPDX-License-Identifier: Apache-2.0
"""The merged adapter, and the learner that trains an adapter on a task and merges it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.learner.adapter_training import AdapterTraining, TrainedAdapter, initial_adapters, train_adapter
from onea.learner.fixed_views import FixedViews
from onea.learner.memory import Memory, parse_memory
from onea.learner.options import CarryOptions, ClassifierOptions
from onea.learner.tasks import StreamPlan, Task
from onea.merging import make_operator
from onea.merging.operator import Operator, Sizes
from onea.options import parse_pairs
from onea.runtime import Runtime
from onea.schema import BelowOne, Fraction, ZeroToOne
from onea.tensors import Tensors, cast_like, to_float64
from onea.vit.adapter import Adapters
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.frozen import FrozenViT

_GRADIENT_BATCH = 32  # for per-sample gradients, a matrix for each sample
_RANDOM = ("fresh", "shared")  # initial weights that do not depend on earlier tasks
_COMMON = ("shared", "first", "previous")  # initial weights with a common origin for the deltas of all tasks


@dataclass(frozen=True)
class MergedAdapter:
    """The adapter that is kept between tasks, with the state of the merge.

    Attributes:
        tensors: weights of the adapter.
        classes: the number of classes merged into it.
        samples: the number of images merged into it.
        operator_state: tensors that the operator needs at the next merge.
        start: initial weights of the next task's adapter, where they are those of an earlier task.
        origin: weights that deltas are relative to, if any.
    """

    tensors: Tensors
    classes: int = 0
    samples: int = 0
    operator_state: Tensors = field(default_factory=dict)
    start: Tensors = field(default_factory=dict)
    origin: Tensors = field(default_factory=dict)

    def sizes_with(self, task: Task) -> Sizes:
        """The sizes of a merge if all classes of the task are new."""
        return Sizes(self.classes, len(task.classes), self.samples, len(task))


class AdapterCache(dict[tuple[Any, ...], tuple[Tensors, dict[str, Any]]]):
    """Trained adapters and their reports, in host memory, for methods that differ only in the merge."""


@dataclass(frozen=True)
class MergingOptions(CarryOptions, ClassifierOptions, AdapterTraining, ABC):
    """Options of a method that trains and merges adapters.

    Attributes:
        train: train adapters; otherwise features stay those of the frozen network.
        single_class: how to handle a task of one class: ``train`` and merge it like any other, or ``skip`` it: then it
            is neither trained, merged nor counted, but its prototype is computed.
        min_share: tasks that contribute less than this share of the merged classes are skipped as well: they would
            hardly change the merged adapter, but old prototypes would drift. 0 trains all tasks (the paper).
        guard: share of the images of a task, at most about 200, that are held out of its training. If accuracy on them
            drops significantly, the merge is rejected. 0 holds out none (the paper).
    """

    train: bool = True
    single_class: Literal["train", "skip"] = "train"
    min_share: ZeroToOne = 0.0
    guard: BelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.operator()  # refuse invalid options now, not after the first task

    def training_options(self, classes: int, images: int) -> AdapterTraining:
        """Options of the training of a task with this number of classes and images."""
        return self

    @abstractmethod
    def operator(self) -> Operator:
        """The operator that merges a new adapter into the merged one."""

    def memory_and_trigger(self) -> tuple[Memory, float]:
        """Which images of earlier tasks are kept, and the share of untrained classes that makes a training due."""
        return 0, 1.0

    def num_fixed_views(self, images: int, classes: int) -> int:
        """The number of fixed views of each image of a task, for training and statistics."""
        return 1 if self.skip_crops(images, classes) else max(self.training_views, self.views)

    def should_train(self, classes: int, share: float) -> bool:
        """Whether to train an adapter on a task, given its classes and their share of the classes in the merge."""
        return self.train and not (self.single_class == "skip" and classes == 1) and share >= self.min_share


@dataclass(frozen=True)
class MemoryOptions(MergingOptions, ABC):
    """Options of a method that may keep images of earlier tasks.

    Attributes:
        memory: number of images of each class that are kept and take part in later trainings; or ``pending``: all
            images of classes that no adapter was trained on, until the next training. 0 keeps none (the paper).
        trigger: with memory, also train as soon as the classes that no adapter was trained on are this share of all
            classes.
    """

    memory: str = "0"
    trigger: Fraction = 0.33

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_memory(self.memory)

    def memory_and_trigger(self) -> tuple[Memory, float]:
        """The parsed options."""
        return parse_memory(self.memory), self.trigger


@dataclass(frozen=True)
class MergedAdapterOptions(MemoryOptions):
    """Options of the training and the merging operator.

    Attributes:
        merge: the operator: one-a, running-mean, weighted-mean, newest, task-arithmetic, ties, dare, fisher, regmean,
            knots, knots-ties, tsv, iso-c, opcm, magmax, acmap, or one that an installed package adds.
        merge_options: options of the operator, such as density=0.2,scale=0.6.
    """

    merge: str = "one-a"
    merge_options: str = ""

    def operator(self) -> Operator:
        """The operator of these options."""
        return make_operator(self.merge, **parse_pairs(self.merge_options, "merge_options"))


class AdapterLearner:
    """Trains an adapter on a task and merges it with the merged adapter, which is replaced, not changed in place.

    An operator on deltas gets the differences from a common origin: the random weights that all tasks share, or the
    initial weights of the first task if each task starts from an earlier one (MagMax). With ``start`` ``fresh`` or
    ``merged`` there is no common origin, and the operator gets the weights themselves. Statistics for Fisher merging
    and RegMean are computed in another pass over the task's images.

    ``plan`` is that of the stream, if it is known.
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

    def train_and_merge(
        self,
        merged: MergedAdapter,
        task: Task,
        sizes: Sizes | None = None,
        views: FixedViews | None = None,
        held_out: Task | None = None,
    ) -> tuple[MergedAdapter, dict[str, Any]]:
        """Train an adapter on a task and merge it; returns the new merged adapter and a report for JSON.

        By default, all classes of the task are new. ``views`` are fixed views of its images, including those held out,
        if computed already. ``held_out`` is the task with its held-out images, for early stopping.
        """
        sizes = sizes or merged.sizes_with(task)
        new = self._train(merged, task, views, held_out)
        merged = self._prepare_merge(merged, new, task)
        result, report = self._merge(merged, new.tensors, sizes)
        return result, new.report | {"merge": report}

    @property
    def start(self) -> str:
        """The initial weights of a task's adapter: those of the options, or those of the operator's paper."""
        start = self.options.start
        return start if start != "auto" else str(getattr(self.operator, "starts_from", "fresh"))

    def local_head(self, task: Task) -> nn.Module | None:
        """The head that trains the adapter of a task; None for that of the options. A subclass may have another."""
        return None

    def new_adapters(self, seed: int = 0, index: int = 0) -> Adapters:
        """The randomly initialised adapter of a task, which does not change the output of the network."""
        return initial_adapters(self.vit, self.options, seed, 0 if self.start == "shared" else index)

    def _train(
        self, merged: MergedAdapter, task: Task, views: FixedViews | None, held_out: Task | None
    ) -> TrainedAdapter:
        """The task's adapter, trained or from the cache."""
        names = AdapterTraining.__dataclass_fields__.keys() - {"start"}  # "auto" depends on the operator
        options = self.options.training_options(len(task.classes), len(task))
        training = tuple(getattr(options, name) for name in sorted(names))
        fixed = views and views.count  # 1 for a task of enough images
        key = (task.seed, task.index, task.classes, len(task), training, fixed, self.start, self.plan)
        # An adapter that starts from an earlier task depends on earlier merges; Fisher information needs the local
        # head, which is not cached.
        cache = self.cache if self.start in _RANDOM and self._statistics_kind != "fisher" else None
        if cache is not None and key in cache:
            tensors, report = cache[key]
            copies = {name: value.to(self.runtime.device, copy=True) for name, value in tensors.items()}
            return TrainedAdapter(copies, report | {"training_shared": True})
        adapters = self.new_adapters(task.seed, task.index)
        if self.start == "merged" and merged.classes:
            adapters.load_state_dict(merged.tensors)
        elif merged.start:
            adapters.load_state_dict(merged.start)
        head = self.local_head(task)
        trained = train_adapter(self.vit, adapters, task, options, self.runtime, self.plan, views, held_out, head)
        if cache is not None:
            copies = {name: value.to("cpu", copy=True) for name, value in trained.tensors.items()}
            cache[key] = (copies, trained.report)
        return trained

    @property
    def _statistics_kind(self) -> str:
        """The kind of statistics that the operator needs: ``fisher``, ``gram`` or none."""
        return str(getattr(self.operator, "needs", ""))

    def _prepare_merge(self, merged: MergedAdapter, new: TrainedAdapter, task: Task) -> MergedAdapter:
        """The merged adapter with start and origin for later tasks, and with the statistics of the new task."""
        is_first = not merged.classes
        is_start = self.start == "previous" or (self.start == "first" and is_first)
        is_origin = is_first and self.start in _COMMON and getattr(self.operator, "on_deltas", False)
        prefix = "" if is_first else "new_"
        statistics = {prefix + name: value for name, value in self._statistics(new, task).items()}
        return replace(
            merged,
            start=new.tensors if is_start else merged.start,
            origin=dict(self.new_adapters(task.seed, task.index).state_dict()) if is_origin else merged.origin,
            operator_state={**merged.operator_state, **statistics},
        )

    def _statistics(self, new: TrainedAdapter, task: Task) -> Tensors:
        if not self._statistics_kind:
            return {}
        self.runtime.progress.start_phase("statistics")
        adapters = initial_adapters(self.vit, self.options, task.seed).eval().to(self.runtime.device)
        adapters.load_state_dict(new.tensors)
        if self._statistics_kind == "gram":
            return gram_matrices(self.vit, adapters, task, self.runtime)
        assert new.head is not None  # for Fisher information, no adapter is taken from the cache
        return diagonal_fisher(self.vit, adapters, new.head, task, self.runtime)

    def _merge(self, merged: MergedAdapter, new: Tensors, sizes: Sizes) -> tuple[MergedAdapter, dict[str, Any]]:
        """Merge an adapter: ``origin + operator(merged - origin, new - origin)``, or without an origin."""
        self.runtime.progress.start_phase("merging")
        report: dict[str, Any] = {}
        state = merged.operator_state
        if merged.classes:
            accumulated = {name: value.to(self.runtime.device) for name, value in merged.tensors.items()}
            origin = {name: to_float64(value).to(accumulated[name].device) for name, value in merged.origin.items()}
            left, right = (
                {name: to_float64(value) - origin[name] for name, value in side.items()} if origin else side
                for side in (accumulated, new)
            )
            result = self.operator(left, right, sizes, state)
            state, report, new = result.state, result.report(), result.tensors
            if origin:
                new = {name: cast_like(origin[name] + new[name], value) for name, value in accumulated.items()}
        classes = round(sizes.accumulated_classes + sizes.new_classes)
        samples = sizes.accumulated_samples + sizes.new_samples
        return replace(merged, tensors=new, classes=classes, samples=samples, operator_state=state), report


# The statistics of Fisher merging and RegMean are sums over samples, not means, so that larger tasks weigh more.


def gram_matrices(vit: FrozenViT, adapters: Adapters, task: Task, runtime: Runtime) -> Tensors:
    """``gram.NAME``: ``sum x x^T`` over all inputs ``x`` of the linear layer with weight NAME, ``[in, in]``."""
    sums: Tensors = {}
    for images, _ in task.whole_image_batches(EVALUATION_BATCH):
        with torch.no_grad(), runtime.autocast(), _recorded(adapters) as layers:
            vit.forward_eager(images, adapters)  # the compiled network calls no forward hooks
        for name, (inputs, _) in layers.items():
            rows = inputs.float().flatten(0, -2)
            _add(sums, f"gram.{name}.weight", rows.T @ rows)
    return sums


def diagonal_fisher(vit: FrozenViT, adapters: Adapters, head: nn.Module, task: Task, runtime: Runtime) -> Tensors:
    """``fisher.NAME``: the sum of the squared gradients of each sample's log-likelihood under the local head.

    Samples are independent, so one backward pass of the summed loss gives the gradient of every sample: for a linear
    layer, the product of its input and the gradient of its output, summed over the sample's tokens. The likelihood of a
    task of one class is 1 for all weights, so its Fisher information is zero.
    """
    sums: Tensors = {}
    for images, labels in task.whole_image_batches(_GRADIENT_BATCH):
        local = labels.to(runtime.device) - task.classes.start
        with torch.enable_grad(), runtime.autocast(), _recorded(adapters) as layers:
            loss = F.cross_entropy(head(vit.forward_eager(images, adapters)).float(), local, reduction="sum")
        gradients = torch.autograd.grad(loss, [outputs for _, outputs in layers.values()])
        for (name, (inputs, _)), gradient in zip(layers.items(), gradients, strict=True):
            per_sample = torch.einsum("bno,bni->boi", gradient.float(), inputs.detach().float())
            _add(sums, f"fisher.{name}.weight", per_sample.square().sum(0))
            _add(sums, f"fisher.{name}.bias", gradient.float().sum(1).square().sum(0))
    return sums


def _add(sums: Tensors, name: str, value: Tensor) -> None:
    value = to_float64(value.detach())
    sums[name] = sums[name] + value if name in sums else value


@contextmanager
def _recorded(adapters: Adapters) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Input and output of each linear layer of the adapters in the next forward pass, by the name of the layer."""
    layers: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        layers[name] = (inputs[0], output)

    linear = [(name, layer) for name, layer in adapters.named_modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_hook(partial(record, name)) for name, layer in linear]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()
