# SPDX-License-Identifier: Apache-2.0
"""Complete runs: resuming after a kill, refusal of folders of other runs, golden numbers, memory."""

from __future__ import annotations

import dataclasses
import gc
import json
import random
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import ROOT
from support.records import comparable_fields
from support.tiny import write_tiny_images

from onea.errors import OneaError
from onea.research.record import read_record, write_record
from onea.research.runs.config import make_config, read_yaml
from onea.research.runs.runner import git_hash, run
from onea.research.runs.setup import prepare
from onea.runtime import Progress, make_runtime
from onea.vit.frozen import FrozenViT

GOLDEN = ROOT / "tests/golden/tiny-run.json"

KILL_POINTS = {
    "mid-epoch": ("torch.optim.SGD", "step", 7),
    "mid-merge": ("torch.linalg", "eigh", 2),
    "mid-checkpoint: the new state is written, the record is not": ("pathlib.Path", "replace", 4),
    "mid-checkpoint: half of the state is written": ("os", "fsync", 3),
    "mid-evaluation": ("onea.vit.heads", "cosine_scores", 3),
}

DRIVER = """
import importlib, json, os, pathlib, signal, sys, timm
from onea.research.runs.config import make_config
from onea.research.runs.runner import run
for job in sys.argv[1:]:  # several run one after the other in copies of this process, which takes seconds to start
    if len(sys.argv) == 2 or not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
values, folder, owner, name, count = json.loads(job)
module, _, inner = owner.rpartition(".")
try:
    target = importlib.import_module(owner)
except ModuleNotFoundError:
    target = getattr(importlib.import_module(module), inner)
real, calls = getattr(target, name), 0
def deadly(*args, **kwargs):
    global calls
    calls += 1
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(target, name, deadly)
run(make_config(values), pathlib.Path(folder))
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny_vit, tiny_images):
    """One finished run that the killed ones are compared with."""
    cache: dict[str, dict] = {}

    def get(values):
        key = json.dumps(values, sort_keys=True)
        if key not in cache:
            cache[key] = run(make_config(values), tmp_path_factory.mktemp("whole"))
        return cache[key]

    return get


@pytest.fixture(scope="module")
def killed(uninterrupted, shared_tiny_run, tmp_path_factory) -> dict[str, Path]:
    """The folder of a run, by the point at which it was killed."""
    uninterrupted(shared_tiny_run)  # first: it packs the images, whose files would count below
    folders = {point: tmp_path_factory.mktemp("killed") for point in KILL_POINTS}
    jobs = [json.dumps([shared_tiny_run, str(folders[point]), *where]) for point, where in KILL_POINTS.items()]
    process = subprocess.run([sys.executable, "-c", DRIVER, *jobs], capture_output=True, text=True, timeout=240)
    assert process.stdout.split() == ["-9"] * len(jobs), process.stderr
    return folders


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_killed_run_resumes_to_the_same_record_bit_for_bit(point, tiny_run, uninterrupted, killed):
    expected, folder = comparable_fields(uninterrupted(tiny_run)), killed[point]
    survived = json.loads((folder / "record.json").read_text()) if (folder / "record.json").exists() else None
    assert survived is None or survived["status"] == "running"
    resumed = run(make_config(tiny_run), folder)
    assert comparable_fields(resumed) == expected
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [], "no partial files stay"


@pytest.mark.slow
def test_ten_kills_at_random_moments(tiny_run, uninterrupted, tmp_path):
    values = tiny_run | {"options": tiny_run["options"] | {"epochs": 30, "max_epochs": 40}}
    command = [sys.executable, "-c", DRIVER, json.dumps([values, str(tmp_path), "os", "getpgid", 1])]
    started = time.monotonic()
    subprocess.run(command, check=True)
    duration = time.monotonic() - started
    expected = comparable_fields(json.loads((tmp_path / "record.json").read_text()))
    moments = random.Random(5)
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        command[-1] = json.dumps([values, str(folder), "os", "getpgid", 1])
        with subprocess.Popen(command) as process:
            time.sleep(moments.uniform(0.2, 0.95) * duration)
            process.kill()
        assert comparable_fields(run(make_config(values), folder)) == expected


def test_a_finished_run_is_not_repeated_and_threads_are_restored(tiny_run, tmp_path, monkeypatch):
    first = run(make_config(tiny_run), tmp_path)
    monkeypatch.setattr(FrozenViT, "forward", lambda *_: pytest.fail("an image is passed again"))
    again = run(make_config(tiny_run | {"threads": 2}), tmp_path)
    assert again == first
    assert first["runtime"] == {"device": "cpu", "precision": "fp32", "threads": 1, "processes": 1, "compiled": False}


def test_the_record_is_complete(tiny_run, tmp_path):
    record = run(make_config(tiny_run), tmp_path)
    assert record == read_record(tmp_path)
    assert record["status"] == "finished"
    assert len(record["backbone"]["sha256"]) == 64
    assert record["stream"]["sizes"] == [3, 1, 2]
    assert record["options"]["kappa"] == 2.0
    assert record["options"]["rank"] == 4
    assert len(record["metrics"]["A"]) == len(record["timings"]["learn_s"]) == 3
    assert record["total"] == [3] * 6
    assert record["tasks"][0]["images"] == 18
    assert {"torch", "timm", "git", "processor"} <= record["environment"].keys()
    assert record["memory"]["peak_bytes"][0]["host"] > 1e7
    assert record["data"]["stored"] == [32, 32]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_surrounding_repository_is_not_recorded(tmp_path):
    """A virtual environment may be inside another repository."""
    source, installed = (tmp_path / root / "onea/research/runs" for root in ("src", ".venv/lib/site-packages"))
    for folder in (source, installed):
        folder.mkdir(parents=True)
    author = ["-c", "user.name=A", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    assert len(git_hash(source) or "") == 40
    assert git_hash(installed) is None


def test_the_folder_of_another_run_is_refused_and_not_changed(tiny_run, tmp_path):
    run(make_config(tiny_run), tmp_path)
    before = (tmp_path / "record.json").read_bytes()
    with pytest.raises(OneaError, match=r"contains another run \(seed 1 instead of 2\)"):
        run(make_config(tiny_run | {"seed": 2}), tmp_path)
    assert (tmp_path / "record.json").read_bytes() == before


def test_a_run_is_not_resumed_on_changed_images(tiny_run, tiny_images, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(tiny_images, images)
    values = tiny_run | {"data": f"folder:{images}"}
    record = run(make_config(values), tmp_path / "out")
    write_record(tmp_path / "out", record | {"status": "running"})
    next((images / "train/class00").iterdir()).unlink()
    with pytest.raises(OneaError, match=r"The data of the run .* changed since it began"):
        run(make_config(values), tmp_path / "out")


def test_error_message_for_a_damaged_checkpoint(tiny_run, tmp_path):
    record = run(make_config(tiny_run), tmp_path)
    state = tmp_path / record["checkpoint"]["file"]
    state.write_bytes(state.read_bytes()[:-10])
    write_record(tmp_path, record | {"status": "running"})
    with pytest.raises(OneaError, match=r"damaged.*start over"):
        run(make_config(tiny_run), tmp_path)
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(OneaError, match="not JSON"):
        run(make_config(tiny_run), tmp_path)


def test_nothing_is_written_if_the_loss_diverges(tiny_run, tmp_path):
    values = tiny_run | {"options": tiny_run["options"] | {"learning_rate": 1e30}}
    with pytest.raises(OneaError, match="task 1"):
        run(make_config(values), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_keeps_the_previous_checkpoint(tiny_run, tmp_path, monkeypatch):
    import errno
    import os

    prepare(make_config(tiny_run), make_runtime("cpu", "fp32", 1))  # packs the images, whose files would count below
    real, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OneaError, match=r"No space left in .*: needs 1 MB; free some or choose another folder"):
        run(make_config(tiny_run), tmp_path)
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["correct"]) == 1
    assert (tmp_path / record["checkpoint"]["file"]).exists()
    monkeypatch.undo()


def test_results_do_not_depend_on_the_storage_of_images(tiny_run, tmp_path):
    records = [
        run(make_config(tiny_run | {"store": storage}), tmp_path / storage) for storage in ("device", "host", "disk")
    ]
    assert comparable_fields(records[0]) == comparable_fields(records[1]) == comparable_fields(records[2])
    exact = run(make_config(tiny_run | {"store": "exact"}), tmp_path / "exact")
    assert exact["data"]["stored"] == "exact"
    assert exact["status"] == "finished"


@pytest.fixture
def damaged_images(tiny_run: dict[str, Any], tiny_images: Path, tmp_path: Path) -> tuple[dict[str, Any], list[Path]]:
    """A run on a copy of the images, of which two cannot be read: one of training, one of test."""
    images = tmp_path / "images"
    shutil.copytree(tiny_images, images)
    bad = [sorted((images / side / "class02").iterdir())[1] for side in ("train", "test")]
    for file in bad:
        file.write_bytes(file.read_bytes()[:60])
    return tiny_run | {"data": f"folder:{images}"}, bad


def test_unreadable_original_files_are_skipped_like_packed_ones(damaged_images, tmp_path):
    values, bad = damaged_images
    data = {}
    for store in ("auto", "exact"):
        record = run(make_config(values | {"store": store, "on_bad": "skip"}), tmp_path / store)
        assert record["status"] == "finished"
        data[store] = {name: record["data"][name] for name in ("skipped", "train_images", "test_images", "classes")}
        data[store]["total"] = record["total"]
    assert data["exact"] == data["auto"]
    assert [line.partition(": ")[0] for line in data["exact"]["skipped"]] == [str(file) for file in bad]


def test_unreadable_original_files_are_refused_like_packed_ones(damaged_images, tmp_path):
    values, bad = damaged_images

    def error_of(store: str, on_bad: str) -> str:
        with pytest.raises(OneaError) as caught:
            run(make_config(values | {"store": store, "on_bad": on_bad}), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return str(caught.value)

    assert error_of("exact", "fail") == error_of("auto", "fail")
    assert f"cannot be read ({bad[0]}: " in error_of("exact", "fail")
    for file in bad[1].parent.iterdir():
        file.write_bytes(bad[1].read_bytes())
    assert error_of("exact", "skip") == error_of("auto", "skip")
    assert "No image of class 'class02' can be read" in error_of("exact", "skip")


@pytest.mark.parametrize(
    "change", [{"long_tail": 0.3}, {"protocol": "pilot"}, {"precision": "bf16"}, {"sizes": None, "tasks": 6}]
)
def test_runs_with_other_settings_finish(change, tiny_run, tmp_path):
    record = run(make_config(tiny_run | change), tmp_path)
    assert record["status"] == "finished"
    if "protocol" in change:
        actual = record["preprocess"]
        assert (actual["mean"], actual["geometry"], actual["filter"]) == ([0.0] * 3, "resize-crop", "bicubic")
        assert actual["resize"] == 32
    if "long_tail" in change:
        assert [task["images"] for task in record["tasks"]] == [6 + 5 + 4, 3, 2 + 2]


@pytest.mark.parametrize("tasks", [0, -3])
def test_zero_tasks_are_refused(tasks, tiny_run):
    with pytest.raises(OneaError, match=f"tasks is {tasks}; there must be at least 1"):
        make_config(tiny_run | {"sizes": None, "tasks": tasks})


def test_held_out_training_images_replace_the_test_images(tiny_run, tmp_path):
    ready = prepare(make_config(tiny_run | {"holdout": 0.34}), make_runtime("cpu", "fp32", 1))
    assert not set(ready.train.rows.tolist()) & set(ready.test.rows.tolist())
    assert ready.test.images is ready.train.images
    assert (len(ready.train.rows), len(ready.test.rows)) == (24, 12)
    record = run(make_config(tiny_run | {"holdout": 0.34, "per_class": 2}), tmp_path)
    assert record["data"]["train_images"] == 12
    assert record["total"] == [2] * 6
    for change, message in (({"holdout": 0.99}, "without training images"), ({"per_class": 0}, "at least 1")):
        with pytest.raises(OneaError, match=message):
            run(make_config(tiny_run | change), tmp_path / "wrong")


def test_a_run_recorded_without_newer_options_is_resumed(tiny_run, tmp_path):
    """It has the default of the new option."""
    config = make_config(tiny_run)
    whole = run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "cut", StopAfter(1))
    record = read_record(tmp_path / "cut")
    for name in ("classifier", "carry", "guard"):
        del record["options"][name]
    write_record(tmp_path / "cut", record)
    assert run(config, tmp_path / "cut")["correct"] == whole["correct"]


class StopAfter(Progress):
    """Ctrl-C after this number of tasks."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def end_task(self, task: int, accuracy: float) -> None:
        if task + 1 == self.tasks:
            raise KeyboardInterrupt


def test_golden_record(tiny_run, tmp_path, request):
    """A change of these numbers is a change of results: if intended, `pytest --write-golden` and a changelog line.

    Other processors round differently. Between plain, AVX2 and AVX-512 kernels of PyTorch, oneDNN and MKL the relative
    differences were at most 2e-6; fifty times that is allowed. No prediction may depend on such differences.
    """
    config = make_config(tiny_run)
    record = run(config, tmp_path)
    state = load_file(tmp_path / record["checkpoint"]["file"])
    actual = {name: record[name] for name in ("stream", "correct", "tasks")}
    actual["norms"] = {name: float(value.double().norm()) for name, value in state.items()}
    if request.config.getoption("--write-golden"):
        GOLDEN.write_text(json.dumps(actual, indent=1) + "\n", encoding="utf-8")
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert actual["stream"] == expected["stream"]
    assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-4, abs=1e-12)
    for task, golden_task in zip(actual["tasks"], expected["tasks"], strict=True):
        assert task["losses"] == pytest.approx(golden_task["losses"], rel=1e-4)
        assert task["merge"].get("gate_max", 0) == pytest.approx(golden_task["merge"].get("gate_max", 0), rel=1e-4)
    ready = prepare(config, make_runtime("cpu", "fp32", 1))
    ready.method.load_state_dict(state)
    best, second = ready.method.scores(ready.test.images.test_views(ready.test.rows)).topk(2).values.unbind(1)
    assert (best - second).min() > 1e-2
    assert actual["correct"] == expected["correct"]


class LiveTensorBytes(Progress):
    """The bytes of all tensors that are alive after each task."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        gc.collect()
        gc.freeze()  # existing objects are neither counted nor visited

    def end_task(self, task: int, accuracy: float) -> None:
        gc.collect()
        tensors = [
            tensor.untyped_storage()
            for tensor in gc.get_objects()
            if type(tensor) in (torch.Tensor, torch.nn.Parameter)
        ]
        self.bytes.append(sum({memory.data_ptr(): memory.nbytes() for memory in tensors}.values()))


def test_memory_and_state_do_not_grow_with_the_number_of_tasks(tiny_run, tmp_path):
    images = tmp_path / "images"
    write_tiny_images(images, classes=30, train=4, test=2)
    states, live_bytes_by_tasks = [], []
    for tasks in (3, 30):
        values = tiny_run | {"data": f"folder:{images}", "sizes": ",".join([str(30 // tasks)] * tasks)}
        folder, live_bytes = tmp_path / str(tasks), LiveTensorBytes()
        record = run(make_config(values), folder, live_bytes)
        gc.unfreeze()
        states.append((folder / record["checkpoint"]["file"]).stat().st_size)
        live_bytes_by_tasks.append(live_bytes.bytes)
    few, many = live_bytes_by_tasks
    assert states[0] == states[1]
    assert many[-1] == few[-1]
    prototype, count = 64 * 4, 8
    per_class = 2 * prototype + count  # as stored, and normalised for predictions
    assert [after - before for before, after in pairwise(many[1:])] == [per_class] * 28, "nothing else is stored"


MEMORY = """
import json, pathlib, resource, sys
from onea.research.runs.config import make_config
from onea.research.runs.runner import run
values, folder = json.loads(sys.argv[1])
run(make_config(values), pathlib.Path(folder))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_the_process_does_not_grow_with_the_number_of_tasks(tiny_run, tmp_path):
    """The smallest peak of three runs, because other processes can only increase it."""
    images = tmp_path / "images"
    write_tiny_images(images, classes=30, train=4, test=2)
    peaks = []
    for tasks in (3, 30):
        values = tiny_run | {"data": f"folder:{images}", "sizes": ",".join([str(30 // tasks)] * tasks)}
        for attempt in range(3):
            command = [sys.executable, "-c", MEMORY, json.dumps([values, str(tmp_path / f"{tasks}-{attempt}")])]
            peaks.append(int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
    assert min(peaks[3:]) < 1.03 * min(peaks[:3])


def test_yaml_has_the_same_options_and_errors_name_typos(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("method: one-a\ndata: glyphs-mini\ntasks: 5\nkappa: 5\nsizes: [3, 1]\n")
    config = make_config(read_yaml(path))
    assert (config.tasks, config.sizes, config.options) == (5, "3,1", {"kappa": 5.0})
    path.write_text("metod: one-a\n")
    with pytest.raises(OneaError, match=r"Unknown option 'metod'.*did you mean 'method'"):
        make_config(read_yaml(path))
    for text, message in (("- a\n", "option: value"), ("a: [", "not valid YAML")):
        path.write_text(text)
        with pytest.raises(OneaError, match=message):
            read_yaml(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": "many"}, "whole number"),
        ({"gamma": "x"}, "a number"),
        ({"store": "cloud"}, "store is 'cloud'"),
        ({"rank": 2.5}, "whole number"),
        ({"gating": "maybe"}, "true or false"),
        ({"tasks": True}, "whole number"),
        ({"method": "onea"}, "did you mean 'one-a'"),
    ],
)
def test_error_messages_name_wrong_values(change, message):
    with pytest.raises(OneaError, match=message):
        make_config(change)


def test_identity_contains_what_changes_results(tiny_run):
    config = make_config(tiny_run)
    assert config.key() == dataclasses.replace(config, device="cuda", threads=8, store="disk", budget=1.0).key()
    assert config.key() != dataclasses.replace(config, seed=2).key()
    assert config.key() != dataclasses.replace(config, store="exact").key()
    assert make_config({"method": "one-a", "kappa": "5"}).key() == make_config({"method": "one-a", "kappa": 5.0}).key()
