# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of onea: against baselines, over a growing number of tasks, and on a whole stream."""

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
from onea.research.bench import baselines, measure
from onea.research.bench.config import CLASSES, BenchConfig
from onea.research.bench.measure import Workload
from onea.research.bench.results import (
    FAST,
    OFFICIAL,
    PLAIN,
    SAME,
    BenchResult,
    Row,
    chip_name,
    duration,
    find_row,
    load_average,
    rate,
    time_interleaved,
    time_repeatedly,
)
from onea.research.data import data_name
from onea.research.methods.presets import preset_options
from onea.research.record import Record
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.evaluation import measure_cost, predict_tasks
from onea.research.runs.runner import environment, peak_memory, run
from onea.runtime import Runtime
from onea.text import plural
from onea.vit.frozen import FrozenViT

OnStatus = Callable[[str], None]
_MAX_WORKERS = 8  # as in published codes
_LOADER_STEPS, _MIN_IMAGES = 16, 128


def bench(config: BenchConfig, on_status: OnStatus = lambda text: None) -> BenchResult:
    """Measure the baselines, onea in fp32 and at its fastest, and the growth with the number of tasks.

    Args:
        config: options of the benchmark.
        on_status: called with the name of each measurement.
    """
    load = load_average()
    same, fast = (config.runtime(same_numerics=numerics) for numerics in (True, False))
    checkout = Path(config.official).expanduser() if config.official else None
    if checkout:
        baselines.check_official_code(checkout)  # before measurements that take minutes
    vit = measure.bench_backbone(config.backbone)
    rows: list[Row] = []
    on_status(f"{PLAIN}: training and inference")
    rows += _plain_rows(config, vit, same)
    if checkout:
        _free_memory()
        on_status(f"{OFFICIAL}: training and inference")
        rows += baselines.official_rows(checkout, config, vit, same.device)
    compiled = config.compiles(fast)
    for name, runtime in ((SAME, same), (FAST, fast)):
        compiles = compiled and name == FAST
        rows += _column_rows(  # no variable refers to the workload, so that its memory is freed
            config, name, measure.single_task_workload(config, vit, runtime, compiled=compiles), on_status
        )
        _free_memory()
    on_status("peak of the chip")
    rows += _utilisation(rows, config, {SAME: same, FAST: fast})
    if config.tasks:
        on_status(f"growth over {config.tasks} tasks")
        rows += measure_growth(config)
    return BenchResult(config, rows, vit.name, fast.precision, compiled, load, environment(fast.device))


def _plain_rows(config: BenchConfig, vit: FrozenViT, runtime: Runtime) -> Iterator[Row]:
    """The plain loop, on as many images as onea."""
    device, seconds = runtime.device, config.seconds
    labels = torch.arange(CLASSES).repeat_interleave(config.images_per_class(device))
    pixels, preprocess = measure.synthetic_pixels(len(labels), vit.size), measure.preprocess_of(vit)
    workers = config.workers or min(_MAX_WORKERS, os.cpu_count() or 1)
    network = baselines.plain_network(vit.vit, config.rank).to(device)
    measure.reset_peak_memory(device)
    images = baselines.PlainImages(pixels, labels, baselines.plain_transform(preprocess, training=True))
    epoch = baselines.plain_epoch(
        network, baselines.loader(images, config.batch, workers, shuffle=True), CLASSES, device
    )
    timing = time_repeatedly(epoch, device, seconds, warm_up=1, min_repeats=3)
    yield rate("training", f"batch {config.batch}", PLAIN, len(images), timing)
    yield from measure.peak_memory_rows(PLAIN, config.batch, device)
    transform = baselines.plain_transform(preprocess, training=False)
    for batch in config.batches:
        # At least one batch for each of two workers, and on a GPU as many images as in training.
        num_images = max(min(len(pixels), max(_MIN_IMAGES, _LOADER_STEPS * batch)), 2 * batch)
        images = baselines.PlainImages(
            measure.synthetic_pixels(num_images, vit.size), torch.zeros(num_images, dtype=torch.long), transform
        )
        latency = time_repeatedly(baselines.plain_inference(network, images, batch, device), device, seconds)
        yield duration("inference", f"batch {batch}", PLAIN, latency)
        evaluation = baselines.plain_evaluation(
            network, baselines.loader(images, batch, workers, shuffle=False), device
        )
        timing = time_repeatedly(evaluation, device, seconds, warm_up=1, min_repeats=3)
        yield rate("inference", f"batch {batch}", PLAIN, num_images, timing)


def _column_rows(config: BenchConfig, name: str, workload: Workload, on_status: OnStatus) -> Iterator[Row]:
    column = measure.Measurements(name, workload, config.seconds)
    on_status(f"{name}: warming up")
    workload.method.learn(workload.prepared.task(0))
    on_status(f"{name}: training")
    yield from column.training()
    on_status(f"{name}: prototypes, evaluation, merge")
    yield from column.prototypes()
    yield from column.evaluation()
    yield from column.merge()
    if name == SAME:
        # FLOPs can be counted only in this column, which is not compiled.
        yield Row("operations", "training", name, measure.training_flops(workload.method) / 1e9, "GFLOP/image")
        yield Row("operations", "inference", name, measure.inference_flops(workload.method) / 1e9, "GFLOP/image")
    # timm, eager and compiled; in a quick benchmark only as the column itself.
    compiled = [workload.compiled] if config.quick else [False, True]
    timm_baselines = [baselines.TimmBaseline(workload, is_compiled) for is_compiled in compiled]
    for batch in config.batches:
        on_status(f"{name} and timm: inference at batch {batch}")
        functions = {name: column.inference(batch)} | {timm.name: timm.inference(batch) for timm in timm_baselines}
        yield from measure.inference_rows(functions, batch, workload.runtime.device, config.seconds)


def _utilisation(rows: list[Row], config: BenchConfig, runtimes: dict[str, Runtime]) -> Iterator[Row]:
    """Model FLOPs utilisation (MFU): FLOP/s of each column as a percentage of the chip's peak."""
    flops = {row.setting: row.value * 1e9 for row in rows if row.measure == "operations"}
    settings = {"training": f"batch {config.batch}", "inference": f"batch {config.batches[-1]}"}
    for name, runtime in runtimes.items():
        peaks = {
            "data sheet": measure.nominal_peak(chip_name(environment(runtime.device)), runtime.precision),
            "measured": measure.measured_peak(runtime.device, runtime.precision, config.seconds),
        }
        for source, peak in peaks.items():
            if peak is None:
                continue
            yield Row("peak of the chip", f"{source}, {runtime.precision}", name, peak / 1e12, "TFLOP/s")
            for phase, setting in settings.items():
                speed = find_row(rows, phase, setting, name, "images/s")
                assert speed is not None
                used = 100 * flops[phase] * speed.value / peak
                yield Row("utilisation", f"{phase}, of {source} peak", name, used, "%")


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


EARLY = 4  # tasks before the first comparison of memory; that of the first task includes all set-up
_CLASSES_PER_TASK = 2
_CPU_BATCH = 64
_LATENCY_BATCHES = (1, 32)


def measure_growth(config: BenchConfig) -> list[Row]:
    """Time per task, peak memory, FLOPs and latency of a run over many small tasks, early and late.

    This takes a new process, because the peak memory of a process never decreases.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_growth_rows, config).result()


def _growth_rows(config: BenchConfig) -> list[Row]:
    runtime = config.runtime(same_numerics=False)
    if runtime.device.type != "cuda":
        config = replace(config, batch=min(config.batch, _CPU_BATCH))
    vit, compiled = measure.bench_backbone(config.backbone), config.compiles(runtime)
    # Full batches from the first task on, so that a later increase of the peak memory is growth.
    per_class = -(-config.batch // _CLASSES_PER_TASK)
    sizes = (_CLASSES_PER_TASK,) * config.tasks
    many_tasks = measure.make_workload(config, vit, runtime, sizes, per_class, 1, compiled=compiled)
    rows = _growth_of_learning(many_tasks)
    one_task = measure.make_workload(config, vit, runtime, (sum(sizes),), 2, 1, compiled=compiled)
    _learn(one_task, 0)
    return rows + _growth_of_inference({1: one_task, config.tasks: many_tasks}, config.seconds)


def _growth_of_learning(workload: Workload) -> list[Row]:
    """Learn and evaluate all tasks."""
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
        if (peak := peaks[task - 1]) is not None:  # not on Windows
            rows.append(Row("growth: peak memory", f"after task {task}", FAST, peak / 1e6, "MB"))
    return rows


def _learn(workload: Workload, index: int) -> float:
    """Learn a task and evaluate; returns the seconds of learning."""
    task = workload.prepared.task(index)
    started = time.perf_counter()
    workload.method.learn(task)
    learned = time.perf_counter() - started
    predict_tasks(
        workload.method, workload.prepared.test, workload.prepared.class_ranges(index), workload.prepared.seed
    )
    return learned


def _time_row(setting: str, seconds: Sequence[float]) -> Row:
    spread = (max(seconds) - min(seconds)) / 2
    return Row("growth: learning a task", setting, FAST, median(seconds), "s", spread)


def _growth_of_inference(workloads: dict[int, Workload], seconds: float) -> list[Row]:
    """Inference after learning the same classes in one task and in many."""
    rows = []
    for tasks, workload in workloads.items():
        flops = measure_cost(workload.method, workload.prepared.test.images, tasks)["flops_per_image"] / 1e9
        rows.append(Row("growth: inference", f"after {plural(tasks, 'task', 'tasks')}", FAST, flops, "GFLOP/image"))
    for batch in _LATENCY_BATCHES:
        device = next(iter(workloads.values())).runtime.device
        timings = time_interleaved([_inference(workload, batch) for workload in workloads.values()], device, seconds)
        rows += [
            duration("growth: inference", f"after {plural(tasks, 'task', 'tasks')}, batch {batch}", FAST, timing)
            for tasks, timing in zip(workloads, timings, strict=True)
        ]
    return rows


def _inference(workload: Workload, batch: int) -> Callable[[], object]:
    test = workload.prepared.test
    rows = torch.arange(batch) % len(test.rows)
    return lambda: workload.method.scores(test.images.test_views(rows))


TASKS = 10


def stream_bench(config: BenchConfig, data: str, folder: Path, on_status: OnStatus = lambda text: None) -> BenchResult:
    """Time one run in a new process, including start-up and compilation. Its record stays in ``folder``.

    Raises:
        OneaError: the run exists already.
    """
    load = load_average()
    same = config.precision == "fp32"
    precision = config.runtime(same_numerics=same).precision
    label = f"{data_name(data)}-{precision}"
    run_folder = folder / f"stream-{Path(config.backbone).stem}-{label}"
    if run_folder.exists():
        raise OneaError(f"{run_folder} contains an earlier run; delete it to measure again, or choose another --out.")
    on_status(f"a stream of {TASKS} tasks")
    started = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        record = pool.submit(run, stream_config(config, data), run_folder).result()
    seconds = time.perf_counter() - started
    rows = _stream_rows(record, SAME if same else FAST, seconds)
    name, compiled = record["backbone"]["name"], record["runtime"]["compiled"]
    return BenchResult(config, rows, name, precision, compiled, load, record["environment"], label)


def stream_config(config: BenchConfig, data: str) -> RunConfig:
    """The defaults of a run, with the paper's epochs."""
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


def _stream_rows(record: Record, column: str, seconds: float) -> list[Row]:
    times, metrics = record["timings"], record["metrics"]
    stream = f"{data_name(record['config']['data'])}, {TASKS} tasks"
    images = [task["images"] * task["epochs"] for task in record["tasks"]]
    learning, later_learning = sum(times["learn_s"]), sum(times["learn_s"][1:])  # the first task includes compilation
    return [
        Row("stream", f"{stream}, from start to end", column, seconds, "s"),
        Row("stream", f"{stream}, learning", column, learning, "s"),
        Row("stream", f"{stream}, evaluation", column, sum(times["evaluate_s"]), "s"),
        Row("stream", f"{stream}, learning", column, sum(images) / learning, "images/s"),
        Row("stream", f"{stream}, learning from task 2 on", column, sum(images[1:]) / later_learning, "images/s"),
        Row("stream", f"{stream}, accuracy A_T", column, metrics["A_T"], "%"),
        Row("stream", f"{stream}, mean accuracy", column, metrics["mean_A"], "%"),
    ]
