# SPDX-License-Identifier: Apache-2.0
"""The interface of merging operators, and checks and helpers that they share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
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
    """The numbers of classes and samples that each side of a merge was trained on.

    >>> Sizes(accumulated_classes=40, new_classes=10, accumulated_samples=4000, new_samples=900).new_share
    0.2

    Raises:
        OneaError: a number is negative, or neither side has a class.
    """

    accumulated_classes: float
    new_classes: float
    accumulated_samples: int
    new_samples: int

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 0 or not self.accumulated_classes + self.new_classes > 0:
            raise OneaError(f"{self} is invalid; no number may be negative, and at least one side must have classes.")

    @classmethod
    def from_counts(cls, accumulated: Mapping[str, int], new: Mapping[str, int]) -> Sizes:
        """The sizes of two sides from the number of images of each class.

        A class on both sides is split in proportion to its images on each.

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


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    >>> merged, state = MergeResult({"up": torch.ones(2)}, {"count": torch.tensor(2)})
    >>> merged["up"], state["count"]
    (tensor([1., 1.]), tensor(2))

    Attributes:
        tensors: the merged tensors.
        state: the tensors that the operator needs at the next merge.
        report: returns a JSON object about the merge; called only if it is recorded.
    """

    tensors: Tensors
    state: Tensors = field(default_factory=dict)
    report: Callable[[], dict[str, Any]] = dict

    def __iter__(self) -> Iterator[Tensors]:
        """Tensors and state, to unpack as ``merged, state = operator(...)``."""
        return iter((self.tensors, self.state))


class Operator(Protocol):
    """Merges new tensors into accumulated ones; does not modify its inputs.

    ``state`` holds the tensors that the operator keeps between merges; it is empty at the first merge. Its ``count``
    is the number of tasks in ``accumulated``.

    >>> def newest(accumulated, new, sizes, state):
    ...     return MergeResult(new)
    >>> merged, state = newest({"up": torch.zeros(2)}, {"up": torch.ones(2)}, Sizes(4, 1, 40, 10), {})
    >>> merged["up"]
    tensor([1., 1.])
    """

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Return the merged tensors, the next state and a report."""


class BaseOperator(Validated, ABC):
    """Base of the built-in operators, which checks both sides; a third-party operator only needs the attributes.

    >>> from onea.merging import operator_class
    >>> ties = operator_class("ties")
    >>> ties.title, ties.uses_sizes, ties.needs
    ('TIES', False, '')

    Attributes:
        title: the operator's name as papers write it.
        paper: link to its paper.
        uses_sizes: whether, by default, the sizes of the sides change the result.
        associative: whether merging tasks one by one gives the same result in any order, up to rounding.
        needs: statistics of the training data that it reads from ``state``: for a tensor NAME those of the new side as
            ``new_fisher.NAME`` or ``new_gram.NAME``, those of the accumulated side as ``fisher.NAME`` or ``gram.NAME``.
            It returns the latter, so that the caller only adds those of the next side.
        on_deltas: whether it merges differences from a common start, rather than the weights themselves.
        starts_from: the weights from which the operator's paper trains a task: ``fresh`` random weights, ``shared``
            random weights (the same for every task), or the trained weights of the ``previous`` or ``first`` task.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    uses_sizes: ClassVar[bool] = False
    associative: ClassVar[bool] = False
    needs: ClassVar[Literal["", "fisher", "gram"]] = ""
    on_deltas: ClassVar[bool] = True
    starts_from: ClassVar[Literal["fresh", "shared", "previous", "first"]] = "shared"

    def __call__(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult:
        """Check both sides and merge them."""
        check_mergeable(accumulated, new)
        return self._merge(accumulated, new, sizes, state)

    @abstractmethod
    def _merge(self, accumulated: Tensors, new: Tensors, sizes: Sizes, state: Tensors) -> MergeResult: ...


def check_mergeable(accumulated: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Refuse sides that differ in names or shapes, or have empty tensors, NaN or infinite numbers."""
    only_left, only_right = sorted(accumulated.keys() - new.keys()), sorted(new.keys() - accumulated.keys())
    if only_left or only_right:
        name, side = (only_left or only_right)[0], "accumulated" if only_left else "new"
        raise OneaError(f"Cannot merge: tensor '{name}' is only on the {side} side; both need the same names.")
    for name, left in accumulated.items():
        right = new[name]
        if left.shape != right.shape:
            raise OneaError(
                f"Cannot merge '{name}': shapes {tuple(left.shape)} and {tuple(right.shape)} differ; "
                "both sides need the same backbone and rank."
            )
        if not left.numel():
            raise OneaError(f"Cannot merge '{name}': it is empty (shape {tuple(left.shape)}); leave it out.")
        for side, tensor in (("accumulated", left), ("new", right)):
            if not torch.isfinite(tensor).all():
                raise OneaError(
                    f"Cannot merge '{name}': the {side} side contains NaN or infinity; retrain that adapter."
                )


def check_no_overflow(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a result with numbers that are too large for its dtype and became infinite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise OneaError(f"The merged '{name}' has numbers too large for {kind}; save its inputs as float32.")


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor has more than one row and column, and so more than one singular direction."""
    return tensor.dim() > 1 and len(tensor) > 1 and tensor.numel() > len(tensor)


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor of two or more dimensions as float64 ``[out, in]``."""
    return to_float64(tensor).flatten(1)


def num_merged(state: Mapping[str, Tensor]) -> int:
    """The number of tasks in the accumulated side; one before the first merge."""
    return int(state["count"]) if "count" in state else 1
