# SPDX-License-Identifier: Apache-2.0
"""One-A+: one adapter and one pass like One-A, with three main changes, each of which can be switched off.

1. **Start.** A task's adapter starts from the merged one, not from random weights, and only tasks that bring a quarter
   of the classes or more train one. The merge is the mean of both adapters, in which a class of the task has two votes
   and an old one has one.
2. **Carry.** The merge moves the features of old classes, whose images are gone. The images of the task show how: their
   features before (rows of ``F0``) and after (``F1``) give the ridge map ``P = I + (F0'F0 + l I)^-1 F0'(F1 - F0)``,
   with the strength ``l`` that best predicts images left out. What is known of old classes is carried along: means
   ``m P``, scatters ``P'SP``, directions ``A P``.
3. **Classify.** A Gaussian per class answers, its covariance between that of the class and the one that all classes
   share (see ``onea.classifiers.gaussian``), instead of the nearest mean.

An adapter that makes held-out images of its own task worse is taken back. The number of images decides how long a task
is trained, never the name of a dataset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from onea.learner.merged_adapter import MergingOptions
from onea.learner.one_a import MIN_BATCH_SIZE, OneAOptions, OneAPlusOptions
from onea.research.methods.adapter_merging import AdapterMerging
from onea.vit.hooks import BlockHooks


class OneAPlus(AdapterMerging):
    """One adapter that every task starts from, statistics that follow it, and a Gaussian per class."""

    title = "One-A+"
    paper = "https://arxiv.org/abs/2603.10237"
    trains = "an adapter for each large task, from the merged one"
    stores = "one adapter, a mean and some directions per class, one matrix"
    in_paper = False
    Options = OneAPlusOptions
    base_learning_rate = 0.15
    paper_presets: ClassVar = {}
    options: OneAPlusOptions

    @classmethod
    def epochs_per_task(cls, options: MergingOptions, sizes: Sequence[int]) -> list[int]:
        """More for larger tasks, none for those that are not trained on; assumes 100 images of a class."""
        assert isinstance(options, OneAPlusOptions)
        training = options.training_options(1, 100)
        values = {name: getattr(training, name) for name in ("epochs", "min_epochs", "max_epochs")}
        return super().epochs_per_task(dataclasses.replace(options, **values), sizes)

    def batch_sizes(self) -> set[int]:
        """The sizes that steps may have."""
        return {self.options.batch_size} if self.options.batch_size else {MIN_BATCH_SIZE, 2 * MIN_BATCH_SIZE}

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapter, which stands still while tasks teach it nothing."""
        return {f"adapter of {self.merged.classes} classes": self.adapter}


class OneAMethod(AdapterMerging):
    """One adapter, merged by asymmetric alignment, information-adaptive weights and directional gates."""

    title = "One-A"
    paper = "https://arxiv.org/abs/2603.10237"
    trains = "an adapter per task"
    stores = "one adapter, a prototype per class"
    Options = OneAOptions
    base_learning_rate = 0.17
    options: OneAOptions
