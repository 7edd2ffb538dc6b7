# SPDX-License-Identifier: Apache-2.0
"""LoRanPAC: truncated least squares on many random features of a network adapted to the first task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from onea import seeds
from onea.classifiers.loranpac import TruncatedFeatures
from onea.learner.local_head import new_head
from onea.learner.merged_adapter import AdapterCache, AdapterLearner
from onea.learner.tasks import Task
from onea.research.methods.adapter_merging import FirstTask, FirstTaskOptions
from onea.research.methods.classification import RandomFeatureOptions
from onea.research.methods.presets import published
from onea.schema import Count


@dataclass(frozen=True)
class LoRanPACOptions(RandomFeatureOptions, FirstTaskOptions):
    """Options of LoRanPAC. Without ``train``, the network stays as it is, as in most of the published configurations.

    Attributes:
        random_features: number of random features E, 100,000 as published. For the rank k they take 4 E k bytes.
        loranpac_head: what the local head of the first task classifies: the ``features`` as in other methods, or as in
            the ``official`` code the random features.
    """

    classifier: str = "loranpac"
    random_features: Count = 20_000
    loranpac_head: Literal["features", "official"] = "features"


class RandomFeatureHead(nn.Module):
    """A head on random features ``relu(x R)``; the projection is not trained."""

    def __init__(self, projection: Tensor, head: nn.Module):
        super().__init__()
        self.register_buffer("projection", projection, persistent=False)
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        logits: Tensor = self.head(F.relu(features @ self.get_buffer("projection")))
        return logits


class _RandomFeatureLearner(AdapterLearner):
    """Trains an adapter with a head on random features."""

    projection: Tensor

    def local_head(self, task: Task) -> nn.Module:
        options, generator = self.options, seeds.generator(task.seed, task.index, "head")
        head = new_head(self.projection.shape[1], len(task.classes), options.head, options.head_scale, generator)
        return RandomFeatureHead(self.projection, head)


def _published(kept: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "rank": 64,
        "epoch_growth": 0.0,
        "random_features": 100_000,
        "head": "cosine",
        "contrastive": False,
    }
    return published(20, 0.01, 48, **options, classifier_options=f"kept={kept}")


class LoRanPAC(FirstTask):
    """Least squares on random features, truncated to the leading singular vectors of all images so far."""

    title = "LoRanPAC"
    paper = "https://arxiv.org/abs/2410.00645"
    stores = "one adapter and the singular vectors of random features (up to 0.8 GB for 20,000 features)"
    Options = LoRanPACOptions
    base_learning_rate = 0.03
    paper_presets: ClassVar = {
        "cifar100": _published(0.75),
        "cub200": _published(0.8),
        "imagenet-a": _published(0.8),
        "imagenet-r": _published(0.75),
        "": _published(0.75),
    }
    options: LoRanPACOptions

    def new_learner(self, adapter_cache: AdapterCache | None) -> AdapterLearner:
        """With the official head no adapters are shared, because those of other methods had other heads."""
        statistics = self._decomposition()
        if self.options.loranpac_head == "features" or statistics is None:
            return super().new_learner(adapter_cache)
        learner = _RandomFeatureLearner(self.vit, self.options, self.runtime, self.plan)
        learner.projection = statistics.projection
        return learner

    def learn(self, task: Task) -> dict[str, Any]:
        """Train the adapter on the first task, and add the images; reports the energy that the truncation kept."""
        report, statistics = super().learn(task), self._decomposition()
        return report if statistics is None else report | {"energy_kept": statistics.energy_kept}

    def _decomposition(self) -> TruncatedFeatures | None:
        """The statistics, unless another classifier was chosen."""
        statistics = self.statistics_for(next(iter(self.classifiers)))
        return statistics if isinstance(statistics, TruncatedFeatures) else None
