# SPDX-License-Identifier: Apache-2.0
"""One update of a model: train an adapter on the new images, merge it, update the statistics and calibrate."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onea.classifiers.drift import RidgeDrift
from onea.classifiers.validation import cross_validated_scores, sample_for_validation
from onea.learner.adapter_training import initial_adapters
from onea.learner.memory import parse_memory
from onea.learner.merged_adapter import AdapterLearner, MergedAdapter, MergingOptions
from onea.learner.one_a import OneAPlusOptions
from onea.learner.tasks import Task
from onea.learner.update import LearnerState, NewImages, UpdateResult, learn_update
from onea.merging.operator import Sizes
from onea.metrics import wilson_interval
from onea.model.calibration import MIN_IMAGES, PRIOR_TEMPERATURE, calibrate
from onea.model.engine import Engine
from onea.model.held_out import Accuracy, HeldOutImages
from onea.model.learning.background import relabelled_background
from onea.model.learning.images import DecodedImages
from onea.model.learning.memory_report import waiting_classes
from onea.model.learning.replay import NO_MEMORY, MemoryPolicy, add_copies, next_exemplars
from onea.model.learning.update_accuracy import measure
from onea.model.learning.update_images import UpdateImages, class_names, has_integer_labels
from onea.model.learning.update_views import UpdateViews
from onea.model.parameters import merging_options, to_python
from onea.model.reports import PhotoReport, few_photos_fields, find_conflicts
from onea.model.state import NO_ROWS, NO_SIGNALS, State, Update, add_counts, empty_statistics, new_id
from onea.runtime import NO_PROGRESS, Progress
from onea.tensors import Tensors, round_to_bfloat16
from onea.text import printable, utc_timestamp

_MAX_ERROR = 0.02  # share of misclassified images up to which the present features distinguish the classes of an update
_GATE_FIELDS = ("base", "align_share", "gate_min", "gate_max")  # of the report of a merge, in the history


def initial_state(engine: Engine, options: MergingOptions, readout: str) -> State:
    """The state of a model without classes; an adapter, if it trains one, does not change the output of the network."""
    if engine.vit.no_hooks_reason:  # a network whose blocks take no adapter
        options = dataclasses.replace(options, train=False, adapter_blocks=0, patch_drop_rate=0.0, freeze_at=0.0)
    return State(
        version=0,
        backbone=engine.backbone,
        preprocess=engine.preprocess_values,
        options=dataclasses.asdict(options),
        classes=(),
        adapter=_copy_to_cpu(initial_adapters(engine.vit, options, seed=0).state_dict()) if options.train else {},
        adapter_images={},
        statistics=empty_statistics(readout, engine.vit.width),
        readout=readout,
        held_out_signals=NO_SIGNALS,
        held_out_signal_rows=NO_ROWS,
        left_out_signals=NO_SIGNALS,
        left_out_signal_rows=NO_ROWS,
        background=torch.empty(0, engine.vit.width),
        temperature=PRIOR_TEMPERATURE,
        calibration_images=0,
        updates=(),
    )


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of an update, apart from the options of the training.

    Attributes:
        held_out: share of the images of each class that is not trained on.
        follow_drift: whether the statistics of earlier classes follow the adapter.
        policy: which photos are stored as small copies.
        seed: seed of all random numbers.
    """

    held_out: float = 0.1
    follow_drift: bool = True
    policy: MemoryPolicy = NO_MEMORY
    seed: int = 0

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> UpdateSettings:
        """The settings in the parameters of a model."""
        params = to_python(params)
        policy = MemoryPolicy(parse_memory(params["memory"]), params["memory_mb"])
        return cls(params["held_out"], params["follow_drift"], policy, params["seed"])


DEFAULT_SETTINGS = UpdateSettings()


def learn(
    engine: Engine,
    state: State,
    batch: DecodedImages,
    *,
    version: int,
    name: str | None = None,
    settings: UpdateSettings = DEFAULT_SETTINGS,
    later: bool = False,
    progress: Progress | None = None,
    started: float | None = None,
) -> tuple[State, PhotoReport]:
    """The state after one more update, with images of new or known classes, and a report about the photos.

    A photo that was taught before as the same class, or is a duplicate, is counted once and not used for evaluation,
    but it may train the adapter again. If that happens and all photos of a class are repeated, the statistics of the
    class are computed again. Stored copies of earlier photos are repeated photos.

    Args:
        engine: the network.
        state: the state before the update.
        batch: images and labels.
        version: version of the new state.
        name: name of the update in the history.
        settings: settings of the update.
        later: whether to leave a training to a later update or to ``refresh``.
        progress: callbacks.
        started: start time of the update; by default the time of the call.

    Raises:
        OneaError: a new class has one image or an invalid name, or training failed.
    """
    started = time.perf_counter() if started is None else started
    title = printable(name) if name else f"update {version}"
    names = class_names(batch, state)
    assert batch.labels is not None
    sizes = Sizes.from_counts(state.adapter_images, Counter(batch.labels))
    options = merging_options(state.options)
    is_due = options.train and settings.policy.memory != 0 and waiting_classes(state, names).is_due(options.trigger)
    may_train = not later and (is_due or options.should_train(len(names), sizes.new_share))
    # Earlier classes that wait for this training need it even if the features distinguish the new ones.
    required = any(name not in state.adapter_images and name not in names for name in state.exemplars)
    photos = batch
    if may_train and settings.policy.memory != 0:
        photos = add_copies(batch, state, engine.side, progress or NO_PROGRESS)
    learned = learn_images(engine, state, photos, settings, title, progress, may_train=may_train, required=required)
    images, taught = learned.images, learned.images.taught
    new_state = dataclasses.replace(learned.state, version=version, integer_labels=has_integer_labels(state, batch))
    report = PhotoReport(
        batch.skipped,
        find_conflicts(batch.names, batch.labels, images.repeats.conflicts),
        batch.ignored_files,
        batch.group_folders,
    )
    update: Update = {
        "version": version,
        "kind": "learn",
        "name": title,
        "date": utc_timestamp(),
        "classes": names,
        "new_classes": len(images.classes) - len(state.classes),
        "known": len(images.classes),
        "images": len(batch),
        "repeated": int(images.repeats.repeated[taught].sum()),
        **report.counts,
        **learned.measures,
        **learned.training_fields,
        **few_photos_fields({name: new_state.images[new_state.row(name)] for name in names}),
        "distinguished": learned.distinguished,
        "relabelled_background": learned.relabelled,
        "seconds": round(time.perf_counter() - started, 3),
    }
    return dataclasses.replace(new_state, updates=(*state.updates, update)), report


@dataclass(frozen=True)
class LearnedImages:
    """The result of learning some images.

    Attributes:
        state: the new state, with the version and the history of the earlier one.
        images: the images, stored copies included.
        result: the result of the update.
        distinguished: whether the classes needed no training.
        relabelled: the number of background images that now belong to a class.
        measures: accuracies, as fields of the history.
    """

    state: State
    images: UpdateImages
    result: UpdateResult
    distinguished: bool
    relabelled: int
    measures: dict[str, Any]

    @property
    def training_fields(self) -> dict[str, Any]:
        """The fields of the history about the training."""
        report = self.result.report
        return {
            "trained": report["trained"],
            "replayed": int((~self.images.taught).sum()),
            "epochs": report.get("epochs", 0),
            "merge": {key: value for key, value in report.get("merge", {}).items() if key in _GATE_FIELDS} or None,
        }


def learn_images(
    engine: Engine,
    state: State,
    batch: DecodedImages,
    settings: UpdateSettings,
    title: str,
    progress: Progress | None,
    *,
    may_train: bool,
    required: bool,
) -> LearnedImages:
    """Learn images, which may include stored copies.

    With ``required``, they are trained on even if the present features distinguish their classes.
    """
    assert batch.labels is not None
    options = merging_options(state.options)
    training = engine.for_training(progress)
    taught = len(batch) - batch.copies
    size = taught, len(set(batch.labels[:taught]))
    # Features by the earlier adapter decide which images are held out, and which background images are now classes.
    views = UpdateViews(engine, state, batch, options, settings.seed, training, may_train, size)
    features = views.features(0, views.earlier_adapter)
    images = UpdateImages.prepare(batch, features, state, settings.held_out, settings.seed, views.runtime.progress)
    distinguished = (
        may_train and not required and isinstance(options, OneAPlusOptions) and _distinguishes(state, images)
    )
    trains = may_train and not distinguished
    if not trains:
        views.discard_fixed()
    relabelled = relabelled_background(state, features[images.taught])

    # Train, merge, compensate drift and add the images to the statistics, as research runs do.
    result = learn_update(
        LearnerState(
            views.earlier_adapter,
            {state.statistics.kind: state.statistics.pad_to(len(images.classes))},
            {"background": state.background[~relabelled], "held_out": state.held_out_features},
            {"held_out": state.held_out_rows},
        ),
        NewImages(
            images.rows, views.features, ~images.trained, views.num_views, options.views, images.new, images.recompute
        ),
        (lambda adapter: _train_and_merge(adapter, state, images, views, title, settings.seed)) if trains else None,
        kind=state.statistics.kind,
        classifier=state.classifier,
        compensation=RidgeDrift() if settings.follow_drift and state.updates else None,
    )
    held_out_before, held_out_after = _update_held_out(state.held_out, result, images)
    # If an update needs no training, the adapter stands for its classes as it is, and counts for them in later merges.
    adapted = result.report["trained"] or distinguished
    learned = _next_state(state, result, images, held_out_after, adapted)
    learned, cross_validated = _calibrate(learned, state, result, images)
    once = images.taught & ~images.repeats.duplicates
    exemplars = next_exemplars(
        state,
        learned,
        settings.policy,
        batch.pixels[once.numpy()],
        images.repeats.fingerprints[once],
        images.rows[once],
        images.series[once],
        settings.seed,
    )
    measures = measure(state, learned, result, images, held_out_before, held_out_after, cross_validated)
    learned = dataclasses.replace(learned, exemplars=exemplars)
    return LearnedImages(learned, images, result, distinguished, int(relabelled.sum()), measures)


def _distinguishes(state: State, images: UpdateImages) -> bool:
    """Whether the present features distinguish the classes of the update, so that training could gain hardly anything.

    They do if the share of new images that are misclassified in cross-validation is at most ``_MAX_ERROR`` with 95 %
    confidence. If all earlier images of a class are in the update again, the purpose is to train on them.
    """
    new = images.new.clone()
    new[images.new] = sample_for_validation(images.rows[new], images.series[new])
    count = int(new.sum())
    if images.are_taught_again or wilson_interval(count, count)[0] < 1 - _MAX_ERROR:  # too few to tell
        return False
    statistics, rows = state.statistics.pad_to(len(images.classes)), images.rows[new]
    scores = cross_validated_scores(
        state.classifier, statistics, images.features[new], rows, statistics.classes, images.series[new]
    )
    accuracy = Accuracy.from_predictions(scores.argmax(1), rows)
    return wilson_interval(accuracy.correct, accuracy.images)[0] >= 1 - _MAX_ERROR


def _train_and_merge(
    merged: MergedAdapter, state: State, images: UpdateImages, views: UpdateViews, name: str, seed: int
) -> tuple[MergedAdapter, dict[str, Any]]:
    """Train a new adapter on the update and merge it; return the merged adapter and a report for JSON."""
    learner = AdapterLearner(views.vit, merging_options(state.options), views.runtime)
    stored = views.training_images()
    views.runtime.progress.start_task(len(state.updates), state.next_update, name)
    task, held_out = (
        Task(state.next_update, name, range(len(images.names)), stored, rows, images.labels[rows], seed)
        for rows in (images.trained.nonzero()[:, 0], (~images.trained).nonzero()[:, 0])
    )
    sizes = Sizes.from_counts(state.adapter_images, images.training_counts)
    result = learner.train_and_merge(merged, task, sizes, views.fixed, held_out)
    views.runtime.progress.start_phase("prototypes")
    return result


def _update_held_out(
    earlier: HeldOutImages, result: UpdateResult, images: UpdateImages
) -> tuple[HeldOutImages, HeldOutImages]:
    """The earlier held-out images that were not trained on now, and all held-out images with their new features."""
    fingerprints, new = images.repeats.fingerprints, images.evaluated
    updated = dataclasses.replace(earlier, features=result.state.features["held_out"])
    if result.report["trained"]:
        still_held_out = earlier.has_none_of(fingerprints[images.trained])
        earlier, updated = earlier[still_held_out], updated[still_held_out]
        updated = updated.recompute_features(result.features, images.rows, fingerprints, images.repeated_classes)
    newer = HeldOutImages(result.features[:, new].transpose(0, 1), images.rows[new], fingerprints[new])
    return earlier, updated.with_newer(newer)


def _next_state(
    state: State, result: UpdateResult, images: UpdateImages, held_out: HeldOutImages, adapted: bool
) -> State:
    """The state after the update, with the calibration and the history of the earlier state.

    ``adapted`` says whether the adapter stands for the classes of the update.
    """
    new_counts = images.newly_trained_counts(state.adapter_images) if adapted else {}
    return dataclasses.replace(
        state,
        id=new_id(),
        classes=images.classes,
        adapter=_copy_to_cpu(result.state.adapter.tensors),
        statistics=result.state.class_statistics.compact(),
        background=result.state.features["background"],
        fingerprints=torch.cat([state.fingerprints, images.repeats.fingerprints[images.new]]),
        fingerprint_rows=torch.cat([state.fingerprint_rows, images.rows[images.new]]),
        held_out_features=round_to_bfloat16(held_out.features),
        held_out_rows=held_out.rows,
        held_out_fingerprints=held_out.fingerprints,
        adapter_images=add_counts(state.adapter_images, new_counts),
    )


def _calibrate(learned: State, earlier: State, result: UpdateResult, images: UpdateImages) -> tuple[State, Accuracy]:
    """The state with calibrated probabilities and familiarity; also the cross-validated accuracy on new images."""
    new = images.new
    if not bool(new.any()):
        return learned, Accuracy(0, 0, 0)
    # Images that an adapter was trained on are more familiar than others; the held-out images show by how much.
    num_held_out = int(images.evaluated.sum()) + len(learned.held_out_signals)
    untrained = images.evaluated[new] & (result.report["trained"] and num_held_out >= MIN_IMAGES)
    before = result.state_before_adding.class_statistics
    return calibrate(learned, before, result.features[:, new], images.rows[new], images.series[new], untrained, earlier)


def _copy_to_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}
