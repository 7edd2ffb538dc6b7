# SPDX-License-Identifier: Apache-2.0
"""Background: features of images that show none of the classes, to make similar images less familiar."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from onea import seeds
from onea.errors import OneaError
from onea.model.answers import Snapshot
from onea.model.learning.fingerprints import compute_fingerprints
from onea.model.learning.images import DecodedImages
from onea.model.state import State, history_entry, new_id
from onea.tensors import round_to_bfloat16
from onea.text import printable, utc_timestamp

MAX_FEATURES = 128  # stored; each one is compared with every image
_MIN_HELD_OUT = 20  # images for a quantile of their familiarity
_QUANTILE = 0.75  # on Grocery, most photos of known classes are more familiar, and few others are
_MIN_PROBABILITY = 0.9  # of the class that an image clearly shows
_MAX_RESEMBLING, _MAX_RESEMBLING_SHARE = 2, 1 / 3  # accepted images that clearly show a class; the larger limit holds
_MAX_EXAMPLES = 3  # photos named in a message
# Cosine of features of a photo before and after training; 1 of 1,080 pairs of different photos of Grocery exceeds it.
_SAME_PHOTO = 0.9


def learn_background(
    model: Snapshot, batch: DecodedImages, *, version: int, name: str | None, seed: int, started: float
) -> State:
    """The state after an update with images of none of the classes; the classes stay the same.

    Args:
        model: the current version.
        batch: the background images.
        version: version of the new state.
        name: name of the update in the history.
        seed: seed of the random sample of images whose features are stored.
        started: start time of the update.

    Raises:
        OneaError: there are no images or no classes, an image was taught as a class, or too many clearly show one.
    """
    state = model.state
    model.check_has_classes()
    if not len(batch):
        raise OneaError("There are no background images to learn from; give at least one.")
    taught = state.find_taught(compute_fingerprints(batch.pixels))
    if taught:
        raise OneaError(
            f"{len(taught):,} of {len(batch):,} background images were taught as a class "
            f"({_examples(batch, taught, 'as')}); remove them, or forget the class first."
        )
    features = model.engine.features(batch.pixels, model.adapters)
    resembling = clearly_known(model, features)
    if len(resembling) > max(_MAX_RESEMBLING, _MAX_RESEMBLING_SHARE * len(batch)):
        raise OneaError(
            f"{len(resembling):,} of {len(batch):,} background images clearly show a known class "
            f"({_examples(batch, resembling, 'like')}); remove them, or teach them as a class."
        )
    generator = seeds.generator(seed, state.next_update, "background")
    sampled = reservoir_sample(len(state.background), len(batch), state.background_images, MAX_FEATURES, generator)
    update = history_entry("background", version, utc_timestamp(), [], len(state.classes)) | {
        "name": printable(name) if name else f"update {version}",
        "images": len(batch),
        "resembling_known": len(resembling),
        "skipped": len(batch.skipped),
        "seconds": round(time.perf_counter() - started, 3),
    }
    learned = dataclasses.replace(
        state,
        id=new_id(),
        version=version,
        background=torch.cat([state.background, round_to_bfloat16(features)])[sampled],
        updates=(*state.updates, update),
    )
    return dataclasses.replace(learned, held_out_signals=_simulate_signals(learned, generator))


def _examples(batch: DecodedImages, labels: Mapping[int, str], word: str) -> str:
    """A list of the first of these images with their classes."""
    named = ", ".join(f"{batch.names[row]} {word} '{label}'" for row, label in list(labels.items())[:_MAX_EXAMPLES])
    return f"{named}{', ...' if len(labels) > _MAX_EXAMPLES else ''}"


def _simulate_signals(state: State, generator: torch.Generator) -> Tensor:
    """The signals of held-out images, given the new background.

    Their features are not stored, so their similarity to the background is simulated, by samples from the Gaussian of
    their class. Their similarity to the classes is stored.
    """
    signals, statistics = state.held_out_signals, state.statistics
    spread = torch.linalg.cholesky(statistics.covariance())
    noise = torch.randn(len(signals), statistics.width, generator=generator, dtype=torch.float64)
    sampled = (statistics.means.double()[state.held_out_signal_rows] + noise @ spread.T).float()
    simulated = state.signals()(sampled, state.classifier.fit(statistics)(sampled))
    nearer = signals[:, 0] - (simulated[:, 0] - simulated[:, -1])
    return torch.cat([signals[:, :-1], torch.minimum(signals[:, -1], nearer)[:, None]], 1)


def clearly_known(model: Snapshot, features: Tensor) -> dict[int, str]:
    """Positions of images that clearly show a known class, with that class.

    They are more familiar than three quarters of the held-out images, and one class has a high probability. With few
    held-out images, the result is empty.
    """
    _, familiarity, _ = model.state.fit_familiarity()
    if len(familiarity) < _MIN_HELD_OUT:
        return {}
    scores = model.score_features(features)
    probability, classes = model.probabilities(scores).classes.max(1)
    clear = (scores.familiarity > familiarity.quantile(_QUANTILE)) & (probability >= _MIN_PROBABILITY)
    return {row: model.classes[int(classes[row])] for row in clear.nonzero()[:, 0].tolist()}


def relabelled_background(state: State, features: Tensor) -> Tensor:
    """Which background images are now taught as a class, ``bool [B]``.

    If these stayed in the background, every image of the class would be unfamiliar, and the threshold would fall.

    Args:
        state: state before the update; without classes, the variance within classes is unknown and none are found.
        features: features of the images of the update by the adapter of the state, ``[N, width]``.
    """
    if not len(state.background) or not state.classes or not len(features):
        return torch.zeros(len(state.background), dtype=torch.bool)
    return state.signals().background_cosines(features).amax(0) >= _SAME_PHOTO


def reservoir_sample(stored: int, new: int, seen: int, capacity: int, generator: torch.Generator) -> Tensor:
    """Positions to keep among stored rows followed by new ones, so that all rows ever seen are equally likely.

    Algorithm R of Vitter (1985): once the reservoir is full, the n-th row replaces a random one with probability
    capacity / n.

    >>> reservoir_sample(2, 2, 2, 4, torch.Generator())
    tensor([0, 1, 2, 3])
    >>> len(reservoir_sample(3, 50, 100, 3, torch.Generator()))
    3
    """
    rows = list(range(stored))
    for row in range(stored, stored + new):
        number = seen + row - stored
        slot = number if number < capacity else int(torch.randint(number + 1, (), generator=generator))
        if slot < capacity:
            rows[slot : slot + 1] = [row]  # appends while the reservoir is not full
    return torch.tensor(rows)
