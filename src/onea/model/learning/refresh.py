# SPDX-License-Identifier: Apache-2.0
"""Refresh: train the adapter once more on all photos at hand, without new ones, and keep the better version."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from onea.errors import OneaError
from onea.model.engine import Engine
from onea.model.learning.fingerprints import compute_fingerprints
from onea.model.learning.images import DecodedImages
from onea.model.learning.replay import add_copies
from onea.model.learning.update import UpdateSettings, learn_images
from onea.model.parameters import merging_options
from onea.model.state import State, Update, history_entry
from onea.runtime import NO_PROGRESS, Progress
from onea.text import plural, utc_timestamp


@dataclasses.dataclass(frozen=True)
class RefreshReport:
    """The result of a refresh.

    Attributes:
        kept: whether the new version is kept, because it is not worse on the same held-out images.
        before: accuracy of the earlier version on these images; None if there are too few.
        after: that of the new version.
        photos: the number of photos that were taught before and found again.
        copies: the number of stored copies of other photos.
        other_photos: the number of photos that were never taught, which are not used.
        seconds: duration.
    """

    kept: bool
    before: float | None
    after: float | None
    photos: int
    copies: int
    other_photos: int
    seconds: float


def refresh_lines(report: RefreshReport) -> list[str]:
    """What was trained on and what became of it, as lines.

    >>> for line in refresh_lines(RefreshReport(True, 0.8, 0.9, 40, 0, 2, 3.21)):
    ...     print(line)
    trained on 40 photos in 3.2 s
    2 photos were never taught and not used
    accuracy on held-out images: 80.0 % before, 90.0 % after
    """
    parts = [plural(report.photos, "photo", "photos")] if report.photos else []
    parts += [plural(report.copies, "stored copy", "stored copies")] if report.copies else []
    lines = [f"trained on {' and '.join(parts)} in {report.seconds:.1f} s"]
    if report.other_photos:
        lines.append(f"{plural(report.other_photos, 'photo was', 'photos were')} never taught and not used")
    if report.before is not None and report.after is not None:
        before, after = 100 * report.before, 100 * report.after
        lines.append(f"accuracy on held-out images: {before:.1f} % before, {after:.1f} % after")
    if not report.kept:
        lines.append("the earlier version is better and stays")
    return lines


def refresh(
    engine: Engine,
    state: State,
    photos: DecodedImages | None,
    *,
    version: int,
    settings: UpdateSettings,
    name: str = "refresh",
    progress: Progress = NO_PROGRESS,
    started: float | None = None,
) -> tuple[State | None, RefreshReport]:
    """Train on photos that were taught before and on stored copies; no photo is learned as new.

    Returns the new state, or None if it is worse on the same held-out images, and a report.

    Args:
        engine: the network.
        state: the model.
        photos: photos without labels; those that were taught are recognised by their fingerprints.
        version: version of the new state.
        settings: settings of the update.
        name: name of the update in the history.
        progress: callbacks.
        started: start time; by default the time of the call.

    Raises:
        OneaError: the preset trains nothing, or there are photos of fewer than two classes.
    """
    started = time.perf_counter() if started is None else started
    if not merging_options(state.options).train:
        raise OneaError("The model has preset fast, which trains nothing; teach a new model with preset auto.")
    found, others = _taught_photos(engine, state, photos)
    batch = add_copies(found, state, engine.side, progress)
    assert batch.labels is not None
    if (classes := len(set(batch.labels))) < 2:
        raise OneaError(
            f"There are photos of {plural(classes, 'class', 'classes')} to train on, and training needs two; give the "
            "folders with the photos that were taught."
        )
    learned = learn_images(engine, state, batch, settings, name, progress, may_train=True, required=True)
    update = history_entry("refresh", version, utc_timestamp(), [], len(state.classes)) | {
        "name": name,
        "images": len(found),
        **learned.measures,
        **learned.training_fields,
        "seconds": round(time.perf_counter() - started, 3),
    }
    before, after = _accuracies(update)
    kept = learned.result.report["trained"] and (before is None or after is None or after >= before)
    new = dataclasses.replace(learned.state, version=version, updates=(*state.updates, update)) if kept else None
    return new, RefreshReport(kept, before, after, len(found), update["replayed"], others, update["seconds"])


def _taught_photos(engine: Engine, state: State, photos: DecodedImages | None) -> tuple[DecodedImages, int]:
    """Those of the photos that were taught, with their classes, and the number of the others."""
    if photos is None:
        side = engine.side
        return DecodedImages(np.empty((0, 3, side, side), np.uint8), (), ()), 0
    taught = state.find_taught(compute_fingerprints(photos.pixels))
    rows = list(taught)
    batch = dataclasses.replace(
        photos,
        pixels=photos.pixels[rows],
        labels=tuple(taught.values()),
        names=tuple(photos.names[row] for row in rows),
    )
    return batch, len(photos) - len(rows)


def _accuracies(update: Update) -> tuple[float | None, float | None]:
    """The accuracy before and after on the same held-out images or, if these are few, in cross-validation."""
    for name in ("overall", "cross_validated"):
        before, after = update[f"{name}_before"], update[f"{name}_accuracy"]
        if before is not None and after is not None:
            return before, after
    return None, None
