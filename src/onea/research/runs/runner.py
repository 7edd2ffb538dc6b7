# SPDX-License-Identifier: Apache-2.0
"""One run: learn every task of the stream, evaluate after each, and leave a record."""

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
    count_correct,
    measure_cost,
    open_set_auroc,
    predict_tasks,
)
from onea.research.runs.reuse import Inputs, check_same_inputs, check_same_run
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
    """Run to the end and return the record; continues what the folder holds, and does not repeat a finished run.

    A kill at any moment loses at most the current task. Before the first task is finished, the folder holds nothing but
    the lock that keeps other processes out.

    >>> import tempfile
    >>> from onea.research.runs.config import make_config
    >>> config = make_config({"method": "simplecil", "data": "glyphs-mini", "tasks": 2, "per_class": 2, "threads": 1})
    >>> record = run(config, tempfile.mkdtemp())
    >>> record["status"], len(record["metrics"]["A"])
    ('finished', 2)

    Args:
        config: what to run.
        folder: where the record and the checkpoint go.
        progress: hears about it.
        adapter_cache: adapters that other runs of this process have trained.
        wait: whether to wait until another process that is at this run is done, instead of refusing.

    Raises:
        OneaError: it cannot be run as asked; the folder holds a model, another run, or a finished one of other images,
            weights or presets than those of now; another process is at it.
    """
    folder, progress = Path(folder), progress or Progress()
    if record := _finished(config, folder, progress):
        if is_main_process() and leftovers(folder, record):
            _tidy_finished(folder)
        return record
    check_writable(folder)
    check_no_model(folder)
    with folder_lock(folder, wait=wait) if is_main_process() else nullcontext():
        return _finished(config, folder, progress) or _continue(config, folder, progress, adapter_cache)


def _finished(config: RunConfig, folder: Path, progress: Progress) -> Record | None:
    """The record of a run that is over, if it may be used again. It needs no lock: nobody writes it any more."""
    record = read_run(folder)
    if record is None or record["status"] != "finished":
        return None
    check_same_run(record, config, folder)
    for remark in Inputs().check(record, config, folder):
        if is_main_process():
            progress.remark(remark)
    return record


def _tidy_finished(folder: Path) -> None:
    """Remove what a kill in the last step of a run has left; what cannot be removed does no harm."""
    with suppress(OneaError), folder_lock(folder):
        if record := read_run(folder):
            remove_leftovers(folder, record)


def _continue(config: RunConfig, folder: Path, progress: Progress, adapter_cache: AdapterCache | None) -> Record:
    record = read_run(folder)
    if record is not None:
        check_same_run(record, config, folder)
    runtime = _runtime(config, record, progress)
    prepared = prepare(config, runtime, adapter_cache)
    if record is None:
        record = _new_record(config, prepared, runtime)
    else:
        check_same_inputs(record, prepared.description, folder)
        _restore(prepared, folder, record)
        record["dates"]["resumed"].append(utc_timestamp())
    record |= {"format": FORMAT, "stamps": prepared.stamps}
    runtime.progress.begin(record)
    bound = None if config.cache_gb is None else int(config.cache_gb * 1e9)
    known = FeatureCache(prepared.test.rows, bound)
    for index in range(len(record["correct"]), prepared.stream.tasks):
        _learn_task(index, prepared, runtime, record, known)
        if runtime.processes.first:
            save_checkpoint(folder, record, prepared.method.state_dict())
        runtime.processes.wait()
        runtime.progress.end_task(index, record["metrics"]["A"][-1])  # said only now that it cannot be lost any more
    return record


def _restore(prepared: PreparedRun, folder: Path, record: Record) -> None:
    """Put the method where the checkpoint left it: it must take the state, and answer with all classes learned."""
    state, method = load_checkpoint(folder, record), prepared.method
    classes = prepared.class_ranges(len(record["correct"]) - 1)[-1].stop
    try:
        method.load_state_dict(state)
        scores = method.scores(prepared.test.images.plain(pad_rows(prepared.test.rows[:1])))
        if scores.shape[1:] != (classes,) or bool(scores.isnan().any()):
            raise ValueError(f"it does not answer with {classes} classes")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, OneaError) or is_out_of_memory(error):
            raise
        reason = truncate(" ".join(str(error).split()))
        raise OneaError(
            f"The checkpoint in {folder} does not fit this run ({reason}); delete that folder to start over."
        ) from error


def _runtime(config: RunConfig, record: Record | None, progress: Progress) -> Runtime:
    # Threads change the order of floating-point sums, and precision everything: a resumed run keeps both.
    earlier = record["runtime"] if record else {}
    precision, threads = earlier.get("precision", config.precision), earlier.get("threads", config.threads)
    return make_runtime(config.device, precision, threads, progress)


def _new_record(config: RunConfig, prepared: PreparedRun, runtime: Runtime) -> Record:
    totals = prepared.test.labels[prepared.test.rows].bincount(minlength=prepared.stream.classes).tolist()
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
        "total": totals,
        "correct": [],
        "tasks": [],
        "metrics": {},
        "cost": [],
        "timings": {"learn_s": [], "evaluate_s": []},
        "memory": {"peak_bytes": []},
        "dates": {"started": utc_timestamp(), "resumed": [], "finished": None},
        "environment": environment(runtime.device),
    }


def shortened(value: Any) -> Any:
    """A report with six digits of every number: losses with all of theirs would be half of a record.

    >>> shortened({"epochs": 2, "losses": [3.9270573343549455, 0.00012345678]})
    {'epochs': 2, 'losses': [3.92706, 0.000123457]}

    A method of somebody else may also tell tensors and numbers that JSON has none for; a task must not be lost for it.

    >>> import torch
    >>> shortened({"loss": torch.tensor(0.5), "deviations": (float("nan"), 2.0)})
    {'loss': 0.5, 'deviations': [None, 2.0]}
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    return [shortened(inner) for inner in value] if isinstance(value, list | tuple) else value


def _learn_task(index: int, prepared: PreparedRun, runtime: Runtime, record: Record, known: FeatureCache) -> None:
    task, stream, method = prepared.task(index), prepared.stream, prepared.method
    runtime.progress.start_task(index, stream.tasks, task.name)
    started = time.perf_counter()
    report = method.learn(task)
    learned = time.perf_counter()
    runtime.progress.note("evaluating")
    seen = predict_tasks(method, prepared.test, prepared.class_ranges(index), prepared.seed, known)
    evaluated = time.perf_counter()  # what --open-set adds is no part of it, or runs with and without would not compare

    correct = count_correct(seen, task.classes.stop)
    (answered, *compared) = correct
    record["correct"].append(correct[answered])
    for name in compared:
        record.setdefault("classifiers", {}).setdefault(name, []).append(correct[name])
    if record["config"].get("open_set"):
        later = prepared.later_class_ranges(index)
        to_come = predict_tasks(method, prepared.test, later, prepared.seed, known) if later else None
        record.setdefault("open_set", []).append(open_set_auroc(seen, to_come))
    told = {"name": task.name, "classes": len(task.classes), "images": len(task), **report}
    record["tasks"].append(shortened(told))
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
    """The record in a run's folder, checked to be whole enough to be shown or continued."""
    record = read_record(folder)
    if record is not None and not is_resumable(record):
        file = record_path(folder)
        raise OneaError(f"{file} is damaged; restore it from a copy, or delete that folder to run it again.")
    return record


def save_checkpoint(folder: Path, record: Record, state: Tensors) -> None:
    """Write the method's state, then the record that points to it; a kill in between leaves the older pair intact."""
    name = f"state-{len(record['correct']):03d}.safetensors"
    content = save_safetensors({key: value.detach().cpu().contiguous() for key, value in state.items()})
    write_atomically(folder / name, content)
    record["checkpoint"] = {"file": name, "sha256": hashlib.sha256(content).hexdigest()}
    write_record(folder, record)
    remove_leftovers(folder, record)


def load_checkpoint(folder: Path, record: Record) -> Tensors:
    """The state that the record points to."""
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
    """Versions, source and hardware."""
    packages = ("torch", "torchvision", "timm", "safetensors", "numpy", "pillow")
    return {
        "onea": __version__,
        "git": git_hash(Path(__file__).parent),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def peak_memory(device: torch.device) -> dict[str, int]:
    """Largest memory this process has held so far, in bytes: the host's, and the device's where there is one.

    Windows does not tell Python the host's.
    """
    peak = {}
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_reserved(device)  # what recorded graphs keep is not counted as allocated
    return peak


def git_hash(folder: Path) -> str | None:
    """The commit of a checkout of onea that this folder of its code is in; none where onea was installed.

    A repository around an environment is that of something else. Only the place tells: a copy of a checkout may lack
    what git would look the files up in.

    >>> git_hash(Path("nowhere"))
    """
    asked = ["git", "-C", str(folder), "rev-parse", "--show-prefix", "HEAD"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    place, _, commit = found.stdout.strip().partition("\n")
    return commit if found.returncode == 0 and place == "src/onea/runs/" else None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="ignore").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
