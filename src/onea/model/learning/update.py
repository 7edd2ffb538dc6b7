# SPDX-License-Identifier: Apache-2.0
"""One update: train an adapter on what arrived, merge it, move the prototypes and calibrate the answers."""

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
from onea.model import calibration
from onea.model.calibration import ENOUGH, calibrated
from onea.model.engine import Engine
from onea.model.held_out import HeldOut, Measured, measure
from onea.model.learning.background import taught_now
from onea.model.learning.images import DecodedImages
from onea.model.learning.update_images import UpdateImages, checked_classes, given_as_numbers
from onea.model.parameters import options_of
from onea.model.sentences import PhotoReport, conflicts_of, few_photos_fields, share_fields
from onea.model.state import NO_ROWS, NO_SIGNALS, State, Update, merged_with, new_id, statistics_for
from onea.runtime import Progress, Runtime
from onea.tensors import Tensors, round_to_bfloat16
from onea.text import printable, utc_timestamp
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT

_GATE_SUMMARY = ("base", "align_share", "gate_min", "gate_max")


def blank(engine: Engine, options: MergingOptions, readout: str) -> State:
    """The state of a model that knows nothing; its adapter leaves the network as it is."""
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
        merged={},
        statistics=statistics_for(readout, engine.vit.width),
        readout=readout,
        margins=NO_SIGNALS,
        margin_rows=NO_ROWS,
        hidden=NO_SIGNALS,
        hidden_rows=NO_ROWS,
        background=torch.empty(0, engine.vit.width),
        temperature=calibration.PRIOR_TEMPERATURE,
        calibrated_on=0,
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
    """The state after one more update, with new or known classes, and which photos need a look; the old state stays.

    A photo that was taught before as the same class, or comes twice, counts once and is no evidence of how well new
    ones are answered. It may train the adapter again; then the statistics of a class whose photos are all there again
    are made anew, as the new adapter sees them.

    ``started`` is when the clock of the update began, where that was before the call.

    Raises:
        OneaError: a class has one image or a name that cannot be used, or training failed.
    """
    names = checked_classes(batch, state)
    assert batch.labels is not None
    started = time.perf_counter() if started is None else started
    called = printable(name) if name else f"update {version}"
    adapters, options = engine.adapters(state), options_of(state.options)
    training = engine.for_training(progress)
    sizes = Sizes.of(state.merged, Counter(batch.labels))
    trains = not engine.vit.no_hooks_reason and options.should_train(len(names), sizes.new_share)
    views = Views(engine, batch, options, adapters, seed, training, exact=not trains)
    features = views.features(0, adapters)
    images = UpdateImages.of(batch, names, features, state, held_out, seed, training[1].progress)
    rows, new, measured, classifier = images.rows, images.new, images.measured, state.classifier
    claimed = taught_now(state, features)

    kept = MergedAdapter(adapters.state_dict(), len(state.merged), sum(state.merged.values()))
    known = LearnerState(
        kept,
        {state.statistics.kind: state.statistics.pad_to(len(images.classes))},
        {"background": state.background[~claimed], "held": state.held},
    )

    def train_and_merge(merged: MergedAdapter) -> tuple[MergedAdapter, dict[str, Any]]:
        return _adapt(engine, state, batch, images, called, seed, training, views, merged)

    def look(view: int, merged: MergedAdapter) -> Tensor:
        if merged is kept:
            return views.features(view, adapters) if view else features
        return views.features(view, engine.adapters_from(merged.tensors, options.scale))

    recomputed = _recomputed(images, state)
    done = learn_update(
        known,
        NewImages(rows, look, ~images.trained, views.num_views, options.views, new, recomputed),
        train_and_merge if trains else None,
        kind=state.statistics.kind,
        classifier=classifier,
        compensate_drift=follow_drift and bool(state.updates),
    )
    report, by_view = done.report, done.features
    before, after = (_statistics(each) for each in (done.state_before_adding, done.state))
    after = after.compact()

    learned_from = add_images({before.kind: before}, by_view[:, new & images.trained], rows[new & images.trained])
    right = 0
    if bool(measured.any()):
        right = int((classifier.fit(learned_from[before.kind])(by_view[0, measured]).argmax(1) == rows[measured]).sum())
    held_before, prints = state.held_out, images.repeats.fingerprints
    held = dataclasses.replace(held_before, features=done.state.features["held"])
    if report["trained"]:
        # What an adapter was trained on since says no more how new images are answered.
        still = held_before.unseen_by(prints[images.trained])
        held_before, held = held_before[still], held[still]
        held = held.seen_anew(by_view, rows, prints, recomputed[0])
    held = held.behind(HeldOut(by_view[:, measured].transpose(0, 1), rows[measured], prints[measured]))
    overall = measure(classifier, after, held)

    learned = dataclasses.replace(
        state,
        id=new_id(),
        version=version,
        classes=images.classes,
        adapter=_on_cpu(done.state.adapter.tensors),
        statistics=after,
        background=done.state.features["background"],
        fingerprints=torch.cat([state.fingerprints, prints[new]]),
        fingerprint_rows=torch.cat([state.fingerprint_rows, rows[new]]),
        held=round_to_bfloat16(held.features),
        held_rows=held.rows,
        held_prints=held.prints,
        merged=merged_with(state.merged, images.taught) if report["trained"] else state.merged,
        numbers=given_as_numbers(state, batch),
    )
    learned, validated = _calibrated(learned, state, before, by_view, images, trained=report["trained"])
    overall_before = validated_before = None
    if report["trained"] and not bool(new.any()):  # before and after are measured on the same photos
        overall_before = measure(classifier, state.statistics, held_before)
    if overall_before and overall_before.share is None:
        again = recomputed[0]
        validated = _cross_validated(classifier, after.reset_classes(again), by_view[0], images, recomputed[1])
        validated_before = _cross_validated(
            classifier, state.statistics.reset_classes(again), features, images, recomputed[1]
        )
    conflicts = conflicts_of(batch.names, batch.labels, images.repeats.conflicts)
    photos = PhotoReport(batch.skipped, conflicts, batch.left_out, batch.groups)
    update: Update = {
        "version": version,
        "kind": "learn",
        "name": called,
        "date": utc_timestamp(),
        "classes": names,
        "new_classes": len(images.classes) - len(state.classes),
        "known": len(images.classes),
        "images": len(batch),
        "seen": int(images.repeats.seen.sum()),
        **photos.counts,
        "held_out": int(measured.sum()),
        **share_fields("held_out", right, int(measured.sum())),
        **share_fields("overall", overall.right, overall.images),
        "overall_images": overall.images,
        "overall_classes": overall.classes,
        "overall_before": overall_before and overall_before.share,
        **share_fields("cross_validated", validated.right, validated.images),
        "cross_validated_images": validated.images,
        "cross_validated_before": validated_before and validated_before.share,
        **few_photos_fields({name: learned.images[learned.row(name)] for name in names}),
        "trained": report["trained"],
        "epochs": report.get("epochs", 0),
        "merge": {key: value for key, value in report.get("merge", {}).items() if key in _GATE_SUMMARY} or None,
        "were_background": int(claimed.sum()),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return dataclasses.replace(learned, updates=(*state.updates, update)), photos


def _statistics(known: LearnerState) -> ClassStatistics:
    (statistics,) = known.statistics.values()
    assert isinstance(statistics, ClassStatistics)
    return statistics


def _recomputed(images: UpdateImages, state: State) -> tuple[Tensor, Tensor]:
    """Classes whose earlier photos are all in this update again, and these photos."""
    repeats, rows = images.repeats, images.rows
    found = torch.bincount(state.fingerprint_rows[repeats.known], minlength=len(state.classes))
    again = ((found > 0) & (found >= torch.tensor(state.images, dtype=torch.int64))).nonzero()[:, 0]
    return again, torch.isin(rows, again) & repeats.before & ~repeats.twice


def _cross_validated(
    classifier: Classifier, others: ClassStatistics, features: Tensor, images: UpdateImages, chosen: Tensor
) -> Measured:
    """How many of the chosen images are right by statistics of others and of further series of their class."""
    if not bool(chosen.any()):
        return Measured(0, 0, 0)
    rows, series = images.rows[chosen], images.series[chosen]
    scores = cross_validated_scores(classifier, others, features[chosen], rows, others.classes, series)
    return Measured.of(scores.argmax(1), rows)


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
    """Train on the update and merge: the new adapter, and a report."""
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
    result = learner.train_and_merge(merged, task, Sizes.of(state.merged, images.taught), views.fixed, held_out)
    runtime.progress.note("prototypes")
    return result


def _calibrated(
    learned: State, earlier: State, before: ClassStatistics, views: Tensor, images: UpdateImages, trained: bool
) -> tuple[State, Measured]:
    """What was learned, with probabilities and familiarity fitted to those images that are new.

    And how many of these are right by statistics without their series.
    """
    new, measured = images.new, images.measured
    if not bool(new.any()):
        return learned, Measured(0, 0, 0)
    # Images that an adapter was trained on look more familiar than others; how much, only those held out can tell.
    enough = trained and int(measured.sum()) + len(learned.margins) >= ENOUGH
    chosen = views[:, new], images.rows[new], images.series[new], measured[new] & enough
    return calibrated(learned, before, *chosen, earlier=earlier)


def _on_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}


class Views:
    """Each image of an update as it is (view 0), and in random crops.

    Crops are looked at in the precision of the training: what that rounds is far less than what cropping changes. The
    images themselves are, too, unless ``exact`` asks for full precision, in which all answers are given.

    Attributes:
        num_views: how many views of each image are looked at; if 1, the image itself counts in place of the others.
        fixed: the same for the training, where it looks at no others.
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
        # A network that no adapter fits is never trained, and nobody knows how well it answers in less precision. Eight
        # bits are for training steps alone.
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
