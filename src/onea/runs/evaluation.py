"""Counting right answers over all classes seen so far."""

from __future__ import annotations

import torch
from torch import Tensor

from onea import seeds
from onea.data.store import Images
from onea.methods.contract import EVALUATION_BATCH, Method


def correct_per_class(method: Method, images: Images, labels: Tensor, seen: int, seed: int) -> list[int]:
    """Right answers for each class seen, over the test images of those classes in one shuffled stream."""
    rows = (labels < seen).nonzero()[:, 0]
    # No method may profit from neighbours of the same class, so the order is random (and the same for all methods).
    rows = rows[torch.randperm(len(rows), generator=seeds.generator(seed, 0, "test order"))]
    answers = [method.scores(images.plain(batch)).argmax(1).cpu() for batch in rows.split(EVALUATION_BATCH)]
    truth = labels[rows]
    return torch.bincount(truth[torch.cat(answers) == truth], minlength=seen).tolist()
