# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of the paper, made by ``onea paper`` with a tiny random ViT and twenty classes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.tiny import write_tiny_images, write_tiny_vit

from onea.cli import main


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("paper")
    write_tiny_vit(root / "tiny.safetensors", width=128)  # CODA-Prompt's components need the width
    write_tiny_images(root / "images", classes=20, train=4, test=2)
    sources = ["--data", f"folder:{root / 'images'}", "--backbone", str(root / "tiny.safetensors")]
    return [*sources, "--scale", "0.01", "--device", "cpu"]


def onea(*arguments: str, patch: pytest.MonkeyPatch) -> int:
    patch.setattr(sys, "argv", ["onea", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.parametrize(
    ("name", "more", "runs"),
    [
        pytest.param("table1", ["--tasks", "4", "--seeds", "1"], 10, marks=pytest.mark.slow),
        ("proxies", ["--tasks", "4"], 3),
        pytest.param("forgetting", ["--tasks", "4"], 5, marks=pytest.mark.slow),
        ("directions", ["--tasks", "4"], 1),
        ("generation", [], 0),
    ],
)
def test_an_experiment_is_run_rendered_and_not_repeated(name, more, runs, inputs, tmp_path, monkeypatch):
    command = ["paper", name, *inputs, *more, "--out", str(tmp_path)]
    assert onea(*command, patch=monkeypatch) == 0
    made = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert {".html"} <= made or {".png"} <= made
    records = sorted(tmp_path.rglob("record.json"))
    assert len(records) == runs
    finished = {path: json.loads(path.read_text())["dates"]["finished"] for path in records}
    assert all(finished.values())
    pages = {path: path.read_bytes() for path in tmp_path.rglob("*.html")}
    assert onea(*command, patch=monkeypatch) == 0
    assert {path: json.loads(path.read_text())["dates"]["finished"] for path in records} == finished
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.html")} == pages
    for page in pages:
        first = Path(page).read_text("utf-8")
        assert "http" not in first.split("<body")[0].replace("http-equiv", ""), "self-contained"
        assert len(first) < 3_000_000
        wanted = ["The stream", "Accuracy of each task", "Spectra and gates per layer"] if runs else []
        assert all(f"<h3>{heading}</h3>" in first for heading in wanted)
        assert first.count("<h3>Accuracy as classes arrive</h3>") == bool(runs)
        twice = {"directions": "Update strength per direction", "alignment": "Basis before and after"}.get(name)
        assert not twice or f"<h3>{twice}</h3>" not in first, "what the figure itself shows is not shown again"
        assert "Nothing has been run yet" not in first


def test_runs_that_differ_only_in_the_merge_share_their_training(inputs, tmp_path, monkeypatch, capsys):
    def shared(*more: str) -> list[bool]:
        out = tmp_path / "-".join(["out", *more])
        command = ["paper", "proxies", *inputs, "--tasks", "4", "--out", str(out), *more]
        assert onea(*command, "--dry-run", patch=monkeypatch) == 0
        printed.append("2 of them differ from another only in the merge" in capsys.readouterr().out)
        assert onea(*command, patch=monkeypatch) == 0
        records = [json.loads(path.read_text()) for path in sorted(out.rglob("record.json"))]
        return sorted(all(task.get("training_shared") for task in record["tasks"]) for record in records)

    printed: list[bool] = []
    assert shared() == [False, True, True]
    assert shared("--no-share-training") == [False, False, False]
    assert printed == [True, False]


def test_records_are_rendered_without_their_data_and_backbone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tiny_vit(tmp_path / "tiny.safetensors")
    write_tiny_images(tmp_path / "images", classes=6, train=2, test=1)
    sources = ["--data", "folder:images", "--backbone", "tiny.safetensors", "--device", "cpu"]
    command = ["paper", "proxies", *sources, "--tasks", "3", "--out", "results"]
    assert onea(*command, patch=monkeypatch) == 0
    pages = {path: path.read_bytes() for path in sorted((tmp_path / "results" / "table5").iterdir())}
    shutil.rmtree(tmp_path / "results" / "table5")
    shutil.rmtree(tmp_path / "images")
    (tmp_path / "tiny.safetensors").unlink()
    assert onea(*command, patch=monkeypatch) == 2, "running needs them"
    assert onea(*command, "--render-only", patch=monkeypatch) == 0
    assert {path: path.read_bytes() for path in sorted((tmp_path / "results" / "table5").iterdir())} == pages
    damaged = min((tmp_path / "results" / "runs").iterdir()) / "record.json"
    damaged.write_bytes(damaged.read_bytes()[:99])
    capsys.readouterr()
    assert onea(*command, "--render-only", patch=monkeypatch) == 0
    assert f"{damaged.relative_to(tmp_path)} is damaged" in capsys.readouterr().out, "a gap has a reason"
