"""Counting right answers over all classes seen so far."""

from __future__ import annotations

import torch

from onea import seeds
from onea.methods.contract import EVALUATION_BATCH, Method
from onea.runs.setup import Side


def correct_per_class(method: Method, test: Side, seen: int, seed: int) -> list[int]:
    """Right answers for each class seen, over the test images of those classes in one shuffled stream."""
    rows = test.rows[test.labels[test.rows] < seen]
    # No method may profit from neighbours of the same class, so the order is random (and the same for all methods).
    rows = rows[torch.randperm(len(rows), generator=seeds.generator(seed, 0, "test order"))]
    processes = method.runtime.processes
    answers = torch.zeros(len(rows), dtype=torch.int64, device=method.runtime.device)
    for number, part in enumerate(torch.arange(len(rows)).split(EVALUATION_BATCH)):
        if number % processes.count == processes.rank:
            answers[part] = method.scores(test.images.plain(rows[part])).argmax(1)
    truth = test.labels[rows]
    return torch.bincount(truth[processes.sum_of(answers).cpu() == truth], minlength=seen).tolist()
