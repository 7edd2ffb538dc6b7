# SPDX-License-Identifier: Apache-2.0
"""A model stays on the network that it was taught with, and `info` describes that network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.models import class_folders, resealed

import onea as product
from onea.errors import OneaError
from onea.vit.network_config import BUNDLED, BUNDLED_SHA256


@pytest.fixture(scope="module")
def taught(tiny_images, tmp_path_factory) -> Path:
    """Two classes, taught one after the other with five blocks of the bundled network, so that nothing is trained."""
    files = class_folders(tiny_images / "train")
    model = product.OneA(image_size=56, depth=5, views=1, precision="fp32", threads=1, device="cpu")
    for name in ("class00", "class01"):
        model.learn(files[name], [name] * len(files[name]))
    return model.save(tmp_path_factory.mktemp("networks") / "shop.onea")


@pytest.fixture
def shop(taught, tmp_path) -> Path:
    return Path(shutil.copytree(taught, tmp_path / "shop.onea"))


def taught_with(path: Path, **backbone: object) -> Path:
    """The same model, with another network in its description."""
    for file in path.glob("states/*/state.json"):
        described = json.loads(file.read_bytes())
        file.write_bytes(resealed(described | {"backbone": described["backbone"] | backbone}))
    return path


def test_the_folder_stores_the_network(shop):
    network = product.load(shop, threads=1).snapshot().state.backbone
    assert network == {"name": BUNDLED, "sha256": BUNDLED_SHA256, "depth": 5, "licence": "apache-2.0"}


def test_another_network_is_refused(shop):
    with pytest.raises(OneaError, match="has other weights"):
        product.load(taught_with(shop, sha256="0" * 64))


def test_info(shop, onea):
    code, out, _ = onea("info", str(shop))
    assert code == 0
    assert ": 2 classes from 12 images, in 2 updates (version 2)" in out
    assert f"network: the first 5 blocks of {BUNDLED}, 56 x 56 pixels, sha256 {BUNDLED_SHA256[:12]}" in out
    assert "preset: auto; classifier: rgda; predicted unknown: 5 % of images of known classes" in out
    advice, stored = out.splitlines()[-2:]
    assert "`onea refresh MODEL FOLDER`" in advice
    assert stored == "No photo is stored."
    found = json.loads(onea("info", str(shop), "--json")[1])
    assert (found["version"], found["preset"], found["backbone"]["name"]) == (2, "auto", BUNDLED)
    assert found["remarks"] == [advice, stored]
