# SPDX-License-Identifier: Apache-2.0
"""How much an image looks like something that was taught: one number, low for what is new."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from onea.classifiers.contract import Scorer
from onea.classifiers.gaussian import RegularisedGaussian
from onea.classifiers.statistics import ClassStatistics
from onea.tensors import to_float64

SIGNALS = 4
NO_BACKGROUND = -1.0  # the signal of an image where no background is known: no cosine is lower
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
    """What tells new images from known ones, ``[B, 4]``: how near the nearest class is, how clearly, how far away, and
    how near the background is.

    In the space where images spread equally around their class, centred on the mean of the class means: the cosine to
    the nearest class mean; the negative entropy of the classes' likelihoods; the negative distance to the nearest class
    mean; and the cosine to the nearest image of the background. None alone does well everywhere: photos from another
    day are far from their class but clearly of it, and an image like no other may clearly resemble one class most.

    Args:
        known: statistics of all classes.
        likelihoods: whether scores are those of ``RegularisedGaussian``; otherwise they only say which classes count.
        background: features of images that show none of the classes, ``[N, width]``; there may be none.
    """

    def __init__(self, known: ClassStatistics, likelihoods: bool, background: Tensor):
        root, means = known.whitening(), to_float64(known.means)
        origin = means.mean(0) if known.classes else means.new_zeros(known.width)
        nothing = F.normalize((to_float64(background) - origin) @ root, dim=1)
        super().__init__(metric=root, shift=origin @ root, targets=(means - origin) @ root, nothing=nothing)
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
        return torch.stack([near, clear, -away, self._background(space)], 1)

    def _background(self, space: Tensor) -> Tensor:
        """The cosine to the nearest image of the background, from whitened and centred features."""
        nothing = self.get_buffer("nothing")
        if not len(nothing):
            return torch.full_like(space[:, 0], NO_BACKGROUND)
        return (F.normalize(space, dim=1) @ nothing.T).amax(1)


class Typicality(Familiarity):
    """The sum of how near and how clearly, less two penalties: for images farther away than known ones usually are, and
    for images nearer to the background than to any class.

    Each signal is taken less its mean and divided by its spread among known images; the first penalty begins one spread
    below the mean, the second where both are equally near, and they count double.

    Args:
        signals: from features and scores.
        seen: signals of known images that were held out, ``[R, 4]``.
    """

    def __init__(self, signals: Signals, seen: Tensor):
        seen = seen[:, :-1]  # the background is compared with how near the classes are, in the same unit
        wide = seen.std(0).clamp_min(1e-6) if len(seen) > 1 else torch.ones(SIGNALS - 1)
        super().__init__(middle=seen.mean(0) if len(seen) else torch.zeros(SIGNALS - 1), spread=wide)
        self.signals = signals

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """How typical images are of what was taught."""
        return self.summed(self.signals.forward(features, scores))

    def summed(self, signals: Tensor) -> Tensor:
        """The same from signals ``[N, 4]``."""
        spread = self.get_buffer("spread")
        near, clear, away = ((signals[:, :-1] - self.get_buffer("middle")) / spread).unbind(1)
        nearer = (signals[:, 0] - signals[:, -1]) / spread[0]
        total: Tensor = near + clear + 2 * (away + 1).clamp_max(0) + 2 * nearer.clamp_max(0)
        return total
