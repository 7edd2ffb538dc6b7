# SPDX-License-Identifier: Apache-2.0
"""Accuracy on all classes from stored features of held-out images, and confidence intervals."""

from __future__ import annotations

import io
import json
import random

import pytest
import torch
from rich.console import Console
from support.models import class_folders, tiny_model

import onea
from onea.classifiers import make_classifier
from onea.classifiers.validation import cross_validated_scores
from onea.cli.display import print_history
from onea.metrics import wilson_interval
from onea.model.held_out import MAX_PER_CLASS, MIN_PER_CLASS, HeldOutImages, evaluate_held_out, newest_of_each_class
from onea.model.learning.fingerprints import WORDS
from onea.model.reports import accuracy_lines, format_accuracy, report_lines
from onea.model.storage.card import history_row

NAMES = tuple(f"class{number:02d}" for number in range(6))


def held_out(features, rows):
    return HeldOutImages(features, rows, torch.zeros(len(rows), WORDS, dtype=torch.int64))


NO_IMAGES = held_out(torch.empty(0, 1, 1), torch.empty(0, dtype=torch.int64))


def test_wilson_intervals_equal_published_ones():
    """Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for correct, total, expected in (
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ):
        assert wilson_interval(correct, total) == pytest.approx(expected, abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("share", "images"), [(0.8, 40), (0.95, 30)])
def test_wilson_intervals_cover_the_true_share_19_times_out_of_20(share, images):
    rng = random.Random(0)
    inside = 0
    for _ in range(2000):
        low, high = wilson_interval(sum(rng.random() < share for _ in range(images)), images)
        inside += low <= share <= high
    assert 0.92 < inside / 2000 < 0.985


@pytest.mark.parametrize("readout", ["rgda", "slda", "ncm"])
def test_held_out_images_are_removed_from_the_statistics(readout):
    """With random labels, accuracy is that of chance, unless an image is included in the statistics."""
    generator = torch.Generator().manual_seed(1)
    features, rows = torch.randn(80, 1, 64, generator=generator), torch.arange(80) % 4
    classifier = make_classifier(readout)
    empty = make_classifier("rgda").statistics(64)
    known = empty.add(features[:, 0], rows)
    found = evaluate_held_out(classifier, known, held_out(features[:40], rows[:40]))
    assert (found.images, found.classes) == (40, 4)
    assert found.correct / found.images < 0.6  # a quarter is chance; five deviations are 0.34
    again = (classifier.fit(known)(features[:, 0]).argmax(1) == rows).float().mean()
    assert again > 0.7


def test_a_limited_number_of_the_newest_images_of_each_class_is_kept():
    features, rows = torch.arange(300.0)[:, None, None], torch.arange(300) % 100
    kept = held_out(features[:200], rows[:200]).with_newer(held_out(features[200:], rows[200:]))
    assert len(kept.rows) == 300  # three of each of 100 classes
    assert set(kept.rows.tolist()) == set(range(100))
    many = NO_IMAGES.with_newer(held_out(features, torch.zeros(300, dtype=torch.int64)))
    assert many.features.flatten().tolist() == list(range(MAX_PER_CLASS))
    assert not many.rows.any()
    crowded = NO_IMAGES.with_newer(held_out(torch.zeros(2000, 1, 1), torch.arange(2000) % 200))
    assert torch.bincount(crowded.rows).max() == MIN_PER_CLASS


@pytest.fixture(scope="module")
def model(tiny_vit, tiny_images):
    """Three updates of two classes."""
    files = class_folders(tiny_images / "train")
    model = tiny_model(tiny_vit)
    for first in (0, 2, 4):
        names = NAMES[first : first + 2]
        model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])
    return model


def test_the_overall_accuracy_covers_all_classes(model):
    updates = model.history
    assert [update["held_out"] for update in updates] == [2, 2, 2]
    assert [update["overall_images"] for update in updates] == [2, 4, 6]
    assert [update["overall_classes"] for update in updates] == [2, 4, 6]
    json.dumps(updates)


def test_no_accuracy_is_reported_for_few_images(model):
    """Of four held-out images, none or all may be correct by chance."""
    for update in model.history:
        for name in ("held_out", "overall", "cross_validated"):
            assert update[f"{name}_accuracy"] is update[f"{name}_interval"] is None
        assert update["cross_validated_images"] == 12
        assert history_row(update)[6:8] == ("", "")
        assert not any("%" in sentence for sentence in report_lines(update))


def all_photos(images):
    return [class_folders(images / side) for side in ("train", "test")]


def taught(model, images, names=NAMES):
    """With nine photos of each class."""
    pairs = [(file, name) for files in all_photos(images) for name in names for file in files[name]]
    return model.learn([file for file, _ in pairs], [name for _, name in pairs])


def test_accuracies_are_reported_from_twenty_images_on(tiny_vit, tiny_images):
    (update,) = taught(tiny_model(tiny_vit, held_out=0.5), tiny_images).history
    assert update["held_out"] == update["overall_images"] == 24
    assert update["overall_accuracy"] == update["held_out_accuracy"], "both are measured on the same images"
    for name in ("held_out", "overall", "cross_validated"):
        low, high = update[f"{name}_interval"]
        assert 0 <= low <= update[f"{name}_accuracy"] <= high <= 1
    assert "of 24 (" in history_row(update)[6]
    assert "of 24 images" in report_lines(update)[0]


def test_with_few_held_out_images_accuracy_is_cross_validated(tiny_vit, tiny_images):
    """Each photo is scored by the statistics of photos in other folds."""
    model = taught(tiny_model(tiny_vit, views=1, epochs=1, single_class="skip"), tiny_images, NAMES[:3])
    update, state = model.history[-1], model.snapshot().state
    assert (update["held_out"], update["held_out_accuracy"], update["cross_validated_images"]) == (3, None, 27)
    sentence = report_lines(update)[0]
    assert sentence.startswith(
        f"cross-validated accuracy {100 * update['cross_validated_accuracy']:.1f} % of 27 images ("
    )
    assert ("with an adapter trained on them" in sentence) == update["trained"]
    files = [file for files in all_photos(tiny_images) for name in NAMES[:3] for file in files[name]]
    rows = torch.tensor([NAMES.index(file.parent.name) for file in files])
    features = torch.from_numpy(model.transform(files))
    empty = make_classifier("rgda").statistics(features.shape[1])
    alone = torch.arange(len(rows))
    scores = cross_validated_scores(state.classifier, empty, features, rows, 3, alone)
    assert abs(update["cross_validated_accuracy"] - float((scores.argmax(1) == rows).double().mean())) <= 0.15


def test_teaching_everything_again_reports_the_gain(tiny_vit, tiny_images):
    """The accuracies before and after are measured on photos that were held out both times."""
    model = taught(tiny_model(tiny_vit, held_out=0.5), tiny_images)
    before = model.snapshot().state
    again, state = taught(model, tiny_images).history[-1], model.snapshot().state
    assert (again["repeated"], again["trained"], again["overall_images"]) == (54, True, 24)
    assert torch.equal(state.held_out_fingerprints, before.held_out_fingerprints)
    assert again["overall_before"] == model.history[0]["overall_accuracy"]
    sentence = report_lines(again)[0]
    assert f"; before this update {100 * again['overall_before']:.1f} %" in sentence
    gained = again["overall_accuracy"] > again["overall_before"]
    assert ("no improvement, undo restores the earlier version" in sentence) == (not gained)


def test_teaching_few_photos_again_reports_the_gain_by_cross_validation(tiny_vit, tiny_images):
    model = taught(tiny_model(tiny_vit), tiny_images, NAMES[:3])
    again = taught(model, tiny_images, NAMES[:3]).history[-1]
    assert (again["trained"], again["overall_before"], again["cross_validated_images"]) == (True, None, 27)
    assert again["cross_validated_before"] is not None
    assert "before this update" in report_lines(again)[0]


def test_an_update_without_improvement_is_reported():
    update = {"held_out": 0, "held_out_accuracy": None, "known": 40, "overall_accuracy": 0.75, "overall_images": 200}
    again = {"overall_classes": 40, "trained": True}
    better, worse = (accuracy_lines(update | again | {"overall_before": share})[0] for share in (0.7, 0.75))
    assert better.endswith(", of all 40 classes; before this update 70.0 %")
    assert worse.endswith("before this update 75.0 %; no improvement, undo restores the earlier version")


def test_few_photos_of_a_class_are_reported(tiny_vit, tiny_images):
    files = all_photos(tiny_images)[0]
    model = tiny_model(tiny_vit).learn([*files["class00"][:2], *files["class01"][:3]], ["kiwi"] * 2 + ["lemon"] * 3)
    update = model.history[-1]
    assert (update["few_photos"], update["fewest"]) == (2, {"kiwi": 2, "lemon": 3})
    assert report_lines(update) == ["few photos: 'kiwi' (2) and 'lemon' (3); 10 or more per class are advisable"]


def test_accuracies_are_reported_with_images_and_interval():
    update = {"held_out": 29, "held_out_accuracy": 1.0, "known": 40}
    assert format_accuracy(update) == "100.0 % of 29 (88 to 100)"
    assert accuracy_lines(update) == [
        "held-out accuracy 100.0 % of 29 images (95 % confidence interval 88 to 100 %), among 40 classes"
    ]
    overall = update | {"overall_accuracy": 0.75, "overall_images": 200, "overall_classes": 38}
    assert accuracy_lines(overall)[1] == (
        "overall accuracy 75.0 % of 200 held-out images (95 % confidence interval 69 to 80 %), of 38 of 40 classes"
    )
    assert accuracy_lines({"held_out": 0, "held_out_accuracy": None, "known": 3}) == []
    assert accuracy_lines(update | {"known": 1})[0].endswith("among 1 class")


def test_the_overall_accuracy_names_the_version_that_was_measured():
    learned = {
        "version": 1,
        "kind": "learn",
        "date": "2026-01-01",
        "name": "shop",
        "classes": ["a", "b"],
        "seconds": 1.0,
    }
    figures = {"new_classes": 2, "images": 300, "known": 2, "held_out": 30, "held_out_accuracy": 0.9}
    overall = {"overall_accuracy": 0.9, "overall_images": 30, "overall_classes": 2}
    gone = {"version": 2, "kind": "forget", "date": "2026-01-01", "classes": ["a"], "known": 1}
    console = Console(width=200, file=io.StringIO())
    print_history(console, [learned | figures | overall, gone], (1, 2))
    assert "), of all 2 classes of version 1\n" in console.file.getvalue(), "not of the current classes"


def test_held_out_features_are_saved_forgotten_and_restored(model, tmp_path):
    loaded = onea.load(model.save(tmp_path / "m.onea"), threads=1, precision="fp32")
    before = loaded.snapshot().state
    assert before.held_out_features.shape == (6, 2, 64)
    assert torch.equal(before.held_out_features, model.snapshot().state.held_out_features)
    loaded.forget("class03", "class00")
    assert len(loaded.snapshot().state.held_out_features) == 4
    assert loaded.snapshot().state.held_out_rows.sort().values.tolist() == [0, 1, 2, 3]
    assert torch.equal(loaded.undo().snapshot().state.held_out_features, before.held_out_features)
    card = (tmp_path / "m.onea/README.md").read_text("utf-8")
    assert "held-out accuracy | overall |" in card


def test_of_very_many_classes_a_random_sample_is_stored():
    """An image stays in the sample while it is among the newest of its class; newer classes have no priority."""
    random = torch.Generator().manual_seed(3)

    def images(rows):
        fingerprints = torch.randint(-(2**62), 2**62, (len(rows), WORDS), generator=random)
        return HeldOutImages(torch.zeros(len(rows), 1, 1), rows, fingerprints)

    first = NO_IMAGES.with_newer(images(torch.arange(1000).repeat_interleave(4)))
    assert len(first.rows) == 512
    more = first.with_newer(images(torch.arange(1000, 2000).repeat_interleave(4)))
    assert len(more.rows) == 512
    assert 190 < int((more.rows < 1000).sum()) < 322, "half of all images were new"
    stays = [tuple(row) for row in more.fingerprints[more.rows < 1000].tolist()]
    assert set(stays) <= {tuple(row) for row in first.fingerprints.tolist()}


def test_the_newest_images_of_each_class_are_the_first_ones():
    rows = torch.randint(0, 30, (400,), generator=torch.Generator().manual_seed(4))
    expected = sorted(place for row in range(30) for place in (rows == row).nonzero()[:5, 0].tolist())
    assert newest_of_each_class(rows, 5).tolist() == expected
