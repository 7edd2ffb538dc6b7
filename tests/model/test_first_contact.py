# SPDX-License-Identifier: Apache-2.0
"""First steps with a model in Python: imports, progress bars, forms of images and labels, and error messages."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from support.models import class_folders, tiny_model

import onea
from onea.errors import OneaError
from onea.model import progress_bar
from onea.runtime import Progress


@pytest.fixture(scope="module")
def files(tiny_images):
    """Six images of each of three classes."""
    return [file for name, found in class_folders(tiny_images / "train").items() if name < "class03" for file in found]


NAMES = np.repeat(["plum", "fig", "kiwi"], 6)


@pytest.fixture(scope="module")
def model(tiny_vit, files):
    return tiny_model(tiny_vit).learn(files, NAMES)


def test_dir_lists_names_that_are_imported_lazily():
    assert {"OneA", "load", "__version__"} <= {*dir(onea)}
    code = "import sys, onea; assert 'OneA' in dir(onea); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_repr_shows_classes_images_and_version(model, tiny_vit):
    untaught = tiny_model(tiny_vit)
    assert repr(untaught).startswith("OneA(")
    assert repr(model).startswith(f"<{untaught!r} with 3 classes [")
    assert repr(model).endswith("from 18 images, version 1>")
    assert all(name in repr(model) for name in ("plum", "fig", "kiwi"))
    assert len(repr(tiny_model(tiny_vit, epochs=1).learn([np.zeros((8, 8, 3), np.uint8)] * 40, [*range(20)] * 2))) < 400


# progress bars


class Listener(Progress):
    def __init__(self):
        self.notes = []

    def start_phase(self, text):
        self.notes.append(text)


def on_a_terminal(monkeypatch) -> io.StringIO:
    """The output of a progress bar, as if standard error were a terminal."""
    screen = io.StringIO()
    monkeypatch.setattr(progress_bar, "Console", lambda **options: Console(file=screen, force_terminal=True, width=100))
    return screen


def test_learning_shows_a_progress_bar_with_the_remaining_time(tiny_vit, files, monkeypatch):
    screen = on_a_terminal(monkeypatch)
    tiny_model(tiny_vit).learn(files, NAMES)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "reading images" in plain or "loading the network" in plain or "training" in plain
    assert re.search(r"left: (-|\d+):", plain)


@pytest.mark.parametrize("how", ["the model's switch", "the call's switch", "a listener"])
def test_the_progress_bar_can_be_switched_off(tiny_vit, files, monkeypatch, how):
    screen, listener = on_a_terminal(monkeypatch), Listener()
    made = tiny_model(tiny_vit, verbose=how != "the model's switch")
    made.learn(files, NAMES, progress={"the model's switch": None, "the call's switch": False}.get(how, listener))
    assert screen.getvalue() == ""
    assert bool(listener.notes) == (how == "a listener")


def test_no_progress_bar_without_a_terminal(tiny_vit, files, capsys):
    tiny_model(tiny_vit).learn(files, NAMES).predict(MANY_IMAGES)
    assert capsys.readouterr() == ("", "")


def test_a_notebook_overwrites_one_line(capsys):
    with progress_bar.LearningBar(Console(force_jupyter=True)) as bar:
        bar.start_epoch(0, 2, 10)
        bar.step(10)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert re.search(r"left: (-|\d+):", plain)
    assert "learned" in plain


MANY_IMAGES = np.zeros((progress_bar.MIN_IMAGES, 16, 16, 3), np.uint8)


@pytest.mark.parametrize("how", ["predict", "predict_proba", "predict_topk", "familiarity", "transform"])
def test_predictions_show_a_progress_bar_for_many_images_only(model, monkeypatch, how):
    screen = on_a_terminal(monkeypatch)
    getattr(model, how)(MANY_IMAGES[1:])
    assert screen.getvalue() == ""
    assert len(getattr(model, how)(MANY_IMAGES)) == len(MANY_IMAGES)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "reading images" in plain or "computing features" in plain or "done" in plain
    assert re.search(r"left: (-|\d+):", plain)


def test_evaluate_shows_a_progress_bar_for_many_images(model, monkeypatch):
    screen = on_a_terminal(monkeypatch)
    assert model.evaluate(MANY_IMAGES, ["plum"] * len(MANY_IMAGES)).images == len(MANY_IMAGES)
    assert "left:" in screen.getvalue()


def test_verbose_also_controls_the_progress_bar_of_predictions(model, monkeypatch):
    screen = on_a_terminal(monkeypatch)
    model.set_params(verbose=False)
    try:
        model.predict(MANY_IMAGES)
    finally:
        model.set_params(verbose=True)
    assert screen.getvalue() == ""


def test_progress_counts_each_image_when_read_and_when_computed(model):
    class Counting(Progress):
        done: dict[str, int] = {}  # noqa: RUF012 - one test, one instance

        def start_images(self, text, images):
            self.text, self.done[text] = text, -images

        def step(self, images):
            self.done[self.text] += images

    model.snapshot().answers(MANY_IMAGES, progress=Counting())
    assert Counting.done == {"reading images": 0, "computing features": 0}


def test_verbose_is_not_saved(model, tmp_path):
    path = model.save(tmp_path / "shop.onea")
    assert '"verbose"' not in (path / "model.json").read_text("utf-8")
    assert onea.load(path, verbose=False).verbose is False


# forms of images and labels


class Column:
    """A column of a table whose type is not one of NumPy, as in Polars."""

    dtype = "String"

    def __init__(self, values):
        self.values, self.shape = values, (len(values),)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype=object)


def test_columns_and_generators_of_paths_predict_like_lists(model, files):
    expected = model.predict(files).tolist()
    assert model.predict(Column([str(file) for file in files])).tolist() == expected
    assert model.predict(file for file in files).tolist() == expected
    assert model.predict(Image.open(file) for file in files).tolist() == expected
    assert model.predict((file, name) for file, name in zip(files, NAMES, strict=True)).tolist() == expected


def test_a_generator_without_labels_is_refused(model, files):
    with pytest.raises(OneaError, match="Labels are missing"):
        model.learn(file for file in files)


def test_a_batch_of_grey_images_needs_a_channel_axis(model):
    grey = np.zeros((7, 24, 20), np.uint8)
    with pytest.raises(OneaError, match=r"\(7, 24, 20\) has no colour channels; give grey images as \[N, H, W, 1\]"):
        model.predict(grey)
    assert len(model.predict(grey[..., None])) == 7
    assert len(model.predict(grey[0])) == 1


@pytest.mark.parametrize("missing", [np.nan, None, np.float64("nan"), type("NAType", (), {})()])
def test_a_missing_label_is_refused(tiny_vit, files, missing):
    untaught = tiny_model(tiny_vit)
    with pytest.raises(OneaError, match="stands for a missing label; leave out images without a label"):
        untaught.learn(files, [*NAMES[:-1], missing])
    assert untaught.version == 0


@pytest.mark.parametrize("asked", ["predict", "predict_proba", "predict_topk", "familiarity", "transform"])
def test_messages_suggest_only_arguments_of_the_method(model, tmp_path, asked):
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(OneaError, match=r": remove it\.$"):
        getattr(model, asked)([tmp_path / "bad.jpg"])


def test_the_message_after_skipping_all_images_does_not_suggest_skipping(model, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(OneaError, match=r": remove it\.$"):
        model.learn([tmp_path / "bad.jpg"], ["new"], on_bad="skip")
    with pytest.raises(OneaError, match="on_bad is 'ignore'; choose fail or skip"):
        model.learn([tmp_path / "bad.jpg"], ["new"], on_bad="ignore")


def test_messages_name_python_arguments_not_command_line_options(model, files, tmp_path, tiny_vit):
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(OneaError, match=r'remove it or pass on_bad="skip"\.$'):
        model.learn([*files, tmp_path / "bad.jpg"], [*NAMES, NAMES[0]])
    with pytest.raises(OneaError, match='device="auto"'):
        tiny_model(tiny_vit, device="cuda:77").learn(files, NAMES)
    with pytest.raises(OneaError, match='backbone="'):
        tiny_model("nowhere.safetensors").learn(files, NAMES)


# features, familiarity and evaluation


def test_transform_returns_the_features_that_are_classified(model, files):
    features = model.transform(files)
    assert (features.shape, features.dtype) == ((18, model.snapshot().engine.vit.width), np.float32)
    alike = model.snapshot().compute_scores(files).scores.numpy()
    np.testing.assert_array_equal(model.snapshot().scorer(torch.from_numpy(features)).numpy(), alike)


def test_unknown_images_are_those_below_the_threshold(model, files, tiny_vit):
    strange = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    for images in (files, strange):
        np.testing.assert_array_equal(model.familiarity(images) < model.threshold_, model.predict(images) == "unknown")
    never = tiny_model(tiny_vit, unknown=0).learn(files, NAMES)
    assert never.threshold_ == -np.inf


def test_an_evaluation_has_results_for_each_class(model, files):
    evaluation = model.evaluate(files, np.repeat(["plum", "fig", "date"], 6))  # the third was never taught
    assert {*evaluation.by_class} == {"plum", "fig", "date"}
    assert evaluation.by_class["plum"].images == 6
    assert evaluation.untaught_classes == ("date",)
    assert evaluation.images == 12, "images of untaught classes are neither correct nor wrong"
    correct = sum(evaluation.by_class[name].correct for name in ("plum", "fig"))
    assert evaluation.accuracy == correct / 12
    assert evaluation.accuracy + evaluation.wrong_rate + evaluation.unknown_rate == pytest.approx(1)
    assert not [mistake for mistake in evaluation.confusions() if mistake[0] == "date"]
    values = evaluation.as_json()
    low, high = values["accuracy_interval"]
    assert 0 <= low <= evaluation.accuracy <= high <= 1
    assert f"accuracy {100 * low:.0f} to {100 * high:.0f} % (95 % confidence interval)" in str(evaluation)
    assert [one["class"] for one in values["untaught_classes"]] == ["date"]
    assert {one["class"] for one in values["classes"]} == {"plum", "fig"}
