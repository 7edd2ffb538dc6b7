# SPDX-License-Identifier: Apache-2.0
"""``onea check``: its tables, JSON, figures and error messages."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from onea.cli.display import print_check
from onea.model.evaluation.check import Check
from onea.model.evaluation.confusions import Absorber, Misclassified, Mistakes


def test_a_check_of_a_folder_prints_tables_and_draws_figures(onea, shop, tiny_images):
    shutil.copytree(tiny_images / "train", "photos")
    shutil.move("photos/class00/0.png", "photos/class01/moved.png")
    code, out, err = onea("check", str(shop), "photos", "--threads", "1", "-o", "found")
    assert code == 0, err
    assert "classes to improve, the most urgent first" in out
    assert "photos that may be mislabelled" in out
    assert "few photos" in out
    for name in ("learning-curves", "suspicious-photos"):
        assert str(Path("found") / f"{name}.png") in out
        assert Image.open(f"found/{name}.png").width > 500


def test_json_has_the_whole_check(onea, shop, tiny_images):
    code, out, err = onea("check", str(shop), str(tiny_images / "train"), "--threads", "1", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["measured"] is True
    assert result["version"] == 1
    assert {item["name"]: item["taught"] for item in result["classes"]} == {
        f"class{row:02d}": 6 if row < 4 else 0 for row in range(6)
    }
    assert all(len(item["curve"]) == len(result["shares"]) for item in result["classes"])
    ratios = [item["ratio"] for item in result["suspects"]]
    assert ratios == sorted(ratios, reverse=True)
    assert all(Path(path).is_file() for path in result["pictures"])


def test_a_model_is_checked_without_photos_and_figures(onea, shop):
    code, out, err = onea("check", str(shop))
    assert code == 0, err
    assert "give a folder of photos" in out
    assert not Path("check").exists()
    result = json.loads(onea("check", str(shop), "--json")[1])
    assert [item["taught"] for item in result["classes"]] == [6] * 4
    assert {item["advice"] for item in result["classes"]} == {"few photos"}
    assert result["suspects"] == result["pictures"] == []


def test_a_model_without_classes_is_not_checked(onea, shop):
    assert onea("forget", str(shop), *(f"class{row:02d}" for row in range(4)))[0] == 0
    code, _, err = onea("check", str(shop))
    assert (code, err) == (2, "onea: The model has no classes yet; teach it some first.\n")


def test_unreadable_photos_are_refused_or_left_out(onea, shop, tiny_images):
    shutil.copytree(tiny_images / "train", "photos")
    Path("photos/class00/x.jpg").write_text("no image")
    code, _, err = onea("check", str(shop), "photos", "--threads", "1")
    assert code == 2
    assert "not an image" in err
    code, _, err = onea("check", str(shop), "photos", "--threads", "1", "--on-bad", "skip")
    assert code == 0
    assert "left out photos/class00/x.jpg" in err.replace("\\", "/")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist; give a folder with one folder of images for each class.\n"),
        (["empty"], "no class folders"),
        (["photos", "--on-bad", "x"], "choose fail or skip"),
        (["--most", "0"], "must be at least 1"),
        (["empty", "-o", "file/found"], "Cannot write"),
    ],
)
def test_a_mistake_gets_one_sentence(onea, shop, arguments, message):
    Path("empty").mkdir()
    Path("file").touch()
    code, _, err = onea("check", str(shop), *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_check_without_a_folder_uses_held_out_photos(onea, shop):
    code, out, err = onea("check", str(shop))
    assert code == 0, err
    assert " of 4 held-out photos misclassified" in out
    assert "not measured" not in out
    mistakes = json.loads(onea("check", str(shop), "--json")[1])["mistakes"]
    assert mistakes["images"] == 4
    assert mistakes.keys() == {"images", "mistakes", "absorbing", "misclassified"}


def test_held_out_mistakes_are_printed():
    console = Console(width=100, file=io.StringIO())
    mistakes = Mistakes(60, 8, (Absorber("fig", 4, 0.5, ("kiwi", "plum")),), (Misclassified("kiwi", 3, 4, "fig"),))
    print_check(console, Check(1, (), (), mistakes=mistakes), 20)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["fig", "4", "50", "kiwi,", "plum"] in lines
    assert ["kiwi", "3", "of", "4", "fig"] in lines
    assert ["8", "of", "60", "held-out", "photos", "misclassified"] in lines
