# SPDX-License-Identifier: Apache-2.0
"""Reuse of finished runs: images, weights and presets are compared, and one process at a time makes a run."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from support import ROOT
from support.malformed import leaves, replaced, without
from support.records import comparable_fields
from support.tiny import save_plain

from onea.errors import OneaError
from onea.files import dump_with_checksum
from onea.locks import folder_lock
from onea.research.methods import METHODS
from onea.research.record import find_record_files, read_record_file, write_record
from onea.research.runs.config import make_config
from onea.research.runs.grid import InProcess, RecordStore, run_grid
from onea.research.runs.reuse import InputChecker
from onea.research.runs.runner import read_run, run
from onea.runtime import Progress


@pytest.fixture
def images(tiny_images, tmp_path) -> Path:
    """Images to be changed, in a format whose files always have the same size."""
    root = tmp_path / "images"
    for file in sorted(tiny_images.rglob("*.png")):
        target = (root / file.relative_to(tiny_images)).with_suffix(".bmp")
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(file).save(target)
    return root


@pytest.fixture
def weights(tiny_vit, tmp_path) -> Path:
    return Path(shutil.copy(tiny_vit, tmp_path / "own.safetensors"))


@pytest.fixture
def values(tiny_run, images, weights) -> dict:
    rest = {name: value for name, value in tiny_run.items() if name != "options"}
    return rest | {"method": "simplecil", "data": f"folder:{images}", "backbone": str(weights)}


class RemarkCollector(Progress):
    def __init__(self):
        self.texts: list[str] = []

    def remark(self, text: str) -> None:
        self.texts.append(text)


def invert(file: Path) -> None:
    """Other pixels in a file of the same name, size and modification time."""
    before = file.stat()
    Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def mark_unfinished(folder: Path) -> None:
    """As if the run had been killed after its first task."""
    write_record(folder, json.loads((folder / "record.json").read_text()) | {"status": "running"})


# what is compared


def test_a_finished_run_on_other_images_is_refused(values, images, tmp_path):
    run(make_config(values), tmp_path / "o")
    before = (tmp_path / "o/record.json").read_bytes()
    for file in sorted((images / "train").rglob("*.bmp"))[::2]:
        file.unlink()
    with pytest.raises(OneaError, match=r"finished run with other images \(names, sizes or classes.*another --out"):
        run(make_config(values), tmp_path / "o")
    assert (tmp_path / "o/record.json").read_bytes() == before


def test_the_command_lists_the_changes_and_writes_nothing(values, images, onea):
    arguments = ["run", "simplecil", *(f"--{name}={value}" for name, value in values.items() if name != "method")]
    assert onea(*arguments, "--out", "o")[0] == 0
    files_before = {path: path.stat().st_mtime_ns for path in Path("o").iterdir()}
    shutil.rmtree(images / "train/class03")
    code, out, err = onea(*arguments, "--out", "o")
    assert (code, out) == (2, "")
    assert err.startswith("onea: o contains a finished run with other images (Class 'class03' is in test/")
    assert len(err.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in Path("o").iterdir()} == files_before


@pytest.mark.parametrize("store", ["auto", "exact"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_an_edit_that_keeps_size_and_time_is_detected(store, split, values, images, tmp_path):
    config = make_config(values | {"store": store})
    run(config, tmp_path / "o")
    invert(images / split / "class00" / "0.bmp")
    with pytest.raises(OneaError, match=rf"other images \(the pixels of {split} have changed\)"):
        run(config, tmp_path / "o")
    mark_unfinished(tmp_path / "o")
    with pytest.raises(OneaError, match=r"The data of the run .* changed since it began \(sha256\)"):
        run(config, tmp_path / "o")


def test_touched_or_copied_images_are_unchanged(values, images, tmp_path):
    config = make_config(values)
    first = run(config, tmp_path / "o")
    for file in images.rglob("*.bmp"):
        os.utime(file, ns=(1, 1))
    assert run(config, tmp_path / "o") == first
    shutil.copytree(images, tmp_path / "copy")
    shutil.rmtree(images)
    (tmp_path / "copy").rename(images)
    assert run(config, tmp_path / "o") == first
    mark_unfinished(tmp_path / "o")
    assert comparable_fields(run(config, tmp_path / "o"))["data"] == first["data"]


def test_unchanged_files_are_not_read(values, tmp_path, monkeypatch):
    config = make_config(values)
    first = run(config, tmp_path / "o")
    for name in (
        "onea.research.data.pack.read_image",
        "onea.research.data.pack.image_size",
        "onea.research.runs.reuse.load_backbone",
    ):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("reads"))
    monkeypatch.setenv("ONEA_CACHE", str(tmp_path / "empty cache"))
    assert run(config, tmp_path / "o") == first


def test_a_finished_run_needs_neither_images_nor_weights(values, images, weights, tmp_path, onea):
    arguments = ["run", "simplecil", *(f"--{name}={value}" for name, value in values.items() if name != "method")]
    first = onea(*arguments, "--out", "o")
    shutil.rmtree(images)
    weights.unlink()
    code, out, err = onea(*arguments, "--out", "o")
    assert code == 0
    assert out.startswith(first[1])
    remarks = [
        f"its {what} were not found and could not be compared"
        for what in (f"images (folder:{images})", f"weights ({weights})")
    ]
    assert err.splitlines() == remarks
    remarks_of_run = RemarkCollector()
    run(make_config(values), Path("o"), remarks_of_run)
    assert remarks_of_run.texts == remarks


@pytest.mark.parametrize("name", ["list:missing.txt", "list:a.txt,b.txt", "cub200", "imagenet-a", "cifar100"])
def test_missing_data_is_not_downloaded(name, tmp_path, monkeypatch):
    from onea.data.dataset import MissingData
    from onea.research.data.sources import load_dataset

    monkeypatch.setattr("torchvision.datasets.CIFAR100.download", lambda _: pytest.fail("fetches"))
    with pytest.raises(MissingData):
        load_dataset(name, root=tmp_path, download=False)


def test_an_unwritable_cache_does_not_count_as_changed_images(tmp_path, monkeypatch):
    from onea.files import cache_folder
    from onea.research.data.sources import load_dataset

    config = make_config({"data": "glyphs-mini"})
    record = {"data": {"fingerprint": load_dataset("glyphs-mini", cache=cache_folder()).fingerprint}}
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONEA_CACHE", str(tmp_path / "file"))
    assert InputChecker()._changed_images(record, config, []) == ""


def test_other_weights_with_the_same_times_are_detected(values, weights, tmp_path):
    config = make_config(values)
    run(config, tmp_path / "o")
    before, tensors = weights.stat(), load_file(weights)
    tensors["cls_token"] = tensors["cls_token"] + 1
    save_plain(tensors, weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    with pytest.raises(OneaError, match=r"finished run with other weights \(of .*own\.safetensors\)"):
        run(config, tmp_path / "o")


def test_copied_weights_are_unchanged(values, weights, tmp_path):
    first = run(make_config(values), tmp_path / "o")
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content)
    assert run(make_config(values), tmp_path / "o") == first


def test_a_changed_preset_is_detected(values, tiny_run, tmp_path, monkeypatch):
    options = {name: value for name, value in tiny_run["options"].items() if name != "learning_rate"}
    config = make_config(values | {"method": "one-a", "options": options})
    run(config, tmp_path / "o")
    before = METHODS.load("one-a").base_learning_rate
    monkeypatch.setattr(METHODS.load("one-a"), "base_learning_rate", 0.125)
    with pytest.raises(OneaError, match=rf"finished run with learning_rate {before} instead of 0\.125; choose another"):
        run(config, tmp_path / "o")


def test_one_message_lists_all_changes(values, images, weights, tmp_path):
    config = make_config(values)
    run(config, tmp_path / "o")
    (images / "train/class00/0.bmp").unlink()
    weights.write_bytes(weights.read_bytes()[:999])
    with pytest.raises(OneaError, match=r"with other images \(names.* and other weights \(Backbone file .* is damaged"):
        run(config, tmp_path / "o")


def test_a_remark_reports_another_default_precision(values, tmp_path, monkeypatch):
    config = make_config({name: value for name, value in values.items() if name != "precision"})
    monkeypatch.setattr("onea.runtime._has_bf16", lambda _: False)
    first = run(config, tmp_path / "o")
    monkeypatch.setattr("onea.runtime._has_bf16", lambda _: True)
    remarks_of_run = RemarkCollector()
    assert run(config, tmp_path / "o", remarks_of_run) == first, "a run keeps its precision, finished or not"
    assert remarks_of_run.texts == [
        "it was computed in fp32, but auto selects bf16 here; --precision bf16 makes another run"
    ]


# other options and damaged records


def test_an_option_added_later_does_not_make_another_run(values, tmp_path):
    config = make_config(values | {"method": "one-a", "options": {"rank": 4, "epochs": 1, "min_epochs": 1}})
    run(config, tmp_path / "o")
    record = read_run(tmp_path / "o")
    del record["options"]["margin"]
    record["options"]["dropped_since"] = 1
    write_record(tmp_path / "o", record)
    assert run(config, tmp_path / "o") == record


def test_the_folder_of_every_committed_record_is_that_of_its_configuration():
    paths = [path for path in find_record_files(ROOT / "docs/results") if path.parent.parent.name == "runs"]
    assert len(paths) > 80
    for path in paths:
        config = read_record_file(path)["config"]
        config = make_config(config | {"store": "exact" if config["store"] == "exact" else "auto"})
        assert path.parent.name == config.folder().name


def mutations(record: dict, generator: random.Random):
    """The record with one part at a time, at any depth, removed or replaced."""
    places = [path for path in leaves(record) if path]
    tops = [path for path in places if len(path) <= 2 and isinstance(path[-1], str)]
    for path in tops + generator.choices(places, k=100):
        yield without(record, path)
        for other in (None, "x", -1, [], {}, [[{}]], 1e400):
            yield replaced(record, path, other)


def with_checksum(record: dict) -> bytes:
    """A record whose checksum is right, unless a value has none because JSON has no infinity."""
    try:
        return dump_with_checksum(record)
    except ValueError:
        return json.dumps(record).encode()


@pytest.mark.parametrize("status", ["finished", "running"])
def test_error_message_for_a_damaged_record(status, values, tmp_path):
    """Every changed record is shown or refused, without a traceback."""
    from onea.research.cli.run import print_summary

    config = make_config(values)
    record = run(config, tmp_path / "o") | {"status": status}
    file, refused, count = tmp_path / "o/record.json", 0, 0
    generator = random.Random(12)
    cases = list(mutations(record, generator))
    for damaged in cases if status == "finished" else generator.sample(cases, 100):
        file.write_bytes(with_checksum(damaged))
        count += 1
        try:
            print_summary(run(config, tmp_path / "o"), tmp_path / "o")
        except OneaError:
            refused += 1
    assert count // 4 < refused < count, (refused, count)


def test_the_committed_records_are_valid():
    for path in find_record_files(ROOT / "docs/results"):
        assert read_run(path.parent) is not None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_a_file_does_not_block(values, tmp_path):
    config, folder = make_config(values), tmp_path / "o"
    record = run(config, folder)
    mark_unfinished(folder)
    state = folder / record["checkpoint"]["file"]
    state.unlink()
    os.mkfifo(state)
    with pytest.raises(OneaError, match=r"Checkpoint .* is missing or cannot be read; delete .* to start over"):
        run(config, folder)
    (folder / "record.json").unlink()
    os.mkfifo(folder / "record.json")
    with pytest.raises(OneaError, match=r"record\.json is not a plain file; remove it"):
        run(config, folder)


def test_leftovers_of_a_kill_in_the_last_step_are_deleted(values, tmp_path):
    config, folder = make_config(values), tmp_path / "o"
    record = run(config, folder)
    files_before = {path.name for path in folder.iterdir()}
    for name in ("state-002.safetensors", ".record.json.7.partial", ".state-003.safetensors.7.partial"):
        (folder / name).touch()
    (folder / "state-of-the-art.safetensors").touch()
    assert run(config, folder) == record
    assert {path.name for path in folder.iterdir()} == files_before | {"state-of-the-art.safetensors"}


# grids


def test_finished_runs_on_changed_images_fail_in_a_grid(values, images, tmp_path):
    store = RecordStore(tmp_path / "store")
    configs = [make_config(values | {"seed": seed}) for seed in (1, 2)]
    run_grid(configs, store)
    assert run_grid(configs, store).skipped == tuple(configs)
    before = {config.key(): store.find(config) for config in configs}
    invert(images / "test/class01/1.bmp")
    new = make_config(values | {"seed": 3})
    outcome = run_grid([*configs, new], store, InProcess())
    assert (outcome.finished, outcome.failed, outcome.skipped) == ((new,), tuple(configs), ())
    assert outcome.failures.keys() == {config.key() for config in configs}
    assert "the pixels of test have changed" in str(outcome.failures[configs[0].key()])
    assert {config.key(): store.find(config) for config in configs} == before, "nothing is lost"


def test_a_grid_reads_its_images_once(values, images, tmp_path, monkeypatch):
    store = RecordStore(tmp_path / "store")
    configs = [make_config(values | {"seed": seed}) for seed in (1, 2, 3)]
    run_grid(configs, store)
    invert(images / "test/class01/1.bmp")
    real, calls = InputChecker._changed_images.__globals__["load_run_dataset"], []
    monkeypatch.setattr("onea.research.runs.reuse.load_run_dataset", lambda *a, **k: calls.append(a) or real(*a, **k))
    assert len(run_grid(configs, store).failed) == 3
    assert len(calls) == 1


def test_a_table_omits_runs_on_changed_images(images, weights, onea, monkeypatch):
    shown: list[int] = []

    def write(_, records, __):
        shown.append(len(records))
        return None, []

    monkeypatch.setattr("onea.runtime._has_bf16", lambda _: False)
    monkeypatch.setattr("onea.research.paper.page.write_experiment", write)
    command = importlib.import_module("onea.research.cli.paper")
    monkeypatch.setattr(command, "print_result", lambda _, __, failures: messages.extend(failures.values()))
    arguments = ["paper", "proxies", f"--data=folder:{images}", f"--backbone={weights}", "--tasks=3", "--scale=0.01"]
    arguments += ["--device=cpu", "--out=o"]
    messages: list[str] = []
    assert onea(*arguments)[0] == 0
    invert(images / "train/class00/0.bmp")
    assert onea(*arguments)[0] == 1
    assert len(messages) == 3
    assert all("the pixels of train have changed" in message for message in messages)
    assert onea(*arguments, "--render-only")[0] == 0
    assert shown == [3, 0, 3], "--render-only shows finished runs"


# one process at a time

SLOW_RUN = """
import json, pathlib, sys
from onea.research.runs.config import make_config
from onea.research.runs.runner import run
from onea.runtime import Progress

class Lines(Progress):
    def start_task(self, task, tasks, name):
        print("at", task, flush=True)

values, folder = json.loads(sys.argv[1])
run(make_config(values), pathlib.Path(folder), Lines())
"""


def test_a_second_process_gets_an_error_that_names_the_first(tiny_run, tmp_path, onea):
    slow = tiny_run["options"] | {"epochs": 3000, "min_epochs": 3000, "max_epochs": 3000}
    values = tiny_run | {"options": slow}
    command = [sys.executable, "-c", SLOW_RUN, json.dumps([values, str(tmp_path / "o")])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "at 0\n"
            with pytest.raises(OneaError, match=rf"o is being written by process {other.pid}, for \d+ s so far; wait"):
                run(make_config(values), tmp_path / "o")
            options = [f"--{name.replace('_', '-')}={value}" for name, value in slow.items()]
            rest = [f"--{name}={value}" for name, value in values.items() if name not in ("method", "options")]
            code, _, err = onea("run", "one-a", *rest, *options, "--out", str(tmp_path / "o"))
            assert code == 2
            assert f"is being written by process {other.pid}" in err
            assert [path.name for path in (tmp_path / "o").iterdir()] == ["lock"]
        finally:
            other.kill()
    quick = tiny_run | {"method": "simplecil", "options": {}}
    assert run(make_config(quick), tmp_path / "o")["status"] == "finished", "its lock ended with its process"


def test_a_finished_run_needs_no_lock(values, tmp_path):
    first = run(make_config(values), tmp_path / "o")
    with folder_lock(tmp_path / "o"):
        assert run(make_config(values), tmp_path / "o") == first


def test_only_the_main_process_locks(values, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with folder_lock(tmp_path / "o"):
        assert run(make_config(values), tmp_path / "o")["status"] == "finished"


def test_a_failed_run_leaves_no_folders(values, tmp_path):
    with pytest.raises(OneaError, match="holdout"):
        run(make_config(values | {"holdout": 0.99}), tmp_path / "a/b/c")
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    with pytest.raises(OneaError, match="holdout"):
        run(make_config(values | {"holdout": 0.99}), tmp_path / "a/b/c")
    assert list((tmp_path / "a").iterdir()) == []


WAITER = """
import pathlib, sys
from onea.locks import folder_lock
with folder_lock(pathlib.Path(sys.argv[1]), wait=True):
    print("in", flush=True)
"""


def test_waiting_for_a_lock_whose_folder_is_removed(tmp_path):
    with folder_lock(tmp_path / "o"):
        command = [sys.executable, "-c", WAITER, str(tmp_path / "o")]
        waiter = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(2)  # enough to reach the lock; without a lock the test passes as well
    out, err = waiter.communicate(timeout=60)
    assert (out, waiter.returncode) == ("in\n", 0), err


def test_a_fresh_demo_does_not_delete_a_locked_folder(onea, tmp_path):
    folder = Path("onea-demo/one-a")
    folder.mkdir(parents=True)
    write_record(folder, {"config": {"method": "one-a"}})
    with folder_lock(folder):
        code, _, err = onea("demo", "--fresh")
    assert code == 2
    assert f"being written by process {os.getpid()}" in err
    assert (folder / "record.json").exists()
