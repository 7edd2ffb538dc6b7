# SPDX-License-Identifier: Apache-2.0
"""Every readout of a model: taught, saved, loaded, gone back from, exported."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from model_tools import class_folders, tiny_model

import onea
from onea.errors import OneaError
from onea.model.export import Graph
from onea.model.state import READOUTS


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


def test_what_is_saved_answers_alike(readout, files, tiny_vit, tmp_path):
    model = tiny_model(tiny_vit, readout=readout)
    teach(model, files, "class00", "class01", "class02")
    teach(model, files, "class03")
    known = [file for name in ("class00", "class01", "class02", "class03") for file in files[name]]
    assert model.score(known, [file.parent.name for file in known]) > 0.5
    loaded = onea.load(model.save(tmp_path / "m.onea"), threads=1, precision="fp32")
    assert loaded.readout == readout
    np.testing.assert_array_equal(loaded.predict_proba(asked(files)), model.predict_proba(asked(files)))
    found = json.loads((tmp_path / "m.onea/model.json").read_text("utf-8"))["format"]
    assert found == (3 if readout in ("gaussian", "centred") else 2), "earlier versions read what they can"


def test_going_back_forgetting_and_teaching_again(readout, files, tiny_vit):
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
    with pytest.raises(OneaError, match="knows no class yet"):
        model.predict(files["class00"])
    teach(model, files, "class00", "class01")
    assert model.score(files["class00"], ["class00"] * len(files["class00"])) > 0.5


def test_the_exported_graph_answers_alike(readout, files, tiny_vit):
    model = tiny_model(tiny_vit, readout=readout, unknown=None)
    teach(model, files, "class00", "class01", "class02")
    snapshot = model.snapshot()
    images = snapshot.read(asked(files))
    probabilities, familiar = Graph(snapshot)(torch.from_numpy(images.pixels).float() / 255)
    assert familiar.all(), "nothing is unknown where nobody asked for it"
    np.testing.assert_allclose(probabilities.numpy(), snapshot.predict_proba(images), atol=5e-3)


def test_probabilities_are_fitted_to_the_size_of_the_scores(readout, files, tiny_vit):
    """The temperature lies inside its grid, and classes that are told apart are told apart with some certainty."""
    model = tiny_model(tiny_vit, readout=readout)
    teach(model, files, *sorted(files)[:4])
    assert 1e-3 < model.snapshot().state.temperature < 1
    assert model.predict_proba(asked(files)).max(1).mean() > 0.4


def test_directions_of_another_readout_are_refused(files, tiny_vit, tmp_path):
    from safetensors.torch import load_file

    gaussian, plain = (tiny_model(tiny_vit, readout=name) for name in ("gaussian", "whitened"))
    for model, name in ((gaussian, "g.onea"), (plain, "w.onea")):
        teach(model, files, "class00", "class01")
        model.save(tmp_path / name)
    tensors = load_file(tmp_path / "g.onea/states/000001/state.safetensors")
    assert {"factors", "cut"} <= tensors.keys()
    state = tmp_path / "w.onea/states/000001/state.safetensors"
    state.write_bytes((tmp_path / "g.onea/states/000001/state.safetensors").read_bytes())
    with pytest.raises(OneaError, match="damaged"):
        onea.load(tmp_path / "w.onea")
