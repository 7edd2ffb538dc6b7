# SPDX-License-Identifier: Apache-2.0
"""Checks of photos and models: label errors, duplicates, confused classes, advice, and no false alarms."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import all_blocks_model, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from onea.classifiers import make_classifier
from onea.classifiers.statistics import ClassStatistics
from onea.classifiers.validation import assign_folds
from onea.errors import OneaError
from onea.model.estimator import OneA
from onea.model.evaluation.check import Check, check_model, check_photos, learning_curves
from onea.model.evaluation.confusions import (
    MAX_NEIGHBOURS,
    Absorber,
    Misclassified,
    Mistakes,
    count_mistakes,
    gaussian_overlap,
)
from onea.model.evaluation.label_errors import find_label_errors
from onea.model.evaluation.pictures import curves_picture, suspects_picture
from onea.model.held_out import remove_held_out
from onea.model.learning.fingerprints import NO_FINGERPRINTS
from onea.model.learning.images import read_labelled
from onea.model.state import NO_FEATURES, NO_ROWS

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 220), "grey": (128, 128, 128)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve noisy photos of each colour."""
    draw = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.array(colour) + draw.normal(0, 25, (32, 32, 3))
            picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            picture.save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture(scope="module")
def model(tiny_vit, tiny_images) -> OneA:
    """A model of four classes, none of which is a colour."""
    files = [file for row in range(4) for file in sorted((tiny_images / f"train/class{row:02d}").iterdir())]
    return all_blocks_model(tiny_vit, epochs=1).learn(files, [file.parent.name for file in files])


def checked(model: OneA, folder: Path, on_bad: str = "fail") -> Check:
    snapshot = model.snapshot()
    return check_photos(snapshot, read_labelled(folder, None, snapshot.side, on_bad))  # type: ignore[arg-type]


def test_clean_photos_need_no_attention(model, photos):
    found = checked(model, photos)
    assert [one.advice for one in found.classes] == ["taught enough"] * 4
    assert {one.name: (one.photos, one.taught) for one in found.classes} == dict.fromkeys(COLOURS, (12, 0))
    assert found.suspects == found.duplicates == ()
    assert not any(pair.alike for pair in found.pairs)


def test_moved_photos_are_named_first_with_their_true_class(model, photos):
    (photos / "red/3.png").rename(photos / "blue/moved.png")
    (photos / "grey/5.png").rename(photos / "green/moved.png")
    first = checked(model, photos).suspects[:2]
    assert {(Path(one.image).name, one.given, one.likelier) for one in first} == {
        ("moved.png", "blue", "red"),
        ("moved.png", "green", "grey"),
    }


def test_a_photo_of_a_known_class_that_has_no_folder_is_suspected(model, photos, tiny_images):
    shutil.copy(tiny_images / "test/class01/0.png", photos / "red/strange.png")
    suspect = checked(model, photos).suspects[0]
    assert Path(suspect.image).name == "strange.png"
    assert suspect.likelier.startswith("class")


def test_a_photo_under_two_names_is_found(model, photos):
    shutil.copy(photos / "red/0.png", photos / "blue/copy.png")
    (one,) = checked(model, photos).duplicates
    assert {(Path(one.image).name, one.given), (Path(one.other_image).name, one.other)} == {
        ("0.png", "red"),
        ("copy.png", "blue"),
    }
    assert one.identical


def test_one_class_with_two_names_can_hardly_be_distinguished(model, photos):
    (photos / "crimson").mkdir()
    for number in range(0, 12, 2):
        (photos / f"red/{number}.png").rename(photos / f"crimson/{number}.png")
    pair = checked(model, photos).pairs[0]
    assert {pair.first, pair.second} == {"red", "crimson"}
    assert pair.alike


def test_advice_for_classes_with_few_photos(model, photos):
    for name, kept in (("red", 3), ("blue", 5)):
        for number in range(kept, 12):
            (photos / f"{name}/{number}.png").unlink()
    found = {one.name: one for one in checked(model, photos).classes}
    assert found["red"].advice == "too few to judge"
    assert found["red"].curve is None
    assert found["blue"].advice == "few photos"
    assert found["blue"].curve is not None


def test_folders_of_one_photo_are_not_judged(model, photos):
    for file in photos.glob("*/*"):
        if file.stem != "0":
            file.unlink()
    found = checked(model, photos)
    assert {one.advice for one in found.classes} == {"too few to judge"}
    assert found.suspects == ()
    assert curves_picture(found) is None
    assert suspects_picture(found.suspects, np.empty((0, 3, 8, 8), np.uint8)) is None


def test_equal_photos_do_not_stop_a_check(model, photos):
    for file in (photos / "red").iterdir():
        Image.new("RGB", (32, 32), (220, 40, 40)).save(file)
    found = {one.name: one for one in checked(model, photos).classes}
    assert found["red"].curve == (1.0,) * 4


def test_a_single_class_is_refused(tiny_vit, photos):
    for name in ("green", "blue", "grey"):
        shutil.rmtree(photos / name)
    alone = tiny_model(tiny_vit, epochs=1).learn(photos)
    with pytest.raises(OneaError, match="only the class 'red'"):
        checked(alone, photos)


def test_a_model_without_photos_reports_few_photos_and_overlap(tiny_vit, photos):
    (photos / "crimson").mkdir()
    for number in range(6):
        shutil.copy(photos / f"red/{number}.png", photos / "crimson")
    for number in range(2, 12):
        (photos / f"grey/{number}.png").unlink()
    state = tiny_model(tiny_vit, epochs=1).learn(photos).snapshot().state
    found = check_model(state)
    advice = {one.name: one.advice for one in found.classes}
    assert advice["grey"] == "too few to judge"
    assert advice["crimson"] == "few photos"
    assert advice["red"] == "too similar to another class"
    assert advice["green"] == "no mistakes stand out"
    assert {found.pairs[0].first, found.pairs[0].second} == {"red", "crimson"}
    assert not found.measured


def test_a_model_without_photos_reports_mistakes_on_held_out_photos(tiny_vit, photos):
    """Half of all photos are red and have two class names, so that there are mistakes."""
    shutil.copytree(photos / "red", photos / "crimson")
    state = tiny_model(tiny_vit, epochs=1, held_out=0.5).learn(photos).snapshot().state
    found = check_model(state).mistakes
    others, features, rows = remove_held_out(state.statistics, state.held_out)
    answers = state.classifier.fit(others)(features).argmax(1)
    assert found == count_mistakes(answers, rows, state.classes)
    assert (found.images, found.mistakes) == (len(rows), int((answers != rows).sum()))
    assert found.mistakes
    assert {one.name for one in found.misclassified} <= {"red", "crimson"}
    without = check_model(
        dataclasses.replace(
            state, held_out_features=NO_FEATURES, held_out_rows=NO_ROWS, held_out_fingerprints=NO_FINGERPRINTS
        )
    )
    assert without.mistakes == Mistakes()
    assert "not measured" in {one.advice for one in without.classes}


def test_a_class_that_absorbs_half_of_all_mistakes_is_reported():
    names = [f"class {number}" for number in range(12)]
    rows = torch.arange(12).repeat_interleave(10)
    answers = rows.clone()
    answers[[10, 11, 12, 20, 21, 30]] = 0  # six photos of three classes
    answers[[40, 50, 60, 70, 80, 90]] = torch.tensor([5, 6, 7, 8, 9, 10])  # and six that are spread out
    found = count_mistakes(answers, rows, names)
    assert (found.images, found.mistakes) == (120, 12)
    assert found.absorbing == (Absorber("class 0", 6, 0.5, ("class 1", "class 2", "class 3")),)
    # Seven of ten are fewer than nine of ten by more than chance (Wilson: 89 % at most); eight of ten (94 %) are not.
    assert found.misclassified == (Misclassified("class 1", 3, 10, "class 0"),)


def test_few_classes_or_few_mistakes_report_no_absorbing_class():
    """Of two classes, each gets all mistakes of the other; two mistakes may coincide by chance."""
    rows = torch.arange(2).repeat_interleave(20)
    both = rows.clone()
    both[[0, 1, 2, 20, 21, 22]] = torch.tensor([1, 1, 1, 0, 0, 0])
    assert count_mistakes(both, rows, ["a", "b"]).absorbing == ()
    few = torch.arange(12)
    few[[3, 4]] = 0
    assert count_mistakes(few, torch.arange(12), list("abcdefghijkl")).absorbing == ()


# the mathematics


def gaussians(counts: list[int], apart: float, width: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of classes whose means lie on the axes, at a distance from the origin."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.randn(len(rows), width, generator=generator) + apart * torch.eye(width)[rows], rows


def test_the_overlap_of_gaussians_is_the_share_of_mistakes():
    """Means two standard deviations from the border: Phi(-1) = 15.9 %; a tenth of it is room for 4,000 photos."""
    features, rows = gaussians([4000, 4000], 2**0.5)
    found = gaussian_overlap(ClassStatistics.empty(24).add(features, rows), [4000, 4000])
    assert found.rows.tolist() == [[1], [0]], "no class is its own neighbour"
    assert found.overlap[:, 0].tolist() == pytest.approx([0.1587] * 2, rel=0.1)


def test_the_overlap_of_few_photos_is_unbiased():
    """Twenty photos of one thing under two names overlap by a half, however many features there are."""
    counts = [400, 10, 10]
    found = [
        gaussian_overlap(ClassStatistics.empty(24).add(*gaussians(counts, 0, seed=seed)), counts).pairs(0)[1, 2]
        for seed in range(20)
    ]
    assert np.mean(found) > 0.3


def test_the_nearest_classes_are_those_of_the_whole_table():
    counts = torch.randint(3, 9, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    known = ClassStatistics.empty(40).add(*gaussians(counts, 1.5, width=40))
    points = known.means.double() @ known.whitening()
    chance = 40 / torch.tensor(counts, dtype=torch.float64)
    squared = torch.cdist(points, points).square() - chance[:, None] - chance
    table = torch.special.ndtr(-squared.clamp_min(0).sqrt() / 2).fill_diagonal_(-1)
    for cells in (1, 7 * 40, 1 << 20):  # a class at a time, seven, all
        found = gaussian_overlap(known, counts, cells)
        tolerance = {"rtol": 0, "atol": 1e-5, "check_dtype": False}  # distances are computed in float32
        torch.testing.assert_close(found.overlap, table.topk(MAX_NEIGHBOURS, 1).values, **tolerance)
        torch.testing.assert_close(table.gather(1, found.rows), found.overlap, **tolerance)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that is computed in its context."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        tensors = [one for one in (found if isinstance(found, tuple | list) else [found]) if torch.is_tensor(one)]
        self.numbers = max([self.numbers, *(one.numel() for one in tensors)])
        return found


def of_many_classes(state, classes):
    """The state as if it had been taught this number of classes, all of them similar."""
    known = state.statistics
    rows = torch.arange(classes) % known.classes
    noise = torch.randn(classes, known.width, generator=torch.Generator().manual_seed(0))
    grown = dataclasses.replace(known.select_classes(rows), means=known.means[rows] + 0.01 * noise)
    return dataclasses.replace(state, classes=tuple(f"class {n}" for n in range(classes)), statistics=grown)


def test_memory_of_a_check_grows_with_the_classes_and_not_with_their_square(model):
    """With four times as many classes, a table of classes by classes is sixteen times as large."""
    state, largest, found = model.snapshot().state, {}, {}
    for classes in (1_000, 4_000):
        many = of_many_classes(state, classes)
        with LargestTensor() as seen:
            found[classes] = check_model(many)
        largest[classes] = seen.numbers
        assert len(found[classes].classes) == classes
        assert 0 < len(found[classes].pairs) <= MAX_NEIGHBOURS * classes
    assert largest[4_000] <= 4.5 * largest[1_000]
    assert largest[4_000] < 4_000**2, "there is no table of classes by classes"


def test_label_errors_are_cross_validated():
    """Half of all noise is suspicious; without cross-validation, each photo would support its own label."""
    features, rows = gaussians([60, 60], 0, width=48)
    ratio = find_label_errors(ClassStatistics.empty(48), features, rows).ratio
    assert 0.3 < float((ratio > 0).double().mean()) < 0.7


def test_curves_rise_with_photos_and_end_where_everything_is_used():
    features, rows = gaussians([16] * 6, 2.5)
    found = learning_curves(make_classifier("whitened"), ClassStatistics.empty(24), features, rows, torch.arange(96))
    assert found.accuracy.shape == (6, 4)
    assert float(found.accuracy[:, 3].mean() - found.accuracy[:, 0].mean()) > 0.03
    ends = [float((found.scores[rows == row].argmax(1) == row).double().mean()) for row in range(6)]
    assert found.accuracy[:, 3].tolist() == pytest.approx(ends)


def test_groups_are_never_divided_between_folds():
    rows, groups = torch.arange(60) % 3, torch.arange(60) // 4
    fold = assign_folds(rows, groups)
    for row in range(3):
        for group in range(15):
            assert len(fold[(rows == row) & (groups == group)].unique()) <= 1
    assert len(fold.unique()) == 5
