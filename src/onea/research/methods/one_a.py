# SPDX-License-Identifier: Apache-2.0
"""One-A and One-A+.

One-A+ has one adapter and one forward pass like One-A, and three main changes, each of which can be switched off:

1. **Initialisation.** The adapter of a task starts from the merged one, not from random weights, and only tasks with a
   quarter of the classes or more train one. The merge is the mean of both adapters, in which a new class has weight 2
   and an old class weight 1.
2. **Drift compensation.** The merge changes the features of old classes, whose images are no longer available. The
   change is estimated on the images of the task: their features before (rows of ``F0``) and after (``F1``) give the
   ridge map ``P = I + (F0'F0 + l I)^-1 F0'(F1 - F0)``, with the strength ``l`` chosen by cross-validation. It is
   applied to the statistics of old classes: means ``m P``, scatters ``P'SP``, directions ``A P``.
3. **Classifier.** A Gaussian per class instead of the nearest mean, with a covariance between that of the class and the
   one shared by all classes (see ``onea.classifiers.gaussian``).

An adapter that lowers the accuracy on held-out images of its own task is discarded. The length of training depends on
the number of images, never on the name of the dataset.
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
    """One adapter, from which every task starts, drift compensation, and a Gaussian per class."""

    title = "One-A+"
    paper = "https://arxiv.org/abs/2603.10237"
    trains = "an adapter for each large task, from the merged one"
    stores = "one adapter, a mean and a few directions per class, and one matrix"
    in_paper = False
    Options = OneAPlusOptions
    base_learning_rate = 0.031
    paper_presets: ClassVar = {}
    related: ClassVar = {
        "SDC, drift of class means": "https://arxiv.org/abs/2004.00440",
        "LDC, a linear map": "https://arxiv.org/abs/2407.08536",
        "DPCR, a linear map of second moments": "https://arxiv.org/abs/2503.05423",
        "SLDC, a linear map of Gaussians": "https://arxiv.org/abs/2511.09926",
        "MoAL, an averaged adapter and a linear map": "https://github.com/Zi-Jian-Gao/Moal",
        "LR-RGDA and HopDC, low-rank Gaussians": "https://arxiv.org/abs/2602.00144",
        "RDA, shrunk covariances (Friedman 1989)": "https://www.jstor.org/stable/2289860",
        "Deep SRDA, the same on deep features": "https://arxiv.org/abs/2309.08353",
    }
    options: OneAPlusOptions

    @classmethod
    def epochs_per_task(cls, options: MergingOptions, sizes: Sequence[int]) -> list[int]:
        """More epochs for larger tasks, none for tasks that train no adapter; assumes 100 images per class."""
        assert isinstance(options, OneAPlusOptions)
        training = options.training_options(1, 100)
        values = {name: getattr(training, name) for name in ("epochs", "min_epochs", "max_epochs")}
        return super().epochs_per_task(dataclasses.replace(options, **values), sizes)

    def batch_sizes(self) -> set[int]:
        """The batch sizes of training."""
        return {self.options.batch_size} if self.options.batch_size else {MIN_BATCH_SIZE, 2 * MIN_BATCH_SIZE}

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The adapter, which does not change in tasks that train none."""
        return {f"adapter of {self.merged.classes} classes": self.adapter}


class OneAMethod(AdapterMerging):
    """One adapter, merged by asymmetric alignment, information-adaptive weights and directional gates."""

    title = "One-A"
    paper = "https://arxiv.org/abs/2603.10237"
    trains = "an adapter per task"
    stores = "one adapter and a prototype per class"
    Options = OneAOptions
    base_learning_rate = 0.068
    options: OneAOptions
