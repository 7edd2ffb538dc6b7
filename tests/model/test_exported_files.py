# SPDX-License-Identifier: Apache-2.0
"""Exported files: which files they may replace, and the cleanup after a killed export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import tiny_model

from onea.errors import OneaError
from onea.model.export import check_path, default_path, export, partial_folder

FACTS = {"precision": "fp32", "input": "photos"}

HELD = """
import sys, time
from pathlib import Path
from onea.model.export import partial_folder
with partial_folder(Path(sys.argv[1])) as folder:
    (folder / "model.onnx").write_bytes(b"half")
    print(folder.name, flush=True)
    time.sleep(600)
"""


def earlier(path: Path, **facts: str) -> Path:
    path.write_bytes(b"an earlier export")
    path.with_name(f"{path.name}.json").write_text(json.dumps(FACTS | facts))
    return path


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"precision": "int8"}, "its precision is int8; choose another place with -o, or replace it with --force"),
        ({"input": "squares"}, "its input is squares"),
    ],
)
def test_an_export_of_another_kind_or_precision_is_not_replaced(facts, words, tmp_path):
    path = earlier(tmp_path / "shop.onnx", **facts)
    with pytest.raises(OneaError, match=words):
        check_path(path, "onnx", FACTS, force=False)
    check_path(path, "onnx", FACTS | facts, force=False)
    check_path(path, "onnx", FACTS, force=True)


@pytest.mark.parametrize("description", [None, "[1]", "{", '{"precision": 3, "input": "photos"}'])
def test_a_file_without_a_valid_description_is_not_replaced(description, tmp_path):
    path = tmp_path / "shop.onnx"
    path.write_bytes(b"somebody's model")
    if description is not None:
        (tmp_path / "shop.onnx.json").write_text(description)
    with pytest.raises(OneaError, match=r"shop\.onnx already exists and is not from an earlier export"):
        check_path(path, "onnx", FACTS, force=False)
    check_path(path, "onnx", FACTS, force=True)


def test_a_json_file_without_an_export_is_not_replaced(tmp_path):
    (tmp_path / "shop.onnx.json").write_text('{"mine": 1}')
    with pytest.raises(OneaError, match=r"shop\.onnx\.json already exists and is not from an earlier export"):
        check_path(tmp_path / "shop.onnx", "onnx", FACTS, force=False)


def test_the_default_path_contains_the_precision(tmp_path):
    assert default_path(tmp_path / "shop.onea", "onnx", "int8") == tmp_path / "shop-int8.onnx"
    assert default_path(tmp_path / "shop.onea", "onnx", "fp32") == tmp_path / "shop.onnx"


def test_force_replaces_an_export_of_another_kind(onea, shop):
    place = earlier(shop.with_name("shop.pt2"), precision="int8")
    words = ["export", str(shop), "--to", "torch"]
    code, _, err = onea(*words)
    assert (code, place.read_bytes()) == (2, b"an earlier export")
    assert "its precision is int8" in err
    assert onea(*words, "--force")[0] == 0
    assert onea(*words)[0] == 0, "an export of the same kind is replaced without --force"
    assert json.loads(place.with_name("shop.pt2.json").read_text())["precision"] == "fp32"


def test_files_of_a_killed_export_are_removed_by_the_next_one(tmp_path, tiny_vit, tiny_images):
    path = tmp_path / "shop.pt2"
    others = [tmp_path / name for name in (".shop.pt2.partial", ".other.pt2.abc.partial", "shop.pt2.1.partial")]
    for other in others:
        other.mkdir()
    words = [sys.executable, "-c", HELD, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = tmp_path / process.stdout.readline().strip()
        with pytest.raises(OneaError, match=f"is being written by process {process.pid}"), partial_folder(path):
            pass
        assert left.is_dir(), "it is still being written"
        process.kill()
    assert (left / "model.onnx").is_file()
    export(tiny_model(tiny_vit).learn(tiny_images / "train").snapshot(), "torch", path)
    assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted([*others, path, tmp_path / "shop.pt2.json"])
