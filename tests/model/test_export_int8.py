# SPDX-License-Identifier: Apache-2.0
"""Exports in int8: only the network is quantised, and a file is kept only if it passes the check on labelled photos."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil

import numpy as np
import pytest
import torch
from support.models import onnx_runtime_or_skip, tiny_model

from onea.cli.display import print_quality
from onea.errors import OneaError
from onea.model.evaluation import metrics as quality
from onea.model.evaluation.metrics import Quality
from onea.model.export import Graph, export
from onea.vit.backbones import load_backbone
from onea.vit.onnx import smooth_activations


@pytest.fixture(scope="module")
def model(tiny_vit, tiny_images):
    return tiny_model(tiny_vit).learn(tiny_images / "train").snapshot()


def test_smoothing_does_not_change_features(tiny_vit):
    vit = load_backbone(tiny_vit)
    with torch.no_grad():
        vit.vit.blocks[0].norm2.weight[3] *= 50  # one channel so large that the others get no quantisation levels
    images = torch.randn(4, 3, vit.size, vit.size, generator=torch.Generator().manual_seed(2))
    even = copy.deepcopy(vit)
    smooth_activations(even, lambda: even(images))
    torch.testing.assert_close(even(images), vit(images), rtol=1e-3, atol=1e-4)

    def unevenness(network):
        gains = network.vit.blocks[0].norm2.weight.abs()
        return float(gains.max() / gains.median())

    assert unevenness(even) < unevenness(vit) / 4
    assert not even.vit.blocks[0].mlp.fc1._forward_pre_hooks


def test_only_the_network_is_quantised(model, tiny_images, tmp_path, monkeypatch):
    """The limits are switched off, because passing them with so few photos depends on the machine."""
    onnx, runtime = pytest.importorskip("onnx"), onnx_runtime_or_skip()
    monkeypatch.setattr(quality, "MAX_LOSS", 1.0)
    monkeypatch.setattr(quality, "MIN_AGREEMENT", 0.0)
    done = export(model, "onnx", tmp_path / "small.onnx", precision="int8", check=tiny_images / "test")
    written = onnx.load(done.path)
    tensors = {tensor.name: tensor for tensor in written.graph.initializer}
    kinds = {name: tensor.data_type for name, tensor in tensors.items()}
    eight = [name for name, kind in kinds.items() if kind == onnx.TensorProto.INT8 and len(tensors[name].dims) == 2]
    assert len(eight) == 2 * 4 + 2 - 1, "four products in each block and two of the adapter in the last, less one of it"
    multiplied = {node.input[1] for node in written.graph.node if node.op_type == "MatMulInteger"}
    assert multiplied == set(eight), "products are computed with integers: no weight is dequantised first"
    head = [name for name in tensors if name.startswith(("scorer.", "familiarity."))]
    wanted = {name: value for name, value in Graph(model).state_dict().items() if name in head}
    assert head
    for name, value in wanted.items():
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensors[name]), value)
    session = runtime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    photos = np.random.default_rng(0).integers(0, 256, (50, 40, 45, 3), dtype=np.uint8)
    found = np.concatenate([session.run(["probabilities"], {"images": photo[None]})[0] for photo in photos])
    gaps = np.abs(found - model.predict_proba(photos)).max(1)
    assert gaps.mean() < 0.1
    assert gaps.max() > 1e-5, "int8 differs from fp32"
    facts = json.loads(done.description.read_text())
    assert facts["precision"] == "int8"
    assert done.quality is not None
    assert facts["check"]["photos"] == done.quality.photos == 18


def test_a_file_that_loses_too_much_is_not_written(model, tiny_images, tmp_path, monkeypatch):
    onnx_runtime_or_skip()
    monkeypatch.setattr(quality, "MIN_AGREEMENT", 1.01)
    with pytest.raises(OneaError, match=r"int8 lowers the accuracy on 18 photos .* so no file was written"):
        export(model, "onnx", tmp_path / "small.onnx", precision="int8", check=tiny_images / "test")
    assert not list(tmp_path.iterdir())


def test_photos_of_untaught_classes_alone_are_refused(model, tiny_images, tmp_path):
    shutil.copytree(tiny_images / "test" / "class00", tmp_path / "photos" / "fig")
    with pytest.raises(OneaError, match="None of the classes"):
        export(model, "onnx", tmp_path / "small.onnx", precision="int8", check=tmp_path / "photos")


def test_photos_of_untaught_classes_do_not_count(model, tiny_images, tmp_path, monkeypatch):
    """Their predictions are never correct, so each of these photos would reduce the share of lost predictions."""
    onnx_runtime_or_skip()
    monkeypatch.setattr(quality, "MAX_LOSS", 1.0)
    monkeypatch.setattr(quality, "MIN_AGREEMENT", 0.0)
    for name in ("class00", "fig", "plum"):
        shutil.copytree(tiny_images / "test" / "class00", tmp_path / "photos" / name)
    done = export(model, "onnx", tmp_path / "small.onnx", precision="int8", check=tmp_path / "photos")
    assert done.quality is not None
    assert done.quality.photos == len(list((tiny_images / "test" / "class00").iterdir()))


@pytest.mark.parametrize(
    ("lost", "won", "same", "kept"),
    [(10, 0, 1940, True), (11, 0, 1990, False), (30, 20, 1940, True), (0, 0, 1939, False), (0, 9, 2000, True)],
)
def test_limits_of_loss_and_agreement(lost, won, same, kept):
    quality = Quality(photos=2000, correct=1500, lost=lost, won=won, same=same)
    with contextlib.nullcontext() if kept else pytest.raises(OneaError, match="no file was written"):
        quality.check()


def test_few_photos_have_confidence_bounds(capsys):
    print_quality(Quality(photos=100, correct=80, lost=0, won=0, same=100))
    said = capsys.readouterr().out
    assert "100 photos: 80.0 % correct, 80.0 % in fp32; 100.0 % of the predictions agree" in said
    assert "at most 1.6 points lost, at least 97.4 % of the answers the same; 2,000 or more photos" in said
    print_quality(Quality(photos=2000, correct=1600, lost=3, won=1, same=1990))
    assert "confidence bounds" not in capsys.readouterr().out


def test_the_confidence_bounds_hold_for_95_percent_of_samples():
    """The bounds from samples must cover the true loss and agreement in about 95 % of cases."""
    random, photos, lost, won, same = np.random.default_rng(1), 200, 0.04, 0.02, 0.95
    loss_covered, agreement_covered = [], []
    for _ in range(2000):
        changed = random.multinomial(photos, [lost, won, 1 - lost - won])
        found = Quality(photos, photos // 2, int(changed[0]), int(changed[1]), int(random.binomial(photos, same)))
        loss, agreement = found.confidence_bounds
        loss_covered.append(loss >= lost - won)
        agreement_covered.append(agreement <= same)
    assert 0.92 < np.mean(loss_covered) < 0.98
    assert 0.92 < np.mean(agreement_covered) < 0.98
