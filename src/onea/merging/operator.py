# SPDX-License-Identifier: Apache-2.0
"""The contract of merging operators: named tensors in, named tensors out, and the size of each side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from onea.errors import OneaError
from onea.options import Validated
from onea.tensors import Tensors, to_float64


@dataclass(frozen=True)
class Sizes:
    """The numbers of classes and samples that each side of a merge has seen.

    >>> Sizes(accumulated_classes=40, new_classes=10, accumulated_samples=4000, new_samples=900).new_share
    0.2

    Raises:
        OneaError: a number is negative, or neither side knows a class.
    """

    accumulated_classes: float
    new_classes: float
    accumulated_samples: int
    new_samples: int

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 0 or not self.accumulated_classes + self.new_classes > 0:
            raise OneaError(f"{self} cannot be: no number may be negative, and one side must know a class.")

    @classmethod
    def from_counts(cls, accumulated: Mapping[str, int], new: Mapping[str, int]) -> Sizes:
        """The sizes of two sides, from the images of each class. A class counts once, divided by its images.

        >>> Sizes.from_counts({"apple": 30, "pear": 10}, {"apple": 10, "plum": 10})
        Sizes(accumulated_classes=1.75, new_classes=1.25, accumulated_samples=40, new_samples=20)
        """

        def classes(side: Mapping[str, int]) -> float:
            return sum(count / (accumulated.get(name, 0) + new.get(name, 0)) for name, count in side.items())

        return cls(classes(accumulated), classes(new), sum(accumulated.values()), sum(new.values()))

    @property
    def new_share(self) -> float:
        """The new side's share of the classes."""
        return self.new_classes / (self.new_classes + self.accumulated_classes)


class Traits(Validated):
    """What is known of an operator before it is used; ours inherit it, a third party's may just have the attributes.

    >>> from onea.merging import operator_class
    >>> ties = operator_class("ties")
    >>> ties.title, ties.uses_sizes, ties.needs
    ('TIES', False, '')

    Attributes:
        title: the operator's name as papers write it.
        paper: link to its paper.
        uses_sizes: whether, by default, the sizes of the sides change the result.
        associative: whether merging one by one gives the same in any order, up to rounding: running equals batch.
        needs: statistics of the training data that it takes through ``state``: for a tensor called NAME the new side's
            under ``new_fisher.NAME`` or ``new_gram.NAME``, the accumulated side's under ``fisher.NAME`` or
            ``gram.NAME``. It returns the latter, so that only the new side's must be given again.
        on_deltas: whether it is made for differences from a common start, rather than for weights as they are.
        starts_from: the weights that a task is trained from in the operator's paper: ``fresh`` random ones, ``shared``
            random ones (the same for every task), or the ``previous`` or ``first`` task's trained ones.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    uses_sizes: ClassVar[bool] = False
    associative: ClassVar[bool] = False
    needs: ClassVar[Literal["", "fisher", "gram"]] = ""
    on_deltas: ClassVar[bool] = True
    starts_from: ClassVar[Literal["fresh", "shared", "previous", "first"]] = "shared"


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    >>> merged, state = MergeResult({"up": torch.ones(2)}, {"count": torch.tensor(2)})
    >>> merged["up"], state["count"]
    (tensor([1., 1.]), tensor(2))

    Attributes:
        tensors: the merged tensors.
        state: the tensors that the operator needs at the next merge.
        report: makes a JSON object about the merge; called only where it is recorded.
    """

    tensors: Tensors
    state: Tensors = field(default_factory=dict)
    report: Callable[[], dict[str, Any]] = dict

    def __iter__(self) -> Iterator[Tensors]:
        """Tensors and state, so that ``merged, state = operator(...)`` does what it looks like."""
        return iter((self.tensors, self.state))


class Operator(Protocol):
    """Merges a new set of tensors into the accumulated one, without touching either.

    ``state`` is whatever the operator must remember between merges, as tensors; pass ``{}`` the first time.

    >>> def newest(accumulated, new, sizes, state):
    ...     return MergeResult(new)
    >>> merged, state = newest({"up": torch.zeros(2)}, {"up": torch.ones(2)}, Sizes(4, 1, 40, 10), {})
    >>> merged["up"]
    tensor([1., 1.])
    """

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Return the merged tensors, the next state and a report."""


def check_mergeable(accumulated: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Refuse sides that differ in names or shapes, or hold a NaN, an infinity or nothing: it would spoil the result."""
    only_left, only_right = sorted(accumulated.keys() - new.keys()), sorted(new.keys() - accumulated.keys())
    if only_left or only_right:
        odd = (only_left or only_right)[0]
        side = "the accumulated" if only_left else "the new"
        raise OneaError(f"Cannot merge: tensor '{odd}' is only on {side} side; both need the same names.")
    for name, left in accumulated.items():
        right = new[name]
        if left.shape != right.shape:
            raise OneaError(
                f"Cannot merge '{name}': shapes {tuple(left.shape)} and {tuple(right.shape)} differ; "
                "both sides need the same backbone and rank."
            )
        if not left.numel():
            raise OneaError(f"Cannot merge '{name}': it holds no numbers (shape {tuple(left.shape)}); leave it out.")
        for side, tensor in (("accumulated", left), ("new", right)):
            if not torch.isfinite(tensor).all():
                raise OneaError(f"Cannot merge '{name}': the {side} side holds a NaN or infinity; retrain it.")


def check_held(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a result that its type of numbers could not hold: the infinities would be saved without a word."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise OneaError(f"The merged '{name}' has numbers that {kind} cannot hold; save its inputs as float32.")


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor has directions to speak of; what has one row or column, or is a vector, has not."""
    return tensor.dim() > 1 and len(tensor) > 1 and tensor.numel() > len(tensor)


def matrix(tensor: Tensor) -> Tensor:
    """A tensor of two or more dimensions as float64 ``[out, in]``."""
    return to_float64(tensor).flatten(1)


def count_of(state: Mapping[str, Tensor]) -> int:
    """The number of sides inside the accumulated one; one before the first merge."""
    return int(state["count"]) if "count" in state else 1


def statistic(state: Mapping[str, Tensor], key: str, shape: tuple[int, ...], title: str, like: Tensor) -> Tensor:
    """A statistic of the training data in float64, next to the tensor it belongs to."""
    if key not in state:
        raise OneaError(
            f"{title} needs statistics of the training data, which bare files do not hold; "
            f"give them as state['{key}'] or choose another operator."
        )
    found = to_float64(state[key]).to(to_float64(like).device)
    if tuple(found.shape) != shape:
        raise OneaError(f"state['{key}'] has shape {tuple(found.shape)}; it must be {shape}.")
    return found
