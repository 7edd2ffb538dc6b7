"""A whole One-A run on a dataset with the paper's epochs, timed from its start to its end."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from onea.bench.rows import FAST, SAME, Row
from onea.bench.run import BenchResult, Tell
from onea.bench.scene import BenchConfig
from onea.data.names import data_name
from onea.methods.one_a import OneAOptions
from onea.runs.config import RunConfig, make_config
from onea.runs.engine import run
from onea.runs.record import Record

TASKS = 10


def stream_bench(config: BenchConfig, data: str, folder: Path, tell: Tell = lambda text: None) -> BenchResult:
    """One run in a fresh process, as a user's is: nothing is loaded or compiled before.

    Its record stays in ``folder``; a run that is finished there is not repeated, and has no time from start to end.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    same = config.precision == "fp32"
    precision = config.runtime(same_numerics=same).precision
    place = folder / f"stream-{data_name(data)}-{precision}"
    known = place.exists()
    tell(f"a stream of {TASKS} tasks")
    started = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        record = pool.submit(run, _config(config, data), place).result()
    seconds = time.perf_counter() - started
    column = SAME if same else FAST
    rows = _rows(record, column)
    if not known:
        rows.insert(0, Row("stream", f"{_name(record)}, from start to end", column, seconds, "s"))
    name, compiled = record["backbone"]["name"], record["runtime"]["compiled"]
    return BenchResult(
        config, rows, name, precision, compiled, load, record["environment"], f"{data_name(data)}-{precision}"
    )


def _config(config: BenchConfig, data: str) -> RunConfig:
    """A run's own defaults, but for the epochs and the machine's settings."""
    paper = OneAOptions()
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
            **{name: getattr(paper, name) for name in ("epochs", "min_epochs", "max_epochs")},
        }
    )


def _name(record: Record) -> str:
    return f"{data_name(record['config']['data'])}, {TASKS} tasks"


def _rows(record: Record, column: str) -> list[Row]:
    what, times, metrics = _name(record), record["timings"], record["metrics"]
    learned, evaluated = sum(times["learn_s"]), sum(times["evaluate_s"])
    passed = sum(task["images"] * task["epochs"] for task in record["tasks"])
    return [
        Row("stream", f"{what}, learning", column, learned, "s"),
        Row("stream", f"{what}, evaluation", column, evaluated, "s"),
        Row("stream", f"{what}, learning", column, passed / learned, "images/s"),
        Row("stream", f"{what}, accuracy A_T", column, metrics["A_T"], "%"),
        Row("stream", f"{what}, mean accuracy", column, metrics["mean_A"], "%"),
    ]
