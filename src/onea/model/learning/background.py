# SPDX-License-Identifier: Apache-2.0
"""Photos of nothing: what an image looks like that shows none of the classes, without being a class."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from onea import seeds
from onea.errors import OneaError
from onea.model.answers import Snapshot
from onea.model.learning.fingerprints import fingerprints
from onea.model.learning.images import DecodedImages
from onea.model.state import State, new_id, noted
from onea.tensors import round_to_bfloat16
from onea.text import printable, utc_timestamp

MOST_FEATURES = 128  # that are kept; each is compared with every image that is asked about
_ENOUGH = 20  # known images held out, whose upper quartile says something
_FAMILIAR = 0.75  # quantile of their familiarity: on Grocery, most photos that were taught are above, few of others are
_SURE = 0.9  # the probability of one class from which on an image is clearly of it
_FEW, _SHARE = 2, 1 / 3  # so many images that look known are no mistake: just those have to be learned
_NAMED = 3  # photos in one sentence
_SAME = 0.9  # cosine of two photos that are one, also after training; of 1,080 others of Grocery, one came as near


def learn_background(
    model: Snapshot, batch: DecodedImages, *, version: int, name: str | None, seed: int, started: float
) -> State:
    """The state after images that show none of the classes; it knows the same classes as before.

    Args:
        model: what is known, which judges the images first.
        batch: the images.
        version: of the new state.
        name: what the history calls this update.
        seed: decides which images are kept, where there are too many.
        started: when the clock of the update began.

    Raises:
        OneaError: there is no image, the model cannot judge them, one was taught as a class, or too many clearly show
            one.
    """
    state = model.state
    model.check_taught()
    if not len(batch):
        raise OneaError("There are no background images to learn from; give at least one.")
    taught = state.taught_as(fingerprints(batch.pixels))
    if taught:
        raise OneaError(
            f"{len(taught):,} of {len(batch):,} background images were taught as a class "
            f"({_examples(batch, taught, 'as')}); take them out, or forget the class first."
        )
    features = model.engine.features(batch.pixels, model.adapters)
    like = like_known(model, features)
    if len(like) > max(_FEW, _SHARE * len(batch)):
        raise OneaError(
            f"{len(like):,} of {len(batch):,} background images clearly show a known class "
            f"({_examples(batch, like, 'like')}); take them out, or teach them as a class."
        )
    generator = seeds.generator(seed, state.next_update, "background")
    kept = kept_rows(len(state.background), len(batch), state.background_images, MOST_FEATURES, generator)
    update = noted("background", version, utc_timestamp(), [], len(state.classes)) | {
        "name": printable(name) if name else f"update {version}",
        "images": len(batch),
        "like_known": len(like),
        "skipped": len(batch.skipped),
        "seconds": round(time.perf_counter() - started, 3),
    }
    learned = dataclasses.replace(
        state,
        id=new_id(),
        version=version,
        background=torch.cat([state.background, round_to_bfloat16(features)])[kept],
        updates=(*state.updates, update),
    )
    return dataclasses.replace(learned, margins=_expected(learned, generator))


def _examples(batch: DecodedImages, labels: Mapping[int, str], word: str) -> str:
    """The first of these images and their classes."""
    named = ", ".join(f"{batch.names[row]} {word} '{label}'" for row, label in list(labels.items())[:_NAMED])
    return f"{named}{', ...' if len(labels) > _NAMED else ''}"


def _expected(state: State, generator: torch.Generator) -> Tensor:
    """The signals of held-out images as the background would have them.

    Their features are gone, so how near each is to the background is that of one that is drawn from its class; how near
    it is to the classes is known.
    """
    known = state.statistics
    spread = torch.linalg.cholesky(known.covariance())
    noise = torch.randn(len(state.margins), known.width, generator=generator, dtype=torch.float64)
    drawn = (known.means.double()[state.margin_rows] + noise @ spread.T).float()
    signals = state.signals()(drawn, state.classifier.fit(known)(drawn))
    nearer = state.margins[:, 0] - (signals[:, 0] - signals[:, -1])
    return torch.cat([state.margins[:, :-1], torch.minimum(state.margins[:, -1], nearer)[:, None]], 1)


def like_known(model: Snapshot, features: Tensor) -> dict[int, str]:
    """The rows of images that clearly show a known class, and which.

    They are more familiar than three quarters of the known images that were held out, and one class is likely. Where
    too few were held out, nothing is clear.
    """
    _, known, _ = model.state.calibrated_familiarity()
    if len(known) < _ENOUGH:
        return {}
    found = model.judge_features(features)
    chances, classes = model.distribution(found).classes.max(1)
    clear = (found.familiarity > known.quantile(_FAMILIAR)) & (chances >= _SURE)
    return {row: model.classes[int(classes[row])] for row in clear.nonzero()[:, 0].tolist()}


def taught_now(state: State, features: Tensor) -> Tensor:
    """Background images that are among images which are taught as a class now, ``bool [B]``.

    As background, they would make every image of the class look like none, and hardly anything would be unknown.

    Args:
        state: what was known before; where that is no class, nothing says how images of a class differ.
        features: of the images that are taught, ``[N, width]``, under the adapter of the state.
    """
    if not len(state.background) or not state.classes:
        return torch.zeros(len(state.background), dtype=torch.bool)
    return state.signals().background_cosines(features).amax(0) >= _SAME


def kept_rows(kept: int, new: int, seen: int, most: int, generator: torch.Generator) -> Tensor:
    """Which of the kept rows and the new ones behind them to keep, so that all ever seen have the same chance.

    Algorithm R of Vitter (1985): once all places are taken, the n-th row takes a random one with the chance most / n.

    >>> kept_rows(2, 2, 2, 4, torch.Generator())
    tensor([0, 1, 2, 3])
    >>> len(kept_rows(3, 50, 100, 3, torch.Generator()))
    3
    """
    places = list(range(kept))
    for row in range(kept, kept + new):
        number = seen + row - kept
        place = number if number < most else int(torch.randint(number + 1, (), generator=generator))
        if place < most:
            places[place : place + 1] = [row]  # one place more, where it is the next free one
    return torch.tensor(places)
