# SPDX-License-Identifier: Apache-2.0
"""``onea tour``: every command is printed and runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from onea.cli import tour
from onea.data.glyphs import FAMILIES


def test_the_pictures_are_those_of_the_dataset():
    assert {char for chars in tour._FAMILIES.values() for char in chars} == {*tour._NAMES}
    assert all({*chars} <= {*FAMILIES[family]} for family, chars in tour._FAMILIES.items())


def test_every_command_is_shown_before_it_runs(onea, monkeypatch, tiny_vit):
    pytest.importorskip("fastapi")
    monkeypatch.setattr(tour, "_SIZE", ("--backbone", tiny_vit))
    monkeypatch.setattr(tour, "_TRAIN_IMAGES", 3)
    code, out, err = onea("tour", "--out", "here")
    assert code == 0, err
    shown = re.findall(r"^\$ (?:onea )?(\S+)", out, re.M)
    commands = ["cd", "teach", "predict", "teach", "predict", "evaluate", "undo", "history", "serve"]
    assert shown[: len(commands)] == commands
    outputs = out.split("\n$ ")
    assert "now has 8 classes (version 1)" in outputs[2]
    assert all(f"new/{name}.png" in outputs[3] for name in ("cloud", "heart", "yin-yang"))
    assert "now has 9 classes (version 2)" in outputs[4]
    shares = re.search(r"([\d.]+) % correct, ([\d.]+) % wrong, ([\d.]+) % unknown of \d+ images", outputs[6])
    assert shares
    assert sum(round(10 * float(share)) for share in shares.groups()) == 1000
    assert "at version 1 again, with 8 classes" in outputs[7]
    assert re.search(r"tour\.onea \(version 1, 8 classes\) at http://127\.0\.0\.1:\d+", outputs[9])
    assert json.loads(onea("info", "here/tour.onea", "--json")[1])["classes"] == 8
    code, _, err = onea("tour", "--out", "here")
    assert code == 2
    assert "contains an earlier tour" in err


def test_without_the_service_the_tour_goes_on(capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onea.serve.service", None)
    tour._serve()
    assert "-m pip install 'fastapi" in capsys.readouterr().out
    assert not list(Path().glob("tour.onea"))
