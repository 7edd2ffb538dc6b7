# SPDX-License-Identifier: Apache-2.0
"""A classifier on the frozen pretrained network, without any training: SimpleCIL, SLDA and RanPAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onea.learner.options import ClassifierOptions
from onea.learner.tasks import Task
from onea.research.methods.classification import FeatureClassification, RandomFeatureOptions
from onea.vit.hooks import NO_HOOKS, BlockHooks


class SimpleCIL(FeatureClassification):
    """Nearest class mean, by cosine, in the pretrained feature space."""

    title = "SimpleCIL"
    paper = "https://arxiv.org/abs/2303.07338"
    trains = "nothing"
    stores = "a prototype per class"
    trains_network = False
    Options = ClassifierOptions

    def learn(self, task: Task) -> dict[str, Any]:
        """Add the task's images to the statistics."""
        self.update_statistics(task)
        return {}

    def hooks(self) -> BlockHooks:
        """None: the pretrained network."""
        return NO_HOOKS

    def cacheable_modules(self) -> dict[str, BlockHooks]:
        """The pretrained network."""
        return {"plain": NO_HOOKS}


@dataclass(frozen=True)
class SLDAOptions(ClassifierOptions):
    """Options of streaming LDA."""

    classifier: str = "slda"


class SLDA(SimpleCIL):
    """Streaming linear discriminant analysis in the pretrained feature space."""

    title = "SLDA"
    paper = "https://arxiv.org/abs/1909.01520"
    stores = "a mean per class, one matrix"
    in_paper = False
    Options = SLDAOptions


@dataclass(frozen=True)
class RanPACOptions(RandomFeatureOptions, ClassifierOptions):
    """Options of RanPAC."""


class RanPACFrozen(SimpleCIL):
    """Ridge regression on random features of the pretrained network."""

    title = "RanPAC (frozen)"
    paper = "https://arxiv.org/abs/2307.02251"
    stores = "two matrices of random features: 200 MB for 5,000"
    in_paper = False
    Options = RanPACOptions
