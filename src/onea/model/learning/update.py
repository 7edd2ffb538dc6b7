# SPDX-License-Identifier: Apache-2.0
"""One update of a model: train an adapter on the new images, merge it, update the statistics and calibrate."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onea.classifiers.base import Classifier
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import cross_validated_scores
from onea.data.image_storage import Images, PackedImages, choose_storage_tier
from onea.learner.fixed_views import FixedViews
from onea.learner.merged_adapter import AdapterLearner, MergedAdapter, MergingOptions
from onea.learner.tasks import Task
from onea.learner.update import LearnerState, NewImages, add_images, learn_update
from onea.merging.operator import Sizes
from onea.model.calibration import MIN_IMAGES, PRIOR_TEMPERATURE, calibrate
from onea.model.engine import Engine
from onea.model.held_out import Accuracy, HeldOutImages, evaluate_held_out
from onea.model.learning.background import relabelled_background
from onea.model.learning.images import DecodedImages
from onea.model.learning.update_images import UpdateImages, class_names, has_integer_labels
from onea.model.parameters import options_of
from onea.model.reports import PhotoReport, accuracy_fields, few_photos_fields, find_conflicts
from onea.model.state import NO_ROWS, NO_SIGNALS, State, Update, add_counts, empty_statistics, new_id
from onea.runtime import Progress, Runtime
from onea.tensors import Tensors, round_to_bfloat16
from onea.text import printable, utc_timestamp
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT

_GATE_SUMMARY = ("base", "align_share", "gate_min", "gate_max")


def initial_state(engine: Engine, options: MergingOptions, readout: str) -> State:
    """The state of a model without classes; its adapter leaves the network as it is."""
    from onea.learner.adapter_training import initial_adapters

    if engine.vit.no_hooks_reason:  # no block has an adapter, and none is ever trained
        options = dataclasses.replace(options, adapter_blocks=0, patch_drop_rate=0.0, freeze_at=0.0)
    return State(
        version=0,
        backbone=engine.backbone,
        preprocess=engine.description,
        options=dataclasses.asdict(options),
        classes=(),
        adapter=_on_cpu(initial_adapters(engine.vit, options, seed=0).state_dict()),
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


def learn(
    engine: Engine,
    state: State,
    batch: DecodedImages,
    *,
    version: int,
    name: str | None = None,
    held_out: float = 0.1,
    follow_drift: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
    started: float | None = None,
) -> tuple[State, PhotoReport]:
    """The state after one more update, with images of new or known classes, and a report about the photos.

    A photo that was taught before as the same class, or comes twice, counts once and is not used for evaluation. It may
    train the adapter again; then the statistics of a class whose photos are all repeated are recomputed with the new
    adapter.

    ``started`` is the start time of the update, if that was before the call.

    Raises:
        OneaError: a new class has one image or an invalid name, or training failed.
    """
    names = class_names(batch, state)
    assert batch.labels is not None
    started = time.perf_counter() if started is None else started
    title = printable(name) if name else f"update {version}"
    adapters, options = engine.adapters(state), options_of(state.options)
    training = engine.for_training(progress)
    sizes = Sizes.from_counts(state.adapter_images, Counter(batch.labels))
    trains = not engine.vit.no_hooks_reason and options.should_train(len(names), sizes.new_share)
    views = Views(engine, batch, options, adapters, seed, training, exact=not trains)
    features = views.features(0, adapters)
    images = UpdateImages.of(batch, names, features, state, held_out, seed, training[1].progress)
    rows, fingerprints, classifier = images.rows, images.repeats.fingerprints, state.classifier
    relabelled = relabelled_background(state, features)
    recomputed = _repeated_classes(images, state)

    earlier_adapter = MergedAdapter(
        adapters.state_dict(), len(state.adapter_images), sum(state.adapter_images.values())
    )
    known = LearnerState(
        earlier_adapter,
        {state.statistics.kind: state.statistics.pad_to(len(images.classes))},
        {"background": state.background[~relabelled], "held_out": state.held_out_features},
    )

    def train_and_merge(merged: MergedAdapter) -> tuple[MergedAdapter, dict[str, Any]]:
        return _adapt(engine, state, batch, images, title, seed, training, views, merged)

    def view_features(view: int, merged: MergedAdapter) -> Tensor:
        if merged is earlier_adapter:
            return views.features(view, adapters) if view else features
        return views.features(view, engine.adapters_from(merged.tensors, options.scale))

    done = learn_update(
        known,
        NewImages(rows, view_features, ~images.trained, views.num_views, options.views, images.new, recomputed),
        train_and_merge if trains else None,
        kind=state.statistics.kind,
        classifier=classifier,
        compensate_drift=follow_drift and bool(state.updates),
    )
    trained, by_view = done.report["trained"], done.features
    before, after = _statistics(done.state_before_adding), _statistics(done.state).compact()

    earlier_held_out = state.held_out
    held = dataclasses.replace(earlier_held_out, features=done.state.features["held_out"])
    if trained:
        # Images that the adapter was trained on since then no longer stand for new ones.
        untouched = earlier_held_out.not_among(fingerprints[images.trained])
        earlier_held_out, held = earlier_held_out[untouched], held[untouched]
        held = held.recompute_features(by_view, rows, fingerprints, recomputed[0])
    evaluated = images.evaluated
    held = held.with_newer(
        HeldOutImages(by_view[:, evaluated].transpose(0, 1), rows[evaluated], fingerprints[evaluated])
    )
    learned = dataclasses.replace(
        state,
        id=new_id(),
        version=version,
        classes=images.classes,
        adapter=_on_cpu(done.state.adapter.tensors),
        statistics=after,
        background=done.state.features["background"],
        fingerprints=torch.cat([state.fingerprints, fingerprints[images.new]]),
        fingerprint_rows=torch.cat([state.fingerprint_rows, rows[images.new]]),
        held_out_features=round_to_bfloat16(held.features),
        held_out_rows=held.rows,
        held_out_fingerprints=held.fingerprints,
        adapter_images=add_counts(state.adapter_images, images.training_counts) if trained else state.adapter_images,
        integer_labels=has_integer_labels(state, batch),
    )
    learned, cross_validated = _calibrate(learned, state, before, by_view, images, trained=trained)

    overall = evaluate_held_out(classifier, after, held)
    overall_before = cross_validated_before = None
    if trained and not bool(images.new.any()):  # so that both are measured on the same photos
        overall_before = evaluate_held_out(classifier, state.statistics, earlier_held_out)
        if overall_before.value is None:
            classes, chosen = recomputed
            cross_validated, cross_validated_before = (
                _cross_validate(classifier, statistics.reset_classes(classes), of_images, images, chosen)
                for statistics, of_images in ((after, by_view[0]), (state.statistics, features))
            )
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
        "repeated": int(images.repeats.repeated.sum()),
        **report.counts,
        "held_out": int(evaluated.sum()),
        **accuracy_fields("held_out", _accuracy_on_update(classifier, before, by_view, images)),
        **accuracy_fields("overall", overall),
        "overall_images": overall.images,
        "overall_classes": overall.classes,
        "overall_before": overall_before and overall_before.value,
        **accuracy_fields("cross_validated", cross_validated),
        "cross_validated_images": cross_validated.images,
        "cross_validated_before": cross_validated_before and cross_validated_before.value,
        **few_photos_fields({name: learned.images[learned.row(name)] for name in names}),
        "trained": trained,
        "epochs": done.report.get("epochs", 0),
        "merge": {key: value for key, value in done.report.get("merge", {}).items() if key in _GATE_SUMMARY} or None,
        "relabelled_background": int(relabelled.sum()),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return dataclasses.replace(learned, updates=(*state.updates, update)), report


def _statistics(known: LearnerState) -> ClassStatistics:
    (statistics,) = known.statistics.values()
    assert isinstance(statistics, ClassStatistics)
    return statistics


def _repeated_classes(images: UpdateImages, state: State) -> tuple[Tensor, Tensor]:
    """Classes whose earlier photos are all in this update again, and these photos, ``bool [N]``."""
    repeats, rows = images.repeats, images.rows
    count = torch.bincount(state.fingerprint_rows[repeats.matched], minlength=len(state.classes))
    classes = ((count > 0) & (count >= torch.tensor(state.images, dtype=torch.int64))).nonzero()[:, 0]
    return classes, torch.isin(rows, classes) & repeats.taught_before & ~repeats.duplicates


def _accuracy_on_update(
    classifier: Classifier, before: ClassStatistics, by_view: Tensor, images: UpdateImages
) -> Accuracy:
    """Accuracy on the held-out images of the update, by statistics of the others."""
    chosen, rows, added = images.evaluated, images.rows, images.new & images.trained
    if not bool(chosen.any()):
        return Accuracy(0, 0, 0)
    statistics = add_images({before.kind: before}, by_view[:, added], rows[added])[before.kind]
    return Accuracy.of(classifier.fit(statistics)(by_view[0, chosen]).argmax(1), rows[chosen])


def _cross_validate(
    classifier: Classifier, others: ClassStatistics, features: Tensor, images: UpdateImages, chosen: Tensor
) -> Accuracy:
    """Accuracy on the chosen images by statistics of others and of further series of their class."""
    if not bool(chosen.any()):
        return Accuracy(0, 0, 0)
    rows, series = images.rows[chosen], images.series[chosen]
    scores = cross_validated_scores(classifier, others, features[chosen], rows, others.classes, series)
    return Accuracy.of(scores.argmax(1), rows)


def _adapt(
    engine: Engine,
    state: State,
    batch: DecodedImages,
    images: UpdateImages,
    name: str,
    seed: int,
    training: tuple[FrozenViT, Runtime],
    views: Views,
    merged: MergedAdapter,
) -> tuple[MergedAdapter, dict[str, Any]]:
    """Train an adapter on the update and merge it; also a report."""
    vit, runtime = training
    learner = AdapterLearner(vit, options_of(state.options), runtime)
    if views.fixed is not None:
        stored: Images = views.fixed.images
    else:
        tier = choose_storage_tier(batch.pixels.nbytes, None, runtime.device)
        stored = PackedImages(batch.pixels, engine.preprocess, runtime.device, tier, runtime.pixel_dtype)
    runtime.progress.start_task(len(state.updates), state.next_update, name)
    task, held_out = (
        Task(state.next_update, name, range(len(images.names)), stored, rows, images.labels[rows], seed)
        for rows in (images.trained.nonzero()[:, 0], (~images.trained).nonzero()[:, 0])
    )
    result = learner.train_and_merge(
        merged, task, Sizes.from_counts(state.adapter_images, images.training_counts), views.fixed, held_out
    )
    runtime.progress.note("prototypes")
    return result


def _calibrate(
    learned: State, earlier: State, before: ClassStatistics, views: Tensor, images: UpdateImages, trained: bool
) -> tuple[State, Accuracy]:
    """The state with probabilities and familiarity fitted to the new images, and their cross-validated accuracy."""
    new = images.new
    if not bool(new.any()):
        return learned, Accuracy(0, 0, 0)
    # Images that an adapter was trained on look more familiar than others; held-out images measure by how much.
    measurable = trained and int(images.evaluated.sum()) + len(learned.held_out_signals) >= MIN_IMAGES
    untrained = images.evaluated[new] & measurable
    return calibrate(learned, before, views[:, new], images.rows[new], images.series[new], untrained, earlier)


def _on_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}


class Views:
    """The views of an update's images: the whole image (view 0) and random crops.

    Crops pass the network in the precision of the training; the rounding is far smaller than the effect of cropping.
    So do whole images, unless they are ``exact``: in full precision, as for predictions.

    Attributes:
        num_views: the number of views of each image; if 1, the image itself counts for the others.
        fixed: the views as the training uses them, if it uses no others.
    """

    def __init__(
        self,
        engine: Engine,
        batch: DecodedImages,
        options: MergingOptions,
        adapters: Adapters,
        seed: int,
        training: tuple[FrozenViT, Runtime],
        exact: bool = False,
    ):
        assert batch.labels is not None
        self._engine, self._pixels, self._labels, self._seed = engine, batch.pixels, batch.labels, seed
        # A network without adapters is never trained, so its accuracy in lower precision is unknown. FP8 is only for
        # training steps.
        full = engine.vit, engine.runtime
        self._for_crops = full if engine.vit.no_hooks_reason or training[1].fp8 else training
        self._for_images = full if exact else self._for_crops
        size = len(batch), len(set(batch.labels))
        self.num_views = options.num_views(*size)
        self.fixed: FixedViews | None = None
        if options.training_views:
            vit, runtime = self._for_images
            tier = choose_storage_tier(batch.pixels.nbytes, None, runtime.device)
            images = PackedImages(batch.pixels, engine.preprocess, runtime.device, tier)
            further = range(1, options.num_fixed_views(*size))
            crops = [engine.draw(batch.labels, seed, view, options.crop_scale) for view in further]
            rows = torch.arange(len(batch))
            self.fixed = FixedViews(
                vit, runtime, images, rows, crops, options.crop_scale, adapters, for_crops=self._for_crops
            )

    def features(self, view: int, adapters: Adapters) -> Tensor:
        """Features of a view of all images, ``[N, width]``, on the CPU."""
        if self.fixed is not None:
            return self.fixed.features(view, adapters).cpu()
        crops = self._engine.draw(self._labels, self._seed, view) if view else None
        by = self._for_crops if view else self._for_images
        return self._engine.features(self._pixels, adapters, crops, by=by)
