# SPDX-License-Identifier: Apache-2.0
"""The picture of a model's history: positions of its parts, measured in pixels."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageColor

from onea.metrics import wilson_interval
from onea.model.storage.history_picture import MAX_UPDATES, SIZE, history_picture, ticks
from onea.presentation.style import PALETTE

BLUE, ORANGE, GREEN = PALETTE[:3]
HALF = 310  # above it, classes; below it, held-out images
BELOW_NAMES = {BLUE: 45, ORANGE: 45, GREEN: 350}  # where the panel begins in which a colour is looked for


def learned(version, new, known, right=None, of=10):
    """An update with the fields that the picture uses; ``right`` of its ``of`` held-out images are correct."""
    held = {"held_out": of, "overall_images": of}
    found = None if right is None else right / of
    return {
        "version": version,
        "kind": "learn",
        "new_classes": new,
        "known": known,
        **held | {"held_out_accuracy": found, "overall_accuracy": None},
    }


def pixels(updates):
    with Image.open(io.BytesIO(history_picture(updates))) as picture:
        assert (picture.format, picture.size) == ("PNG", SIZE)
        return np.asarray(picture.convert("RGB"))


def places(picture, colour):
    """Rows and columns of the pixels of a colour, without those beside names."""
    found = (picture[BELOW_NAMES[colour] :] == ImageColor.getrgb(colour)).all(2).nonzero()
    return found[0] + BELOW_NAMES[colour], found[1]


def columns(picture):
    """The runs of neighbouring columns that show a dot or an interval of an update: first and last."""
    found = np.unique(places(picture, GREEN)[1])
    return [(part[0], part[-1]) for part in np.split(found, (np.diff(found) > 1).nonzero()[0] + 1)]


def test_dots_have_their_intervals_and_no_line_joins_them():
    found = columns(pixels([learned(1, 3, 3, 9), learned(2, 1, 4, 5), learned(3, 1, 5, 2)]))
    assert len(found) == 3, "a line would make one run of columns of them"


def test_an_interval_is_drawn_to_scale():
    rows, _ = places(pixels([learned(1, 3, 3, 9)]), GREEN)
    low, high = wilson_interval(9, 10)
    percent = 246 / 100  # pixels
    assert np.ptp(rows) == pytest.approx((high - low) * 100 * percent, abs=3)


@pytest.mark.parametrize(("better", "worse"), [(10, 9), (5, 4), (1, 0)])
def test_dots_of_higher_accuracy_are_higher(better, worse):
    high, low = (places(pixels([learned(1, 2, 2, right)]), GREEN)[0].mean() for right in (better, worse))
    assert high < low


def test_bars_are_proportional_to_numbers_of_classes():
    rows, across = places(pixels([learned(1, 40, 40), learned(2, 20, 60)]), BLUE)
    middle = (across.min() + across.max()) / 2
    first, second = (np.ptp(rows[side]) for side in (across < middle, across > middle))
    assert first == pytest.approx(2 * second, abs=3)


def test_unmeasured_accuracies_are_not_shown():
    forgot = {"version": 2, "kind": "forget", "known": 1, "classes": ["pear"]}
    picture = pixels([learned(1, 2, 2), forgot])
    for colour in (GREEN, ORANGE):
        assert not (picture[HALF:] == ImageColor.getrgb(colour)).all(2).any(), "neither dots nor a name for them"
    assert len(places(picture, ORANGE)[0]), "classes known, forgotten ones no more"


@pytest.mark.parametrize("updates", [0, 1, MAX_UPDATES, MAX_UPDATES + 40])
def test_any_number_of_updates(updates):
    shown = pixels([learned(version, 1, version, 7) for version in range(1, updates + 1)])
    assert len(columns(shown)) == min(updates, MAX_UPDATES) if updates else not len(places(shown, GREEN)[0])


@pytest.mark.parametrize("most", [*range(30), 99, 100, 101, 9_999, 12_345])
def test_ticks_reach_the_maximum_in_few_round_steps(most):
    found = ticks(most)
    assert found[0] == 0
    assert most <= found[-1]
    assert 2 <= len(found) <= 6
    assert str(found.step).rstrip("0") in {"1", "2", "5"}


def test_saving_a_model_needs_no_matplotlib():
    """Which takes longer to load than an update of few photos takes to save."""
    code = "import sys, onea.model.storage.folder; from onea.model.storage.card import history_picture; "
    code += "history_picture([]); "
    code += "sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
