# SPDX-License-Identifier: Apache-2.0
"""SEMA: self-expansion with a mixture of adapters. Modules are added only where the data look new."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onea import seeds
from onea.errors import OneaError
from onea.learner.options import TrainingOptions
from onea.learner.tasks import StreamPlan, Task
from onea.learner.training import Loss, Recipe, Trained, train
from onea.options import Count, NotNegative, Share
from onea.research.hooks.mixture import ExpandableAdapters, Listener
from onea.research.methods.contract import Method
from onea.runtime import Runtime
from onea.tensors import Tensors, part_of, prefixed
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.frozen import FrozenViT
from onea.vit.heads import GrowingHead, masked_cross_entropy

_DETECTION_BATCH = 128
_MODULES, _HEAD = "modules.", "head."


@dataclass(frozen=True)
class SEMAOptions(TrainingOptions):
    """Options of SEMA.

    Attributes:
        epochs: of training a new module's adapter and router row together with the head.
        rank: width of an adapter's bottleneck.
        scale: factor on an adapter's output.
        expandable: share of the blocks, counted from the last, whose modules may multiply; at least one block.
        threshold: standard deviations off every known module at which a batch asks for a new one.
        descriptor_epochs: of training a new module's descriptor.
        descriptor_rate: learning rate of descriptors.
        descriptor_width: width of a descriptor's bottleneck.
        buffer: number of a descriptor's last losses that tell what is usual.
        standardise: measure the mean tokens of each block by their mean and deviation on the descriptor's own task, so
            that one rate suits all blocks; off is the official code, whose descriptors hardly train on small data.
    """

    learning_rate: float = 0.005
    batch_size: int = 32
    rank: Count = 16
    scale: float = 1.0
    expandable: Share = 0.25
    threshold: NotNegative = 2.0
    descriptor_epochs: Count = 20
    descriptor_rate: NotNegative = 0.01
    descriptor_width: Count = 128
    buffer: Count = 500
    standardise: bool = True

    def descriptor_recipe(self) -> Recipe:
        """How to optimise a descriptor."""
        return dataclasses.replace(self.recipe(epochs=self.descriptor_epochs), learning_rate=self.descriptor_rate)


class SEMA(Method):
    """A frozen network that grows: at most one module per expandable block and task, and only when detection asks."""

    title: ClassVar[str] = "SEMA"
    paper: ClassVar[str] = "https://arxiv.org/abs/2403.18886"
    trains: ClassVar[str] = "adapters, router rows and descriptors where data look new, a linear head"
    stores: ClassVar[str] = "modules whose number grows with the tasks, a linear head"
    Options: ClassVar[type] = SEMAOptions
    base_learning_rate: ClassVar[float | None] = 0.0026
    paper_presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "cifar100": {"epochs": 5, "threshold": 2.0, "standardise": False},
        "imagenet-a": {"epochs": 20, "threshold": 1.0, "standardise": False},
        "imagenet-r": {"epochs": 20, "threshold": 2.0, "standardise": False},
        # No official configuration (CUB among them): ImageNet-R's.
        "": {"epochs": 20, "threshold": 2.0, "standardise": False},
    }
    auto_preset: ClassVar[Mapping[str, Any]] = {"rank": 16, "descriptor_rate": 0.1}
    options: SEMAOptions

    def __init__(self, vit: FrozenViT, options: SEMAOptions, runtime: Runtime, plan: StreamPlan | None = None):
        super().__init__(vit, options, runtime, plan)
        expandable = max(1, round(vit.depth * options.expandable))
        self.adapters = ExpandableAdapters(
            vit.depth, expandable, vit.width, options.rank, options.scale, options.descriptor_width, options.buffer
        ).to(runtime.device)
        self.head = GrowingHead(vit.width, "uniform").to(runtime.device)

    def learn(self, task: Task) -> dict[str, Any]:
        """Expand where the task looks new and train what was added; train the head alone if nothing was."""
        first = len(self.head.weight) == 0
        self._grow_head(task)
        report: dict[str, Any] = {
            "epochs": self.epochs_for(task),
            "losses": [],
            "descriptor_losses": [],
            "expanded": [],
        }
        if first:
            self.adapters.begin(seeds.generator(task.seed, task.index, "modules"))
            self.adapters.to(self.runtime.device)
            # The blocks that cannot expand learn now or never: a tiny first task leaves their adapters nearly at zero.
            self._train_new(task, self.adapters.expandable, [self.adapters.fixed], report)
        else:
            report["surprise"] = self._expand_where_new(task, report)
            if not report["expanded"]:
                report["losses"] += self._train_functions(task, [], [], " function")
        report["modules"] = [len(self.adapters.mixture(block)) for block in self.adapters.expandable]
        return report

    def scores(self, images: Tensor) -> Tensor:
        """Logits of the head over all classes seen, from one pass through all modules."""
        with torch.no_grad():
            logits: Tensor = self.head(self.features(images, self.adapters))
            return logits

    def state_dict(self) -> Tensors:
        """All modules, with the losses their descriptors remember, and the head."""
        return {
            **prefixed(_MODULES, self.adapters.state_dict()),
            **prefixed(_HEAD, self.head.state_dict()),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        modules = part_of(_MODULES, state)
        if modules:
            self.adapters.rebuild(modules)
            self.adapters.to(self.runtime.device)
        self.head.load_rows(state[_HEAD + "weight"], state[_HEAD + "bias"])

    def _grow_head(self, task: Task) -> None:
        self.head.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))
        with torch.no_grad():
            self.head.bias[task.classes.start :].zero_()  # published: Kaiming rows, zero bias

    def _expand_where_new(self, task: Task, report: dict[str, Any]) -> dict[str, float]:
        """Scan the task's training images until a whole scan finds nothing new, expanding the shallowest block first.

        Returns the largest surprise that each block met.
        """
        highest = dict.fromkeys(self.adapters.expandable, 0.0)
        expanded: list[int] = report["expanded"]
        found, scan = True, 0
        while found and len(expanded) < len(highest):
            self.runtime.progress.note("looking for new data")
            found = False
            order, crops = (
                seeds.generator(task.seed, task.index, f"{name} scan {scan}") for name in ("order", "crops")
            )
            for images, _ in task.augmented_batches(_DETECTION_BATCH, self.options.crop_scale, order, crops):
                heard = Listener(self.adapters)
                self.features(images, heard)
                # A new module changes nothing that its own or an earlier block sees, so looking at all blocks at once
                # finds what looking block by block and stopping at the first finds.
                for block in (block for block in highest if block not in expanded):
                    surprise = self.adapters.mixture(block).surprise(heard.means[block])
                    highest[block] = max(highest[block], surprise)
                    if surprise > self.options.threshold:
                        self._expand(block, task, report)
                        found = True
                        break
            scan += 1
        return {str(block): value for block, value in highest.items()}

    def _expand(self, block: int, task: Task, report: dict[str, Any]) -> None:
        self.adapters.expand(block, seeds.generator(task.seed, task.index, f"module {block}"))
        self.adapters.to(self.runtime.device)
        self._train_new(task, [block], [], report)
        report["expanded"].append(block)

    def _train_new(
        self, task: Task, blocks: Sequence[int], others: Sequence[nn.Module], report: dict[str, Any]
    ) -> None:
        """Both phases for the newest modules of these blocks: what they do, then what they know."""
        number = f" {len(report['expanded'])}"
        report["losses"] += self._train_functions(task, blocks, others, " function" + number)
        report["descriptor_losses"] += self._train_descriptors(task, blocks, " descriptor" + number)

    def _train_functions(
        self, task: Task, blocks: Sequence[int], others: Sequence[nn.Module], purpose: str
    ) -> list[float]:
        """Adapters, router rows and the head, by cross-entropy over the task's own classes.

        The whole head is optimised, so weight decay also shrinks old rows a little, as published.
        """
        newest = [self.adapters.mixture(block)[-1] for block in blocks]
        heard = Listener(self.adapters)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            value = masked_cross_entropy(self.head(self.vit(images, heard)), labels, task.classes)
            if blocks and not self.options.standardise:
                with torch.no_grad():
                    heard.descriptor_losses(blocks)  # only to be remembered: they count as soon as data arrive
            return value

        modules = [*others, *(expert.adapter for expert in newest), *(expert.route for expert in newest), self.head]
        return self._thawed(modules, loss, task, self.options.recipe(epochs=self.epochs_for(task)), purpose)

    def _train_descriptors(self, task: Task, blocks: Sequence[int], purpose: str) -> list[float]:
        heard = Listener(self.adapters)
        if self.options.standardise:
            self._standardise(task, blocks)

        def loss(images: Tensor, _: Tensor) -> Tensor:
            with torch.no_grad():  # nothing before a descriptor is trained
                self.vit.forward_blocks(self.vit.embed(images, heard), heard, stop=max(blocks) + 1)
            return heard.descriptor_losses(blocks).mean(1).sum()

        modules = [self.adapters.mixture(block)[-1].descriptor for block in blocks]
        try:
            return self._thawed(modules, loss, task, self.options.descriptor_recipe(), purpose)
        except OneaError as error:
            raise OneaError(
                f"The descriptors of task {task.index + 1} did not converge; lower their rate (--descriptor-rate), or "
                "the adapters' own (--learning-rate) if it made the features too large."
            ) from error

    def _standardise(self, task: Task, blocks: Sequence[int]) -> None:
        """Give the newest descriptors of these blocks the mean and deviation of the task's mean tokens."""
        means: dict[int, list[Tensor]] = {block: [] for block in blocks}
        for images, _ in task.plain_batches(EVALUATION_BATCH):
            heard = Listener(self.adapters)
            self.features(images, heard)
            for block, found in means.items():
                found.append(heard.means[block])
        for block, found in means.items():
            self.adapters.mixture(block)[-1].descriptor.standardise(torch.cat(found))

    def _thawed(
        self, modules: Sequence[nn.Module], loss: Loss, task: Task, recipe: Recipe, purpose: str
    ) -> list[float]:
        """Train these modules and nothing else, and freeze them again."""
        for module in modules:
            module.requires_grad_(True)
        losses = train([Trained(module) for module in modules], loss, task, recipe, self.runtime, purpose=purpose)
        for module in modules:
            module.requires_grad_(False)
        return losses
