# SPDX-License-Identifier: Apache-2.0
"""The whole bench: baselines, the two columns, how much of the chip they use, and growth."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from onea.errors import OneaError
from onea.research.bench.config import CLASSES, BenchConfig
from onea.research.bench.measure import (
    Measurements,
    TimmBaseline,
    Workload,
    answering,
    bench_backbone,
    inference_flops,
    make_workload,
    measured_peak,
    nominal_peak,
    peak_memory_rows,
    preprocess_of,
    reset_peak_memory,
    single_task_workload,
    synthetic_pixels,
    training_flops,
)
from onea.research.bench.official import check_checkout, official_rows
from onea.research.bench.plain import (
    PlainImages,
    loader,
    plain_epoch,
    plain_evaluation,
    plain_inference,
    plain_network,
    plain_transform,
)
from onea.research.bench.results import (
    FAST,
    OFFICIAL,
    PLAIN,
    SAME,
    BenchResult,
    Row,
    chip_name,
    duration,
    find,
    rate,
    time_interleaved,
    time_repeatedly,
)
from onea.research.data import data_name
from onea.research.methods.presets import preset_options
from onea.research.record import Record
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.evaluation import correct_per_class, measure_cost
from onea.research.runs.runner import environment, peak_memory, run
from onea.runtime import Runtime
from onea.vit.frozen import FrozenViT

OnStatus = Callable[[str], None]
_MOST_WORKERS = 8  # as published codes ask for
_LOADER_STEPS, _FEWEST_IMAGES = 16, 128


def bench(config: BenchConfig, on_status: OnStatus = lambda text: None) -> BenchResult:
    """Measure everything; ``on_status`` hears what is being measured."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    same, fast = (config.runtime(same_numerics=numerics) for numerics in (True, False))
    checkout = Path(config.official).expanduser() if config.official else None
    if checkout:
        check_checkout(checkout)  # before minutes of measuring
    vit = bench_backbone(config.backbone)
    rows: list[Row] = []
    on_status(f"{PLAIN}: training and inference")
    rows += _plain_rows(config, vit, same)
    if checkout:
        _release()
        on_status(f"{OFFICIAL}: training and inference")
        rows += official_rows(checkout, config, vit, same.device)
    compiled = config.compiles(fast)
    for name, runtime in ((SAME, same), (FAST, fast)):
        rows += _column_rows(
            config, name, single_task_workload(config, vit, runtime, compiled=compiled and name == FAST), on_status
        )
        _release()
    on_status("peak of the chip")
    rows += _utilisation(rows, config, {SAME: same, FAST: fast})
    if config.tasks:
        on_status(f"growth over {config.tasks} tasks")
        rows += growth(config)
    return BenchResult(config, rows, vit.name, fast.precision, compiled, load, environment(fast.device))


def _plain_rows(config: BenchConfig, vit: FrozenViT, runtime: Runtime) -> Iterator[Row]:
    """The plain loop on as many images as our columns get."""
    device, seconds = runtime.device, config.seconds
    labels = torch.arange(CLASSES).repeat_interleave(config.images_per_class(device))
    pixels, preprocess = synthetic_pixels(len(labels), vit.size), preprocess_of(vit)
    workers = config.workers or min(_MOST_WORKERS, os.cpu_count() or 1)
    network = plain_network(vit.vit, config.rank).to(device)
    reset_peak_memory(device)
    images = PlainImages(pixels, labels, plain_transform(preprocess, training=True))
    epoch = plain_epoch(network, loader(images, config.batch, workers, shuffle=True), CLASSES, device)
    timing = time_repeatedly(epoch, device, seconds, warm_up=1, fewest=3)
    yield rate("training", f"batch {config.batch}", PLAIN, len(images), timing)
    yield from peak_memory_rows(PLAIN, config.batch, device)
    transform = plain_transform(preprocess, training=False)
    for batch in config.batches:
        # At least a batch for each of two workers; on a GPU as many as training has.
        some = max(min(len(pixels), max(_FEWEST_IMAGES, _LOADER_STEPS * batch)), 2 * batch)
        part = PlainImages(synthetic_pixels(some, vit.size), torch.zeros(some, dtype=torch.long), transform)
        latency = time_repeatedly(plain_inference(network, part, batch, device), device, seconds)
        yield duration("inference", f"batch {batch}", PLAIN, latency)
        once = plain_evaluation(network, loader(part, batch, workers, shuffle=False), device)
        timing = time_repeatedly(once, device, seconds, warm_up=1, fewest=3)
        yield rate("inference", f"batch {batch}", PLAIN, some, timing)


def _column_rows(config: BenchConfig, name: str, workload: Workload, on_status: OnStatus) -> Iterator[Row]:
    column = Measurements(name, workload, config.seconds)
    on_status(f"{name}: warming up")
    workload.method.learn(workload.prepared.task(0))
    on_status(f"{name}: training")
    yield from column.training()
    on_status(f"{name}: prototypes, evaluation, merge")
    yield from column.prototypes()
    yield from column.evaluation()
    yield from column.merge()
    if name == SAME:
        # This column is not compiled, so that its operations can be counted.
        yield Row("operations", "training", name, training_flops(workload.method) / 1e9, "GFLOP/image")
        yield Row("operations", "inference", name, inference_flops(workload.method) / 1e9, "GFLOP/image")
    # Plain timm, eager and compiled; in a quick bench only the way the column itself runs.
    baselines = [
        TimmBaseline(workload, compiled) for compiled in ([workload.compiled] if config.quick else [False, True])
    ]
    for batch in config.batches:
        on_status(f"{name} and timm: inference at batch {batch}")
        answers = {name: column.answer(batch)} | {timm.name: timm.answer(batch) for timm in baselines}
        yield from answering(answers, batch, workload.runtime.device, config.seconds)


def _utilisation(rows: list[Row], config: BenchConfig, runtimes: dict[str, Runtime]) -> Iterator[Row]:
    """Operations per second of each column as a share of what the chip could do (MFU)."""
    flops = {row.setting: row.value * 1e9 for row in rows if row.measure == "operations"}
    settings = {"training": f"batch {config.batch}", "inference": f"batch {config.batches[-1]}"}
    for name, runtime in runtimes.items():
        peaks = {
            "data sheet": nominal_peak(chip_name(environment(runtime.device)), runtime.precision),
            "measured": measured_peak(runtime.device, runtime.precision, config.seconds),
        }
        for source, peak in peaks.items():
            if peak is None:
                continue
            yield Row("peak of the chip", f"{source}, {runtime.precision}", name, peak / 1e12, "TFLOP/s")
            for measure, setting in settings.items():
                speed = find(rows, measure, setting, name, "images/s")
                assert speed is not None
                used = 100 * flops[measure] * speed.value / peak
                yield Row("utilisation", f"{measure}, of {source} peak", name, used, "%")


def _release() -> None:
    """Give back the memory of what is not used any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
        flops = measure_cost(workload.method, workload.prepared.test.images, tasks)["flops_per_image"] / 1e9
        rows.append(Row("growth: inference", f"after {_tasks(tasks)}", FAST, flops, "GFLOP/image"))
    for batch in _LATENCY_BATCHES:
        device = next(iter(workloads.values())).runtime.device
        timings = time_interleaved([_answer(workload, batch) for workload in workloads.values()], device, seconds)
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
