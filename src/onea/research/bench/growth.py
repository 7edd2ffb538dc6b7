# SPDX-License-Identifier: Apache-2.0
"""Growth of the cost with the number of tasks: a real One-A run over many small tasks, in a fresh process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import median

import torch

from onea.research.bench.config import BenchConfig
from onea.research.bench.rows import FAST, Row, duration
from onea.research.bench.timing import timed_in_turn
from onea.research.bench.workload import Workload, bench_backbone, make_workload
from onea.research.runs.evaluation import correct_per_class, measure
from onea.research.runs.record import peak_memory

EARLY = 4  # tasks after which memory is compared; the first has everything to set up
_CLASSES = 2  # of each task
_CPU_BATCH = 64
_LATENCY_BATCHES = (1, 32)


def growth(config: BenchConfig) -> list[Row]:
    """Time per task, peak memory, operations and latency, early and late.

    In a process of its own, because a process's peak memory never falls.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, config).result()


def _measure(config: BenchConfig) -> list[Row]:
    runtime = config.runtime(same_numerics=False)
    if runtime.device.type != "cuda":
        config = replace(config, batch=min(config.batch, _CPU_BATCH))
    vit, compiled = bench_backbone(config.backbone), config.compiles(runtime)
    # Training batches are full from the first task on, so that a larger peak later could only come from growth.
    per_class = -(-config.batch // _CLASSES)
    many = make_workload(config, vit, runtime, (_CLASSES,) * config.tasks, per_class, 1, compiled=compiled)
    rows = _rows_of_run(many)
    once = make_workload(config, vit, runtime, (_CLASSES * config.tasks,), 2, 1, compiled=compiled)
    _learn(once, 0)
    return rows + _rows_of_answers({1: once, config.tasks: many}, config.seconds)


def _rows_of_run(workload: Workload) -> list[Row]:
    """Learn and evaluate task by task, as a run does."""
    seconds, peaks = [], []
    kind = "device" if workload.runtime.device.type == "cuda" else "host"
    tasks = workload.prepared.stream.tasks
    for index in range(tasks):
        seconds.append(_learn(workload, index))
        peaks.append(peak_memory(workload.runtime.device).get(kind))
    window = min(EARLY, (tasks - 1) // 2)
    rows = [
        _time_row(f"tasks 2 to {1 + window}", seconds[1 : 1 + window]),
        _time_row(f"tasks {tasks - window + 1} to {tasks}", seconds[-window:]),
    ]
    for task in (EARLY, tasks):
        if (peak := peaks[task - 1]) is not None:  # not every system tells
            rows.append(Row("growth: peak memory", f"after task {task}", FAST, peak / 1e6, "MB"))
    return rows


def _learn(workload: Workload, index: int) -> float:
    """Learn a task and evaluate; the seconds of learning."""
    task = workload.prepared.task(index)
    started = time.perf_counter()
    workload.method.learn(task)
    learned = time.perf_counter() - started
    correct_per_class(
        workload.method, workload.prepared.test, workload.prepared.class_ranges(index), workload.prepared.seed
    )
    return learned


def _time_row(setting: str, seconds: Sequence[float]) -> Row:
    spread = (max(seconds) - min(seconds)) / 2
    return Row("growth: learning a task", setting, FAST, median(seconds), "s", spread)


def _rows_of_answers(workloads: dict[int, Workload], seconds: float) -> list[Row]:
    """Inference after learning the same classes in one task and in many."""
    rows = []
    for tasks, workload in workloads.items():
        flops = measure(workload.method, workload.prepared.test.images, tasks)["flops_per_image"] / 1e9
        rows.append(Row("growth: inference", f"after {_tasks(tasks)}", FAST, flops, "GFLOP/image"))
    for batch in _LATENCY_BATCHES:
        device = next(iter(workloads.values())).runtime.device
        timings = timed_in_turn([_answer(workload, batch) for workload in workloads.values()], device, seconds)
        rows += [
            duration("growth: inference", f"after {_tasks(tasks)}, batch {batch}", FAST, timing)
            for tasks, timing in zip(workloads, timings, strict=True)
        ]
    return rows


def _answer(workload: Workload, batch: int) -> Callable[[], object]:
    test = workload.prepared.test
    chosen = torch.arange(batch) % len(test.rows)
    return lambda: workload.method.scores(test.images.plain(chosen))


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"
