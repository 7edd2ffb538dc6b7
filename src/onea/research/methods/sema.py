# SPDX-License-Identifier: Apache-2.0
"""SEMA: self-expansion with a mixture of adapters. Modules are added when the data differ from earlier tasks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onea import seeds
from onea.errors import OneaError
from onea.learner.optimisation import Loss, ParamGroup, Recipe, train
from onea.learner.options import TrainingOptions
from onea.learner.tasks import Task
from onea.research.methods.contract import Method
from onea.schema import Count, Fraction, NotNegative
from onea.tensors import Tensors
from onea.vit.adapter import Adapter
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.heads import GrowingHead, masked_cross_entropy
from onea.vit.hooks import BlockHooks

_MIN_LOSSES = 3  # fewer losses have no meaningful standard deviation
_MIN_SPREAD = 1e-3  # relative to the mean, because the losses of a single class may be almost equal
_DETECTION_BATCH = 128


class Descriptor(nn.Module):
    """Representation descriptor: a linear autoencoder of the mean tokens of a task, and its last ``buffer`` losses.

    Tokens may be standardised by their mean and standard deviation. Their norms differ between blocks by orders of
    magnitude, so without this no single learning rate fits all descriptors.
    """

    recent: Tensor
    centre: Tensor
    spread: Tensor

    def __init__(self, width: int, hidden: int, buffer: int, generator: torch.Generator):
        super().__init__()
        self.buffer = buffer
        self.encode = _linear(width, hidden, generator)
        self.decode = _linear(hidden, width, generator)
        self.register_buffer("recent", torch.empty(0))
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    def standardise(self, means: Tensor) -> None:
        """Standardise tokens by the mean and deviation of ``means``, ``[N, width]``, and discard earlier losses."""
        deviation, self.centre = torch.std_mean(means.float(), dim=0, correction=0)
        # Avoids division by very small deviations; that of a single image is zero.
        self.spread = deviation.clamp_min(_MIN_SPREAD * deviation.mean()) if deviation.any() else self.spread
        self.recent = self.recent[:0]

    def forward(self, mean: Tensor) -> Tensor:
        """Mean squared reconstruction error of the mean token of each image, ``[B]``, in float32."""
        with torch.autocast(mean.device.type, enabled=False):
            mean = (mean.float() - self.centre) / self.spread
            reconstruction: Tensor = self.decode(self.encode(mean))
            return (reconstruction - mean).square().mean(1)

    def append_losses(self, losses: Tensor) -> None:
        """Append losses to the buffer, which keeps the latest ones."""
        self.recent = torch.cat([self.recent, losses.detach()])[-self.buffer :]

    def z_scores(self, mean: Tensor) -> Tensor:
        """Absolute z-score of the loss of each image with respect to the buffer, ``[B]``."""
        losses: Tensor = self(mean)
        if len(self.recent) < _MIN_LOSSES:
            return torch.zeros_like(losses)
        centre, spread = self.recent.mean(), self.recent.std()
        floor = (_MIN_SPREAD * centre).clamp_min(torch.finfo(torch.float32).tiny)
        return ((losses - centre) / spread.clamp_min(floor)).abs()


class Expert(nn.Module):
    """A module of the mixture: an adapter, a row of the router and a representation descriptor."""

    def __init__(
        self, width: int, rank: int, scale: float, descriptor_width: int, buffer: int, generator: torch.Generator
    ):
        super().__init__()
        self.adapter = Adapter(width, rank, scale, 0.0, generator)
        self.route = _linear(width, 1, generator)
        self.descriptor = Descriptor(width, descriptor_width, buffer, generator)


class Mixture(nn.Module):
    """The modules of one block: ``sum_k softmax(routes(mean token))_k * adapter_k(u)``."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList()

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, index: int) -> Expert:
        expert = self.experts[index]
        assert isinstance(expert, Expert)
        return expert

    def routing_weights(self, mean: Tensor) -> Tensor:
        """The weight of each module for each image, ``[B, modules]``."""
        return torch.cat([self[k].route(mean) for k in range(len(self))], dim=1).float().softmax(1)

    def forward(self, u: Tensor) -> Tensor:
        """The weighted sum of the updates of tokens ``[B, N, width]``."""
        weights = self.routing_weights(u.mean(1)).to(u.dtype)
        update = torch.zeros_like(u)
        for k in range(len(self)):
            update = update + weights[:, k, None, None] * self[k].adapter(u)
        return update

    def z_score(self, mean: Tensor) -> float:
        """Mean z-score of a batch, for the module with the smallest one."""
        z_scores = [self[k].descriptor.z_scores(mean).mean() for k in range(len(self))]
        return float(torch.stack(z_scores).min())


class ExpandableAdapters(nn.Module, BlockHooks):
    """An adapter beside the MLP of each of the first blocks, an expandable mixture beside that of the last blocks.

    There are no modules until ``initialise`` or ``load_state_dict``. All parameters are frozen except in training.
    """

    compilable = True

    def __init__(
        self, depth: int, expandable: int, width: int, rank: int, scale: float, descriptor_width: int, buffer: int
    ):
        super().__init__()
        self.width, self.rank, self.scale = width, rank, scale
        self.descriptor_width, self.buffer = descriptor_width, buffer
        self.first_expandable = depth - expandable
        self.fixed = nn.ModuleList()
        self.mixtures = nn.ModuleList(Mixture() for _ in range(expandable))

    @property
    def expandable(self) -> range:
        """The blocks with an expandable mixture."""
        return range(self.first_expandable, self.first_expandable + len(self.mixtures))

    def mixture(self, block: int) -> Mixture:
        """The mixture of an expandable block."""
        mixture = self.mixtures[block - self.first_expandable]
        assert isinstance(mixture, Mixture)
        return mixture

    def initialise(self, generator: torch.Generator) -> None:
        """Add the first module of every block, initialised as the identity."""
        self.fixed.extend(
            Adapter(self.width, self.rank, self.scale, 0.0, generator) for _ in range(self.first_expandable)
        )
        for block in self.expandable:
            self.expand(block, generator)
        self.requires_grad_(False).eval()

    def expand(self, block: int, generator: torch.Generator) -> Expert:
        """Add a module. Its update is zero, but the routing weights of the other modules change."""
        expert = Expert(self.width, self.rank, self.scale, self.descriptor_width, self.buffer, generator)
        self.mixture(block).experts.append(expert.requires_grad_(False).eval())
        return expert

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restore a saved state with any number of modules."""
        if state_dict:
            self.fixed, self.mixtures = nn.ModuleList(), nn.ModuleList(Mixture() for _ in self.mixtures)
            self.initialise(torch.Generator())  # the random values are replaced by the saved ones
        for name, value in state_dict.items():
            if name.endswith(".descriptor.recent"):
                _, mixture, _, expert, *_ = name.split(".")
                block = self.first_expandable + int(mixture)
                while len(self.mixture(block)) <= int(expert):
                    self.expand(block, torch.Generator())
                self.mixture(block)[int(expert)].descriptor.recent = value.clone()
        return super().load_state_dict(state_dict, strict, assign)

    def mlp_update(self, block: int, u: Tensor) -> Tensor:
        """The update of a block, from its residual stream ``u`` after attention and before the second norm."""
        update: Tensor = self.fixed[block](u) if block < self.first_expandable else self.mixture(block)(u)
        return update


class MeanTokenRecorder(BlockHooks):
    """Runs the adapters and records the mean token of each expandable block."""

    compilable = True  # the mean tokens are outputs of the forward pass

    def __init__(self, adapters: ExpandableAdapters):
        self.adapters = adapters
        self.means: dict[int, Tensor] = {}

    def mlp_update(self, block: int, u: Tensor) -> Tensor:
        """The update of the adapters."""
        if block in self.adapters.expandable:
            self.means[block] = u.detach().mean(1)
        return self.adapters.mlp_update(block, u)

    def descriptor_losses(self, blocks: Iterable[int]) -> Tensor:
        """Losses of the newest descriptors for the last batch, ``[blocks, B]``, which are appended to their buffers."""
        losses = []
        for block in blocks:
            descriptor = self.adapters.mixture(block)[-1].descriptor
            losses.append(descriptor(self.means[block]))
            descriptor.append_losses(losses[-1])
        return torch.stack(losses)


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A linear layer with the initialisation of ``nn.Linear``, whose random numbers come from ``generator``."""
    linear = nn.Linear(inputs, outputs)
    bound = 1 / math.sqrt(inputs)
    for parameter in (linear.weight, linear.bias):
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return linear


@dataclass(frozen=True)
class SEMAOptions(TrainingOptions):
    """Options of SEMA.

    Attributes:
        epochs: epochs of training for a new adapter, its row of the router and the head.
        rank: bottleneck width of each adapter.
        scale: factor on the output of each adapter.
        expandable: fraction of the blocks, counted from the last, in which modules may be added; at least one block.
        threshold: z-score with respect to all modules of a block above which a batch triggers expansion.
        descriptor_epochs: epochs of training for the representation descriptor of a new module.
        descriptor_rate: learning rate of the representation descriptors.
        descriptor_width: bottleneck width of each representation descriptor.
        buffer: number of losses from which a descriptor computes their mean and standard deviation.
        standardise: standardise the mean tokens of each block on the task of the descriptor, so that one learning rate
            fits all blocks. Off is the official code, in which descriptors hardly train on small datasets.
    """

    learning_rate: float = 0.005
    batch_size: int = 32
    rank: Count = 16
    scale: float = 1.0
    expandable: Fraction = 0.25
    threshold: NotNegative = 2.0
    descriptor_epochs: Count = 20
    descriptor_rate: NotNegative = 0.01
    descriptor_width: Count = 128
    buffer: Count = 500
    standardise: bool = True

    def descriptor_recipe(self) -> Recipe:
        """The recipe for training a descriptor."""
        return dataclasses.replace(self.recipe(epochs=self.descriptor_epochs), learning_rate=self.descriptor_rate)


class SEMA(Method):
    """A frozen network that expands on demand, by at most one module per expandable block and task."""

    title = "SEMA"
    paper = "https://arxiv.org/abs/2403.18886"
    trains = "adapters, router rows and descriptors on demand, a linear head"
    stores = "a growing number of modules and a linear head"
    state = ("modules", "head")
    Options = SEMAOptions
    base_learning_rate = 0.0016
    paper_presets: ClassVar = {
        "cifar100": {"epochs": 5, "threshold": 2.0, "standardise": False},
        "imagenet-a": {"epochs": 20, "threshold": 1.0, "standardise": False},
        "imagenet-r": {"epochs": 20, "threshold": 2.0, "standardise": False},
        # Not published: the settings of ImageNet-R.
        "": {"epochs": 20, "threshold": 2.0, "standardise": False},
    }
    auto_preset: ClassVar = {"rank": 16, "descriptor_rate": 0.1}
    options: SEMAOptions

    def setup(self) -> None:
        """Create blocks without modules, and a head without classes."""
        vit, options = self.vit, self.options
        expandable = max(1, round(vit.depth * options.expandable))
        self.modules = ExpandableAdapters(
            vit.depth, expandable, vit.width, options.rank, options.scale, options.descriptor_width, options.buffer
        ).to(self.runtime.device)
        self.head = GrowingHead(vit.width, "uniform").to(self.runtime.device)

    def learn(self, task: Task) -> dict[str, Any]:
        """Add and train modules in the blocks in which the data are new; without such blocks, train only the head."""
        is_first = len(self.head.weight) == 0
        self._grow_head(task)
        report: dict[str, Any] = {"epochs": self.epochs_for(task)}
        report |= {"losses": [], "descriptor_losses": [], "expanded": []}
        if is_first:
            self.modules.initialise(seeds.generator(task.seed, task.index, "modules"))
            self.modules.to(self.runtime.device)
            # The adapters of the other blocks are trained in the first task only.
            self._train_new(task, self.modules.expandable, [self.modules.fixed], report)
        else:
            report["surprise"] = self._expand_where_new(task, report)
            if not report["expanded"]:
                report["losses"] += self._train_functions(task, [], [], " function")
        report["modules"] = [len(self.modules.mixture(block)) for block in self.modules.expandable]
        return report

    def scores(self, images: Tensor) -> Tensor:
        """Logits of all classes seen so far, from one forward pass through all modules."""
        with torch.no_grad():
            logits: Tensor = self.head(self.features(images, self.modules))
            return logits

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a saved state of any number of modules."""
        super().load_state_dict(state)
        self.modules.to(self.runtime.device)

    def _grow_head(self, task: Task) -> None:
        self.head.grow(len(task.classes), seeds.generator(task.seed, task.index, "head"))
        with torch.no_grad():
            self.head.bias[task.classes.start :].zero_()  # published: Kaiming rows, zero bias

    def _expand_where_new(self, task: Task, report: dict[str, Any]) -> dict[str, float]:
        """Scan the training images of the task until no batch triggers an expansion; earlier blocks are expanded first.

        Returns:
            The largest z-score of each block.
        """
        highest = dict.fromkeys(self.modules.expandable, 0.0)
        expanded: list[int] = report["expanded"]
        is_new, scan = True, 0
        while is_new and len(expanded) < len(highest):
            self.runtime.progress.start_phase("scanning for new data")
            is_new = False
            order, crops = (
                seeds.generator(task.seed, task.index, f"{name} scan {scan}") for name in ("order", "crops")
            )
            for images, _ in task.train_batches(_DETECTION_BATCH, self.options.crop_scale, order, crops):
                recorder = MeanTokenRecorder(self.modules)
                self.features(images, recorder)
                # A new module does not change the inputs of its block or of earlier ones, so one forward pass is
                # equivalent to one per block.
                for block in (block for block in highest if block not in expanded):
                    z_score = self.modules.mixture(block).z_score(recorder.means[block])
                    highest[block] = max(highest[block], z_score)
                    if z_score > self.options.threshold:
                        self.modules.expand(block, seeds.generator(task.seed, task.index, f"module {block}"))
                        self.modules.to(self.runtime.device)
                        self._train_new(task, [block], [], report)
                        expanded.append(block)
                        is_new = True
                        break
            scan += 1
        return {str(block): value for block, value in highest.items()}

    def _train_new(
        self, task: Task, blocks: Sequence[int], others: Sequence[nn.Module], report: dict[str, Any]
    ) -> None:
        """Train the newest modules of these blocks: adapters and router first, then descriptors."""
        number = f" {len(report['expanded'])}"
        report["losses"] += self._train_functions(task, blocks, others, " function" + number)
        report["descriptor_losses"] += self._train_descriptors(task, blocks, " descriptor" + number)

    def _train_functions(
        self, task: Task, blocks: Sequence[int], others: Sequence[nn.Module], purpose: str
    ) -> list[float]:
        """Train adapters, router rows and the head by cross-entropy over the classes of the task.

        The whole head is optimised, so weight decay also shrinks old rows, as published.
        """
        newest = [self.modules.mixture(block)[-1] for block in blocks]
        recorder = MeanTokenRecorder(self.modules)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            value = masked_cross_entropy(self.head(self.vit(images, recorder)), labels, task.classes)
            if blocks and not self.options.standardise:
                with torch.no_grad():
                    recorder.descriptor_losses(blocks)  # fills the buffers from the first batch on
            return value

        modules = [*others, *(expert.adapter for expert in newest), *(expert.route for expert in newest), self.head]
        return self._train_only(modules, loss, task, self.recipe(task), purpose)

    def _train_descriptors(self, task: Task, blocks: Sequence[int], purpose: str) -> list[float]:
        recorder = MeanTokenRecorder(self.modules)
        if self.options.standardise:
            self._standardise(task, blocks)

        def loss(images: Tensor, _: Tensor) -> Tensor:
            with torch.no_grad():  # the descriptors do not propagate gradients to the network
                self.vit.forward_blocks(self.vit.embed(images, recorder), recorder, stop=max(blocks) + 1)
            return recorder.descriptor_losses(blocks).mean(1).sum()

        modules = [self.modules.mixture(block)[-1].descriptor for block in blocks]
        try:
            return self._train_only(modules, loss, task, self.options.descriptor_recipe(), purpose)
        except OneaError as error:
            raise OneaError(
                f"The descriptors of task {task.index + 1} did not converge; lower their learning rate "
                "(--descriptor-rate), or that of the adapters (--learning-rate) if the features are too large."
            ) from error

    def _standardise(self, task: Task, blocks: Sequence[int]) -> None:
        """Standardise the newest descriptors of these blocks on the mean tokens of the task."""
        means: dict[int, list[Tensor]] = {block: [] for block in blocks}
        for images, _ in task.whole_image_batches(EVALUATION_BATCH):
            recorder = MeanTokenRecorder(self.modules)
            self.features(images, recorder)
            for block, tokens in means.items():
                tokens.append(recorder.means[block])
        for block, tokens in means.items():
            self.modules.mixture(block)[-1].descriptor.standardise(torch.cat(tokens))

    def _train_only(
        self, modules: Sequence[nn.Module], loss: Loss, task: Task, recipe: Recipe, purpose: str
    ) -> list[float]:
        """Train these modules and freeze them again."""
        for module in modules:
            module.requires_grad_(True)
        losses = train([ParamGroup(module) for module in modules], loss, task, recipe, self.runtime, purpose=purpose)
        for module in modules:
            module.requires_grad_(False)
        return losses
