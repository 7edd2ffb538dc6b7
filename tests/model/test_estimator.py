# SPDX-License-Identifier: Apache-2.0
"""The estimator: learning in any order, undo, failures, concurrency, and parameters."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import class_folders, tiny_model, wait_for

import onea
from onea.errors import OneaError


@pytest.fixture(scope="module")
def taught(tiny_vit, tiny_images):
    return tiny_model(tiny_vit).learn(tiny_images / "train")


def test_it_learns(taught, tiny_images):
    """The accuracy is far above one sixth, that of guessing; ``unknown`` counts as wrong."""
    assert taught.score(tiny_images / "test") > 0.6
    assert taught.classes_.tolist() == [f"class{n:02d}" for n in range(6)]
    assert taught.version == 1
    assert taught.history[0]["held_out"] == 6


def test_batched_and_single_predictions_are_the_same(taught, tiny_images):
    files = sorted((tiny_images / "test").rglob("*.png"))
    together = taught.predict_proba(files)
    alone = np.concatenate([taught.predict_proba(file) for file in files])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert taught.predict(files).tolist() == [taught.predict(file)[0] for file in files]


def test_probabilities_and_top_answers_agree(taught, tiny_images):
    probabilities = taught.predict_proba(tiny_images / "test")
    none = [answer.none for answer in taught.snapshot().answers(tiny_images / "test")]
    np.testing.assert_allclose(probabilities.sum(1) + none, 1)
    for row, top in zip(probabilities, taught.predict_topk(tiny_images / "test", 3), strict=True):
        assert [name for name, _ in top] == taught.classes_[np.argsort(-row, kind="stable")[:3]].tolist()
        np.testing.assert_allclose([chance for _, chance in top], np.sort(row)[::-1][:3])
    assert len(taught.predict_topk(tiny_images / "test", 99)[0]) == 6


def test_no_images_give_no_predictions(taught):
    assert taught.predict([]).tolist() == []
    assert taught.predict_proba([]).shape == (0, 6)
    assert taught.predict_topk([], 3) == []


def test_the_same_seed_gives_the_same_model(tiny_vit, tiny_images, taught):
    again = tiny_model(tiny_vit).learn(tiny_images / "train")
    assert np.array_equal(again.predict_proba(tiny_images / "test"), taught.predict_proba(tiny_images / "test"))
    other = tiny_model(tiny_vit, seed=1).learn(tiny_images / "train")
    assert not np.array_equal(other.predict_proba(tiny_images / "test"), taught.predict_proba(tiny_images / "test"))


# Means and the scatter add up exactly. Directions of a class are rounded to bfloat16 (a relative 2^-9, so 2^-8 in
# their squares), in a basis that depends on earlier classes.
@pytest.mark.parametrize(("readout", "relative"), [("whitened", 0.0), ("rgda", 2**-8)])
def test_single_classes_may_arrive_in_any_order(readout, relative, tiny_vit, tiny_images):
    """Updates of one class train no adapter, so only the order of the classes can make a difference."""
    folders = class_folders(tiny_images / "train")
    models = []
    for order in (list(folders), list(reversed(folders))):
        model = tiny_model(tiny_vit, held_out=0, readout=readout)
        for name in order:
            model.learn(folders[name], [name] * len(folders[name]))
        models.append(model)
    one, other = models
    assert not one.history[-1]["trained"]
    columns = [other.snapshot().classes.index(name) for name in one.snapshot().classes]
    files = tiny_images / "test"
    similar = one.snapshot().compute_scores(files).scores, other.snapshot().compute_scores(files).scores[:, columns]
    torch.testing.assert_close(*similar, atol=1e-4, rtol=relative)


def test_teaching_a_class_again_changes_that_class_only(tiny_vit, tiny_images):
    folders = class_folders(tiny_images / "train")
    model = tiny_model(tiny_vit, options={"merge": "one-a", "min_share": 0.25})
    first = {name: files[:4] for name, files in folders.items()}
    model.learn([f for files in first.values() for f in files], [n for n, files in first.items() for _ in files])
    before = model.snapshot().state
    model.learn(folders["class03"][4:], ["class03"] * 2)
    after = model.snapshot().state
    assert after.classes == before.classes
    assert after.images == [4, 4, 4, 6, 4, 4]
    moved = (after.statistics.means != before.statistics.means).any(1)
    assert moved.tolist() == [False, False, False, True, False, False]
    assert model.history[-1]["new_classes"] == 0
    one = np.asarray(Image.open(folders["class03"][4]))[:, ::-1]
    model.learn([one], ["class03"])  # one more image of a known class is enough
    assert model.snapshot().state.images[3] == 7
    more = {name: folders[name] for name in ("class00", "class01", "class02")}
    model.learn([f for files in more.values() for f in files], [n for n, files in more.items() for _ in files])
    assert model.history[-1]["trained"]
    assert model.history[-1]["merge"]["base"] in ("new", "accumulated")
    assert 0 < model.history[-1]["merge"]["gate_min"] < model.history[-1]["merge"]["gate_max"] < 1


def test_forget_rename_and_undo(tiny_vit, tiny_images):
    model = tiny_model(tiny_vit).learn(tiny_images / "train")
    files = tiny_images / "test"
    at_first, scores = model.predict_proba(files), model.snapshot().compute_scores(files).scores.numpy()
    model.forget("class02")
    assert model.version == 2
    assert "class02" not in model.predict(files)
    now = model.snapshot()
    np.testing.assert_allclose(
        now.compute_scores(files).scores.numpy(), np.delete(scores, 2, axis=1), rtol=1e-6, atol=1e-6
    )
    remaining = np.delete(at_first, 2, axis=1)
    as_near = 1e-6 / now.state.temperature  # what the scores' tolerance means for probabilities
    shares = model.predict_proba(files)
    remaining, shares = (part / part.sum(1, keepdims=True) for part in (remaining, shares))  # but for none of them
    np.testing.assert_allclose(shares, remaining, atol=as_near)
    answers = model.predict(files)
    model.rename("class05", "five")
    assert (model.predict(files) == np.where(answers == "class05", "five", answers)).all()
    model.undo().undo()
    assert model.version == 1
    assert np.array_equal(model.predict_proba(files), at_first)
    model.forget("class00")
    assert model.version == 4  # 2 and 3 are never used again
    assert [update["version"] for update in model.history] == [1, 4]


def test_undo_goes_back_to_the_oldest_kept_version(tiny_vit, tiny_images):
    model = tiny_model(tiny_vit, keep=2).learn(tiny_images / "train")
    for name in ("class00", "class01", "class02"):
        model.forget(name)
    model.undo().undo()
    with pytest.raises(OneaError, match="no earlier version"):
        model.undo()
    assert len(model.classes_) == 5


def test_failed_learning_changes_nothing(taught, tiny_images):
    before, version = taught.predict_proba(tiny_images / "test"), taught.version
    bad = [
        ({"images": [np.zeros((8, 8, 3), np.uint8)], "labels": ["new"]}, "one image"),
        ({"images": [np.zeros((8, 8, 3), np.uint8)] * 2, "labels": ["CLASS00"] * 2}, "only in case"),
        ({"images": [np.zeros((8, 8, 3), np.uint8)] * 4, "labels": ["New", "New", "new", "new"]}, "only in case"),
        ({"images": [np.zeros((8, 8, 3), np.uint8)] * 2, "labels": ["Unknown"] * 2}, "cannot be called"),
        ({"images": [np.zeros((8, 8, 3), np.uint8)] * 2, "labels": [" a"] * 2}, "class name"),
        ({"images": [np.zeros((8, 8, 3), np.uint8)] * 2, "labels": ["a"]}, "2 images but 1 labels"),
        ({"images": [], "labels": []}, "no images"),
        ({"images": tiny_images / "nowhere"}, "does not exist"),
        ({"images": tiny_images / "train/class00"}, "no class folders"),
        ({"images": [b"no image"] * 2, "labels": ["new"] * 2}, "cannot be read"),
    ]
    for arguments, words in bad:
        with pytest.raises(OneaError, match=words):
            taught.learn(**arguments)
    assert taught.version == version
    assert np.array_equal(taught.predict_proba(tiny_images / "test"), before)


def test_fit_starts_over_unless_it_fails(tiny_vit, tiny_images):
    folders = class_folders(tiny_images / "train")
    model = tiny_model(tiny_vit).learn(tiny_images / "train")
    with pytest.raises(OneaError):
        model.fit(folders["class00"][:1], ["x"])
    assert len(model.classes_) == 6
    files = folders["class00"] + folders["class01"]
    model.fit(files, ["a"] * 6 + ["b"] * 6)
    assert model.classes_.tolist() == ["a", "b"]
    assert model.version == 2


def test_predictions_during_learning_come_from_one_complete_version(tiny_vit, tiny_images):
    folders = class_folders(tiny_images / "train")
    model = tiny_model(tiny_vit)
    model.learn(folders["class00"] + folders["class01"], ["class00"] * 6 + ["class01"] * 6)
    seen, failures, stop = set(), [], threading.Event()
    file = next((tiny_images / "test").rglob("*.png"))

    def ask() -> None:
        while not stop.is_set():
            current = model.snapshot()
            answer = current.answers(file, k=99)[0]
            if answer.version != current.version or len(answer.top) != current.version + 1:
                failures.append(answer)
            seen.add(answer.version)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for name in ("class02", "class03", "class04"):
            wait_for(lambda: model.version in seen)
            model.learn(folders[name], [name] * 6)
        wait_for(lambda: model.version in seen)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert seen == {1, 2, 3, 4}


def test_scikit_learns_conventions(tiny_vit):
    model = tiny_model(tiny_vit)
    again = onea.OneA(**model.get_params())
    assert again.get_params() == model.get_params()
    assert "epochs=2" in repr(model)
    with pytest.raises(OneaError, match="did you mean 'epochs'"):
        model.set_params(epoch=3)
    assert model.set_params(epochs=3).epochs == 3
    assert not hasattr(model, "classes_")
    with pytest.raises(OneaError, match="teach it"):
        model.predict(np.zeros((8, 8, 3), np.uint8))
    sklearn = pytest.importorskip("sklearn.base")
    assert sklearn.clone(model).get_params() == model.get_params()


def test_a_taught_model_refuses_other_training_parameters_and_pickling(taught):
    with pytest.raises(OneaError, match="rank cannot change"):
        taught.set_params(rank=8)
    with pytest.raises(OneaError, match="unknown is 2"):
        taught.set_params(unknown=2)
    with pytest.raises(OneaError, match="unknown is 'often'; it must be a number"):
        taught.set_params(unknown="often")
    assert taught.unknown == 0.05
    with pytest.raises(OneaError, match="save"):
        pickle.dumps(taught)


def test_a_model_without_classes_has_nothing_to_forget(tiny_vit, tiny_images):
    model = tiny_model(tiny_vit).learn(tiny_images / "train")
    model.forget(*model.classes_)
    with pytest.raises(OneaError, match=r"^The model has no classes yet; teach it some first\.$"):
        model.forget("class00")


def test_forget_without_names_is_refused(tiny_vit, tiny_images):
    model = tiny_model(tiny_vit).learn(tiny_images / "train")
    with pytest.raises(OneaError, match="name at least one to forget"):
        model.forget(*[])
    assert model.versions.kept == (1,)


def test_numpy_numbers_are_valid_parameters(tiny_vit, tiny_images, tmp_path):
    """NumPy numbers, as from ``np.arange``, can be saved, too."""
    numbers = {"seed": np.int64(3), "epochs": np.int64(2), "keep": np.int64(2), "views": np.int64(2)}
    others = {"held_out": np.float32(0.1), "mirror": np.bool_(True), "options": {"patience": np.int64(2)}}
    sizes = {"image_size": np.int64(14), "depth": np.int64(1), "learning_rate": np.float32(0.05)}
    model = tiny_model(tiny_vit, **numbers, **others, **sizes).learn(tiny_images / "train")
    again = onea.load(model.save(tmp_path / "shop.onea"))
    assert (again.seed, again.epochs, again.keep, again.image_size, again.mirror) == (3, 2, 2, 14, True)
    assert again.options == {"patience": 2}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"seed": "a"}, "seed is 'a'; it needs a whole number"),
        ({"seed": None}, "seed is None; it needs a whole number"),
        ({"seed": 1.5}, "seed is 1.5; it needs a whole number"),
        ({"threads": "all"}, "threads is 'all'; it needs a whole number"),
        ({"keep": 1.5}, "keep is 1.5; it needs a whole number"),
        ({"mirror": "no"}, "mirror is 'no'; it must be True or False"),
        ({"follow_drift": 3}, "follow_drift is 3; it must be True or False"),
        ({"backbone": Path("tiny.safetensors")}, "backbone is .*; give the name of a network or file, as text"),
        ({"held_out": 0.9}, "held_out"),
        ({"unknown": 1.5}, "unknown"),
        ({"readout": "other"}, "readout"),
        ({"options": {"carry": "none"}}, "follow_drift"),
        ({"options": {"classifier": "rgda"}}, "readout"),
        ({"options": {"new_vots": 3}}, "new_votes"),
        ({"options": {"kapa": 3}, "preset": "paper"}, "kappa"),
        ({"preset": "tiny"}, "preset"),
        ({"backbone": "nowhere.safetensors"}, "does not exist"),
    ],
)
def test_invalid_parameters_are_refused(tiny_vit, tiny_images, params, words):
    with pytest.raises(OneaError, match=words):
        tiny_model(tiny_vit, **params).learn(tiny_images / "train")


def test_importing_onea_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, onea; print('torch' in sys.modules, onea.OneA.__name__, callable(onea.load))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "OneA", "True"]
    assert Path(onea.__file__).name == "__init__.py"
