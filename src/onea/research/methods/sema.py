# SPDX-License-Identifier: Apache-2.0
"""Adapters that multiply in the last blocks: modules of an adapter, a router row and a descriptor, mixed softly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onea import seeds
from onea.errors import OneaError
from onea.learner.options import TrainingOptions
from onea.learner.tasks import StreamPlan, Task
from onea.learner.training import Loss, ParamGroup, Recipe, train
from onea.research.methods.contract import Method
from onea.runtime import Runtime
from onea.schema import Count, Fraction, NotNegative
from onea.tensors import Tensors, add_prefix, select_prefix
from onea.vit.adapter import Adapter
from onea.vit.batching import EVALUATION_BATCH
from onea.vit.frozen import FrozenViT
from onea.vit.heads import GrowingHead, masked_cross_entropy
from onea.vit.hooks import BlockHooks

_FEWEST_LOSSES = 3  # a deviation from fewer losses than these means nothing
_SMALLEST_SPREAD = 1e-3  # of the mean loss: one class may leave next to none, and everything would look new
_DETECTION_BATCH = 128
_MODULES, _HEAD = "modules.", "head."


class Descriptor(nn.Module):
    """A linear autoencoder of the mean tokens a module was trained on, and its last ``buffer`` losses there.

    Tokens may be standardised by the mean and deviation that they have there. Their sizes differ between blocks by
    orders of magnitude, and without it no one learning rate suits all descriptors.
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
        """From now on measure tokens by the mean and deviation of these, ``[N, width]``; earlier losses are void."""
        deviation, self.centre = torch.std_mean(means.float(), dim=0, correction=0)
        # A dimension that hardly varies would be blown up; one image alone has no deviation at all.
        self.spread = deviation.clamp_min(_SMALLEST_SPREAD * deviation.mean()) if deviation.any() else self.spread
        self.recent = self.recent[:0]

    def forward(self, mean: Tensor) -> Tensor:
        """Squared reconstruction error of each image's mean token, ``[B]``, in full precision."""
        with torch.autocast(mean.device.type, enabled=False):
            mean = (mean.float() - self.centre) / self.spread
            rebuilt: Tensor = self.decode(self.encode(mean))
            return (rebuilt - mean).square().mean(1)

    def remember(self, losses: Tensor) -> None:
        """First in, first out: only the latest losses count."""
        self.recent = torch.cat([self.recent, losses.detach()])[-self.buffer :]

    def deviations(self, mean: Tensor) -> Tensor:
        """How many standard deviations each image's loss lies off the remembered ones, ``[B]``."""
        losses: Tensor = self(mean)
        if len(self.recent) < _FEWEST_LOSSES:
            return torch.zeros_like(losses)
        centre, spread = self.recent.mean(), self.recent.std()
        floor = (_SMALLEST_SPREAD * centre).clamp_min(torch.finfo(torch.float32).tiny)
        return ((losses - centre) / spread.clamp_min(floor)).abs()


class Expert(nn.Module):
    """A module: the adapter that does the work, the router row that weighs it, the descriptor that knows its data."""

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

    def shares(self, mean: Tensor) -> Tensor:
        """The share of each module for each image, ``[B, modules]``."""
        return torch.cat([self[k].route(mean) for k in range(len(self))], dim=1).float().softmax(1)

    def forward(self, u: Tensor) -> Tensor:
        """Map tokens ``[B, N, width]`` to what is added to them."""
        shares = self.shares(u.mean(1)).to(u.dtype)
        update = torch.zeros_like(u)
        for k in range(len(self)):
            update = update + shares[:, k, None, None] * self[k].adapter(u)
        return update

    def surprise(self, mean: Tensor) -> float:
        """Mean deviation of a batch from what the module that knows it best was trained on."""
        deviations = [self[k].descriptor.deviations(mean).mean() for k in range(len(self))]
        return float(torch.stack(deviations).min())


class ExpandableAdapters(nn.Module, BlockHooks):
    """A single adapter beside the MLP of each earlier block, a growing mixture beside that of the last ones.

    Starts without any module; ``begin`` or ``rebuild`` make them. Everything is frozen until someone thaws it.
    """

    compilable = True

    def __init__(
        self, depth: int, expandable: int, width: int, rank: int, scale: float, descriptor_width: int, buffer: int
    ):
        super().__init__()
        self.width, self.rank, self.scale = width, rank, scale
        self.descriptor_width, self.buffer = descriptor_width, buffer
        self.first = depth - expandable
        self.fixed = nn.ModuleList()
        self.mixtures = nn.ModuleList(Mixture() for _ in range(expandable))

    @property
    def expandable(self) -> range:
        """The blocks whose modules may multiply."""
        return range(self.first, self.first + len(self.mixtures))

    def mixture(self, block: int) -> Mixture:
        """The modules of an expandable block."""
        mixture = self.mixtures[block - self.first]
        assert isinstance(mixture, Mixture)
        return mixture

    def begin(self, generator: torch.Generator) -> None:
        """Give every block its first module; they add nothing yet."""
        self.fixed.extend(Adapter(self.width, self.rank, self.scale, 0.0, generator) for _ in range(self.first))
        for block in self.expandable:
            self.expand(block, generator)
        self.requires_grad_(False).eval()

    def expand(self, block: int, generator: torch.Generator) -> Expert:
        """Add a module. It adds zero itself, but takes its share from the others, so the output does change."""
        expert = Expert(self.width, self.rank, self.scale, self.descriptor_width, self.buffer, generator)
        self.mixture(block).experts.append(expert.requires_grad_(False).eval())
        return expert

    def rebuild(self, state: Tensors) -> None:
        """Take the modules of a saved state back, however many they are."""
        generator = torch.Generator()  # what it draws is overwritten
        self.fixed, self.mixtures = nn.ModuleList(), nn.ModuleList(Mixture() for _ in self.mixtures)
        self.begin(generator)
        for block in self.expandable:
            saved = f"mixtures.{block - self.first}.experts."
            count = len({name.removeprefix(saved).split(".")[0] for name in state if name.startswith(saved)})
            while len(self.mixture(block)) < count:
                self.expand(block, generator)
            for index in range(count):
                self.mixture(block)[index].descriptor.recent = state[f"{saved}{index}.descriptor.recent"].clone()
        self.load_state_dict(state)

    def mlp_update(self, block: int, u: Tensor) -> Tensor:
        """The update of a block for its residual stream ``u`` (after attention, before the second norm)."""
        update: Tensor = self.fixed[block](u) if block < self.first else self.mixture(block)(u)
        return update


class Listener(BlockHooks):
    """Runs adapters as they are, and notes the mean token that reaches each expandable block."""

    compilable = True  # what it notes are results of the pass

    def __init__(self, adapters: ExpandableAdapters):
        self.adapters = adapters
        self.means: dict[int, Tensor] = {}

    def mlp_update(self, block: int, u: Tensor) -> Tensor:
        """The update of the adapters."""
        if block in self.adapters.expandable:
            self.means[block] = u.detach().mean(1)
        return self.adapters.mlp_update(block, u)

    def descriptor_losses(self, blocks: Iterable[int]) -> Tensor:
        """Losses of the newest descriptors of these blocks for the last batch, ``[blocks, B]``; they remember them."""
        losses = []
        for block in blocks:
            descriptor = self.adapters.mixture(block)[-1].descriptor
            losses.append(descriptor(self.means[block]))
            descriptor.remember(losses[-1])
        return torch.stack(losses)


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A linear map that starts as ``nn.Linear`` does, from our own generator."""
    linear = nn.Linear(inputs, outputs)
    bound = 1 / math.sqrt(inputs)
    with torch.no_grad():
        for parameter in (linear.weight, linear.bias):
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    return linear


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
    expandable: Fraction = 0.25
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

    title = "SEMA"
    paper = "https://arxiv.org/abs/2403.18886"
    trains = "adapters, router rows and descriptors where data look new, a linear head"
    stores = "modules whose number grows with the tasks, a linear head"
    Options = SEMAOptions
    base_learning_rate = 0.0026
    paper_presets: ClassVar = {
        "cifar100": {"epochs": 5, "threshold": 2.0, "standardise": False},
        "imagenet-a": {"epochs": 20, "threshold": 1.0, "standardise": False},
        "imagenet-r": {"epochs": 20, "threshold": 2.0, "standardise": False},
        # No official configuration (CUB among them): ImageNet-R's.
        "": {"epochs": 20, "threshold": 2.0, "standardise": False},
    }
    auto_preset: ClassVar = {"rank": 16, "descriptor_rate": 0.1}
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
            **add_prefix(_MODULES, self.adapters.state_dict()),
            **add_prefix(_HEAD, self.head.state_dict()),
        }

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        modules = select_prefix(_MODULES, state)
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
            for images, _ in task.train_batches(_DETECTION_BATCH, self.options.crop_scale, order, crops):
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
        losses = train([ParamGroup(module) for module in modules], loss, task, recipe, self.runtime, purpose=purpose)
        for module in modules:
            module.requires_grad_(False)
        return losses
