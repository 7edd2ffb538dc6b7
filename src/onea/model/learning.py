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

from onea.classifiers.carrying import feature_map
from onea.classifiers.contract import Classifier
from onea.classifiers.statistics import ClassStatistics
from onea.data.image_storage import Images, PackedImages, choose_storage_tier
from onea.merging.operator import Sizes
from onea.methods.adapter_merging import MergingOptions
from onea.methods.guard import fallen, held_out_accuracy
from onea.model import calibration
from onea.model.background import taught_now
from onea.model.calibrating import ENOUGH, calibrated
from onea.model.engine import Engine
from onea.model.images import DecodedImages
from onea.model.photo_report import PhotoReport, conflicts_of
from onea.model.recipe import method_of, options_of
from onea.model.rolling import measure, newest_held
from onea.model.sentences import share_fields
from onea.model.state import NO_ROWS, NO_SIGNALS, State, Update, merged_with, new_id, statistics_for
from onea.model.update_images import UpdateImages, checked_classes, given_as_numbers
from onea.model.views import Views
from onea.runtime import Progress, Runtime
from onea.tasks import Task
from onea.tensors import Tensors, compact
from onea.text import now, printable
from onea.vit.adapter import Adapters
from onea.vit.frozen import FrozenViT

_GATE_SUMMARY = ("base", "align_share", "gate_min", "gate_max")


def blank(engine: Engine, options: MergingOptions, readout: str) -> State:
    """The state of a model that knows nothing; its adapter leaves the network as it is."""
    from onea.methods.adapter_training import blank_adapters

    if engine.vit.frozen_only:  # no block has an adapter, and none is ever trained
        options = dataclasses.replace(options, adapter_blocks=0, patch_drop_rate=0.0, freeze_at=0.0)
    return State(
        version=0,
        backbone=engine.backbone,
        preprocess=engine.description,
        options=dataclasses.asdict(options),
        classes=(),
        adapter=_on_cpu(blank_adapters(engine.vit, options, seed=0).state_dict()),
        merged={},
        statistics=statistics_for(readout, engine.vit.width),
        readout=readout,
        familiar=torch.empty(0),
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
    trains = options.trains(len(names), Sizes.of(state.merged, Counter(batch.labels)).new_share)
    views = Views(engine, batch, options, adapters, seed, training, exact=not trains)
    features = views.features(0, adapters)
    images = UpdateImages.of(batch, names, features, state, held_out, seed)
    rows, new, measured, classifier = images.rows, images.new, images.measured, state.classifier

    claimed = taught_now(state, features)
    grown, background = state.statistics.grown(len(images.classes)), state.background[~claimed]
    known = _Known(adapters, features, grown, background, state.held)
    report: dict[str, Any] = {"trained": False}
    if not engine.vit.frozen_only:
        adapters, report = _adapt(engine, state, batch, images, called, seed, training, views)
    training[1].progress.note("prototypes")
    if report["trained"]:
        moved = known.through(adapters, views.features(0, adapters), carry=follow_drift and bool(state.updates))
        # An adapter that answers held-out images worse than the one before it is not kept.
        report["trained"] = not _worse(moved, known, images, classifier)
        known = moved if report["trained"] else known

    further = (views.features(view, known.adapters) for view in range(1, views.looks))
    by_view = torch.stack([known.features, *further]).expand(options.views, -1, -1)
    before = known.statistics
    if report["trained"]:
        before = _made_anew(before, by_view, images, state)
    after = _added(before, by_view, rows, new).compact()

    answers = classifier.fit(_added(before, by_view, rows, new & images.trained))(known.features[measured]).argmax(1)
    right = int((answers == rows[measured]).sum())
    # What an adapter was trained on since says no more how new images are answered.
    still = ~torch.isin(state.held_rows, rows[images.repeats.before & images.trained]) | (not report["trained"])
    newest = by_view[:, measured].transpose(0, 1), rows[measured]
    held, held_rows = newest_held(*newest, known.held[still], state.held_rows[still])
    overall = measure(classifier, after, held, held_rows)

    learned = dataclasses.replace(
        state,
        id=new_id(),
        version=version,
        classes=images.classes,
        adapter=_on_cpu(known.adapters.state_dict()),
        statistics=after,
        background=known.background,
        fingerprints=torch.cat([state.fingerprints, images.fingerprints[new]]),
        fingerprint_rows=torch.cat([state.fingerprint_rows, rows[new]]),
        held=compact(held),
        held_rows=held_rows,
        merged=merged_with(state.merged, images.taught) if report["trained"] else state.merged,
        numbers=given_as_numbers(state, batch),
    )
    learned = _calibrated(learned, state, before, by_view, images, trained=report["trained"])
    conflicts = conflicts_of(batch.names, batch.labels, images.repeats.conflicts)
    photos = PhotoReport(batch.skipped, conflicts, batch.left_out, batch.groups)
    update: Update = {
        "version": version,
        "kind": "learn",
        "name": called,
        "date": now(),
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
        "trained": report["trained"],
        "epochs": report.get("epochs", 0),
        "merge": {key: value for key, value in report.get("merge", {}).items() if key in _GATE_SUMMARY} or None,
        "were_background": int(claimed.sum()),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return dataclasses.replace(learned, updates=(*state.updates, update)), photos


def _added(known: ClassStatistics, views: Tensor, rows: Tensor, chosen: Tensor) -> ClassStatistics:
    """Statistics with all views of the chosen images added."""
    return known.add(views[:, chosen].flatten(0, 1), rows[chosen].repeat(len(views)))


def _made_anew(known: ClassStatistics, views: Tensor, images: UpdateImages, state: State) -> ClassStatistics:
    """Statistics in which classes whose photos are all there again have those as the new adapter sees them."""
    repeats, rows = images.repeats, images.rows
    found = torch.bincount(state.fingerprint_rows[repeats.known], minlength=len(state.classes))
    again = ((found > 0) & (found >= torch.tensor(state.images, dtype=torch.int64))).nonzero()[:, 0]
    return _added(known.cleared(again), views, rows, torch.isin(rows, again) & repeats.before & ~repeats.twice)


def _adapt(
    engine: Engine,
    state: State,
    batch: DecodedImages,
    images: UpdateImages,
    name: str,
    seed: int,
    training: tuple[FrozenViT, Runtime],
    views: Views,
) -> tuple[Adapters, dict[str, Any]]:
    """Train on the update and merge: the new adapter, and what is to be told about it."""
    vit, runtime = training
    sizes = Sizes.of(state.merged, images.taught)
    method = method_of(state.options)(vit, options_of(state.options), runtime)
    method.restore(state.adapter, len(state.merged), sizes.accumulated_samples)
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
    report = method.adapt(task, sizes, views.fixed, held_out)
    return method.kept, report


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known as an adapter sees it: the images of an update, and what is kept of earlier ones.

    Attributes:
        adapters: through which it is seen.
        features: of the images of the update, ``[N, width]``.
        statistics: of all images before it.
        background: as in ``State``.
        held: likewise.
    """

    adapters: Adapters
    features: Tensor
    statistics: ClassStatistics
    background: Tensor
    held: Tensor

    def through(self, adapters: Adapters, features: Tensor, carry: bool) -> _Known:
        """The same through another adapter, whose features these are; what is kept follows where it is carried."""
        if not carry:
            return dataclasses.replace(self, adapters=adapters, features=features)
        by = feature_map(self.features, features)
        background = compact(self.background @ by.float())
        held = compact(self.held @ by.float()) if len(self.held) else self.held
        return _Known(adapters, features, self.statistics.carry(by), background, held)


def _worse(after: _Known, before: _Known, images: UpdateImages, classifier: Classifier) -> bool:
    """Whether held-out images are answered worse through one adapter than through another, by more than chance."""
    held_out = ~images.trained
    now, then = (
        held_out_accuracy(classifier, known.statistics, known.features, images.rows, held_out)
        for known in (after, before)
    )
    return fallen(then, now, max(1, int(held_out.sum())))


def _calibrated(
    learned: State, earlier: State, before: ClassStatistics, views: Tensor, images: UpdateImages, trained: bool
) -> State:
    """What was learned, with probabilities and familiarity fitted to those images that are new."""
    comparable: State | None = earlier
    if len(earlier.familiar):  # an earlier version measured familiarity otherwise
        learned = dataclasses.replace(learned, familiar=torch.empty(0), margins=NO_SIGNALS, margin_rows=NO_ROWS)
        comparable = None
    new, measured = images.new, images.measured
    if not bool(new.any()):
        return learned
    # Images that an adapter was trained on look more familiar than others; how much, only those held out can tell.
    enough = trained and int(measured.sum()) + len(learned.margins) >= ENOUGH
    chosen = views[:, new], images.rows[new], images.series[new], measured[new] & enough
    return calibrated(learned, before, *chosen, earlier=comparable)


def _on_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}
