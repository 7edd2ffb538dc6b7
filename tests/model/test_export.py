# SPDX-License-Identifier: Apache-2.0
"""Exports: the file answers as the model does, for any batch, and is kept only then."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from model_tools import tiny_model

from onea.errors import OneaError
from onea.model import export as exporting
from onea.model.export import Graph, export
from onea.model.images import DecodedImages


@pytest.fixture(scope="module")
def model(tiny_vit, tiny_images):
    return tiny_model(tiny_vit).learn(tiny_images / "train").snapshot()


@pytest.fixture(scope="module")
def thousand(model):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (1000, 3, model.side, model.side), dtype=np.uint8)
    return DecodedImages(pixels, None, tuple(map(str, range(1000))))


def test_the_graph_is_the_model(model, thousand):
    probabilities, familiar = Graph(model)(torch.from_numpy(thousand.pixels).float() / 255)
    np.testing.assert_allclose(probabilities.detach().numpy(), model.predict_proba(thousand), atol=1e-4)
    margins = model.judge(thousand).familiarity
    clear = (margins - model.threshold).abs() > 1e-4  # nearer to the threshold, rounding decides
    assert clear.float().mean() > 0.9
    assert torch.equal(familiar[clear], (margins >= model.threshold)[clear])
    assert (margins >= model.threshold).tolist() == [not answer.unknown for answer in model.answers(thousand)]


def test_onnx_gives_the_same_answer_on_a_thousand_images(model, thousand, tmp_path):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    done = export(model, "onnx", tmp_path / "model.onnx")
    assert done.difference <= 1e-3
    session = runtime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    pixels = thousand.pixels.astype(np.float32) / 255
    parts = [session.run(["probabilities"], {"images": part})[0] for part in np.split(pixels, [1, 8, 300])]
    found, wanted = np.concatenate(parts), model.predict_proba(thousand)
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    best = np.sort(wanted, axis=1)
    ties = best[:, -1] - best[:, -2] < 1e-4
    assert ties.mean() < 0.05
    assert (found.argmax(1) == wanted.argmax(1))[~ties].all()
    written = onnx.load(done.path)
    assert {entry.domain: entry.version for entry in written.opset_import}[""] == exporting.OPSET
    props = {entry.key: json.loads(entry.value) for entry in written.metadata_props}
    facts = json.loads(done.description.read_text())
    assert props["classes"] == facts["classes"] == list(model.classes)
    assert facts["version"] == model.version


def test_torch_export_gives_the_same_answer(model, thousand, tmp_path):
    done = export(model, "torch", tmp_path / "model.pt2")
    loaded = torch.export.load(done.path).module()
    images = torch.from_numpy(thousand.pixels[:100]).float() / 255
    np.testing.assert_allclose(loaded(images)[0].detach(), model.predict_proba(thousand)[:100], atol=1e-4)


def test_a_file_that_differs_is_not_kept(model, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_read_torch", lambda path: lambda batch: (torch.zeros(len(batch), 6), None))
    with pytest.raises(OneaError, match="not kept"):
        export(model, "torch", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_named(model, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(OneaError, match=r"onea\[export\]"):
        export(model, "onnx", tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
