# SPDX-License-Identifier: Apache-2.0
"""The whole bench: baselines, the two columns, how much of the chip they use, and growth."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onea.research.bench.answering import TimmBaseline, answering
from onea.research.bench.config import CLASSES, BenchConfig
from onea.research.bench.flops import inference_flops, measured_peak, nominal_peak, training_flops
from onea.research.bench.growth import growth
from onea.research.bench.measure import Measurements, forget_peak, peak_rows
from onea.research.bench.official import check_checkout, official_rows
from onea.research.bench.plain import (
    PlainImages,
    loader,
    plain_epoch,
    plain_network,
    plain_pass,
    plain_request,
    plain_transform,
)
from onea.research.bench.rows import (
    FAST,
    OFFICIAL,
    PLAIN,
    SAME,
    Row,
    chip_of,
    csv_name,
    duration,
    find,
    hardware_of,
    rate,
    write_csv,
)
from onea.research.bench.timing import timed
from onea.research.bench.workload import Workload, bench_backbone, one_task, preprocess_of, synthetic_pixels
from onea.research.runs.record import environment
from onea.runtime import Runtime
from onea.vit.frozen import FrozenViT

OnStatus = Callable[[str], None]
_BUSY = 0.25  # of the cores
_MOST_WORKERS = 8  # as published codes ask for
_LOADER_STEPS, _FEWEST_IMAGES = 16, 128


@dataclass(frozen=True)
class BenchResult:
    """All figures of one bench, and the machine they belong to.

    Attributes:
        load: processes that wanted a core on average in the minute before, none of them ours.
        data: the dataset of a whole stream, if that is what was measured.
    """

    config: BenchConfig
    rows: list[Row]
    backbone: str
    precision: str
    compiled: bool
    load: float
    environment: dict[str, Any]
    data: str = ""

    @property
    def hardware(self) -> str:
        """The chip and the cores."""
        return hardware_of(self.environment, self.environment["cores"])

    def write(self, folder: Path) -> Path:
        """Leave the figures in a file whose name carries the hardware."""
        path = folder / csv_name(self.environment, self.environment["cores"], self.backbone, self.data)
        write_csv(path, self.rows, self.backbone, self.hardware, self.load, self.environment)
        return path

    @property
    def busy(self) -> bool:
        """Whether others were using the machine enough to spoil the figures."""
        return bool(self.load > _BUSY * self.environment["cores"])


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
            config, name, one_task(config, vit, runtime, compiled=compiled and name == FAST), on_status
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
    forget_peak(device)
    images = PlainImages(pixels, labels, plain_transform(preprocess, training=True))
    epoch = plain_epoch(network, loader(images, config.batch, workers, shuffle=True), CLASSES, device)
    timing = timed(epoch, device, seconds, warm_up=1, fewest=3)
    yield rate("training", f"batch {config.batch}", PLAIN, len(images), timing)
    yield from peak_rows(PLAIN, config.batch, device)
    transform = plain_transform(preprocess, training=False)
    for batch in config.batches:
        # At least a batch for each of two workers; on a GPU as many as training has.
        some = max(min(len(pixels), max(_FEWEST_IMAGES, _LOADER_STEPS * batch)), 2 * batch)
        part = PlainImages(synthetic_pixels(some, vit.size), torch.zeros(some, dtype=torch.long), transform)
        latency = timed(plain_request(network, part, batch, device), device, seconds)
        yield duration("inference", f"batch {batch}", PLAIN, latency)
        once = plain_pass(network, loader(part, batch, workers, shuffle=False), device)
        timing = timed(once, device, seconds, warm_up=1, fewest=3)
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
            "data sheet": nominal_peak(chip_of(environment(runtime.device)), runtime.precision),
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
