# SPDX-License-Identifier: Apache-2.0
"""Familiarity: an out-of-distribution score, low for images of no known class.

It combines scores of the literature: cosine to the class means, maximum softmax probability (Hendrycks and Gimpel,
2017), likelihood ratio to a background model (Ren et al., 2019) and Mahalanobis distance (Lee et al., 2018).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onea.classifiers.base import Scorer
from onea.classifiers.gaussian import MANY_CLASSES, RegularisedGaussian
from onea.classifiers.statistics import ClassStatistics
from onea.tensors import eigh, to_float64

WEIGHTED_SIGNALS = ("cosine", "confidence", "likelihood ratio", "distance")
NUM_SIGNALS = len(WEIGHTED_SIGNALS) + 1  # and the background margin, which only serves as a penalty
NO_BACKGROUND = 2.0  # the margin without background images: the largest possible difference of two cosines
_DEFAULT_WEIGHTS = (0.4, 0.4, 0.6, 0.0)
_PRIOR_STRENGTH = 0.1  # of these weights in the fit, as only a few classes can be left out
_STD = 1.5  # of the weighted sum on known images; it sets the relative size of the penalties
_MAX_DISTANCE = 3.0  # in standard deviations; larger distances are penalised
# Divides log-likelihoods: features are correlated, so the maximum softmax probability would otherwise almost always be
# near one.
_TEMPERATURE = 128.0
_NEWTON_STEPS = 50
NEAREST_CLASSES = 128  # of many classes, those that matter for the confidence of an image
_MAX_STEP = 2.0  # a full Newton step would overshoot if the classes are well separated


@dataclass(frozen=True)
class ClassSpread:
    """How the means of classes are distributed.

    Attributes:
        mean: their mean, ``[width]`` float64.
        points: points with the same covariance around zero, at most as many as features, ``[N, width]`` float64.
    """

    mean: Tensor
    points: Tensor

    @classmethod
    def of(cls, statistics: ClassStatistics) -> ClassSpread:
        """The spread of all classes of the statistics."""
        means, width = to_float64(statistics.means), statistics.width
        mean = means.mean(0) if len(means) else means.new_zeros(width)
        points = means - mean
        if len(points) > width:
            values, vectors = eigh(points.T @ points * (width / len(points)))
            points = values.clamp_min(0).sqrt()[:, None] * vectors.T
        return cls(mean, points)


class Signals(Scorer):
    """Five signals of familiarity, ``[B, 5]``, from features ``[B, width]`` and a classifier's scores ``[B, classes]``.

    In the whitened space, centred on the mean of the class means, with image ``z`` and class means ``m_c``:

    1. cosine: ``max_c cos(z, m_c)``,
    2. confidence: the logarithm of the maximum softmax probability, among the ``NEAREST_CLASSES`` most likely classes
       if there are more than ``MANY_CLASSES``,
    3. likelihood ratio: ``max_c log p(z | c) - log N(z; 0, I + B)``, with ``B`` the between-class covariance,
    4. distance: ``-min_c |z - m_c|``,
    5. background margin: ``max_c cos(z, m_c) - max_b cos(z, b)`` over background images ``b``.

    No signal is best on all data. Photos taken on another day are far from their class but similar to no other class,
    unusual images may be most similar to one class, and classes with large variance attract images of unknown classes.

    Args:
        statistics: statistics of all classes.
        scores_are_likelihoods: whether scores are those of ``RegularisedGaussian``; otherwise they are computed here.
        background: features of images without a class, ``[N, width]``; may be empty.
        spread: the spread of all classes, if the statistics are of some of them.
    """

    def __init__(
        self,
        statistics: ClassStatistics,
        scores_are_likelihoods: bool,
        background: Tensor,
        spread: ClassSpread | None = None,
    ):
        whitening, means = statistics.whitening(), to_float64(statistics.means)
        spread = spread or ClassSpread.of(statistics)
        origin, centred = spread.mean, (means - spread.mean) @ whitening
        variances, axes = principal_axes(spread.points @ whitening)
        super().__init__(
            metric=whitening,
            shift=origin @ whitening,
            means=centred,
            # z^T (I + B)^(-1) z = |z|^2 - |z between_class_basis|^2, and log det (I + B)
            between_class_basis=(axes * (variances / (1 + variances)).sqrt()[:, None]).T,
            log_determinant=(1 + variances).log().sum(),
            background=F.normalize((to_float64(background) - origin) @ whitening, dim=1),
        )
        self.likelihoods = None if scores_are_likelihoods else RegularisedGaussian().fit(statistics)

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """The signals of each image; classes with score -inf are ignored, as if they were unknown."""
        considered = scores > -torch.inf
        if self.likelihoods is not None:
            scores = self.likelihoods.forward(features).where(considered, -torch.inf)
        log_likelihoods = scores * features.shape[1]
        compared = log_likelihoods
        if compared.shape[1] > MANY_CLASSES:
            compared = compared.topk(NEAREST_CLASSES).values
        confidence = torch.log_softmax(compared / _TEMPERATURE, dim=1).amax(1)
        means = self.get_buffer("means")
        whitened = self._whiten(features)
        products = whitened @ means.T
        squared_norms, squared_mean_norms = whitened.square().sum(1, keepdim=True), means.square().sum(1)
        cosines = products / (squared_norms * squared_mean_norms).sqrt().clamp_min(1e-6)
        squared_distances = squared_norms - 2 * products + squared_mean_norms
        squared_distance = squared_distances.where(considered, torch.inf).amin(1).clamp_min(0)
        cosine = cosines.where(considered, -1).amax(1)
        between = (whitened @ self.get_buffer("between_class_basis")).square().sum(1)
        log_marginal = -0.5 * (squared_norms[:, 0] - between + self.get_buffer("log_determinant"))
        likelihood_ratio = log_likelihoods.amax(1) - log_marginal
        margin = self._background_margin(cosine, whitened)
        return torch.stack([cosine, confidence, likelihood_ratio, -squared_distance.sqrt(), margin], 1)

    def background_cosines(self, features: Tensor) -> Tensor:
        """The cosine of each image to each background image, ``[B, N]``."""
        return self._background_cosines(self._whiten(features))

    def _whiten(self, features: Tensor) -> Tensor:
        return features @ self.get_buffer("metric") - self.get_buffer("shift")

    def _background_cosines(self, whitened: Tensor) -> Tensor:
        return F.normalize(whitened, dim=1) @ self.get_buffer("background").T

    def _background_margin(self, cosine: Tensor, whitened: Tensor) -> Tensor:
        if not len(self.get_buffer("background")):
            return torch.full_like(cosine, NO_BACKGROUND)
        return cosine - self._background_cosines(whitened).amax(1)


def principal_axes(points: Tensor) -> tuple[Tensor, Tensor]:
    """Variances ``[K]`` of points ``[N, width]`` around zero and their unit axes ``[K, width]``, in ascending order.

    Computed from the smaller of the two Gram matrices; axes without variance are left out.

    >>> variances, axes = principal_axes(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]], dtype=torch.float64))
    >>> variances.tolist(), axes.abs().tolist()
    ([4.5, 8.0], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    """
    by_points = len(points) < points.shape[1]
    variances, vectors = eigh((points @ points.T if by_points else points.T @ points) / max(1, len(points)))
    present = variances > 1e-9 * variances[-1:].clamp_min(1e-30).sum()
    axes = F.normalize(vectors.T @ points, dim=1) if by_points else vectors.T
    return variances[present], axes[present]


class SignalScaler(nn.Module):
    """Standardises signals by their mean and standard deviation on known images.

    The background margin is not centred, because its zero has a meaning; it is divided by the deviation of the cosine.

    Args:
        held_out: signals of held-out images of known classes, ``[R, 5]``.
    """

    def __init__(self, held_out: Tensor):
        super().__init__()
        has_std = len(held_out) > 1
        std = held_out.std(0).clamp_min(1e-6) if has_std else torch.ones(NUM_SIGNALS)
        mean = held_out.mean(0) if has_std else torch.zeros(NUM_SIGNALS)
        self.register_buffer("mean", torch.cat([mean[:-1], mean.new_zeros(1)]))
        self.register_buffer("std", torch.cat([std[:-1], std[:1]]))

    def forward(self, signals: Tensor) -> Tensor:
        """Standardised signals, ``[B, 5]``."""
        standardised: Tensor = (signals - self.get_buffer("mean")) / self.get_buffer("std")
        return standardised


class Familiarity(Scorer):
    """A weighted sum of signals, with penalties for a very large distance and for greater similarity to the background.

    The weights best separate held-out images of known classes from images of classes that were left out of the
    statistics. With a single class only the distance is used: its mean is the origin, so the cosine is undefined, and
    its probability is always one.

    Args:
        signals: signals of features and scores.
        held_out: signals of held-out images of known classes, ``[R, 5]``.
        left_out: standardised signals of images of classes that were left out, ``[S, 5]``.
    """

    def __init__(self, signals: Signals, held_out: Tensor, left_out: Tensor):
        super().__init__(weights=fit_weights(held_out, left_out))
        self.signals, self.scale = signals, SignalScaler(held_out)
        self.single_class = len(signals.get_buffer("means")) == 1

    def forward(self, features: Tensor, scores: Tensor) -> Tensor:
        """The familiarity of each image, ``[B]``."""
        return self.combine(self.scale(self.signals.forward(features, scores)))

    def combine(self, standardised: Tensor) -> Tensor:
        """The familiarity from standardised signals ``[N, 5]``."""
        *_, distance, margin = standardised.unbind(1)
        if self.single_class:
            return _STD * distance
        penalties = 4 * (distance + _MAX_DISTANCE).clamp_max(0) + 2 * margin.clamp_max(0)
        familiarity: Tensor = standardised[:, : len(WEIGHTED_SIGNALS)] @ self.get_buffer("weights") + penalties
        return familiarity


def fit_weights(held_out: Tensor, left_out: Tensor) -> Tensor:
    """The weights of the signals by logistic regression between known and left-out classes, ``[4]``.

    Signals with a negative weight are dropped, because a negative weight can only be due to chance. Without left-out
    classes, the default weights are used; that of the distance is zero. Weights are scaled so that the sum has a fixed
    standard deviation on known images.

    Args:
        held_out: signals of held-out images of known classes, ``[R, 5]``.
        left_out: standardised signals of images of classes that were left out, ``[S, 5]``.
    """
    weights = torch.tensor(_DEFAULT_WEIGHTS, dtype=torch.float64)
    known = SignalScaler(held_out)(held_out)[:, : len(weights)]
    if len(known) < 2:
        return weights
    used = list(range(len(weights))) if len(left_out) else []
    while used:
        prior = torch.tensor(_DEFAULT_WEIGHTS)[used]
        fitted, _ = fit_logistic_regression(known[:, used], left_out[:, used], prior, _PRIOR_STRENGTH)
        if bool((fitted >= 0).all()):
            weights = torch.zeros_like(weights)
            weights[used] = fitted
            break
        used = [signal for signal, weight in zip(used, fitted.tolist(), strict=True) if weight > 0]
    std = (to_float64(known) @ weights).std()
    return weights * (_STD / std.clamp_min(1e-6))


def fit_logistic_regression(positive: Tensor, negative: Tensor, prior: Tensor, strength: float) -> tuple[Tensor, float]:
    """Weights ``[k]`` and intercept of a balanced logistic regression by Newton's method.

    Both classes have the same total weight; the penalty is ``strength / 2 |weights - prior|^2``.

    Args:
        positive: ``[N, k]``.
        negative: ``[M, k]``.
        prior: the weights if there were no data, ``[k]``.
        strength: of the prior.

    >>> rows = torch.tensor([[1.0], [2.0]])
    >>> weights, intercept = fit_logistic_regression(rows, -rows, torch.zeros(1), 0.1)
    >>> bool(weights > 0), abs(intercept) < 1e-6
    (True, True)
    """
    rows = to_float64(torch.cat([positive, negative]))
    inputs = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    targets = torch.cat([rows.new_ones(len(positive)), rows.new_zeros(len(negative))])
    sample_weights = torch.cat([rows.new_full((len(part),), 0.5 / len(part)) for part in (positive, negative)])
    centre = torch.cat([to_float64(prior), rows.new_zeros(1)])
    penalty = torch.full_like(centre, strength)
    penalty[-1] = 0
    coefficients = centre.clone()
    for _ in range(_NEWTON_STEPS):
        probabilities = torch.sigmoid(inputs @ coefficients)
        gradient = inputs.T @ (sample_weights * (probabilities - targets)) + penalty * (coefficients - centre)
        curvature = (sample_weights * probabilities * (1 - probabilities))[:, None]
        hessian = inputs.T @ (curvature * inputs) + penalty.diag()
        step = torch.linalg.solve(hessian + 1e-12 * torch.eye(len(centre), dtype=hessian.dtype), gradient)
        coefficients = coefficients - step * (_MAX_STEP / step.norm().clamp_min(_MAX_STEP))
    return coefficients[:-1], float(coefficients[-1])
