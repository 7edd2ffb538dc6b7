# SPDX-License-Identifier: Apache-2.0
"""A figure over all classes from features of held-out images, and how sure any such figure is."""

from __future__ import annotations

import json
import random

import pytest
import torch
from model_tools import class_folders, tiny_model

import onea
from onea.classifiers import make_classifier
from onea.metrics import wilson_interval
from onea.model.card import history_row
from onea.model.rolling import LEAST_OF_CLASS, MOST_OF_CLASS, measure, newest_held
from onea.model.sentences import held_out_sentences, held_out_share

NAMES = tuple(f"class{number:02d}" for number in range(6))


def test_wilson_as_published():
    """Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for right, total, wanted in (
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ):
        assert wilson_interval(right, total) == pytest.approx(wanted, abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("share", "images"), [(0.8, 40), (0.95, 30)])
def test_the_true_share_lies_inside_nineteen_times_out_of_twenty(share, images):
    draw = random.Random(0)
    inside = 0
    for _ in range(2000):
        low, high = wilson_interval(sum(draw.random() < share for _ in range(images)), images)
        inside += low <= share <= high
    assert 0.92 < inside / 2000 < 0.985


@pytest.mark.parametrize("readout", ["rgda", "slda", "ncm"])
def test_an_image_is_not_compared_with_itself(readout):
    """Where labels are drawn at random nothing can be known, though images that are in the statistics look known."""
    generator = torch.Generator().manual_seed(1)
    features, rows = torch.randn(80, 1, 64, generator=generator), torch.arange(80) % 4
    classifier = make_classifier(readout)
    empty = make_classifier("rgda").statistics(64)
    known = empty.add(features[:, 0], rows)
    found = measure(classifier, known, features[:40], rows[:40])
    assert (found.images, found.classes) == (40, 4)
    assert found.right / found.images < 0.6  # a quarter is chance; five deviations are 0.34
    again = (classifier.fit(known)(features[:, 0]).argmax(1) == rows).float().mean()
    assert again > 0.7


def test_so_many_are_kept_of_each_class_the_newest():
    held, rows = torch.arange(300.0)[:, None, None], torch.arange(300) % 100
    kept, of = newest_held(held[200:], rows[200:], held[:200], rows[:200])
    assert len(kept) == 300  # three of each of 100 classes
    many, classes = newest_held(held, torch.zeros(300, dtype=torch.int64), held[:0], rows[:0])
    assert many.flatten().tolist() == list(range(MOST_OF_CLASS))
    assert not classes.any()
    crowded = torch.arange(2000) % 200
    assert torch.bincount(newest_held(torch.zeros(2000, 1, 1), crowded, held[:0], rows[:0])[1]).max() == LEAST_OF_CLASS
    assert set(of.tolist()) == set(range(100))


@pytest.fixture(scope="module")
def model(tiny_vit, tiny_images):
    """Three updates of two classes."""
    files = class_folders(tiny_images / "train")
    model = tiny_model(tiny_vit)
    for first in (0, 2, 4):
        names = NAMES[first : first + 2]
        model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])
    return model


def test_the_figure_covers_all_classes(model):
    updates = model.history
    assert [update["held_out"] for update in updates] == [2, 2, 2]
    assert [update["overall_images"] for update in updates] == [2, 4, 6]
    assert [update["overall_classes"] for update in updates] == [2, 4, 6]
    assert updates[0]["overall_accuracy"] == updates[0]["held_out_accuracy"], "the same images, judged the same way"
    for update in updates:
        for name in ("held_out", "overall"):
            low, high = update[f"{name}_interval"]
            assert 0 <= low <= update[f"{name}_accuracy"] <= high <= 1
    json.dumps(updates)


def test_it_is_said_with_how_many_and_how_sure(model):
    update = {"held_out": 9, "held_out_accuracy": 1.0, "known": 40}
    assert held_out_share(update) == "100.0 % of 9 (70 to 100)"
    assert held_out_sentences(update) == [
        "100.0 % of 9 held-out images (70 to 100 %, 19 times out of 20) right, among all 40 classes"
    ]
    overall = update | {"overall_accuracy": 0.75, "overall_images": 200, "overall_classes": 38}
    assert held_out_sentences(overall)[1] == (
        "overall: 75.0 % of 200 held-out images (69 to 80 %, 19 times out of 20) right, of 38 of 40 classes"
    )
    assert held_out_sentences({"held_out": 0, "held_out_accuracy": None, "known": 3}) == []
    assert held_out_sentences(update | {"known": 1})[0].endswith("right, among 1 class")
    assert "of 6 (" in history_row(model.history[-1])[7]


def test_it_is_kept_forgotten_and_undone(model, tmp_path):
    loaded = onea.load(model.save(tmp_path / "m.onea"), threads=1, precision="fp32")
    before = loaded.snapshot().state
    assert before.held.shape == (6, 2, 64)
    assert torch.equal(before.held, model.snapshot().state.held)
    loaded.forget("class03", "class00")
    assert len(loaded.snapshot().state.held) == 4
    assert loaded.snapshot().state.held_rows.sort().values.tolist() == [0, 1, 2, 3]
    assert torch.equal(loaded.undo().snapshot().state.held, before.held)
    card = (tmp_path / "m.onea/README.md").read_text("utf-8")
    assert "held-out accuracy | overall |" in card
