# SPDX-License-Identifier: Apache-2.0
"""How much an image looks like something that was taught: one number, low for what is new."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.classifiers.contract import Scorer
from onea.classifiers.gaussian import RegularisedGaussian
from onea.classifiers.logistic import fit_log_odds
from onea.classifiers.statistics import ClassStatistics
from onea.tensors import eigh, to_float64

WEIGHTED = ("near", "clear", "likely")  # signals; the two that follow are penalties alone
SIGNALS = len(WEIGHTED) + 2
NO_BACKGROUND = 2.0  # the signal of an image where no background is known: cosines differ by no more
_USUAL = (0.3, 0.6, 0.5)  # weights of the signals where nothing else is known
_LOYALTY = 0.3  # to these weights: the few classes that can be left out say little
_SPREAD = 1.5  # of the weighted sum among known images, which gives the penalties their size
_FAR = 2.0  # spreads from which on an image is farther away than known ones are
# What log-likelihoods of features are divided by, which are correlated. Probabilities that are sharper than this, as
# those of the answers are, are almost all near one and hardly differ.
_SOFTNESS = 32.0


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


class Signals(ScoreReader):
    """What tells new images from known ones, ``[B, 5]``.

    In the space where images spread equally around their class, centred on the mean of the class means:

    1. near: the cosine to the nearest class mean,
    2. clear: the logarithm of the largest probability,
    3. likely: the logarithm of the likelihood of the likeliest class, less that of one Gaussian as wide as all classes,
    4. away: the negative distance to the nearest class mean,
    5. nearer: by how much the cosine to the nearest class mean exceeds that to the nearest image of the background.

    None does well everywhere: photos from another day are far from their class but clearly of it, an image like no
    other may clearly resemble one class most, and wide classes claim whatever is new.

    Args:
        known: statistics of all classes.
        likelihoods: whether scores are those of ``RegularisedGaussian``; otherwise they only say which classes count.
        background: features of images that show none of the classes, ``[N, width]``; there may be none.
    """

    def __init__(self, known: ClassStatistics, likelihoods: bool, background: Tensor):
        root, means = known.whitening(), to_float64(known.means)
        origin = means.mean(0) if known.classes else means.new_zeros(known.width)
        targets = (means - origin) @ root
        variances, axes = principal_axes(targets)
        super().__init__(
            metric=root,
            shift=origin @ root,
            targets=targets,
            wider=(axes * (variances / (1 + variances)).sqrt()[:, None]).T,
            volume=(1 + variances).log().sum(),
            nothing=F.normalize((to_float64(background) - origin) @ root, dim=1),
        )
        self.likelihoods = None if likelihoods else RegularisedGaussian().fit(known)

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """All signals."""
        counted = scores > -torch.inf
        if self.likelihoods is not None:
            scores = self.likelihoods.forward(features).where(counted, -torch.inf)
        logarithms = scores * features.shape[1]
        clear = torch.log_softmax(logarithms / _SOFTNESS, dim=1).amax(1)
        targets = self.get_buffer("targets")
        space = self._whitened(features)
        along, lengths, widths = space @ targets.T, space.square().sum(1, keepdim=True), targets.square().sum(1)
        cosines = along / (lengths * widths).sqrt().clamp_min(1e-6)
        apart = (lengths - 2 * along + widths).where(counted, torch.inf).amin(1).clamp_min(0)
        near = cosines.where(counted, -1).amax(1)
        along_means = (space @ self.get_buffer("wider")).square().sum(1)
        anything = -0.5 * (lengths[:, 0] - along_means + self.get_buffer("volume"))
        likely = logarithms.amax(1) - anything
        return torch.stack([near, clear, likely, -apart.sqrt(), self._nearer(near, space)], 1)

    def background_cosines(self, features: Tensor) -> Tensor:
        """The cosine of each image to each image of the background, ``[B, N]``."""
        return self._background_cosines(self._whitened(features))

    def _whitened(self, features: Tensor) -> Tensor:
        return features @ self.get_buffer("metric") - self.get_buffer("shift")

    def _background_cosines(self, space: Tensor) -> Tensor:
        return F.normalize(space, dim=1) @ self.get_buffer("nothing").T

    def _nearer(self, near: Tensor, space: Tensor) -> Tensor:
        """How much nearer classes are than the background, from cosines to classes and whitened, centred features."""
        if not len(self.get_buffer("nothing")):
            return torch.full_like(near, NO_BACKGROUND)
        return near - self._background_cosines(space).amax(1)


def principal_axes(points: Tensor) -> tuple[Tensor, Tensor]:
    """Variances ``[K]`` of points ``[N, width]`` around zero and their directions ``[K, width]``, the largest last.

    From the smaller of the two products of the points with themselves; directions without variance are left out.

    >>> variances, axes = principal_axes(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]], dtype=torch.float64))
    >>> variances.tolist(), axes.abs().tolist()
    ([4.5, 8.0], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    """
    few = len(points) < points.shape[1]
    variances, vectors = eigh((points @ points.T if few else points.T @ points) / max(1, len(points)))
    there = variances > 1e-9 * variances[-1:].clamp_min(1e-30).sum()
    axes = F.normalize(vectors.T @ points, dim=1) if few else vectors.T
    return variances[there], axes[there]


class SignalScaler(nn.Module):
    """Signals as deviations from those of known images: less their mean, by their spread.

    The last, which compares two cosines, is only divided, by the spread of the cosines to classes.

    Args:
        seen: signals of known images that were held out, ``[R, 5]``.
    """

    def __init__(self, seen: Tensor):
        super().__init__()
        enough = len(seen) > 1
        spread = seen.std(0).clamp_min(1e-6) if enough else torch.ones(SIGNALS)
        middle = seen.mean(0) if enough else torch.zeros(SIGNALS)
        self.register_buffer("middle", torch.cat([middle[:-1], middle.new_zeros(1)]))
        self.register_buffer("spread", torch.cat([spread[:-1], spread[:1]]))

    def forward(self, signals: Tensor) -> Tensor:
        """Deviations, ``[B, 5]``."""
        deviations: Tensor = (signals - self.get_buffer("middle")) / self.get_buffer("spread")
        return deviations


class Typicality(Familiarity):
    """A weighted sum of signals, less two penalties: for images farther away than known ones are, and for images nearer
    to the background than to any class.

    The weights are those that best tell known images that were held out from images of classes that were left out.
    Of a single class only the distance tells anything: its mean is that of all means, to which there is no direction;
    there is no other that an image might rather be; and what is far away is likeliest where the class is widest.

    Args:
        signals: from features and scores.
        seen: signals of known images that were held out, ``[R, 5]``.
        strange: signals of images of classes that were left out, as deviations from known ones, ``[S, 5]``.
    """

    def __init__(self, signals: Signals, seen: Tensor, strange: Tensor):
        super().__init__(weights=fitted_weights(seen, strange))
        self.signals, self.scale = signals, SignalScaler(seen)
        self.alone = len(signals.get_buffer("targets")) == 1

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """How typical images are of what was taught."""
        return self.total(self.scale(self.signals.forward(features, scores)))

    def total(self, deviations: Tensor) -> Tensor:
        """The same from signals as deviations, ``[N, 5]``."""
        *_, away, nearer = deviations.unbind(1)
        if self.alone:
            return _SPREAD * away
        penalties = 4 * (away + _FAR).clamp_max(0) + 2 * nearer.clamp_max(0)
        total: Tensor = deviations[:, : len(WEIGHTED)] @ self.get_buffer("weights") + penalties
        return total


def fitted_weights(seen: Tensor, strange: Tensor) -> Tensor:
    """The weights with which signals best tell known images from those of classes that were left out, ``[3]``.

    None is negative: a signal that would speak against known images is left out, as that can only be chance. Without
    classes left out, the weights are the usual ones. The sum always has the same spread among known images.

    Args:
        seen: signals of known images that were held out, ``[R, 5]``.
        strange: signals of images of classes that were left out, as deviations from known ones, ``[S, 5]``.
    """
    weights = torch.tensor(_USUAL, dtype=torch.float64)
    known = SignalScaler(seen)(seen)[:, : len(weights)]
    if len(known) < 2:
        return weights
    used = list(range(len(weights))) if len(strange) else []
    while used:
        found, _ = fit_log_odds(known[:, used], strange[:, used], torch.tensor(_USUAL)[used], _LOYALTY)
        if bool((found >= 0).all()):
            weights = torch.zeros_like(weights)
            weights[used] = found
            break
        used = [signal for signal, weight in zip(used, found.tolist(), strict=True) if weight > 0]
    spread = (to_float64(known) @ weights).std()
    return weights * (_SPREAD / spread.clamp_min(1e-6))
