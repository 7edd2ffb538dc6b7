# SPDX-License-Identifier: Apache-2.0
"""Every readout of a model: teaching, saving, loading, undo and export."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.models import class_folders, tiny_model

import onea
from onea.classifiers.familiarity import NUM_SIGNALS
from onea.errors import OneaError
from onea.model.calibration import max_signals_per_class
from onea.model.export import Graph
from onea.model.learning import update as learning
from onea.model.learning.background import MAX_FEATURES
from onea.model.parameters import Parameters
from onea.model.state import READOUTS, empty_statistics


@pytest.fixture(params=READOUTS)
def readout(request) -> str:
    return request.param


@pytest.fixture
def files(tiny_images):
    return class_folders(tiny_images / "train")


def teach(model, files, *names):
    model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])


def asked(files):
    return [file for name in sorted(files) for file in files[name]]


def test_a_loaded_model_predicts_the_same(readout, files, tiny_vit, tmp_path):
    model = tiny_model(tiny_vit, readout=readout)
    teach(model, files, "class00", "class01", "class02")
    teach(model, files, "class03")
    known = [file for name in ("class00", "class01", "class02", "class03") for file in files[name]]
    assert model.score(known, [file.parent.name for file in known]) > 0.5
    loaded = onea.load(model.save(tmp_path / "m.onea"), threads=1, precision="fp32")
    assert loaded.readout == readout
    np.testing.assert_array_equal(loaded.predict_proba(asked(files)), model.predict_proba(asked(files)))


def test_undo_forget_and_teaching_again(readout, files, tiny_vit):
    model = tiny_model(tiny_vit, readout=readout)
    teach(model, files, "class00", "class01", "class02")
    before = model.predict_proba(asked(files))
    teach(model, files, "class03")
    model.forget("class01").rename("class02", "other")
    assert model.classes_.tolist() == ["class00", "class03", "other"]
    assert np.isfinite(model.predict_proba(asked(files))).all()
    teach(model, files, "class01")
    assert len(model.classes_) == 4
    for _ in range(4):
        model.undo()
    np.testing.assert_array_equal(model.predict_proba(asked(files)), before)


def test_all_classes_can_be_forgotten_and_taught_again(readout, files, tiny_vit):
    model = tiny_model(tiny_vit, readout=readout)
    teach(model, files, "class00", "class01")
    model.forget("class00", "class01")
    with pytest.raises(OneaError, match="has no classes yet"):
        model.predict(files["class00"])
    teach(model, files, "class00", "class01")
    assert model.score(files["class00"], ["class00"] * len(files["class00"])) > 0.5


def test_the_exported_graph_predicts_the_same(readout, files, tiny_vit):
    model = tiny_model(tiny_vit, readout=readout, unknown=None)
    teach(model, files, "class00", "class01", "class02")
    snapshot = model.snapshot()
    images = snapshot.read(asked(files))
    probabilities, none = Graph(snapshot)(torch.from_numpy(images.pixels).float() / 255)
    assert not none.any(), "nothing is unknown if that is switched off"
    np.testing.assert_allclose(probabilities.numpy(), snapshot.predict_proba(images), atol=5e-3)


def test_the_temperature_is_fitted_to_the_scale_of_the_scores(readout, files, tiny_vit):
    """The temperature lies inside its grid, and probabilities of distinct classes are not too low."""
    model = tiny_model(tiny_vit, readout=readout)
    teach(model, files, *sorted(files)[:4])
    assert 1e-3 < model.snapshot().state.temperature < 1
    assert model.predict_proba(asked(files)).max(1).mean() > 0.4


def test_tensors_of_another_readout_are_refused(files, tiny_vit, tmp_path):
    gaussian, plain = (tiny_model(tiny_vit, readout=name) for name in ("rgda", "whitened"))
    for model, name in ((gaussian, "g.onea"), (plain, "w.onea")):
        teach(model, files, "class00", "class01")
        model.save(tmp_path / name)
    tensors = load_file(tmp_path / "g.onea/states/000001/state.safetensors")
    assert {"factors", "cut"} <= tensors.keys()
    state = tmp_path / "w.onea/states/000001/state.safetensors"
    state.write_bytes((tmp_path / "g.onea/states/000001/state.safetensors").read_bytes())
    with pytest.raises(OneaError, match="damaged"):
        onea.load(tmp_path / "w.onea")


@pytest.mark.parametrize("name", ["fecam", "ranpac"])
def test_classifiers_that_cannot_follow_the_adapter_are_refused(name, files, tiny_vit):
    with pytest.raises(OneaError, match=f"readout is '{name}', which cannot follow changes of the adapter"):
        teach(tiny_model(tiny_vit, readout=name), files, "class00", "class01")


def test_factors_are_stored_in_bfloat16(files, tiny_vit, tmp_path):
    model = tiny_model(tiny_vit, readout="rgda")
    teach(model, files, "class00", "class01")
    model.save(tmp_path / "m.onea")
    kept = load_file(tmp_path / "m.onea/states/000001/state.safetensors")["factors"]
    assert kept.dtype == torch.bfloat16
    factors = model.snapshot().state.statistics.factors
    assert torch.equal(kept, factors[:, : kept.shape[1]])
    assert not factors[:, kept.shape[1] :].any()


def test_image_counts_do_not_depend_on_the_number_of_views(files, tiny_vit):
    means = {}
    for views in (1, 3):
        model = tiny_model(tiny_vit, views=views)
        teach(model, files, "class00", "class01")
        state = model.snapshot().state
        assert state.images == [len(files["class00"]), len(files["class01"])]
        assert state.statistics.counts.tolist() == [views * images for images in state.images]
        means[views] = state.statistics.means
    assert not torch.allclose(means[1], means[3])


def test_an_adapter_with_lower_accuracy_is_rejected(files, tiny_vit, monkeypatch):
    """If training ends in an adapter that makes all images look the same, the network is used without it.

    The effect of a too high learning rate depends on rounding, so the weights are spoiled directly.
    """

    def spoil_adapter(*args):
        merged, report = train_and_merge(*args)
        for name, weight in merged.tensors.items():
            weight.fill_(
                1e12 if "up.bias" in name else 0
            )  # so large that differences between images are lost in rounding
        return merged, report

    train_and_merge = learning._train_and_merge
    monkeypatch.setattr(learning, "_train_and_merge", spoil_adapter)
    names = sorted(files)
    model = tiny_model(tiny_vit, held_out=0.5)
    teach(model, files, *names[:4])
    (update,) = model.history
    assert (update["trained"], update["epochs"] > 0) == (False, True)
    state = model.snapshot().state
    assert state.adapter_images == {}
    assert not any(value.any() for name, value in state.adapter.items() if "up.weight" in name), (
        "the adapter is the initial one"
    )
    known = [file for name in names[:4] for file in files[name]]
    assert model.score(known, [file.parent.name for file in known]) > 0.5


def test_size_of_a_large_model_with_all_its_versions():
    """200 classes on a ViT-B: the sizes of all tensors of a version; a folder has six versions."""
    statistics = empty_statistics("rgda", 768).pad_to(200).state_dict()
    bytes_of = {
        name: value.numel() * (2 if name == "factors" else value.element_size()) for name, value in statistics.items()
    }
    adapter = 12 * 4 * (2 * 128 * 768 + 128 + 768)  # rank 128, as published
    signals = (
        2 * 200 * max_signals_per_class(200) * (NUM_SIGNALS * 4 + 8)
    )  # of known images and of left-out classes, with classes
    background = MAX_FEATURES * 768 * 2
    one = sum(bytes_of.values()) + adapter + signals + background
    assert one < 40e6
    assert (1 + Parameters.keep) * one < 150e6


def test_one_class_is_distinguished_from_very_different_images(readout, files, tiny_vit):
    model = tiny_model(tiny_vit, readout=readout)
    teach(model, files, "class00")
    answers = model.snapshot().answers(files["class00"])
    assert {answer.verdict for answer in answers} <= {"answer", "unknown"}, "with one class, no other is likely"
    assert [answer.top[0][1] + answer.none for answer in answers] == pytest.approx([1] * len(answers))
    squares = np.indices((32, 32)).sum(0) // 4 % 2 * 255
    strange = np.repeat(squares[None, :, :, None], 3, 3).astype(np.uint8)
    familiarity = model.snapshot().compute_scores(strange).familiarity
    assert familiarity < model.snapshot().compute_scores(files["class00"]).familiarity.min()


def test_classes_too_small_for_held_out_images_can_be_taught_with_others(files, tiny_vit):
    """Every fifth class has three images, so one fold of left-out classes has no image to evaluate."""
    names = [f"c{number:02d}" for number in range(25)]
    photos = [file for name in sorted(files) for file in files[name]]
    rng = np.random.default_rng(0)
    images, labels = [], []
    for number, name in enumerate(names):
        for _ in range(3 if number % 5 == 0 else 5):
            images.append(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
            labels.append(name)
    model = tiny_model(tiny_vit, epochs=1).learn(np.stack(images), labels)
    (update,) = model.history
    assert update["trained"]
    assert update["held_out"] == 20
    state = model.snapshot().state
    assert len(state.held_out_signals) == len(labels), "training images have signals, too"
    assert not set(state.left_out_signal_rows.tolist()) & set(range(0, 25, 5)), "these classes have no held-out images"
    assert not model.snapshot().compute_scores(photos).familiarity.isnan().any()
