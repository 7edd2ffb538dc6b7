# SPDX-License-Identifier: Apache-2.0
"""What the images of an update say of probabilities, and of which images look familiar."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from onea.classifiers.familiarity import SIGNALS, SignalScaler
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import classes_left_out, left_out
from onea.model import calibration
from onea.model.state import State

ENOUGH = 20  # known images that say where 5 % lie; with fewer held out, training images have a say too
_FOLDS = 10  # a tenth fewer images of a class than in the end; with a fifth fewer, they are noticeably less familiar
# How many are kept of one class; so that many classes take little room, of all; and nevertheless of each.
MOST_MARGINS, _ALL_MARGINS, _LEAST_MARGINS = 64, 2048, 8


def calibrated(
    state: State, before: ClassStatistics, views: Tensor, rows: Tensor, groups: Tensor, honest: Tensor
) -> State:
    """The same state with probabilities and familiarity fitted to the images of its last update.

    Args:
        state: what was learned.
        before: the statistics without these images.
        views: their features, ``[views, N, width]``.
        rows: their classes.
        groups: their series.
        honest: images that the adapter was not trained on, ``bool [N]``, where it was trained on others. Each image is
            judged by statistics without its series; probabilities are fitted to the honest ones alone.
    """
    features = views[0]
    scores, signals = torch.empty(len(rows), len(state.classes)), torch.empty(len(rows), SIGNALS)
    for here, others in left_out(before, views, rows, groups, _FOLDS):
        scores[here], signals[here] = _judged(state, others, features[here])
    margins, margin_rows = _newest(_as_if_unseen(signals, honest), rows, state.margins, state.margin_rows)
    hidden, hidden_rows = state.hidden, state.hidden_rows
    for here, out, others in classes_left_out(before, views, rows, groups, honest):
        usual, strange = (_judged(state, others, features[chosen])[1] for chosen in (here, out))
        # Signals depend on the number of classes, so these are compared with those of images judged by the same ones.
        scale = SignalScaler(usual if len(usual) >= ENOUGH else margins)
        hidden, hidden_rows = _newest(scale(strange), rows[out], hidden, hidden_rows)
    fair = honest if honest.any() else torch.ones_like(honest)
    temperature = calibration.fit_temperature(scores[fair], rows[fair])
    return dataclasses.replace(
        state,
        margins=margins,
        margin_rows=margin_rows,
        hidden=hidden,
        hidden_rows=hidden_rows,
        temperature=calibration.combined_temperature(
            state.temperature, state.calibrated_on, temperature, int(fair.sum())
        ),
        calibrated_on=state.calibrated_on + int(fair.sum()),
    )


def _judged(state: State, known: ClassStatistics, features: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of images, and the signals of their familiarity, by other statistics than those of the state."""
    scores = state.classifier.fit(known)(features)
    return scores, dataclasses.replace(state, statistics=known).signals()(features, scores)


def _as_if_unseen(signals: Tensor, honest: Tensor) -> Tensor:
    """Signals as if the adapter had been trained on no image: their mean is that of the honest ones.

    These alone would be too few to tell where the least familiar twentieth of all images begins.

    >>> _as_if_unseen(torch.tensor([[4.0], [6.0], [3.0], [5.0]]), torch.tensor([False, False, True, True])).tolist()
    [[3.0], [5.0], [3.0], [5.0]]
    """
    if not bool(honest.any()) or bool(honest.all()):
        return signals
    shift = signals[honest].mean(0) - signals[~honest].mean(0)
    return torch.where(honest[:, None], signals, signals + shift)


def _newest(values: Tensor, rows: Tensor, earlier: Tensor, earlier_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values that are kept, newest first, and their classes."""
    values, rows = torch.cat([values, earlier]), torch.cat([rows, earlier_rows])
    if not len(rows):
        return values, rows
    classes = rows.unique()
    most = most_margins(len(classes))
    kept = torch.cat([(rows == row).nonzero()[:most, 0] for row in classes]).sort().values
    return values[kept], rows[kept]


def most_margins(classes: int) -> int:
    """The number of held-out images of a class whose signals are kept.

    >>> [most_margins(classes) for classes in (1, 40, 200, 1000)]
    [64, 51, 10, 8]
    """
    return max(_LEAST_MARGINS, min(MOST_MARGINS, _ALL_MARGINS // max(1, classes)))
