# SPDX-License-Identifier: Apache-2.0
"""Model folders, repositories of the Hub and exported files reveal no path of the machine that made them."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.models import onnx_runtime_or_skip, resealed, tiny_model

import onea
from onea.errors import OneaError
from onea.files import cache_folder
from onea.model.export import export


@pytest.fixture
def private(tmp_path, tiny_vit, monkeypatch):
    """A network in a folder with a private name, and an empty cache."""
    monkeypatch.setenv("ONEA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "secret-customer" / "net.safetensors"
    file.parent.mkdir()
    shutil.copyfile(tiny_vit, file)
    return file


@pytest.fixture
def model(private, tiny_images):
    return tiny_model(str(private)).learn(tiny_images / "train")


def contents(place: Path) -> dict[str, bytes]:
    """The contents of the files of a folder, and of files in archives."""
    found = {str(path): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    for path in [path for path in map(Path, found) if zipfile.is_zipfile(path)]:
        with zipfile.ZipFile(path) as archive:
            found |= {f"{path}/{name}": archive.read(name) for name in archive.namelist()}
    return found


def assert_no_path(place: Path, private: Path) -> None:
    here = (private.parent.name, str(private.parents[1]), str(Path(onea.__file__).parent), "site-packages")
    for name, content in contents(place).items():
        for told in here:
            assert told.encode() not in content, f"{told} in {name}"


def test_a_model_folder_contains_no_path(model, private, tmp_path):
    saved = model.save(tmp_path / "models" / "shop.onea")
    assert_no_path(saved, private)
    assert model.snapshot().state.backbone.keys() == {"name", "sha256", "config"}
    assert json.loads((saved / "model.json").read_bytes())["params"]["backbone"] == "net.safetensors"


def test_an_update_of_a_loaded_model_adds_no_path(model, private, tmp_path, tiny_images):
    saved = model.save(tmp_path / "models" / "shop.onea")
    loaded = onea.load(saved, device="cpu", threads=1)
    assert loaded.backbone == str(private)
    loaded.rename("class00", "zero").save(saved)
    assert_no_path(saved, private)


def test_a_pushed_model_contains_no_path(model, private, tmp_path, monkeypatch):
    def upload(*, repo_id, folder_path, **rest):
        return str(shutil.copytree(folder_path, tmp_path / "hub"))

    monkeypatch.setattr("huggingface_hub.create_repo", lambda *args, **kwargs: None)
    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    model.push_to_hub("me/shop")
    assert len(contents(tmp_path / "hub")) > 3
    assert_no_path(tmp_path / "hub", private)


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_an_exported_file_contains_no_path(to, model, private, tmp_path):
    """By default, PyTorch records the source line of each operation."""
    if to == "onnx":
        onnx_runtime_or_skip()
    (tmp_path / "out").mkdir()
    export(model.snapshot(), to, tmp_path / "out" / f"shop.{to}")
    assert_no_path(tmp_path / "out", private)


def test_the_backbone_file_is_found_where_it_was_last_used(model, private, tmp_path, monkeypatch):
    saved, wanted = model.save(tmp_path / "models" / "shop.onea"), model.classes_.tolist()
    monkeypatch.chdir(tmp_path)
    assert onea.load(saved, device="cpu", threads=1).classes_.tolist() == wanted
    moved = private.rename(tmp_path / "moved.safetensors")
    with pytest.raises(
        OneaError, match=r"needs the backbone file net\.safetensors \(sha256 .*\), which is not where it was last used"
    ):
        onea.load(saved)
    assert onea.load(saved, backbone=str(moved), device="cpu", threads=1).classes_.tolist() == wanted
    assert onea.load(saved, device="cpu", threads=1).backbone == str(moved), "the path is remembered once it was given"


def test_the_backbone_file_is_found_beside_the_model_folder(model, private, tmp_path, tiny_images):
    saved = model.save(tmp_path / "models" / "shop.onea")
    wanted = model.predict_proba(tiny_images / "test")
    shutil.rmtree(cache_folder())
    with pytest.raises(OneaError, match="put it next to the model folder, or pass its path"):
        onea.load(saved)
    private.rename(saved.parent / private.name)
    loaded = onea.load(saved, device="cpu", threads=1)
    np.testing.assert_array_equal(loaded.predict_proba(tiny_images / "test"), wanted)


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"file": 3}', '{"file": "/nowhere/net.safetensors"}'])
def test_a_damaged_cache_entry_is_ignored(note, model, tmp_path):
    saved = model.save(tmp_path / "models" / "shop.onea")
    [place] = (cache_folder() / "backbones").iterdir()
    place.write_text(note)
    with pytest.raises(OneaError, match="is not where it was last used"):
        onea.load(saved)


@pytest.mark.parametrize("name", ["../net.safetensors", "/etc/net.safetensors", "a\\net.safetensors"])
def test_a_backbone_name_with_a_path_is_refused(name, model, tmp_path):
    saved = model.save(tmp_path / "models" / "shop.onea")
    [file] = saved.glob("states/*/state.json")
    described = json.loads(file.read_bytes())
    file.write_bytes(resealed(described | {"backbone": described["backbone"] | {"name": name}}))
    with pytest.raises(OneaError, match="the name of its backbone is a path"):
        onea.load(saved)
