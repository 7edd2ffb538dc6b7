# SPDX-License-Identifier: Apache-2.0
"""Replay: stored copies of earlier photos take part in a training, and which copies are stored after an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from onea import seeds
from onea.data.dataset import Pixels, natural_key
from onea.learner.memory import PENDING, Memory, select_evenly
from onea.model.exemplars import Copies, ExemplarFile, Exemplars, count_bytes, load_copies
from onea.model.learning.fingerprints import compute_fingerprints, find_copies
from onea.model.learning.images import DecodedImages
from onea.model.state import State
from onea.runtime import Progress
from onea.tensors import rows_of_each

MEGABYTE = 1_000_000
_MAX_PENDING = 100  # copies of a class; training needs no more


@dataclass(frozen=True)
class MemoryPolicy:
    """Which photos are stored as small copies.

    Attributes:
        memory: the number of each class, 0 for none, or ``pending``: those of classes that no adapter was trained on.
        megabytes: the largest number of megabytes of all copies.
    """

    memory: Memory = 0
    megabytes: int = 256

    @property
    def per_class(self) -> int:
        """The largest number of copies of a class."""
        return _MAX_PENDING if self.memory == PENDING else self.memory


NO_MEMORY = MemoryPolicy()


def add_copies(batch: DecodedImages, state: State, side: int, progress: Progress) -> DecodedImages:
    """The images of an update, followed by the stored copies of other photos."""
    assert batch.labels is not None
    fingerprints = compute_fingerprints(batch.pixels)
    parts: list[tuple[Pixels, Tensor]] = [(batch.pixels, fingerprints)]
    labels = list(batch.labels)
    progress.start_phase("reading stored copies")
    for name in sorted(state.exemplars, key=natural_key):
        for file in state.exemplars[name]:
            pixels, of_copies = file.decode(side)
            others = find_copies(of_copies, fingerprints) < 0
            parts.append((pixels[others.numpy()], of_copies[others]))
            labels += [name] * int(others.sum())
    copies = len(labels) - len(batch)
    return replace(
        batch,
        pixels=np.concatenate([pixels for pixels, _ in parts]),
        labels=tuple(labels),
        names=(*batch.names, *("a stored copy" for _ in range(copies))),
        fingerprints=torch.cat([part for _, part in parts]),
        copies=copies,
    )


def next_exemplars(
    state: State,
    learned: State,
    policy: MemoryPolicy,
    pixels: Pixels,
    fingerprints: Tensor,
    rows: Tensor,
    groups: Tensor,
    seed: int,
) -> Exemplars:
    """The stored copies after an update.

    Args:
        state: the model before the update.
        learned: the model after it, still with the earlier copies.
        policy: which photos are stored.
        pixels: photos of the update, each once, ``uint8 [N, 3, S, S]``.
        fingerprints: their fingerprints, ``[N, 2]``.
        rows: their classes, ``[N]``.
        groups: the series of each photo within its class, ``[N]``.
        seed: seed of the random choice.
    """
    exemplars = {name: files for name, files in learned.exemplars.items() if _is_stored(name, learned, policy)}
    taught = learned.images
    for row, members in rows_of_each(rows):
        name = learned.classes[row]
        if _is_stored(name, learned, policy):
            generator = seeds.generator(seed, state.next_update, f"exemplars/{name}")
            earlier = load_copies(exemplars.get(name, ()))
            copies = _chosen(earlier, members, fingerprints, groups, taught[row], policy.per_class, pixels, generator)
            exemplars[name] = (ExemplarFile.of(copies),)
    return _within_limits(exemplars, policy)


def _is_stored(name: str, learned: State, policy: MemoryPolicy) -> bool:
    """Whether the policy stores photos of a class."""
    return policy.memory != 0 and not (policy.memory == PENDING and name in learned.adapter_images)


def _chosen(
    earlier: Copies,
    members: Tensor,
    fingerprints: Tensor,
    groups: Tensor,
    total: int,
    count: int,
    pixels: Pixels,
    generator: torch.Generator,
) -> Copies:
    """Earlier copies and new photos of a class, in proportion to the photos that they stand for."""
    earlier = earlier.select((find_copies(earlier.fingerprints, fingerprints[members]) < 0).nonzero()[:, 0].tolist())
    share = max(0, total - len(members)) / max(1, total)
    num_earlier = min(len(earlier), max(round(count * share), count - len(members)))
    kept = torch.randperm(len(earlier), generator=generator)[:num_earlier].sort().values
    new = members[select_evenly(groups[members], count - num_earlier, generator)]
    return earlier.select(kept.tolist()) + Copies.encode(pixels[new.numpy()], fingerprints[new])


def _within_limits(exemplars: Mapping[str, tuple[ExemplarFile, ...]], policy: MemoryPolicy) -> Exemplars:
    """At most the allowed number of copies of each class, and fewer of all classes if they have too many bytes."""
    limited = {name: _limited(files, policy.per_class) for name, files in exemplars.items()}
    count = max((file.images for files in limited.values() for file in files), default=0)
    while count > 1 and (total := count_bytes(limited)) > policy.megabytes * MEGABYTE:
        count = min(count - 1, int(count * policy.megabytes * MEGABYTE / total))
        limited = {name: _limited(files, max(1, count)) for name, files in limited.items()}
    return limited


def _limited(files: tuple[ExemplarFile, ...], count: int) -> tuple[ExemplarFile, ...]:
    """Files with at most this many copies in all."""
    if sum(file.images for file in files) <= count:
        return files
    copies = load_copies(files)
    return (ExemplarFile.of(copies.select(range(count))),) if len(copies) > count else files
