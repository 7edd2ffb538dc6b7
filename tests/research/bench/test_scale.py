# SPDX-License-Identifier: Apache-2.0
"""Models with very many classes: synthetic ones for the benchmark, and the growth of an update's cost."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

import onea as package
from onea.classifiers.gaussian import MANY_CLASSES
from onea.classifiers.statistics import used_rows
from onea.model.learning.images import read_labelled
from onea.model.learning.update import learn
from onea.model.storage import folder
from onea.model.storage.folder import Manifest, model_params
from onea.model.versions import Versions
from onea.research.bench.scale import grow

PHOTOS = list(np.random.default_rng(0).integers(0, 256, (12, 48, 48, 3), dtype=np.uint8))


def test_synthetic_classes_make_a_model_like_any_other(shop, tmp_path):
    model = package.load(shop, threads=1)
    state = model.snapshot().state
    grown = grow(state, 30)
    place = tmp_path / "grown.onea"
    folder.write(place, grown, Manifest(Versions((grown.version,), grown.version), model_params(model)), [grown])
    [file] = place.rglob("state.safetensors")
    with safe_open(file, "pt") as stored:
        directions = stored.get_slice("factors").get_shape()[1]
    assert directions == used_rows(grown.statistics.factors) < grown.statistics.factors.shape[1]
    other = package.load(place, threads=1)
    assert len(other.classes_) == 30
    assert other.snapshot().state.images[-1] == 20
    assert "one more" in other.learn(PHOTOS, ["one more"] * len(PHOTOS)).classes_


def test_the_cost_of_one_more_class_hardly_grows_with_the_number_of_classes(shop):
    """Counted in operations of matrices. What grows are products of a bounded sample with the means of all classes."""
    model = package.load(shop, threads=1)
    engine, state = model.snapshot().engine, model.snapshot().state
    photos = read_labelled(PHOTOS, ["one more"] * len(PHOTOS), engine.side)
    operations = []
    for classes in (MANY_CLASSES + 1, 4 * (MANY_CLASSES + 1)):
        grown = grow(state, classes)
        with FlopCounterMode(display=False) as counter:
            learn(engine, grown, photos, version=grown.version + 1, later=True)
        operations.append(counter.get_total_flops())
    assert operations[1] < 2.5 * operations[0]


@pytest.mark.slow
def test_models_of_several_sizes_are_measured(onea, tmp_path):
    code, out, _ = onea("bench", "--scale", "4,6", "--threads", "1", "--out", str(tmp_path))
    assert code == 0
    assert "6 classes" in out
    [path] = tmp_path.glob("bench-*-scale.csv")
    rows = list(csv.DictReader(path.open(newline="")))
    assert {row["setting"] for row in rows} == {"4 classes", "6 classes"}
    measured = {row["measure"] for row in rows}
    assert {"load", "predict one photo", "one more class", "check", "one version on disk"} <= measured
    assert all(float(row["value"]) > 0 for row in rows)


@pytest.mark.parametrize("text", ["", "many", "1", "10,-5", "10;20", "9999999999"])
def test_invalid_numbers_of_classes_are_refused(text, onea, tmp_path):
    code, _, err = onea("bench", "--scale", text or ",", "--out", str(tmp_path))
    assert code != 0
    assert "numbers of classes from 2 to 100,000" in err
