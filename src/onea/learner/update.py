# SPDX-License-Identifier: Apache-2.0
"""One update of a class-incremental learner, the same for research runs and for models.

Given the state (the merged adapter ``A`` and statistics ``S`` of the classes) and new images ``X`` with labels:

1. **Train and merge**: train an adapter on the images that are not held out and merge it, ``A' = merge(A, train(X))``.
2. **Compensate drift**: with features ``F = f(X; A)`` and ``F' = f(X; A')``, fit a map ``m`` with ``m(F) ~ F'`` and
   apply it to the statistics of earlier classes: ``S' = m(S)``. If some images of an earlier class are at hand again,
   the error of the map on them corrects the mean of their class. If no feature changed, no statistic changes.
3. **Check**: if accuracy on the held-out images drops significantly, reject the merge: ``A', S' = A, S``.
4. **Add** the features ``f(X; A')`` to the statistics of their classes.

All randomness is an input: which images are held out, their random crops, and the seeds of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from onea.classifiers.base import Classifier, Statistics
from onea.classifiers.drift import Drift, DriftCompensation
from onea.classifiers.statistics import ClassStatistics
from onea.learner.held_out import dropped_significantly, held_out_accuracy
from onea.learner.merged_adapter import MergedAdapter
from onea.tensors import round_to_bfloat16, to_float64

TrainAndMerge = Callable[[MergedAdapter], tuple[MergedAdapter, dict[str, Any]]]  # returns a report for JSON as well


@dataclass(frozen=True)
class LearnerState:
    """All that a learner keeps between updates.

    Attributes:
        adapter: the merged adapter.
        statistics: statistics of the features of each class, by kind; all classifiers of a kind share them.
        features: stored features of some earlier images, ``[N, ..., width]`` by name; their drift is compensated too.
        feature_rows: the class of each image of ``features``, ``[N]`` by the same name, for those of known classes.
    """

    adapter: MergedAdapter
    statistics: Mapping[Hashable, Statistics]
    features: Mapping[str, Tensor] = field(default_factory=dict)
    feature_rows: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def class_statistics(self) -> ClassStatistics:
        """The statistics of a learner that keeps those of one kind."""
        (statistics,) = self.statistics.values()
        assert isinstance(statistics, ClassStatistics)
        return statistics

    def move(self, drift: Drift) -> LearnerState:
        """The state after the features of all earlier images drifted."""
        statistics = {kind: drift.move_statistics(old) for kind, old in self.statistics.items()}
        features = {
            name: round_to_bfloat16(drift.move_features(value)) if len(value) else value
            for name, value in self.features.items()
        }
        return replace(self, statistics=statistics, features=features)

    def shift_means(self, shifts: Tensor) -> LearnerState:
        """The state with the features of each class shifted, by a row of ``[classes, width]``."""
        statistics = {
            kind: old.shift_means(shifts.to(old.means.device)) if isinstance(old, ClassStatistics) else old
            for kind, old in self.statistics.items()
        }
        features = dict(self.features)
        for name, rows in self.feature_rows.items():
            if len(rows):
                of_image = shifts.to(features[name])[rows]
                features[name] = round_to_bfloat16(
                    features[name] + of_image.reshape(len(rows), *[1] * (features[name].dim() - 2), -1)
                )
        return replace(self, statistics=statistics, features=features)

    def add(self, features: Tensor, labels: Tensor) -> LearnerState:
        """The state with images added to their classes; see ``add_images``."""
        return replace(self, statistics=add_images(self.statistics, features, labels))

    def reset_classes(self, classes: Tensor) -> LearnerState:
        """The state with empty statistics of these classes."""
        statistics = {
            kind: old.reset_classes(classes) if isinstance(old, ClassStatistics) else old
            for kind, old in self.statistics.items()
        }
        return replace(self, statistics=statistics)


def add_images(
    statistics: Mapping[Hashable, Statistics], features: Tensor, labels: Tensor
) -> dict[Hashable, Statistics]:
    """Statistics with images added: features of all views ``[views, N, width]``, and labels ``[N]``."""
    flat, repeated = features.flatten(0, 1), labels.repeat(len(features)).to(features.device)
    return {kind: old.add(flat, repeated) for kind, old in statistics.items()}


@dataclass(frozen=True)
class NewImages:
    """The images of an update.

    Attributes:
        labels: the class of each image, as its row in the statistics, ``[N]``.
        compute_features: given the number of a view and an adapter, features of that view of all images, ``[N,
            width]``. View 0 is the whole image, the others are random crops.
        held_out: mask of the images that are not trained on, ``bool [N]``.
        num_views: the number of views that are computed.
        samples_per_image: how often each image counts in the statistics; with a single view, this view is repeated.
        counted: mask of the images that are added to the statistics, ``bool [N]``; None is all.
        recompute: classes whose earlier images are all in this update again, and the mask of these images, ``bool
            [N]``. If the adapter changes, the statistics of these classes are computed from these images.
    """

    labels: Tensor
    compute_features: Callable[[int, MergedAdapter], Tensor]
    held_out: Tensor
    num_views: int = 1
    samples_per_image: int = 1
    counted: Tensor | None = None
    recompute: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update.

    Attributes:
        state: the new state.
        state_before_adding: the new adapter, with statistics of earlier images only.
        features: features of the new images with the new adapter, ``[samples_per_image, N, width]``.
        report: on training, merge and check, for JSON.
    """

    state: LearnerState
    state_before_adding: LearnerState
    features: Tensor
    report: dict[str, Any]


def learn_update(
    state: LearnerState,
    images: NewImages,
    train_and_merge: TrainAndMerge | None,
    *,
    kind: Hashable,
    classifier: Classifier,
    compensation: DriftCompensation | None,
) -> UpdateResult:
    """Learn new images, of new or known classes.

    Args:
        state: state of the learner; it is not changed.
        images: images of the update.
        train_and_merge: trains an adapter on the images that are not held out, and merges it; None keeps the adapter.
        kind: kind of the statistics that ``classifier`` is fitted to.
        classifier: predicts the held-out images for the check.
        compensation: how to compensate the drift of features in the statistics of earlier classes, if at all.
    """
    if train_and_merge is None:
        features, report = images.compute_features(0, state.adapter), {"trained": False}
    else:
        state, features, report = _adapt(state, images, train_and_merge, kind, classifier, compensation)
    crops = (images.compute_features(view, state.adapter) for view in range(1, images.num_views))
    views = torch.stack([features, *crops]).expand(images.samples_per_image, -1, -1)
    if report["trained"] and images.recompute is not None:
        classes, earlier = images.recompute
        state = state.reset_classes(classes).add(views[:, earlier], images.labels[earlier])
    counted = slice(None) if images.counted is None else images.counted
    return UpdateResult(state.add(views[:, counted], images.labels[counted]), state, views, report)


def mean_errors(errors: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The mean error of each class, shrunk towards zero: ``n / (n + 1)`` of the mean of ``n``, ``[classes, width]``.

    >>> mean_errors(torch.tensor([[2.0], [4.0]]), torch.tensor([1, 1]), classes=2).tolist()
    [[0.0], [2.0]]
    """
    labels = labels.to(errors.device)
    total = torch.zeros(classes, errors.shape[1], dtype=errors.dtype, device=errors.device).index_add(0, labels, errors)
    return total / (torch.bincount(labels, minlength=classes) + 1)[:, None]


def _adapt(
    state: LearnerState,
    images: NewImages,
    train_and_merge: TrainAndMerge,
    kind: Hashable,
    classifier: Classifier,
    compensation: DriftCompensation | None,
) -> tuple[LearnerState, Tensor, dict[str, Any]]:
    """Steps 1 to 3: the new state, or the old one if the merge was rejected; its features; and a report."""
    check = bool(images.held_out.any())
    # A forward pass over all images, which only drift compensation and check need.
    before = images.compute_features(0, state.adapter) if check or compensation else None

    adapter, report = train_and_merge(state.adapter)
    after = images.compute_features(0, adapter)
    new = replace(state, adapter=adapter)
    report = {"trained": True, **report}
    if before is None:
        return new, after, report

    if compensation and not torch.equal(before, after):
        drift = compensation.fit(before, after)
        new = new.move(drift)
        if images.counted is not None and not bool(images.counted.all()):
            again = ~images.counted
            errors = to_float64(after[again]) - drift.move_features(to_float64(before[again]))
            new = new.shift_means(mean_errors(errors, images.labels[again], state.statistics[kind].classes))

    if check:
        accuracy_before, accuracy_after = (
            held_out_accuracy(classifier, candidate.statistics[kind], features, images.labels, images.held_out)
            for candidate, features in ((state, before), (new, after))
        )
        count = int(images.held_out.sum())
        report["guard"] = {"before": accuracy_before, "after": accuracy_after, "images": count}
        if dropped_significantly(accuracy_before, accuracy_after, count):
            return state, before, report | {"trained": False}
    return new, after, report
