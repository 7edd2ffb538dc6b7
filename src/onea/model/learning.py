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
from onea.classifiers.statistics import ClassStatistics
from onea.data.assemble import natural_key
from onea.data.image_storage import Images, PackedImages, choose_storage_tier
from onea.errors import OneaError
from onea.merging.operator import Sizes
from onea.methods.adapter_merging import MergingOptions
from onea.methods.guard import fallen, held_out_accuracy
from onea.model import calibration
from onea.model.calibrating import ENOUGH, calibrated
from onea.model.engine import Engine
from onea.model.fingerprints import Repeats, fingerprints
from onea.model.groups import series
from onea.model.images import DecodedImages
from onea.model.names import check_names
from onea.model.recipe import method_of, options_of
from onea.model.rolling import measure, newest_held
from onea.model.sentences import conflict_fields, left_out_fields, share_fields
from onea.model.state import NO_ROWS, NO_SIGNALS, State, Update, merged_with, new_id, statistics_for
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
        options = dataclasses.replace(options, adapter_blocks=0, patch_drop_rate=0.0)
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


def checked_classes(batch: DecodedImages, state: State) -> list[str]:
    """The classes of an update in natural order, or one sentence about what is wrong with them."""
    assert batch.labels is not None
    names = sorted(set(batch.labels), key=natural_key)
    check_names(names, state.classes)
    counts = Counter(batch.labels)
    for name in names:
        if counts[name] < 2 and name not in state.classes:
            raise OneaError(f"Class '{name}' has one image; give at least two, better ten or more.")
    return names


def given_as_numbers(state: State, batch: DecodedImages) -> bool:
    """Whether a model was given its classes as whole numbers; its first update decides."""
    return state.numbers if state.classes else batch.numbers


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
) -> State:
    """The state after one more update, with new or known classes; the old state stays as it is.

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
    position = {label: index for index, label in enumerate(names)}
    labels = torch.tensor([position[label] for label in batch.labels])
    adapters = engine.adapters(state)
    options = options_of(state.options)
    training = engine.for_training(progress)
    trains = options.trains(len(names), Sizes.of(state.merged, Counter(batch.labels)).new_share)
    views = Views(engine, batch, options, adapters, seed, training, exact=not trains)
    earlier = views.features(0, adapters)
    number = len(state.updates) + 1  # decides all draws, so that an update that is undone and taught again is the same
    alike = series(earlier, labels, state.statistics)
    held = calibration.held_out_rows(labels, names, alike, held_out, seed, number)
    trained = torch.ones(len(labels), dtype=torch.bool).index_fill(0, held, False)
    prints = fingerprints(batch.pixels)
    repeats = state.repeats(prints, batch.labels)
    new, measured = ~repeats.seen, repeats.unseen_by(trained)

    taught = Counter(batch.labels[row] for row in trained.nonzero()[:, 0].tolist())
    sizes = Sizes.of(state.merged, taught)

    called = printable(name) if name else f"update {version}"
    merged, report = adapters, dict[str, Any](trained=False)
    if not engine.vit.frozen_only:
        merged, report = _adapt(engine, state, batch, labels, trained, sizes, number, called, seed, training, views)
    (progress or Progress()).note("prototypes")
    classes = state.classes + tuple(label for label in names if label not in state.classes)
    rows = torch.tensor([classes.index(label) for label in names])[labels]
    features, before, classifier = earlier, state.statistics.grown(len(classes)), state.classifier
    background, rolling, by = state.background, state.held, None
    if report["trained"]:
        moved = views.features(0, merged)
        carried, behind = before, background
        if state.updates and follow_drift:
            by = feature_map(earlier, moved)
            carried, behind = before.carry(by), compact(background @ by.float())
        then = held_out_accuracy(classifier, before, earlier, rows, ~trained)
        after_it = held_out_accuracy(classifier, carried, moved, rows, ~trained)
        # An adapter that answers held-out images worse than the one before it is not kept.
        report["trained"] = not fallen(then, after_it, max(1, len(held)))
        if report["trained"]:
            adapters, features, before, background = merged, moved, carried, behind
            rolling = rolling if by is None or not len(rolling) else compact(rolling @ by.float())
    further = (views.features(view, adapters) for view in range(1, options.views))
    by_view = torch.stack([features, *further])
    if report["trained"]:
        again = _all_there(state, repeats)
        before = _added(before.cleared(again), by_view, rows, torch.isin(rows, again) & repeats.before & ~repeats.twice)
    after, seen = _added(before, by_view, rows, new).compact(), _added(before, by_view, rows, new & trained)
    unseen = classifier.fit(seen)(features[measured])
    right = int((unseen.argmax(1) == rows[measured]).sum())
    # What an adapter was trained on since says no more how new images are answered.
    still = ~torch.isin(state.held_rows, rows[repeats.before & trained]) | (not report["trained"])
    watched = newest_held(by_view[:, measured].transpose(0, 1), rows[measured], rolling[still], state.held_rows[still])
    overall = measure(classifier, after, *watched)

    learned = dataclasses.replace(
        state,
        id=new_id(),
        version=version,
        classes=classes,
        adapter=_on_cpu(adapters.state_dict()),
        statistics=after,
        background=background,
        fingerprints=torch.cat([state.fingerprints, prints[new]]),
        fingerprint_rows=torch.cat([state.fingerprint_rows, rows[new]]),
        held=compact(watched[0]),
        held_rows=watched[1],
        merged=merged_with(state.merged, taught) if report["trained"] else state.merged,
        numbers=given_as_numbers(state, batch),
    )
    comparable: State | None = state
    if len(state.familiar):  # an earlier version measured familiarity otherwise
        learned = dataclasses.replace(learned, familiar=torch.empty(0), margins=NO_SIGNALS, margin_rows=NO_ROWS)
        comparable = None
    # Images that an adapter was trained on look more familiar than others; how much, only those held out can tell.
    enough = report["trained"] and int(measured.sum()) + len(learned.margins) >= ENOUGH
    if bool(new.any()):
        images = by_view[:, new], rows[new], alike[new], measured[new] & enough
        learned = calibrated(learned, before, *images, earlier=comparable)
    update: Update = {
        "version": version,
        "kind": "learn",
        "name": called,
        "date": now(),
        "classes": names,
        "new_classes": len(classes) - len(state.classes),
        "known": len(classes),
        "images": len(batch),
        "seen": int(repeats.seen.sum()),
        **conflict_fields(batch.names, batch.labels, repeats.conflicts),
        "held_out": int(measured.sum()),
        **share_fields("held_out", right, int(measured.sum())),
        **share_fields("overall", overall.right, overall.images),
        "overall_images": overall.images,
        "overall_classes": overall.classes,
        "trained": report["trained"],
        "epochs": report.get("epochs", 0),
        "merge": {key: value for key, value in report.get("merge", {}).items() if key in _GATE_SUMMARY} or None,
        "skipped": len(batch.skipped),
        **left_out_fields(batch.left_out),
        "seconds": round(time.perf_counter() - started, 3),
    }
    return dataclasses.replace(learned, updates=(*state.updates, update))


def _added(known: ClassStatistics, views: Tensor, rows: Tensor, chosen: Tensor) -> ClassStatistics:
    """Statistics with all views of the chosen images added."""
    return known.add(views[:, chosen].flatten(0, 1), rows[chosen].repeat(len(views)))


def _all_there(state: State, repeats: Repeats) -> Tensor:
    """The rows of classes whose photos are all in an update again."""
    found = torch.bincount(state.fingerprint_rows[repeats.known], minlength=len(state.classes))
    return ((found > 0) & (found >= torch.tensor(state.images, dtype=torch.int64))).nonzero()[:, 0]


def _adapt(
    engine: Engine,
    state: State,
    batch: DecodedImages,
    labels: Tensor,
    trained: Tensor,
    sizes: Sizes,
    number: int,
    name: str,
    seed: int,
    training: tuple[FrozenViT, Runtime],
    views: Views,
) -> tuple[Adapters, dict[str, Any]]:
    """Train on the update and merge: the new adapter, and what is to be told about it."""
    vit, runtime = training
    method = method_of(state.options)(vit, options_of(state.options), runtime)
    method.restore(state.adapter, len(state.merged), sizes.accumulated_samples)
    if views.fixed is not None:
        images: Images = views.fixed.images
    else:
        tier = choose_storage_tier(batch.pixels.nbytes, None, runtime.device)
        images = PackedImages(batch.pixels, engine.preprocess, runtime.device, tier, runtime.pixel_dtype)
    chosen = trained.nonzero()[:, 0]
    classes = range(int(labels.max()) + 1)
    runtime.progress.start_task(len(state.updates), len(state.updates) + 1, name)
    task = Task(number, name, classes, images, chosen, labels[chosen], seed)
    held = (~trained).nonzero()[:, 0]
    held_out = dataclasses.replace(task, rows=held, labels=labels[held])
    report = method.adapt(task, sizes, views.fixed, held_out)
    return method.kept, report


def _on_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}
