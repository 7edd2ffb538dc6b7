# SPDX-License-Identifier: Apache-2.0
"""How much an image looks like something that was taught: one number, low for what is new."""

from __future__ import annotations

import torch
from torch import Tensor

from onea.classifiers.contract import Scorer
from onea.classifiers.gaussian import RegularisedGaussian
from onea.classifiers.linear import WhitenedCosine
from onea.classifiers.statistics import ClassStatistics

SIGNALS = 2
_SOFTNESS = 6.0  # what log-likelihoods are divided by, of correlated features as if they were independent


class Familiarity(Scorer):
    """Features ``[B, width]`` and their scores ``[B, classes]`` to one number for each image, or several.

    A class with a score of -inf is left out, as if nobody had taught it.
    """

    def __call__(self, features: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """The numbers, in float32 whatever the network computes in."""
        with torch.autocast(features.device.type, enabled=False):
            found: Tensor = self.forward(features.float(), scores.float())
            return found

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """See ``__call__``."""
        raise NotImplementedError


class Margin(Familiarity):
    """How much nearer an image is to its nearest class than that class's own images are on average; mostly below 0.

    What models had before format 3; those that were taught then keep it until they are taught again.
    """

    def __init__(self, familiar: Tensor):
        super().__init__(familiar=familiar)

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """The largest score, less the mean score of that class's own images."""
        best, index = scores.max(1)
        return best - self.get_buffer("familiar")[index]


class Signals(Familiarity):
    """What tells new images from known ones, ``[B, 2]``: how near the nearest class is, and how clearly it is that one.

    The first is the cosine to the nearest class mean in the centred whitened space, the second the negative entropy of
    the classes' likelihoods. Neither alone does well everywhere: photos from another day are far from their class but
    clearly of it, and an object like no other may clearly resemble one class most.

    Args:
        known: statistics of all classes.
        likelihoods: whether scores are those of ``RegularisedGaussian``; otherwise they only say which classes count.
    """

    def __init__(self, known: ClassStatistics, likelihoods: bool):
        super().__init__()
        self.cosines = WhitenedCosine().fit(known)
        self.likelihoods = None if likelihoods else RegularisedGaussian().fit(known)

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """Both signals."""
        counted = scores > -torch.inf
        if self.likelihoods is not None:
            scores = self.likelihoods.forward(features).where(counted, -torch.inf)
        near = self.cosines.forward(features).where(counted, -1).amax(1)
        chances = torch.softmax(scores * (features.shape[1] / _SOFTNESS), dim=1)
        return torch.stack([near, (chances * chances.clamp_min(1e-12).log()).sum(1)], 1)


class Typicality(Familiarity):
    """The sum of both signals, each less its mean and divided by its spread among known images.

    Args:
        signals: from features and scores.
        seen: signals of known images that were held out, ``[R, 2]``.
    """

    def __init__(self, signals: Signals, seen: Tensor):
        wide = seen.std(0).clamp_min(1e-6) if len(seen) > 1 else torch.ones(SIGNALS)
        super().__init__(middle=seen.mean(0) if len(seen) else torch.zeros(SIGNALS), spread=wide)
        self.signals = signals

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """How typical images are of what was taught."""
        return self.summed(self.signals.forward(features, scores))

    def summed(self, signals: Tensor) -> Tensor:
        """The same from signals ``[N, 2]``."""
        total: Tensor = ((signals - self.get_buffer("middle")) / self.get_buffer("spread")).sum(1)
        return total
