# SPDX-License-Identifier: Apache-2.0
"""The distribution over the classes and none of them, the verdict that follows from it, and accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import tiny_model
from support.tiny import write_tiny_images

from onea.model.answers import MAJORITY, Answer, Snapshot, candidates
from onea.model.calibration import MIN_SLOPE, fit_slope
from onea.model.evaluation.metrics import Counts, Quality

KNOWN = 4  # classes that are taught, of eight


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Synthetic photos of eight classes."""
    root = tmp_path_factory.mktemp("drawn")
    write_tiny_images(root, classes=8, train=40, test=50)
    return root


def files(photos: Path, split: str, classes: range) -> tuple[list[Path], list[str]]:
    found = [file for number in classes for file in sorted((photos / split / f"class{number:02d}").iterdir())]
    return found, [file.parent.name for file in found]


def one_class(photos: Path, number: int) -> list[Path]:
    return files(photos, "test", range(number, number + 1))[0]


@pytest.fixture(scope="module")
def estimator(tiny_vit, photos):
    return tiny_model(tiny_vit, held_out=0.3).learn(*files(photos, "train", range(KNOWN)))


@pytest.fixture(scope="module")
def model(estimator) -> Snapshot:
    return estimator.snapshot()


@pytest.fixture(scope="module")
def answers(model, photos) -> list[Answer]:
    """For photos of all classes, taught or not, and for mixtures of photos of two classes."""
    first, second = (np.stack([np.array(Image.open(file)) for file in one_class(photos, n)]) for n in (0, 1))
    between = (0.4 * first + 0.6 * second).astype(np.uint8), (0.6 * first + 0.4 * second).astype(np.uint8)
    return [
        *model.answers(files(photos, "test", range(8))[0], k=KNOWN),
        *model.answers(np.concatenate(between), k=KNOWN),
    ]


def test_probabilities_of_all_classes_and_of_none_of_them_add_up_to_one(answers, estimator, photos):
    for answer in answers:
        row = answer.as_json()
        assert sum(one["probability"] for one in row["top"]) + row["none_of_these"] == pytest.approx(1)
    shown = photos / "test" / "class00"
    none = [answer.none for answer in estimator.snapshot().answers(shown)]
    np.testing.assert_allclose(estimator.predict_proba(shown).sum(1), 1 - np.array(none))
    assert [sum(chance for _, chance in top) for top in estimator.predict_topk(shown, KNOWN)] == pytest.approx(
        1 - np.array(none)
    )


def test_verdicts_agree_with_probabilities(answers):
    """For example, a class and none of the classes are never both more probable than one half."""
    assert {answer.verdict for answer in answers} == {"answer", "unsure", "unknown"}
    for answer in answers:
        best = answer.top[0][1]
        if answer.verdict == "unknown":
            assert answer.label == "unknown"
            assert answer.probability == answer.none > MAJORITY > best
        else:
            assert (answer.label, answer.probability) == answer.top[0]
            assert answer.none <= MAJORITY
            assert (answer.verdict == "answer") == (best >= MAJORITY)
        assert answer.candidates == () if answer.verdict != "unsure" else len(answer.candidates) in (2, 3)
        assert answer.candidates == answer.top[: len(answer.candidates)]


def test_the_verdict_does_not_depend_on_how_many_classes_are_listed(model, photos):
    shown = files(photos, "test", range(8))[0][::7]
    for one, all_of_them in zip(model.answers(shown, k=1), model.answers(shown, k=KNOWN), strict=True):
        assert (one.verdict, one.label, one.candidates) == (
            all_of_them.verdict,
            all_of_them.label,
            all_of_them.candidates,
        )


def test_exactly_the_photos_below_the_threshold_are_unknown(model, estimator, photos):
    """So the stated rate of known photos predicted as ``unknown`` holds for any slope."""
    shown = photos / "test"
    below = estimator.familiarity(shown) < estimator.threshold_
    assert 0 < below.mean() < 1
    assert [answer.verdict == "unknown" for answer in model.answers(shown)] == below.tolist()
    assert (estimator.predict(shown) == "unknown").tolist() == below.tolist()


def test_without_unknown_class_probabilities_add_up_to_one(tiny_vit, photos):
    model = tiny_model(tiny_vit, unknown=0).learn(*files(photos, "train", range(KNOWN)))
    np.testing.assert_allclose(model.predict_proba(photos / "test").sum(1), 1)
    assert {answer.none for answer in model.snapshot().answers(photos / "test")} == {0.0}


def test_a_model_of_one_class_has_the_minimum_slope(tiny_vit, photos):
    """The only class cannot be left out, so the slope cannot be fitted."""
    model = tiny_model(tiny_vit).learn(*files(photos, "train", range(1))).snapshot()
    _, known, _ = model.state.fit_familiarity()
    assert model.slope == pytest.approx(-MIN_SLOPE / float(known.double().std()))
    verdicts = {answer.verdict for answer in model.answers(photos / "test")}
    assert verdicts <= {"answer", "unknown"}


def test_the_slope_has_a_minimum_if_left_out_classes_look_known():
    """Otherwise ``unknown`` would have a probability of about one half for every image."""
    generator = torch.Generator().manual_seed(0)
    known, hidden = (torch.randn(200, generator=generator) for _ in range(2))
    assert fit_slope(known, hidden + 1) == fit_slope(known, torch.empty(0)) < -1


@pytest.mark.parametrize(
    ("chances", "none", "names"),
    [
        ((0.5, 0.3), 0.2, ""),  # an answer
        ((0.3, 0.1), 0.6, ""),  # unknown
        ((0.4, 0.2, 0.1), 0.3, "ab"),
        ((0.3, 0.1, 0.1, 0.1), 0.4, "abc"),
        ((0.2, 0.2, 0.2, 0.2, 0.2), 0.0, "abc"),  # at most three
    ],
)
def test_candidates_are_the_two_or_three_best(chances, none, names):
    ranked = tuple(zip("abcdef", chances, strict=False))
    assert "".join(name for name, _ in candidates(ranked, none)) == names


def test_all_accuracies_agree(estimator, model, photos, tmp_path):
    """On photos of known classes mixed with others, so that some are correct, some wrong and some unknown."""
    shown, labels = files(photos, "test", range(KNOWN))
    other, _ = files(photos, "test", range(KNOWN, 8))
    shown, labels = shown + other[:60], labels + ["class00"] * 60
    found = estimator.evaluate(shown, labels)
    given = estimator.predict(shown).tolist()
    assert min(found.accuracy, found.wrong_rate, found.unknown_rate) > 0
    assert found.accuracy + found.wrong_rate + found.unknown_rate == pytest.approx(1)
    same = np.mean(np.array(given) == labels)
    told = found.as_json()
    quality = Quality.compare(labels, given, given)
    assert (
        estimator.score(shown, labels)
        == found.accuracy
        == told["accuracy"]
        == Counts.from_predictions(labels, given).accuracy
        == quality.accuracy[0]
        == same
    )
    assert sum(one.correct + one.wrong + one.unknown for one in found.by_class.values()) == found.images
    assert (
        len(found.mistakes)
        == round(found.wrong_rate * found.images)
        == found.total.wrong
        == int(found.confusion.sum() - np.diagonal(found.confusion).sum())
    )


@pytest.mark.parametrize("counts", [Counts(6, 5, 1), Counts(3, 1, 1), Counts(7, 3, 2), Counts(182, 169, 0)])
def test_printed_percentages_add_up_to_100(counts):
    shares = [round(10 * float(part.split()[0])) for part in str(counts).split(", ")]
    assert sum(shares) == 1000
    assert shares[0] == round(1000 * counts.accuracy)


def calibration_error(chances: torch.Tensor, correct: torch.Tensor, bins: int = 10) -> float:
    """Mean distance between confidence and accuracy, over ten equal intervals of confidence."""
    place = (chances * bins).long().clamp_max(bins - 1)
    gaps = [(chances[place == row] - correct[place == row].double()).sum().abs() for row in range(bins)]
    return float(sum(gaps)) / len(correct)


def test_the_combined_distribution_is_better_calibrated_than_that_of_the_classes_alone(model, photos):
    """On photos of known and other classes; without ``unknown``, probabilities assume that each shows a known class."""
    shown, labels = files(photos, "test", range(8))
    found = model.compute_scores(shown)
    probabilities = model.probabilities(found)
    rows = torch.tensor([model.classes.index(label) if label in model.classes else -1 for label in labels])
    correct, answered = found.scores.argmax(1) == rows, ~probabilities.unknown
    alone = torch.softmax(found.scores.double() / model.state.temperature, 1).amax(1)
    errors = [
        calibration_error(chances[answered], correct[answered]) for chances in (alone, probabilities.classes.amax(1))
    ]
    assert errors[1] < errors[0] + 0.01
    known = rows >= 0
    assert float(probabilities.none[known].mean()) < 0.1, "twice the stated rate"
