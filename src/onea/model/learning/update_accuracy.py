# SPDX-License-Identifier: Apache-2.0
"""The accuracies of an update, on held-out images and in cross-validation, as fields of the history."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onea.classifiers.validation import cross_validated_scores
from onea.learner.update import UpdateResult, add_images
from onea.model.held_out import Accuracy, HeldOutImages, evaluate_held_out
from onea.model.learning.update_images import UpdateImages
from onea.model.reports import accuracy_fields
from onea.model.state import State


def measure(
    state: State,
    learned: State,
    result: UpdateResult,
    images: UpdateImages,
    held_out_before: HeldOutImages,
    held_out_after: HeldOutImages,
    cross_validated: Accuracy,
) -> dict[str, Any]:
    """Accuracies for the history.

    If only the adapter was updated, the accuracy before the update is measured on the same images, too.
    """
    overall = evaluate_held_out(state.classifier, learned.statistics, held_out_after)
    overall_before = cross_validated_before = None
    if result.report["trained"] and not bool(images.new.any()):
        overall_before = evaluate_held_out(state.classifier, state.statistics, held_out_before)
        if overall_before.value is None:
            cross_validated = _cross_validate(learned, result.features[0], images)
            cross_validated_before = _cross_validate(state, images.features, images)
    return {
        "held_out": int(images.evaluated.sum()),
        **accuracy_fields("held_out", _held_out_accuracy(state, result, images)),
        **accuracy_fields("overall", overall),
        "overall_images": overall.images,
        "overall_classes": overall.classes,
        "overall_before": overall_before and overall_before.value,
        **accuracy_fields("cross_validated", cross_validated),
        "cross_validated_images": cross_validated.images,
        "cross_validated_before": cross_validated_before and cross_validated_before.value,
    }


def _held_out_accuracy(state: State, result: UpdateResult, images: UpdateImages) -> Accuracy:
    """Accuracy on the held-out images of the update, by statistics without them."""
    test, rows, training = images.evaluated, images.rows, images.new & images.trained
    if not bool(test.any()):
        return Accuracy(0, 0, 0)
    before = result.state_before_adding.class_statistics
    statistics = add_images({before.kind: before}, result.features[:, training], rows[training])[before.kind]
    predicted = state.classifier.fit(statistics)(result.features[0, test]).argmax(1)
    return Accuracy.from_predictions(predicted, rows[test])


def _cross_validate(state: State, features: Tensor, images: UpdateImages) -> Accuracy:
    """Cross-validated accuracy on the images of the classes all of whose images are repeated."""
    classes, test = images.recompute
    if not bool(test.any()):
        return Accuracy(0, 0, 0)
    others, rows = state.statistics.reset_classes(classes), images.rows[test]
    scores = cross_validated_scores(state.classifier, others, features[test], rows, others.classes, images.series[test])
    return Accuracy.from_predictions(scores.argmax(1), rows)
