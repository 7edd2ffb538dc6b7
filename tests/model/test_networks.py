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
from onea.vit.network_config import BUNDLED, DEFAULT, FAST

BETTER = f"A new model with the network {DEFAULT}"


@pytest.fixture(scope="module")
def taught(tiny_images, tmp_path_factory) -> Path:
    """Two classes on the small bundled network; nothing is trained, which would take long."""
    files = class_folders(tiny_images / "train")
    model = product.OneA(backbone="fast", views=1, precision="fp32", threads=1, device="cpu")
    for name in ("class00", "class01"):
        model.learn(files[name], [name] * len(files[name]))
    return model.save(tmp_path_factory.mktemp("networks") / "shop.onea")


@pytest.fixture
def shop(taught, tmp_path) -> Path:
    return Path(shutil.copytree(taught, tmp_path / "shop.onea"))


def taught_with(path: Path, **backbone: str) -> Path:
    """The same model, with another network in its description."""
    for file in path.glob("states/*/state.json"):
        described = json.loads(file.read_bytes())
        file.write_bytes(resealed(described | {"backbone": described["backbone"] | backbone}))
    return path


def test_the_folder_stores_the_full_name_of_the_network(shop):
    network = product.load(shop, threads=1).snapshot().state.backbone
    known = {"name": FAST, "sha256": BUNDLED[FAST], "depth": 5, "licence": "apache-2.0"}
    assert network == known


@pytest.mark.parametrize("other", [{"sha256": BUNDLED[DEFAULT]}, {"sha256": "0" * 64}, {"name": DEFAULT}])
def test_another_network_is_refused(other, shop):
    with pytest.raises(OneaError, match="has other weights"):
        product.load(taught_with(shop, **other))


def test_info(shop, onea):
    code, out, _ = onea("info", str(shop))
    assert code == 0
    assert ": 2 classes from 12 images, in 2 updates (version 2)" in out
    assert f"network: the first 5 blocks of {FAST}, 84 x 84 pixels, sha256 {BUNDLED[FAST][:12]}" in out
    assert "preset: auto; classifier: rgda; predicted unknown: 5 % of images of known classes" in out
    assert BETTER in out
    found = json.loads(onea("info", str(shop), "--json")[1])
    assert (found["version"], found["preset"], found["backbone"]["name"]) == (2, "auto", FAST)
    assert any(BETTER in remark for remark in found["remarks"])
    out = onea("info", str(taught_with(shop, name=DEFAULT, sha256=BUNDLED[DEFAULT])))[1]
    assert f"of {DEFAULT}, 84" in out
    assert len(out.splitlines()) == 4, "no advice about the network, only about the untrained adapter"


def test_updates_do_not_repeat_the_advice_about_the_network(shop, tiny_images, onea):
    shutil.copytree(tiny_images / "train" / "class02", "more/class02")
    code, out, _ = onea("teach", str(shop), "more", "--threads", "1")
    assert code == 0
    assert BETTER not in out
