# SPDX-License-Identifier: Apache-2.0
"""Streams as files: what is exported, runs on them, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.records import comparable_fields
from support.tiny import write_tiny_images

from onea.errors import OneaError
from onea.research.data.sources import load_dataset
from onea.research.report.aggregate import settings
from onea.research.report.compare import compare
from onea.research.report.records import load_records
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.runner import run
from onea.research.runs.setup import prepare, stream_of_run
from onea.research.runs.stream_file import FORMAT, export_stream, stream_from_file, stream_options
from onea.research.streams import Stream, class_order, make_stream
from onea.runtime import make_runtime

OPTIONS: dict[str, dict[str, Any]] = {
    "step": {"tasks": 3, "gamma": 0.2, "seed": 5},
    "descending": {"tasks": 3, "gamma": 0.2, "order": "descending"},
    "balanced": {"stream": "balanced", "tasks": 2, "seed": 2},
    "sizes": {"sizes": "3,1,2", "seed": 3},
    "long tail": {"sizes": "3,1,2", "long_tail": 0.3, "seed": 4},
}


@pytest.fixture
def values(tiny_run: dict[str, Any]) -> dict[str, Any]:
    """A run without an option of its stream."""
    return {name: value for name, value in tiny_run.items() if name not in ("sizes", "options")} | {
        "method": "simplecil"
    }


@pytest.fixture
def export(onea, values, tmp_path) -> Any:
    """The file of a stream that the command prints, and its content."""

    def call(**options: Any) -> tuple[str, dict[str, Any]]:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "stream"]
        flags += ["--balanced"] if options.get("stream") == "balanced" else []
        code, out, err = onea("stream", f"--data={values['data']}", "--json", *flags)
        assert code == 0, err
        (tmp_path / "stream.json").write_text(out)
        return str(tmp_path / "stream.json"), json.loads(out)

    return call


def test_a_stream_without_a_dataset_has_numbers(onea):
    code, out, _ = onea("stream", "--classes", "100", "--tasks", "10", "--json")
    content = json.loads(out)
    assert code == 0
    assert content == {
        "format": "onea-stream-1",
        "seed": 1,
        "order": "shuffled",
        "class_order": list(class_order(100, 1)),
        "sizes": [14, 1, 3, 6, 36, 9, 23, 2, 2, 4],
        "names": [],
        "samples": None,
    }


def test_files_are_named_relative_to_their_folder_and_pixels_by_number(export, onea):
    _, content = export(tasks=3)
    assert content["class_order"] == [f"class{index:02d}" for index in class_order(6, 1)]
    assert content["train"]["class03"] == [f"train/class03/{number}.png" for number in range(6)]
    assert content["test"]["class03"] == [f"test/class03/{number}.png" for number in range(3)]
    glyphs = json.loads(onea("stream", "--data", "glyphs-mini", "--json")[1])
    dataset = load_dataset("glyphs-mini")
    assert glyphs["names"][0] == "suits"
    for side, split in (("train", dataset.train), ("test", dataset.test)):
        rows = {row: name for name, numbers in glyphs[side].items() for row in numbers}
        assert [rows[row] for row in range(len(split))] == [dataset.classes[label] for label in split.labels]


def test_the_json_is_also_written_beside_the_figures(onea):
    code, out, err = onea("stream", "--json", "--out", "drawn")
    assert (code, json.loads(out)["format"], len(err.splitlines())) == (0, FORMAT, 4)
    assert Path("drawn/stream.json").read_text() == out
    assert onea("stream", "--out", "again")[1].splitlines()[-1] == str(Path("again/stream.json"))
    assert Path("again/stream.json").read_text() == out


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_on_an_exported_stream_is_the_run_that_the_options_describe(options, export, values, tmp_path):
    file, _ = export(**options)
    direct = run(make_config(values | options), tmp_path / "direct")
    config = make_config(values | {"stream": file})
    from_file = run(config, tmp_path / "from file")
    fields = [comparable_fields(record) for record in (direct, from_file)]
    assert [record.pop("config")["seed"] for record in fields] == [options.get("seed", 1)] * 2
    assert fields[0] == fields[1]
    assert len(settings([direct, from_file])) == 1, "a report has them in one table"
    comparison = compare(*(load_records(tmp_path / name) for name in ("direct", "from file")))
    assert all(row.mean == 0 for row in comparison.rows)
    assert run(config, tmp_path / "from file") == from_file, "it was repeated"


def test_the_images_of_a_long_tail_are_those_of_the_run(export, values):
    file, content = export(**OPTIONS["long tail"])
    prepared = prepare(make_config(values | {"stream": file}), make_runtime("cpu", "fp32", 1))
    used = [len(prepared.task(index).rows) for index in range(3)]
    listed = [len(content["train"][name]) for name in content["class_order"]]
    assert listed == content["samples"] == [6, 5, 4, 3, 2, 2]
    assert used == [sum(listed[:3]), listed[3], sum(listed[4:])]
    with pytest.raises(OneaError, match="leave out the seed"):
        make_config(values | {"stream": file, "seed": 9})


def test_natural_tasks_keep_their_names(onea):
    content = json.loads(onea("stream", "--data", "glyphs-mini", "--json")[1])
    config = make_config({"data": "glyphs-mini", "stream": content})
    dataset = load_dataset("glyphs-mini")
    assert stream_of_run(config, dataset) == stream_of_run(RunConfig(), dataset)


def test_the_stream_is_part_of_the_key(export, values):
    file, content = export(tasks=3)
    key = make_config(values | {"stream": file}).key()
    assert key == make_config(values | {"stream": content}).key()
    swapped = content | {"class_order": content["class_order"][::-1]}
    other_images = content | {"test": content["train"]}
    assert len({key, *(make_config(values | {"stream": each}).key() for each in (swapped, other_images))}) == 3
    recorded = json.loads(json.dumps(make_config(values | {"stream": file}).identity()))
    assert RunConfig(**recorded | {"store": "auto"}).key() == key


def test_an_earlier_stream_of_a_folder_is_not_continued(export, values, tmp_path):
    file, content = export(tasks=3)
    run(make_config(values | {"stream": file}), tmp_path / "run")
    swapped = content | {"class_order": content["class_order"][::-1]}
    with pytest.raises(OneaError, match=r"contains another run.*stream_file"):
        run(make_config(values | {"stream": swapped}), tmp_path / "run")


def test_another_seed_keeps_the_stream(export, values):
    file, content = export(tasks=3)
    config = make_config(values | {"stream": file, "seed": 7})
    stream = stream_of_run(config, load_dataset(config.data))
    assert config.seed == 7
    assert [f"class{index:02d}" for index in stream.class_order] == content["class_order"]


@pytest.mark.parametrize("numbers", [True, False])
def test_a_file_of_others_needs_only_order_and_sizes(numbers, values):
    order = [2, 0, 1, 5, 4, 3]
    content = {
        "format": FORMAT,
        "class_order": order if numbers else [f"class{index:02d}" for index in order],
        "sizes": [4, 2],
    }
    config = make_config(values | {"stream": content})
    assert stream_of_run(config, load_dataset(config.data)) == Stream(tuple(order), (4, 2))


def test_every_stream_survives_its_file():
    dataset = load_dataset("glyphs-mini")
    for seed in range(5):
        stream = make_stream(classes=50, tasks=4 + seed, gamma=0.1, seed=seed, long_tail=0.5, n_max=12)
        for content in (export_stream(stream, seed, "shuffled"), export_stream(stream, seed, "shuffled", dataset)):
            options = stream_options(json.loads(json.dumps(content)), "file")
            assert stream_from_file(options["stream_file"], dataset) == stream


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "onea-stream-9"}, "'format' is not 'onea-stream-1'"),
        ({"class_order": [1, "a"]}, "'class_order' is missing or wrong"),
        ({"class_order": [0, 0, 1, 2, 3, 4]}, "exactly once"),
        ({"class_order": [0, 1, 2, 3, 4, 6]}, "class '6', which"),
        ({"class_order": list("abcdef")}, "class 'a', which"),
        ({"class_order": [0, 1]}, "The stream has 2 classes but"),
        ({"sizes": [3, 4]}, "add up to 7"),
        ({"sizes": [6, 0]}, "'sizes' is missing or wrong"),
        ({"sizes": None}, "'sizes' is missing or wrong"),
        ({"seed": "one"}, "'seed' is missing or wrong"),
        ({"seed": -1}, "seed is -1"),
        ({"order": "random"}, "'order' is missing or wrong"),
        ({"names": ["one"]}, "1 task names for 2 tasks"),
        ({"samples": [1]}, "1 sample counts for 6 classes"),
        ({"train": {"a": ["x.png"]}, "test": {"a": ["y.png"]}}, "lists other training or test images"),
    ],
)
def test_a_file_that_does_not_match_gets_one_sentence(change, message, values, onea, tmp_path):
    file = Path("stream.json")
    content = {"format": FORMAT, "class_order": list(range(6)), "sizes": [4, 2]}
    file.write_text(json.dumps(content | change))
    words = [f"--{name}={values[name]}" for name in ("data", "backbone", "precision", "threads")]
    code, _, err = onea("run", "simplecil", "--stream", "stream.json", *words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [file.resolve()]


def test_other_images_are_refused(export, values, tmp_path):
    file, _ = export(tasks=3)
    write_tiny_images(tmp_path / "more", train=7)
    other = values | {"stream": file, "data": f"folder:{tmp_path / 'more'}"}
    with pytest.raises(OneaError, match="lists other training or test images"):
        prepare(make_config(other), make_runtime("cpu", "fp32", 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "one-a", "--stream", "missing.json"], "cannot be read"),
        (["run", "one-a", "--stream", "text.json"], "not the file of a stream"),
        (["run", "one-a", "--stream", "file"], "give its path"),
        (["run", "one-a", "--stream", "stream.json", "--tasks", "2"], "tasks has no effect"),
        (["run", "one-a", "--stream", "stream.json", "--long-tail", "0.5"], "long_tail has no effect"),
        (["stream", "--data", "glyphs-mini", "--classes", "5"], "--classes has no effect"),
        (["stream", "--root", "data"], "--root has no effect"),
    ],
)
def test_options_that_do_not_fit_get_one_sentence(words, message, onea):
    Path("text.json").write_text("words")
    Path("stream.json").write_text(json.dumps({"format": FORMAT, "class_order": [0, 1], "sizes": [2]}))
    code, _, err = onea(*words)
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert message in err
