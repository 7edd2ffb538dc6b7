# SPDX-License-Identifier: Apache-2.0
"""Train an adapter once for all runs that differ only in how they merge it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onea.runs.config import RunConfig
from onea.runs.jobs import Job

if TYPE_CHECKING:
    from onea.methods.adapter_merging import AdapterMemo


def training_of(config: RunConfig) -> str | None:
    """What runs must agree in to train the same adapters, or None where a method does not merge adapters.

    It is the whole configuration less the method and the options of its merge. Two methods with different presets
    may agree here and train differently all the same; a memo tells them apart.
    """
    from onea.methods import method_class
    from onea.methods.adapter_merging import AdapterMerging
    from onea.methods.adapter_training import AdapterTraining

    if not issubclass(method_class(config.method), AdapterMerging):
        return None
    names = {item.name for item in dataclasses.fields(AdapterTraining)}
    options = {name: value for name, value in config.options.items() if name in names}
    return json.dumps(dataclasses.asdict(config) | {"method": None, "options": options}, sort_keys=True)


def once_per_training(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """The runs that still train where adapters are shared: the first of each training, and all that share nothing."""
    firsts: dict[str, RunConfig] = {}
    for config in configs:
        firsts.setdefault(training_of(config) or config.key(), config)
    return list(firsts.values())


def with_memos(jobs: Sequence[Job]) -> Iterator[tuple[Job, AdapterMemo | None]]:
    """The jobs, those that train alike one after the other, each with the adapters that it may share.

    One memo exists at a time: that of the jobs at hand, and none where only one job could use it.
    """
    from onea.methods.adapter_merging import AdapterMemo

    trainings = [training_of(job.config) or job.config.key() for job in jobs]
    counts = Counter(trainings)
    for training, count in counts.items():
        memo = AdapterMemo() if count > 1 else None
        yield from ((job, memo) for job, own in zip(jobs, trainings, strict=True) if own == training)
