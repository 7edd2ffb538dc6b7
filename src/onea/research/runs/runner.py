# SPDX-License-Identifier: Apache-2.0
"""One run: learn and evaluate every task of a stream, with a checkpoint and a record after each."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_safetensors

from onea import __version__
from onea.distributed import is_main_process
from onea.errors import OneaError, is_out_of_memory, truncate
from onea.files import check_no_model, check_writable, open_regular, read_tensors, write_atomically
from onea.learner.merged_adapter import AdapterCache
from onea.locks import folder_lock
from onea.metrics import summarise
from onea.research.record import (
    FORMAT,
    Record,
    is_resumable,
    leftovers,
    read_record,
    record_path,
    remove_leftovers,
    write_record,
)
from onea.research.runs.config import RunConfig
from onea.research.runs.evaluation import (
    COST_AFTER_TASKS,
    FeatureCache,
    measure_cost,
    open_set_auroc,
    predict_tasks,
)
from onea.research.runs.reuse import InputChecker, check_same_inputs, check_same_run
from onea.research.runs.setup import PreparedRun, prepare
from onea.runtime import Progress, Runtime, make_runtime
from onea.tensors import Tensors
from onea.text import utc_timestamp
from onea.vit.batching import pad_rows


def run(
    config: RunConfig,
    folder: Path | str,
    progress: Progress | None = None,
    adapter_cache: AdapterCache | None = None,
    *,
    wait: bool = False,
) -> Record:
    """Learn and evaluate all tasks and return the record; an interrupted run is resumed, a finished one not repeated.

    A kill at any moment loses at most the current task. Until the first task is finished, the folder contains only a
    lock file.

    >>> import tempfile
    >>> from onea.research.runs.config import make_config
    >>> config = make_config({"method": "simplecil", "data": "glyphs-mini", "tasks": 2, "per_class": 2, "threads": 1})
    >>> record = run(config, tempfile.mkdtemp())
    >>> record["status"], len(record["metrics"]["A"])
    ('finished', 2)

    Args:
        config: configuration of the run.
        folder: folder of the record and the checkpoint.
        progress: receives the progress of the run.
        adapter_cache: adapters that other runs of this process have trained.
        wait: wait for another process that executes the same run, instead of raising an error.

    Raises:
        OneaError: the configuration is invalid; the folder holds a model, another run, or a finished run with other
            images, weights or presets; another process executes this run.
    """
    folder, progress = Path(folder), progress or Progress()
    if record := _load_finished(config, folder, progress):
        if is_main_process() and leftovers(folder, record):  # from a kill in the last step; harmless
            with suppress(OneaError), folder_lock(folder):
                remove_leftovers(folder, read_run(folder) or record)
        return record
    check_writable(folder)
    check_no_model(folder)
    with folder_lock(folder, wait=wait) if is_main_process() else nullcontext():
        return _load_finished(config, folder, progress) or _start_or_resume(config, folder, progress, adapter_cache)


def _load_finished(config: RunConfig, folder: Path, progress: Progress) -> Record | None:
    """The record of a finished run, if it may be reused. No lock is needed, because a finished record never changes."""
    record = read_run(folder)
    if record is None or record["status"] != "finished":
        return None
    check_same_run(record, config, folder)
    for remark in InputChecker().check(record, config, folder):
        if is_main_process():
            progress.remark(remark)
    return record


def _start_or_resume(config: RunConfig, folder: Path, progress: Progress, adapter_cache: AdapterCache | None) -> Record:
    record = read_run(folder)
    if record is not None:
        check_same_run(record, config, folder)
    # A resumed run keeps both: threads change the order of floating-point sums, and the precision changes all results.
    settings = {"precision": config.precision, "threads": config.threads} | (record["runtime"] if record else {})
    runtime = make_runtime(config.device, settings["precision"], settings["threads"], progress)
    prepared = prepare(config, runtime, adapter_cache)
    if record is None:
        record = _new_record(config, prepared, runtime)
    else:
        check_same_inputs(record, prepared.description, folder)
        _restore(prepared, folder, record)
        record["dates"]["resumed"].append(utc_timestamp())
    record |= {"format": FORMAT, "stamps": prepared.stamps}
    runtime.progress.begin(record)
    max_bytes = None if config.cache_gb is None else int(config.cache_gb * 1e9)
    feature_cache = FeatureCache(prepared.test.rows, max_bytes)
    for index in range(len(record["correct"]), prepared.stream.tasks):
        _learn_and_evaluate(index, prepared, runtime, record, feature_cache)
        if runtime.processes.is_main:
            save_checkpoint(folder, record, prepared.method.state_dict())
        runtime.processes.wait()
        runtime.progress.end_task(index, record["metrics"]["A"][-1])  # after the checkpoint
    return record


def _restore(prepared: PreparedRun, folder: Path, record: Record) -> None:
    """Load the checkpoint into the method and check that it predicts all classes learned so far."""
    state, method = load_checkpoint(folder, record), prepared.method
    classes = prepared.class_ranges(len(record["correct"]) - 1)[-1].stop
    try:
        method.load_state_dict(state)
        scores = method.scores(prepared.test.images.test_views(pad_rows(prepared.test.rows[:1])))
        if scores.shape[1:] != (classes,) or bool(scores.isnan().any()):
            raise ValueError(f"it does not predict {classes} classes")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, OneaError) or is_out_of_memory(error):
            raise
        reason = truncate(" ".join(str(error).split()))
        raise OneaError(
            f"The checkpoint in {folder} does not fit this run ({reason}); delete that folder to start over."
        ) from error


def _new_record(config: RunConfig, prepared: PreparedRun, runtime: Runtime) -> Record:
    test = prepared.test
    return {
        "status": "running",
        "config": config.identity(),
        **prepared.description,
        "runtime": {
            "device": runtime.device.type,
            "precision": runtime.precision,
            "threads": runtime.threads,
            "processes": runtime.processes.count,
            "compiled": prepared.compiled,
        },
        "total": test.labels[test.rows].bincount(minlength=prepared.stream.classes).tolist(),
        "correct": [],
        "tasks": [],
        "metrics": {},
        "cost": [],
        "timings": {"learn_s": [], "evaluate_s": []},
        "memory": {"peak_bytes": []},
        "dates": {"started": utc_timestamp(), "resumed": [], "finished": None},
        "environment": environment(runtime.device),
    }


def to_json(value: Any) -> Any:
    """A method's report as JSON, with numbers rounded to six digits to keep the record small.

    >>> to_json({"epochs": 2, "losses": [3.9270573343549455, 0.00012345678]})
    {'epochs': 2, 'losses': [3.92706, 0.000123457]}

    Methods of other packages may also report tensors and NaN.

    >>> import torch
    >>> to_json({"loss": torch.tensor(0.5), "deviations": (float("nan"), 2.0)})
    {'loss': 0.5, 'deviations': [None, 2.0]}
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: to_json(inner) for key, inner in value.items()}
    return [to_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _learn_and_evaluate(
    index: int, prepared: PreparedRun, runtime: Runtime, record: Record, feature_cache: FeatureCache
) -> None:
    """Learn a task, evaluate on all classes seen, and add the results to the record."""
    task, stream, method = prepared.task(index), prepared.stream, prepared.method
    runtime.progress.start_task(index, stream.tasks, task.name)
    started = time.perf_counter()
    report = method.learn(task)
    learned = time.perf_counter()
    runtime.progress.start_phase("evaluating")
    seen = predict_tasks(method, prepared.test, prepared.class_ranges(index), prepared.seed, feature_cache)
    evaluated = time.perf_counter()  # excludes --open-set, so that times of runs with and without it are comparable

    correct = seen.correct_per_class()
    first, *others = correct
    record["correct"].append(correct[first])
    for name in others:
        record.setdefault("classifiers", {}).setdefault(name, []).append(correct[name])
    if record["config"].get("open_set"):
        later = prepared.later_class_ranges(index)
        unseen = predict_tasks(method, prepared.test, later, prepared.seed, feature_cache) if later else None
        record.setdefault("open_set", []).append(open_set_auroc(seen, unseen))
    record["tasks"].append(to_json({"name": task.name, "classes": len(task.classes), "images": len(task), **report}))
    record["metrics"] = summarise(record["correct"], record["total"], stream.sizes)
    record["timings"]["learn_s"].append(learned - started)
    record["timings"]["evaluate_s"].append(evaluated - learned)
    record["memory"]["peak_bytes"].append(peak_memory(runtime.device))
    if index + 1 in COST_AFTER_TASKS or index + 1 == stream.tasks:
        record["cost"].append(measure_cost(method, prepared.test.images, index + 1))
    if index + 1 == stream.tasks:
        record["status"] = "finished"
        record["dates"]["finished"] = utc_timestamp()


def read_run(folder: Path) -> Record | None:
    """The record in a run's folder, if it is complete enough to resume the run."""
    record = read_record(folder)
    if record is None or is_resumable(record):
        return record
    path = record_path(folder)
    raise OneaError(f"{path} is damaged; restore it from a backup, or delete that folder to run it again.")


def save_checkpoint(folder: Path, record: Record, state: Tensors) -> None:
    """Write the method's state, then the record that refers to it; after a kill, the previous pair is still valid."""
    name = f"state-{len(record['correct']):03d}.safetensors"
    content = save_safetensors({key: value.detach().cpu().contiguous() for key, value in state.items()})
    write_atomically(folder / name, content)
    record["checkpoint"] = {"file": name, "sha256": hashlib.sha256(content).hexdigest()}
    write_record(folder, record)
    remove_leftovers(folder, record)


def load_checkpoint(folder: Path, record: Record) -> Tensors:
    """The state that the record refers to."""
    path = folder / record["checkpoint"]["file"]
    try:
        file, _ = open_regular(path, follow=True)
    except OneaError as error:
        raise OneaError(f"Checkpoint {path} is missing or cannot be read; delete {folder} to start over.") from error
    with file:
        if hashlib.file_digest(file, "sha256").hexdigest() != record["checkpoint"]["sha256"]:
            raise OneaError(f"Checkpoint {path} is damaged (truncated or changed); delete {folder} to start over.")
        file.seek(0)
        return read_tensors(file.read(), f"Checkpoint {path}", f"delete {folder} to start over")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions of packages, commit and hardware."""
    packages = ("torch", "torchvision", "timm", "safetensors", "numpy", "pillow")
    return {
        "onea": __version__,
        "git": git_hash(Path(__file__).parent),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak memory of this process in bytes, on the host (not on Windows) and on a GPU."""
    peak = {}
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_reserved(device)  # includes memory of CUDA graphs
    return peak


def git_hash(folder: Path) -> str | None:
    """The commit of the checkout that contains this folder of onea's code; None for an installed package.

    A virtual environment may be inside another repository, so the path of the folder within the checkout is compared.

    >>> git_hash(Path("nowhere"))
    """
    command = ["git", "-C", str(folder), "rev-parse", "--show-prefix", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    path, _, commit = result.stdout.strip().partition("\n")
    return commit if result.returncode == 0 and path == f"src/{__package__.replace('.', '/')}/" else None


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="ignore").splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor()
