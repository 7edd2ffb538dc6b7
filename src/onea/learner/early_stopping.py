# SPDX-License-Identifier: Apache-2.0
"""An end to trainings that teach held-out images of their own task nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onea.learner.local_head import Network
from onea.learner.tasks import Task
from onea.runtime import Runtime
from onea.vit.adapter import Adapters
from onea.vit.batching import EVALUATION_BATCH


@dataclass
class Patience:
    """Says after each epoch whether to stop: when so many in a row were no better than the best before them.

    >>> shares = iter([0.5, 0.7, 0.7, 0.6, 0.9])
    >>> stop = Patience(2, lambda: next(shares))
    >>> [stop() for _ in range(4)]
    [False, False, False, True]
    """

    epochs: int
    share: Callable[[], float]
    best: float = -1.0
    waited: int = 0

    def __call__(self) -> bool:
        """Measure, and say so."""
        share = self.share()
        self.best, self.waited = (share, 0) if share > self.best else (self.best, self.waited + 1)
        return self.waited >= self.epochs


def share_right(
    network: Network,
    adapters: Adapters,
    head: nn.Module,
    held_out: Task,
    inputs: Callable[[Tensor], Tensor],
    runtime: Runtime,
) -> float:
    """The share of a task's images that the local head answers right; ``inputs`` makes network inputs of rows."""
    right = torch.zeros((), device=runtime.device)
    adapters.eval()
    with torch.no_grad(), runtime.autocast():
        for rows, labels in zip(
            held_out.rows.split(EVALUATION_BATCH), held_out.labels.split(EVALUATION_BATCH), strict=True
        ):
            answers = head(network(inputs(rows), adapters)).argmax(1)
            right += (answers == (labels - held_out.classes.start).to(answers.device)).sum()
    adapters.train()
    # Processes that share a run must not differ about when it ends, whatever their rounding.
    return float(runtime.processes.sum_of(right)) / (len(held_out) * runtime.processes.count)
