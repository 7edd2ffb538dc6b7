# SPDX-License-Identifier: Apache-2.0
"""A classifier on the frozen pretrained network, without any training: SimpleCIL, SLDA and RanPAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from onea.learner.options import ClassifierOptions
from onea.learner.tasks import Task
from onea.research.methods.classification import FeatureClassification, RandomFeatureOptions
from onea.vit.hooks import NO_HOOKS, BlockHooks


class SimpleCIL(FeatureClassification):
    """Nearest class mean, by cosine, in the pretrained feature space."""

    title: ClassVar[str] = "SimpleCIL"
    paper: ClassVar[str] = "https://arxiv.org/abs/2303.07338"
    trains: ClassVar[str] = "nothing"
    stores: ClassVar[str] = "a prototype per class"
    trains_network: ClassVar[bool] = False
    Options: ClassVar[type] = ClassifierOptions

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

    title: ClassVar[str] = "SLDA"
    paper: ClassVar[str] = "https://arxiv.org/abs/1909.01520"
    stores: ClassVar[str] = "a mean per class, one matrix"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = SLDAOptions


@dataclass(frozen=True)
class RanPACOptions(RandomFeatureOptions, ClassifierOptions):
    """Options of RanPAC."""


class RanPACFrozen(SimpleCIL):
    """Ridge regression on random features of the pretrained network."""

    title: ClassVar[str] = "RanPAC (frozen)"
    paper: ClassVar[str] = "https://arxiv.org/abs/2307.02251"
    stores: ClassVar[str] = "two matrices of random features: 200 MB for 5,000"
    in_paper: ClassVar[bool] = False
    Options: ClassVar[type] = RanPACOptions
