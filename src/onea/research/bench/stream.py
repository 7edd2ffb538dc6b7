# SPDX-License-Identifier: Apache-2.0
"""A whole One-A run on a dataset with the paper's epochs, timed from its start to its end."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from onea.errors import OneaError
from onea.research.bench.config import BenchConfig
from onea.research.bench.rows import FAST, SAME, Row
from onea.research.bench.run import BenchResult, OnStatus
from onea.research.data import data_name
from onea.research.methods.presets import preset_options
from onea.research.record import Record
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.runner import run

TASKS = 10


def stream_bench(config: BenchConfig, data: str, folder: Path, on_status: OnStatus = lambda text: None) -> BenchResult:
    """One run in a fresh process, as a user's is: nothing is loaded or compiled before. Its record stays in ``folder``.

    Raises:
        OneaError: the run is there already, so there would be nothing to time.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    same = config.precision == "fp32"
    precision = config.runtime(same_numerics=same).precision
    label = f"{data_name(data)}-{precision}"
    place = folder / f"stream-{Path(config.backbone).stem}-{label}"
    if place.exists():
        raise OneaError(f"{place} holds an earlier run; delete it to measure again, or choose another --out.")
    on_status(f"a stream of {TASKS} tasks")
    started = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        record = pool.submit(run, _config(config, data), place).result()
    seconds = time.perf_counter() - started
    column = SAME if same else FAST
    rows = [Row("stream", f"{_name(record)}, from start to end", column, seconds, "s"), *_rows(record, column)]
    name, compiled = record["backbone"]["name"], record["runtime"]["compiled"]
    return BenchResult(config, rows, name, precision, compiled, load, record["environment"], label)


def _config(config: BenchConfig, data: str) -> RunConfig:
    """A run's own defaults, but for the epochs and the machine's settings."""
    paper = preset_options("one-a", "paper")
    return make_config(
        {
            "method": "one-a",
            "data": data,
            "backbone": config.backbone,
            "tasks": TASKS,
            "precision": config.precision,
            "device": config.device,
            "threads": config.threads,
            "compile": "auto" if config.compile is None else "yes" if config.compile else "no",
            **{name: paper[name] for name in ("epochs", "min_epochs", "max_epochs")},
        }
    )


def _name(record: Record) -> str:
    return f"{data_name(record['config']['data'])}, {TASKS} tasks"


def _rows(record: Record, column: str) -> list[Row]:
    what, times, metrics = _name(record), record["timings"], record["metrics"]
    learned, evaluated = sum(times["learn_s"]), sum(times["evaluate_s"])
    passed = [task["images"] * task["epochs"] for task in record["tasks"]]
    later = sum(passed[1:]) / sum(times["learn_s"][1:])  # the first task compiles
    return [
        Row("stream", f"{what}, learning", column, learned, "s"),
        Row("stream", f"{what}, evaluation", column, evaluated, "s"),
        Row("stream", f"{what}, learning", column, sum(passed) / learned, "images/s"),
        Row("stream", f"{what}, learning from task 2 on", column, later, "images/s"),
        Row("stream", f"{what}, accuracy A_T", column, metrics["A_T"], "%"),
        Row("stream", f"{what}, mean accuracy", column, metrics["mean_A"], "%"),
    ]
