# SPDX-License-Identifier: Apache-2.0
"""One update, the same for research runs and for models: train, merge, carry, check, add.

1. **Train** an adapter on the new images and **merge** it into the one that is kept.
2. **Carry** the statistics of earlier classes along: the new images show how the merge moved features.
3. **Check** images held out of the training: a merge that makes their answers worse is discarded.
4. **Add** the new images to the statistics of their classes.

Everything random is an input: which images are held out, and which crops of them are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from onea.classifiers.carrying import feature_map
from onea.classifiers.contract import Classifier, Statistics
from onea.classifiers.statistics import ClassStatistics
from onea.learner.held_out import dropped_significantly, held_out_accuracy
from onea.learner.merged_adapter import MergedAdapter
from onea.tensors import round_to_bfloat16

Adapt = Callable[[MergedAdapter], tuple[MergedAdapter, dict[str, Any]]]


@dataclass(frozen=True)
class Known:
    """All that is kept between updates.

    Attributes:
        adapter: the merged adapter.
        statistics: of each class, by kind; every classifier reads those of one kind.
        features: of some earlier images, ``[..., width]`` by name, which follow a change of the adapter.
    """

    adapter: MergedAdapter
    statistics: Mapping[Hashable, Statistics]
    features: Mapping[str, Tensor] = field(default_factory=dict)

    def carried(self, by: Tensor) -> Known:
        """The same after a linear map ``[width, width]`` of all features."""
        statistics = {kind: known.carry(by) for kind, known in self.statistics.items()}
        features = {
            name: round_to_bfloat16(value @ by.float()) if len(value) else value
            for name, value in self.features.items()
        }
        return replace(self, statistics=statistics, features=features)

    def add(self, features: Tensor, rows: Tensor) -> Known:
        """The same with images added, as ``with_images`` takes them."""
        return replace(self, statistics=with_images(self.statistics, features, rows))


def with_images(
    statistics: Mapping[Hashable, Statistics], features: Tensor, rows: Tensor
) -> dict[Hashable, Statistics]:
    """Statistics with images added to their classes: features of their views ``[V, N, width]``, classes ``[N]``."""
    flat, labels = features.flatten(0, 1), rows.repeat(len(features)).to(features.device)
    return {kind: known.add(flat, labels) for kind, known in statistics.items()}


@dataclass(frozen=True)
class NewImages:
    """The images of an update.

    Attributes:
        rows: the class of each, as a row of the statistics, ``[N]``.
        features: computes those of a view of all images with an adapter, ``[N, width]``; view 0 is the whole image.
        looks: the number of views that are looked at.
        views: the number of views that enter the statistics; if only one is looked at, it counts that often.
        held_out: images that are not trained on, ``bool [N]``.
        added: images that enter the statistics, ``bool [N]``; None is all.
        recomputed: classes whose earlier images are all in this update again, and these images, ``bool [N]``. If the
            adapter changes, their statistics are computed from these images once more.
    """

    rows: Tensor
    features: Callable[[int, MergedAdapter], Tensor]
    held_out: Tensor
    looks: int = 1
    views: int = 1
    added: Tensor | None = None
    recomputed: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Update:
    """The result of an update.

    Attributes:
        known: all that is known now.
        before: the same without the new images: the adapter of now, and statistics of earlier images.
        features: of the views of the new images, ``[views, N, width]``.
        report: a JSON object about training, merge and check.
    """

    known: Known
    before: Known
    features: Tensor
    report: dict[str, Any]


def learn_update(
    known: Known, images: NewImages, adapt: Adapt | None, *, kind: Hashable, classifier: Classifier, carry: bool
) -> Update:
    """Learn new images.

    Args:
        known: what was learned before.
        images: of new classes or known ones.
        adapt: trains an adapter on the images that are not held out, and merges it; None leaves the adapter as it is.
        kind: of the statistics that ``classifier`` reads.
        classifier: answers held-out images for the check.
        carry: whether statistics follow the adapter.
    """
    checks = adapt is not None and bool(images.held_out.any())
    # One pass over the images, which a training without check and carry does not need.
    features = images.features(0, known.adapter) if adapt is None or checks or carry else None
    now = known
    report: dict[str, Any] = {"trained": adapt is not None}
    if adapt is not None:
        adapter, more = adapt(known.adapter)
        report |= more
        after = images.features(0, adapter)
        now = replace(known, adapter=adapter)
        if carry and features is not None:
            now = now.carried(feature_map(features, after))
        if checks and features is not None:
            seen = ((known, features), (now, after))
            accuracy_before, accuracy_after = (
                held_out_accuracy(classifier, each.statistics[kind], found, images.rows, images.held_out)
                for each, found in seen
            )
            count = int(images.held_out.sum())
            report["guard"] = {"before": accuracy_before, "after": accuracy_after, "images": count}
            if dropped_significantly(accuracy_before, accuracy_after, count):
                now, after, report["trained"] = known, features, False
        features = after
    assert features is not None
    more_views = (images.features(view, now.adapter) for view in range(1, images.looks))
    views = torch.stack([features, *more_views]).expand(images.views, -1, -1)
    if report["trained"] and images.recomputed is not None:
        classes, again = images.recomputed
        now = _cleared(now, classes).add(views[:, again], images.rows[again])
    added = slice(None) if images.added is None else images.added
    return Update(now.add(views[:, added], images.rows[added]), now, views, report)


def _cleared(known: Known, classes: Tensor) -> Known:
    statistics = {
        kind: each.cleared(classes) if isinstance(each, ClassStatistics) else each
        for kind, each in known.statistics.items()
    }
    return replace(known, statistics=statistics)
