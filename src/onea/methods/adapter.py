"""An adapter per task, merged by any operator of the merging library: ``onea run adapter --merge ties``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from onea.errors import OneaError
from onea.merging import make_operator
from onea.merging.operator import Operator, Sizes, Tensors, like, precise
from onea.methods.adapter_merging import AdapterMemo, AdapterMerging, MergingOptions
from onea.methods.adapter_training import blank_adapters
from onea.methods.merge_statistics import diagonal_fisher, gram_matrices
from onea.methods.state import part_of, prefixed
from onea.runtime import Runtime
from onea.tasks import Plan, Task
from onea.vit.frozen import FrozenViT

_ORIGIN = "origin."
_COMMON = ("shared", "first", "previous")  # starts from which the deltas of all tasks can be measured


@dataclass(frozen=True)
class MergedAdapterOptions(MergingOptions):
    """Options of the training, and which merge follows it.

    Attributes:
        merge: the operator: one-a, running-mean, weighted-mean, task-arithmetic, ties, dare, fisher, regmean, knots,
            knots-ties, tsv, iso-c, opcm, magmax, acmap, or one that an installed package adds.
        merge_options: options of the operator, such as density=0.2,scale=0.6.
    """

    merge: str = "one-a"
    merge_options: str = ""

    def operator(self) -> Operator:
        """The operator that these options name."""
        return make_operator(self.merge, **parse_pairs(self.merge_options))


def parse_pairs(text: str) -> dict[str, str]:
    """Options in one word.

    >>> parse_pairs("density=0.2, scale=0.6")
    {'density': '0.2', 'scale': '0.6'}
    """
    pairs = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise OneaError(f"merge_options has '{part}'; write name=value pairs such as density=0.2,scale=0.6.")
        pairs[name] = value
    return pairs


class MergedAdapter(AdapterMerging):
    """One adapter, merged by the operator of your choice.

    Operators made for deltas get the difference from the common start: the random weights that all tasks share, or
    those of the first task where tasks start from one another (MagMax). With ``--start fresh`` or ``merged`` there is
    no common start, and they get the weights as they are. Fisher merging and RegMean get their statistics from one
    more pass over the task's images.
    """

    title: ClassVar[str] = "Merged adapter"
    paper: ClassVar[str] = "https://arxiv.org/abs/2603.10237"
    trains: ClassVar[str] = "an adapter per task"
    stores: ClassVar[str] = "one adapter, a prototype per class, what the operator remembers"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = MergedAdapterOptions
    options: MergedAdapterOptions

    def __init__(
        self,
        vit: FrozenViT,
        options: MergedAdapterOptions,
        runtime: Runtime,
        plan: Plan | None = None,
        memo: AdapterMemo | None = None,
    ):
        super().__init__(vit, options, runtime, plan, memo)
        self._operator = options.operator()
        self._needs: str = getattr(self._operator, "needs", "")
        self._subtracts = self.start_rule in _COMMON and bool(getattr(self._operator, "on_deltas", False))
        self._head: nn.Module | None = None
        self.origin: Tensors = {}  # the weights that deltas are measured from, if any

    def operator(self) -> Operator:
        """The operator that the options name."""
        return self._operator

    def merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes) -> tuple[Tensors, dict[str, Any]]:
        """The merged adapter; deltas are taken before and undone after."""
        if not self.origin:
            return super().merge(accumulated, new, sizes)
        origin = {name: precise(value).to(accumulated[name].device) for name, value in self.origin.items()}
        old, joining = (
            {name: precise(value) - origin[name] for name, value in side.items()} for side in (accumulated, new)
        )
        merged, report = super().merge(old, joining, sizes)
        return {name: like(origin[name] + merged[name], value) for name, value in accumulated.items()}, report

    def state_dict(self) -> Tensors:
        """All of the parent's, and the weights that deltas are measured from."""
        return {**super().state_dict(), **prefixed(_ORIGIN, self.origin)}

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state)
        self.origin = part_of(_ORIGIN, state)

    def _trained(self, task: Task) -> tuple[Tensors, dict[str, Any]]:
        if self._needs != "fisher":
            return super()._trained(task)
        trained = self._train(task)
        self._head = trained.head
        return trained.tensors, trained.report

    def _absorb(self, new: Tensors, task: Task) -> dict[str, Any]:
        first = not self.merged_classes
        if first and self._subtracts:
            self.origin = dict(self.new_adapter(task).state_dict())
        prefix = "" if first else "new_"
        self.memory |= {prefix + name: value for name, value in self._statistics(new, task).items()}
        report = super()._absorb(new, task)
        self._head = None
        return report

    def _statistics(self, new: Tensors, task: Task) -> Tensors:
        if not self._needs:
            return {}
        self.runtime.progress.note("statistics")
        adapters = blank_adapters(self.vit, self.options, task.seed).eval().to(self.runtime.device)
        adapters.load_state_dict(new)
        if self._needs == "gram":
            return gram_matrices(self.vit, adapters, task, self.runtime)
        assert self._head is not None  # _trained keeps it when the Fisher information is needed
        return diagonal_fisher(self.vit, adapters, self._head, task, self.runtime)
