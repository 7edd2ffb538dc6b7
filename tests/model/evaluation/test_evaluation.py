# SPDX-License-Identifier: Apache-2.0
"""Evaluation with images of unknown classes: metrics, refusals and the figure."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from support.models import tiny_model

from onea.errors import OneaError
from onea.model.evaluation.evaluation import evaluate
from onea.model.evaluation.metrics import OpenSet
from onea.model.evaluation.pictures import open_set_picture
from onea.openset import auroc, oscr_curve

KNOWN = ("class00", "class01", "class02")


def learned(vit: str, images: Path, root: Path, **params):
    """A model of three classes."""
    for name in KNOWN:
        (root / "lesson").mkdir(exist_ok=True)
        (root / "lesson" / name).symlink_to(images / "train" / name)
    return tiny_model(vit, **params).learn(root / "lesson").snapshot()


@pytest.fixture(scope="module")
def model(tiny_vit, tiny_images, tmp_path_factory):
    return learned(tiny_vit, tiny_images, tmp_path_factory.mktemp("model"))


@pytest.fixture
def strange(tiny_images, tmp_path) -> Path:
    """Images of other classes, in folders and outside."""
    shutil.copytree(tiny_images / "test/class04", tmp_path / "strange/deep/inside/class04")
    shutil.copy(tiny_images / "test/class05/0.png", tmp_path / "strange/alone.png")
    return tmp_path / "strange"


def test_open_set_metrics_follow_from_scores_and_familiarity(model, tiny_images, strange):
    found = evaluate(model, tiny_images / "test", unknown=strange)
    known = [file for name in KNOWN for file in sorted((tiny_images / "test" / name).iterdir())]
    judged, unknown = model.compute_scores(known), model.compute_scores(strange).familiarity
    nearest = [model.classes[row] for row in judged.scores.argmax(1)]
    right = torch.tensor([name == file.parent.name for name, file in zip(nearest, known, strict=True)])
    assert found.open_set is not None
    assert len(found.open_set.unknown) == 4
    assert found.untaught_classes == ("class03", "class04", "class05"), "which are neither known nor among the unknown"
    assert found.open_set.auroc == auroc(judged.familiarity, unknown)
    assert found.open_set.curve.area == oscr_curve(judged.familiarity, right, unknown).area
    answers = model.predict(sorted(strange.rglob("*.png")))
    assert found.open_set.unknown_rejected == (answers == "unknown").mean()
    assert found.open_set.known_rejected == found.unknown_rate == (model.predict(known) == "unknown").mean()
    assert found.open_set.accuracy == (model.predict(known) == [file.parent.name for file in known]).mean()


def test_unknown_images_change_open_set_metrics_only(model, tiny_images, strange):
    alone, both = (evaluate(model, tiny_images / "test", unknown=where) for where in (None, strange))
    assert alone.open_set is None
    assert (alone.confusion == both.confusion).all()
    assert (alone.unknown_counts == both.unknown_counts).all()


def test_open_set_metrics_without_a_threshold(tiny_vit, tiny_images, tmp_path, strange):
    model = learned(tiny_vit, tiny_images, tmp_path, unknown=0)
    found = evaluate(model, tiny_images / "test", unknown=strange).open_set
    assert found is not None
    assert not found.has_threshold
    assert (found.unknown_rejected, found.known_rejected) == (0, 0)
    assert 0 <= found.auroc <= 1
    assert found.accuracy == pytest.approx(float(found.curve.ccr[-1]))


@pytest.mark.parametrize("name", ["class01", "CLASS01"])
def test_unknown_images_in_a_folder_of_a_known_class_are_refused(model, tiny_images, strange, name):
    shutil.copytree(tiny_images / "test/class01", strange / "deep" / name)
    with pytest.raises(OneaError, match="contains images of 'class01', a class of the model"):
        evaluate(model, tiny_images / "test", unknown=strange)
    with pytest.raises(OneaError, match="contains images of 'class01'"):
        evaluate(model, tiny_images / "test", unknown=tiny_images / "test/class01")


def test_a_missing_or_empty_folder_of_unknown_images_is_refused(model, tiny_images, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, words in (("empty", "no images below"), ("nowhere", "does not exist"), ("file", "is a file")):
        with pytest.raises(OneaError, match=words):
            evaluate(model, tiny_images / "test", unknown=tmp_path / name)


def drawn(known: list[float], right: list[bool], unknown: list[float], threshold: float):
    found = OpenSet(torch.tensor(known), torch.tensor(right), torch.tensor(unknown), threshold)
    figure = open_set_picture(found)
    figure.draw_without_rendering()
    return figure


def test_the_picture_shows_the_threshold_on_the_curve():
    figure = drawn([0.0, 1.0, 2.0, 3.0], [True, False, True, True], [-2.0, -1.0, 0.5, 1.5], 0.25)
    above, below = figure.axes
    assert above.get_title(loc="left") == "Familiarity: AUROC 81.2 %"  # 2 + 3 + 4 + 4 of 16 pairs
    assert [text.get_text() for text in above.get_legend().get_texts()][:2] == ["known (4)", "unknown (4)"]
    curve, point = below.lines
    assert point.get_xydata().tolist() == [[50.0, 50.0]], (
        "two unknown images are accepted, and two known ones are correct"
    )
    assert point.get_xydata()[0].tolist() in curve.get_xydata().tolist()
    assert "50.0 % of unknown images rejected" in below.get_legend().get_texts()[0].get_text()


def test_the_picture_of_a_model_without_a_threshold_has_none():
    above, below = drawn([1.0, 2.0], [True, True], [0.0], -math.inf).axes
    assert len(below.lines) == 1
    assert below.get_legend() is None
    assert not above.lines


def test_equal_familiarity_can_be_drawn():
    for axes in drawn([1.0], [True], [1.0], 1.0).axes:
        low, high = axes.get_xlim()
        assert low < 1.0 < high


def test_known_images_stay_visible_beside_unknown_ones_that_are_far_away():
    known = torch.linspace(-1, 0, 50).tolist()
    above, _ = drawn(known, [True] * 50, [-1000.0] * 50, -0.9).axes
    low, high = above.get_xlim()
    assert (known[-1] - known[0]) / (high - low) > 0.25


def test_photos_that_were_taught_are_counted(model, tiny_images, tmp_path):
    shutil.copytree(tiny_images / "test/class00", tmp_path / "mixed/class00")
    shutil.copy(tiny_images / "train/class00/4.png", tmp_path / "mixed/class00/taught.png")
    (tmp_path / "mixed/notes.txt").write_text("from Monday")
    found = evaluate(model, tmp_path / "mixed")
    assert found.remarks == [
        "files ignored (not images, or outside the class folders): 1 (notes.txt)",
        "1 of 4 images was taught: the accuracy on new images may be lower",
    ]
    assert evaluate(model, tiny_images / "test").remarks == []
