# SPDX-License-Identifier: Apache-2.0
"""Consistent output: commands and HTTP have the same keys and values, tables fit into 80 columns."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.models import class_folders, tiny_model

from onea import load as onea_load
from onea.cli.display import print_learned
from onea.model.reports import format_accuracy


@pytest.fixture(scope="module")
def taught(tiny_vit, tiny_images, tmp_path_factory) -> Path:
    """A model of three classes, taught at once."""
    root = tmp_path_factory.mktemp("taught")
    files_of = {name: files for name, files in class_folders(tiny_images / "train").items() if name < "class03"}
    labels = [name for name, files in files_of.items() for _ in files]
    return tiny_model(tiny_vit).learn([file for files in files_of.values() for file in files], labels).save(root / "m")


@pytest.fixture
def shop(onea, taught) -> Path:
    shutil.copytree(taught, "shop.onea")
    return Path("shop.onea")


def test_json_csv_and_the_service_have_the_same_keys_and_values(onea, shop, tiny_images):
    schemas = pytest.importorskip("onea.serve.schemas", exc_type=ImportError)
    import onea as library

    photos = str(tiny_images / "test")
    lines = [json.loads(line) for line in onea("predict", "shop.onea", photos, "--json")[1].splitlines()]
    answers = library.load(shop).snapshot().answers(tiny_images / "test", 3)
    table = list(csv.DictReader(onea("predict", "shop.onea", photos, "--csv")[1].splitlines()))
    for line, answer, row in zip(lines, answers, table, strict=True):
        assert {*line} == {*schemas.ImagePrediction.of(answer).model_dump(by_alias=True)}
        assert (line["class"], line["verdict"]) == (answer.label, answer.verdict) == (row["class"], row["verdict"])
        assert line["probability"] == pytest.approx(answer.probability, abs=1e-5)
        assert float(row["none_of_these"]) == line["none_of_these"] == pytest.approx(answer.none, abs=1e-5)
        assert row["candidates"] == "|".join(name for name, _ in answer.candidates)
        assert [row[f"class_{place}"] for place in (1, 2, 3)] == [item["class"] for item in line["top"]]
        assert sum(item["probability"] for item in line["top"]) + line["none_of_these"] == pytest.approx(1)
        assert set(row) - {f"{what}_{place}" for what in ("class", "probability") for place in (1, 2, 3)} == {*line} - {
            "top"
        }


def test_classes_are_listed_as_the_service_lists_them(onea, shop):
    code, out, _ = onea("classes", "shop.onea")
    assert code == 0
    assert [line.split() for line in out.splitlines() if line.strip().startswith("class0")] == [
        [f"class0{number}", "6"] for number in range(3)
    ]
    result = json.loads(onea("classes", "shop.onea", "--json")[1])
    assert result == {"version": 1, "count": 3, "classes": [{"name": f"class0{n}", "images": 6} for n in range(3)]}


def test_evaluate_as_json(onea, shop, tiny_images):
    broken = Path("photos/class00")
    shutil.copytree(tiny_images / "test", "photos")
    (broken / "cut.png").write_bytes((broken / "0.png").read_bytes()[:60])
    code, _, err = onea("evaluate", "shop.onea", "photos", "--json")
    assert code == 2
    assert "pass --on-bad skip." in err
    code, out, err = onea("evaluate", "shop.onea", "photos", "--json", "--on-bad", "skip")
    assert code == 0, err
    assert "left out" in err
    assert "cut.png" in err
    result = json.loads(out)
    assert [item["class"] for item in result["untaught_classes"]] == ["class03", "class04", "class05"]
    assert sum(item["images"] for item in result["classes"]) == result["images"] == 9
    assert result["accuracy"] == sum(item["correct"] for item in result["classes"]) / 9
    assert result["accuracy"] + result["wrong"] + result["unknown"] == pytest.approx(1)
    assert len(result["skipped"]) == 1
    assert not list(Path().glob("*.png")), "figures are drawn only on request"
    code, out, err = onea("evaluate", "shop.onea", "photos", "--json", "--on-bad", "skip", "-o", "seen.png")
    assert json.loads(out)["images"] == 9
    assert Path("seen.png").is_file()


def test_evaluate_in_a_read_only_folder_draws_no_figure(onea, shop, tiny_images, monkeypatch):
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)  # root may write everywhere
    code, out, err = onea("evaluate", "shop.onea", str(tiny_images / "test"))
    assert code == 0, err
    assert "png" not in out
    assert onea("evaluate", "shop.onea", str(tiny_images / "test"), "-o", "seen.png")[0] == 2


def test_two_classes_can_be_merged(onea, shop, tiny_images):
    code, _, err = onea("rename", "shop.onea", "class00", "class01")
    assert code == 2
    assert "choose another name for 'class00', or merge them with --merge." in err
    code, out, _ = onea("rename", "shop.onea", "class00", "class01", "--merge")
    assert code == 0
    assert "shop.onea now has 2 classes (version 2)" in out
    result = json.loads(onea("classes", "shop.onea", "--json")[1])
    assert result["classes"] == [{"name": "class01", "images": 12}, {"name": "class02", "images": 6}]
    answers = [json.loads(line) for line in onea("predict", "shop.onea", str(tiny_images), "--json")[1].splitlines()]
    assert {item["class"] for line in answers for item in line["top"]} == {"class01", "class02"}
    assert onea("rename", "shop.onea", "class01", "class01", "--merge")[0] == 2
    assert "undid version 2 (merged class00 into class01)" in onea("undo", "shop.onea")[1]
    assert json.loads(onea("classes", "shop.onea", "--json")[1])["count"] == 3


def test_listed_defaults_of_a_method_are_those_of_a_run(onea):
    from onea.research.data.sources import load_dataset
    from onea.research.runs.config import make_config
    from onea.research.runs.setup import method_options
    from onea.schedules import DatasetSize

    def shown(*words: str) -> dict[str, str]:
        rows = [line.split() for line in onea("methods", "one-a", *words)[1].splitlines() if line.startswith("--")]
        return {row[0]: row[1] for row in rows}

    glyphs = load_dataset("glyphs-mini")
    of_glyphs = DatasetSize(len(glyphs.train), len(glyphs.classes), len(glyphs.groups))
    for words, config, shape in (
        ([], {}, of_glyphs),
        ([], {"backbone": "vit_base_patch16_224.augreg_in21k"}, of_glyphs),  # which network it is changes none of them
        (["--data", "cifar100"], {"data": "cifar100"}, DatasetSize(50_000, 100, 10)),
        (["--preset", "paper/cub200", "--data", "cifar100"], {"preset": "paper/cub200"}, of_glyphs),
    ):
        options = method_options(make_config({"method": "one-a"} | config), shape)
        result = shown(*words)
        assert result["--learning-rate"] == str(options.learning_rate)
        assert result["--batch-size"] == str(options.batch_size)
        assert result["--epochs"] == str(options.epochs)
    assert shown() != shown("--preset", "paper")


def test_a_model_taught_class_by_class_comes_with_advice(onea, tiny_vit, tiny_images):
    fast = ["--backbone", tiny_vit, "--epochs", "1", "--threads", "1", "--precision", "fp32"]
    for number in range(2):
        Path(f"day{number}").mkdir()
        Path(f"day{number}/class0{number}").symlink_to(tiny_images / f"train/class0{number}")
    first = onea("teach", "shop.onea", "day0", *fast)[1]
    assert "never been trained" not in first, "there is nothing to distinguish a single class from"
    second = onea("teach", "shop.onea", "day1")[1]
    assert "Its adapter has never been trained, since that takes several classes" in second
    assert any("never been trained" in item for item in json.loads(onea("info", "shop.onea", "--json")[1])["remarks"])
    Path("both").mkdir()
    for number in range(2):
        Path(f"both/class0{number}").symlink_to(tiny_images / f"train/class0{number}")
    assert onea("teach", "shop.onea", "both")[0] == 0
    trained = json.loads(onea("history", "shop.onea", "--json")[1])["updates"][-1]["trained"]
    assert ("never been trained" in onea("info", "shop.onea")[1]) == (not trained)


def test_the_printed_time_includes_loading_and_saving(onea, tiny_vit, tiny_images):
    """Not only the update: loading and reading before it and writing after it take time, too."""
    fast = ["--backbone", tiny_vit, "--epochs", "1", "--threads", "1", "--precision", "fp32"]
    started = time.perf_counter()
    out = onea("teach", "new.onea", str(tiny_images / "train"), *fast)[1]
    waited = time.perf_counter() - started
    match = re.search(r"from 36 images in (\d+\.\d) s", out)
    assert match
    [update] = json.loads(onea("history", "new.onea", "--json")[1])["updates"]
    assert update["seconds"] - 0.05 <= float(match[1]) <= waited + 0.05
    print_learned(Console(), onea_load("new.onea"), Path("new.onea"), 19.6)
    assert onea("info", "new.onea")[1].startswith("learned 6 new classes from 36 images in 19.6 s")


def test_singular_forms(onea, shop, tiny_images):
    shutil.copytree(tiny_images / "test/class00", "more/class00", ignore=shutil.ignore_patterns("[12].png"))
    assert "learned 1 known class again from 1 image in" in onea("teach", "shop.onea", "more", "--threads", "1")[1]
    assert "shop.onea now has 1 class " in onea("forget", "shop.onea", "class01", "class02")[1]
    assert "is at version 2 again, with 3 classes" in onea("undo", "shop.onea")[1]


def test_a_heic_photo_in_a_folder_is_never_ignored(onea, shop, tiny_images):
    shutil.copytree(tiny_images / "test/class00", "new")
    Path("new/IMG_1.HEIC").write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heic")  # nothing can read it
    code, out, err = onea("predict", "shop.onea", "new")
    assert (code, out) == (2, "")
    assert "1 of 4 images cannot be read" in err
    assert "IMG_1.HEIC" in err
    code, out, err = onea("predict", "shop.onea", "new", "--json", "--on-bad", "skip")
    assert (code, len(out.splitlines())) == (0, 3)
    assert "left out" in err
    assert "IMG_1.HEIC" in err


@pytest.mark.parametrize(
    "words", ["predict shop.onea {}", "evaluate shop.onea {}", "history shop.onea", "classes shop.onea"]
)
def test_tables_fit_into_80_columns(onea, shop, tiny_images, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    Path("new").symlink_to(tiny_images / "test")
    code, out, err = onea(*words.format("new").split())
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80
    result = out.split()
    wanted = ["class00", "class01", "class02"]
    if "history" in words:
        [update] = json.loads(onea("history", "shop.onea", "--json")[1])["updates"]
        wanted = [update["date"][:10], "held-out", "seconds"]
        assert format_accuracy(update) in out
    for word in wanted:
        assert any(word in item for item in result), f"{word} is broken in\n{out}"


LONG = {
    "class00": "Golden delicious apples from the old orchard",
    "class01": "Golden delicious apples from the new orchard (organic)",
    "class02": "a_name_without_any_space_that_is_longer_than_half_a_line_is",
}


@pytest.mark.parametrize(
    "words", ["predict shop.onea {}", "evaluate shop.onea {}", "history shop.onea", "classes shop.onea",
              "check shop.onea", "check shop.onea {}"],
)  # fmt: skip
def test_long_names_are_complete_in_80_columns(onea, shop, tiny_images, monkeypatch, words):
    """Wrapped names are complete, and no number is broken."""
    monkeypatch.setenv("COLUMNS", "80")
    for old, new in LONG.items():
        assert onea("rename", "shop.onea", old, new)[0] == 0
        shutil.copytree(tiny_images / "test" / old, Path("new") / new)
    code, out, err = onea(*words.format("new").split())
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    first = "".join(re.split(r"\s{2,}", line)[0] for line in out.splitlines())  # columns are two spaces apart
    for name in LONG.values():
        bare = name.replace(" ", "")
        assert any(bare in text.replace(" ", "") for text in (first, out.replace("\n", ""))), f"{name} in\n{out}"
    for image in Path("new").rglob("*.png") if "predict" in words else ():
        assert str(image) in out.replace("\n", ""), out
