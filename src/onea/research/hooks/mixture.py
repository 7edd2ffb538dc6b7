# SPDX-License-Identifier: Apache-2.0
"""Adapters that multiply in the last blocks: modules of an adapter, a router row and a descriptor, mixed softly."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from onea.tensors import Tensors
from onea.vit.adapter import Adapter
from onea.vit.hooks import BlockHooks

_FEWEST_LOSSES = 3  # a deviation from fewer losses than these means nothing
_SMALLEST_SPREAD = 1e-3  # of the mean loss: one class may leave next to none, and everything would look new


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
