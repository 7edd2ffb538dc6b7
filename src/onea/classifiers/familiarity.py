# SPDX-License-Identifier: Apache-2.0
"""How much an image looks like something that was taught: one number, low for what is new."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from onea.classifiers.contract import Scorer
from onea.classifiers.gaussian import RegularisedGaussian
from onea.classifiers.statistics import ClassStatistics
from onea.tensors import to_float64

SIGNALS = 3
_SOFTNESS = 6.0  # what log-likelihoods are divided by, of correlated features as if they were independent


class ScoreReader(Scorer, ABC):
    """A module that reads features ``[B, width]`` and the scores ``[B, classes]`` that a classifier gave them.

    A class with a score of -inf is left out, as if nobody had taught it.
    """

    def __call__(self, features: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """What it finds, in float32 whatever the network computes in."""
        with torch.autocast(features.device.type, enabled=False):
            found: Tensor = self.forward(features.float(), scores.float())
            return found

    @abstractmethod
    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """The same, in the precision that is given."""


class Familiarity(ScoreReader):
    """One number for each image, ``[B]``."""


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


class Signals(ScoreReader):
    """What tells new images from known ones, ``[B, 3]``: how near the nearest class is, how clearly, and how far away.

    In the space where images spread equally around their class, centred on the mean of the class means: the cosine to
    the nearest class mean; the negative entropy of the classes' likelihoods; and the negative distance to the nearest
    class mean. None alone does well everywhere: photos from another day are far from their class but clearly of it,
    and an image like no other may clearly resemble one class most.

    Args:
        known: statistics of all classes.
        likelihoods: whether scores are those of ``RegularisedGaussian``; otherwise they only say which classes count.
    """

    def __init__(self, known: ClassStatistics, likelihoods: bool):
        root, means = known.whitening(), to_float64(known.means)
        origin = means.mean(0) if known.classes else means.new_zeros(known.width)
        super().__init__(metric=root, shift=origin @ root, targets=(means - origin) @ root)
        self.likelihoods = None if likelihoods else RegularisedGaussian().fit(known)

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """All signals."""
        counted = scores > -torch.inf
        if self.likelihoods is not None:
            scores = self.likelihoods.forward(features).where(counted, -torch.inf)
        chances = torch.softmax(scores * (features.shape[1] / _SOFTNESS), dim=1)
        clear = (chances * chances.clamp_min(1e-12).log()).sum(1)
        targets = self.get_buffer("targets")
        space = features @ self.get_buffer("metric") - self.get_buffer("shift")
        along, lengths, widths = space @ targets.T, space.square().sum(1, keepdim=True), targets.square().sum(1)
        cosines = along / (lengths * widths).sqrt().clamp_min(1e-6)
        apart = lengths - 2 * along + widths
        near = cosines.where(counted, -1).amax(1)
        away = apart.where(counted, torch.inf).amin(1).clamp_min(0).sqrt()
        return torch.stack([near, clear, -away], 1)


class Typicality(Familiarity):
    """The sum of how near and how clearly, less a penalty for images farther away than known ones usually are.

    Each signal is taken less its mean and divided by its spread among known images; the penalty begins one spread below
    the mean and counts double.

    Args:
        signals: from features and scores.
        seen: signals of known images that were held out, ``[R, 3]``.
    """

    def __init__(self, signals: Signals, seen: Tensor):
        wide = seen.std(0).clamp_min(1e-6) if len(seen) > 1 else torch.ones(SIGNALS)
        super().__init__(middle=seen.mean(0) if len(seen) else torch.zeros(SIGNALS), spread=wide)
        self.signals = signals

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """How typical images are of what was taught."""
        return self.summed(self.signals.forward(features, scores))

    def summed(self, signals: Tensor) -> Tensor:
        """The same from signals ``[N, 3]``."""
        near, clear, away = ((signals - self.get_buffer("middle")) / self.get_buffer("spread")).unbind(1)
        total: Tensor = near + clear + 2 * (away + 1).clamp_max(0)
        return total
