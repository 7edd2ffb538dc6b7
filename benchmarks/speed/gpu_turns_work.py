# SPDX-License-Identifier: Apache-2.0
"""One side of ``gpu_turns.py``: runs the requested measurements with the code on PYTHONPATH.

It runs with commit 1a2ee9f and with the current code, so some objects have two names here. Its output lines begin with
``@``, and their parts are separated by tabs: a figure (name, value, unit), ``done``, or ``failed`` and the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from onea.learner.one_a import OneAOptions
from onea.research.bench.results import synchronise, time_interleaved
from onea.research.methods.one_a import OneAMethod
from onea.research.runs.evaluation import predict_tasks
from onea.research.runs.setup import ImageSubset, PreparedRun
from onea.research.streams import Stream
from onea.vit.batching import EVALUATION_BATCH


def _first(*places: str) -> Any:
    """The first existing object among ``module:name``: the name in the current code, then that in the old commit."""
    for place in places:
        module, name = place.split(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(places)} exists")


BenchConfig = _first("onea.research.bench.config:BenchConfig", "onea.research.bench.scene:BenchConfig")
Measurements = _first("onea.research.bench.measure:Measurements", "onea.research.bench.measure:Column")
PackedImages = _first("onea.data.image_storage:PackedImages", "onea.data.store:PackedImages")
StreamPlan = _first("onea.learner.tasks:StreamPlan", "onea.learner.tasks:Plan")
TimmBaseline = _first("onea.research.bench.baselines:TimmBaseline", "onea.research.bench.timm_baseline:TimmBaseline")
Workload = _first("onea.research.bench.measure:Workload", "onea.research.bench.scene:Scene")
bench_backbone = _first("onea.research.bench.measure:bench_backbone", "onea.research.bench.backbone:bench_backbone")
make_workload = _first("onea.research.bench.measure:make_workload", "onea.research.bench.scene:make_scene")
preprocess_of = _first("onea.research.bench.measure:preprocess_of", "onea.research.bench.scene:preprocess_of")
OLD = importlib.util.find_spec("onea.research.bench.results") is None

TASK_SIZES = (14, 1, 3, 6, 36, 9, 23, 2, 2, 4)  # CIFAR-100, T=10, gamma 0.01, seed 1
IN_FLIGHT = 8  # queued batches, as in an evaluation
WHOLE = 20  # epochs of a whole training: the minimum of the paper's schedule
Figures = list[tuple[str, float, str]]


class Side:
    """The measurements of one side; ``prepare_...`` stores the objects for a section."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.prepared: dict[Any, Any] = {}
        self.replayed = _count_replays() if not OLD else None

    def prepare_train(self) -> Figures:
        """Compile the training, and run it twice."""
        workload = self._large(self.arguments.precision)
        column = Measurements("", workload, 1.0)
        column._epochs(2)
        self.prepared["train"] = column, column._epochs(3)[-1]
        return []

    def train(self, seconds: float) -> Figures:
        """Images per second of one training."""
        column, epoch = self.prepared["train"]
        return self._trained(column, round(seconds / epoch))

    def _trained(self, column: Any, epochs: int) -> Figures:
        before = self.replayed() if self.replayed else 0
        workload = getattr(column, "scene", None) or column.workload
        device = workload.runtime.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        # Lower blocks may learn in some epochs only, so all epochs of a training are measured.
        first, *later = column._epochs(WHOLE if self.arguments.freeze else max(epochs, 3) + 1)
        images, middle = len(workload.prepared.task(0)), statistics.median(later)
        whole = first + (sum(later) if self.arguments.freeze else (WHOLE - 1) * middle)
        figures = [
            ("training, later epochs", images / middle, "images/s"),
            (f"training, {WHOLE} epochs with the first", WHOLE * images / whole, "images/s"),
        ]
        if self.replayed:
            figures.append(("steps replayed", self.replayed() - before, "steps"))
        return figures + _memory(device)

    def prepare_infer(self) -> Figures:
        """Learn a task, and run inference until everything is compiled."""
        if "train" in self.prepared:
            column = self.prepared["train"][0]
        else:
            column = Measurements("", self._large(self.arguments.precision), 1.0)
        workload = getattr(column, "scene", None) or column.workload
        workload.method.learn(workload.prepared.task(0))
        infer = (column.answer if OLD else column.inference)(self.arguments.answers)
        for _ in range(4):
            infer()
        synchronise(workload.runtime.device)
        self.prepared["infer"] = infer, workload.runtime.device
        return []

    def infer(self, seconds: float) -> Figures:
        """Images per second with several batches in flight."""
        infer, device = self.prepared["infer"]
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            for _ in range(IN_FLIGHT):
                infer()
            synchronise(device)
            count += IN_FLIGHT
        return [("inference", count * self.arguments.answers / (time.perf_counter() - started), "images/s")]

    def _large(self, precision: str, *, compiled: bool | None = None, batch: int = 0, steps: int = 0) -> Any:
        arguments = self.arguments
        config = BenchConfig(
            arguments.large,
            rank=arguments.rank,
            device=arguments.device,
            batch=batch or arguments.batch,
            precision=precision,
            tasks=0,
        )
        runtime = config.runtime(same_numerics=False)
        compiled = (config.compiles(runtime) and not arguments.eager) if compiled is None else compiled
        per_class = -(-(steps or arguments.steps) * config.batch // 8)
        tested = -(-arguments.answers // 8)
        workload = make_workload(
            config, bench_backbone(arguments.large), runtime, (8,), per_class, tested, compiled=compiled
        )
        if arguments.last:
            method = workload.method
            options = replace(
                method.options, adapter_blocks=arguments.last, cached_views=arguments.views,
                patch_drop_rate=arguments.drop, freeze_at=arguments.freeze,
            )  # fmt: skip
            method = OneAMethod(method.vit, options, runtime, method.plan)
            workload = replace(workload, method=method, prepared=replace(workload.prepared, method=method))
        return workload

    def prepare_small(self) -> Figures:
        """Compile the training of the small network."""
        column = Measurements("", self._small(), 1.0)
        column._epochs(2)
        self.prepared["small"] = column, column._epochs(3)[-1]
        return []

    def small(self, seconds: float) -> Figures:
        """Images per second of the training of the first task."""
        column, epoch = self.prepared["small"]
        return self._trained(column, round(seconds / epoch))

    def prepare_stream(self) -> Figures:
        """Compile everything that the stream needs; the time is reported separately."""
        started = time.perf_counter()
        workload = self._small()
        method = workload.method
        options = replace(method.options, epochs=1, min_epochs=1, max_epochs=1)
        short = OneAMethod(method.vit, options, workload.runtime, method.plan)
        short.learn(workload.prepared.task(0))
        self._evaluate(replace(workload, method=short), 0)
        synchronise(workload.runtime.device)
        self.prepared["stream"] = workload
        return [("stream, loading and compiling", time.perf_counter() - started, "s")]

    def stream(self, seconds: float) -> Figures:
        """Seconds of learning and evaluating all tasks, starting with a new adapter."""
        workload = self.prepared["stream"]
        method = OneAMethod(workload.method.vit, workload.method.options, workload.runtime, workload.method.plan)
        workload = replace(workload, method=method, prepared=replace(workload.prepared, method=method))
        synchronise(workload.runtime.device)
        started, learned = time.perf_counter(), 0.0
        for index in range(workload.prepared.stream.tasks):
            before = time.perf_counter()
            method.learn(workload.prepared.task(index))
            synchronise(workload.runtime.device)
            learned += time.perf_counter() - before
            self._evaluate(workload, index)
        return [
            ("stream, learned and evaluated", time.perf_counter() - started, "s"),
            ("stream, learned", learned, "s"),
        ]

    def _small(self) -> Any:
        """CIFAR-100's stream with random images: the time does not depend on their content."""
        arguments = self.arguments
        weights = arguments.weights if OLD else f"plain:{arguments.weights}"  # the old commit's default
        config = BenchConfig(
            weights, rank=64, device=arguments.device, batch=arguments.batch, precision=arguments.precision, tasks=0
        )
        runtime, vit = config.runtime(same_numerics=False), bench_backbone(weights)
        compiled = config.compiles(runtime) and not arguments.eager
        vit.cast_matrices(runtime.dtype, *(() if OLD else (runtime.fp8,))).to(runtime.device)
        if compiled:
            vit.compile_for({config.batch, EVALUATION_BATCH})
        epochs = arguments.epochs
        options = OneAOptions(
            rank=64, batch_size=config.batch, crop_scale=0.3, head="cosine", head_scale=16.0,
            epochs=epochs, min_epochs=max(1, round(0.8 * epochs)), max_epochs=round(1.6 * epochs),
        )  # fmt: skip
        sizes = TASK_SIZES if arguments.per_class >= 100 else (2, 1, 3)
        method: Any = OneAMethod(vit, options, runtime, StreamPlan(sum(sizes), len(sizes)))
        if arguments.one_parameter:
            if not compiled:
                raise ValueError("an adapter of one parameter is for compiled passes")
            new = method.new_adapter
            method.new_adapter = lambda task: _as_one_parameter(new(task))
        sides: list[Any] = []
        for per_class in (arguments.per_class, max(1, arguments.per_class // 5)):
            labels = torch.arange(sum(sizes)).repeat_interleave(per_class)
            pixels = np.random.default_rng(1).integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
            images = PackedImages(pixels, preprocess_of(vit), runtime.device, "device", runtime.pixel_dtype)
            sides.append(ImageSubset(images, labels, torch.arange(len(labels))))
        stream = Stream(tuple(range(sum(sizes))), sizes)
        return Workload(PreparedRun(stream, sides[0], sides[1], method, {}, 1, compiled), method, runtime)

    def _evaluate(self, workload: Any, index: int) -> None:
        prepared = workload.prepared
        seen = [prepared.stream.range_of(task) for task in range(index + 1)]
        predict_tasks(workload.method, prepared.test, seen, prepared.seed)

    def prepare_one(self) -> Figures:
        """Learn a task of few images, nothing compiled."""
        for precision in ("bf16", "fp32"):
            workload = self._large(precision, compiled=False, batch=8, steps=1)
            workload.method.learn(workload.prepared.task(0))
            self.prepared["one", precision] = workload
        return []

    def one(self, seconds: float) -> Figures:
        """Milliseconds per image of onea and of plain timm, in turn and not compiled."""
        figures: Figures = []
        for precision in ("bf16", "fp32"):
            workload = self.prepared["one", precision]
            functions = [
                column.answer(1) if OLD else column.inference(1)
                for column in (Measurements("", workload, seconds), TimmBaseline(workload, compiled=False))
            ]
            ours, timm = time_interleaved(functions, workload.runtime.device, seconds / 4)
            figures += [
                (f"one image, {precision}, not compiled", 1000 * ours.seconds, "ms"),
                (f"one image, {precision}, timm eager", 1000 * timm.seconds, "ms"),
                (f"one image, {precision}, ours / timm", ours.seconds / timm.seconds, "times"),
            ]
        return figures

    def prepare_memory(self) -> Figures:
        """Nothing: memory is measured from the start of the process."""
        return []

    def memory(self, seconds: float) -> Figures:
        """The memory that training in fp32 reserves, without the plain loop's images."""
        if self.arguments.plain:
            device = _plain_training(self.arguments)
        else:
            workload = self._large("fp32", compiled=False, steps=4)
            Measurements("", workload, 1.0)._epochs(3)
            device = workload.runtime.device
        return _memory(device)


def _plain_training(arguments: argparse.Namespace) -> torch.device:
    from onea.research.bench.baselines import plain_epoch, plain_network

    vit = bench_backbone(arguments.large)
    device = torch.device("cuda" if arguments.device == "auto" else arguments.device)
    labels = torch.arange(arguments.batch) % 8
    batches = [(torch.rand(arguments.batch, 3, vit.size, vit.size), labels) for _ in range(4)]
    epoch = plain_epoch(plain_network(vit.vit, arguments.rank).to(device), batches, 8, device)
    for _ in range(3):
        epoch()
    return device


def _memory(device: torch.device) -> Figures:
    if device.type != "cuda":
        return []
    return [
        ("peak memory, reserved", torch.cuda.max_memory_reserved(device) / 1e6, "MB"),
        ("peak memory, allocated", torch.cuda.max_memory_allocated(device) / 1e6, "MB"),
    ]


def _count_replays() -> Callable[[], int]:
    """A function that returns the number of replayed steps since this call."""
    training: Any = importlib.import_module("onea.learner.optimisation")
    kind, total = training.StepGraph, [0]

    def replay(graph: Any, *inputs: torch.Tensor) -> torch.Tensor:
        before = graph.replayed
        loss: torch.Tensor = kind.__call__(graph, *inputs)
        total[0] += graph.replayed - before
        return loss

    training.StepGraph = type("Counted", (kind,), {"__call__": replay})
    return lambda: total[0]


def _as_one_parameter(adapters: Any) -> Any:
    """The same adapter with all its weights in one parameter, for passes that are compiled."""
    from onea.vit.adapter import Adapters

    class OneParameter(Adapters):
        def flat(self, dtype: torch.dtype) -> torch.Tensor:
            return cast(torch.Tensor, self.row)

    row = torch.cat([part.detach().flatten() for part in adapters._parts])
    adapters.requires_grad_(False)
    adapters.__class__ = OneParameter
    adapters.row = nn.Parameter(row)
    return adapters


def send(*parts: object) -> None:
    """Print a line for gpu_turns.py."""
    print("@", *parts, sep="\t", flush=True)


def main() -> None:
    """Handle requests until the input ends."""
    parser = argparse.ArgumentParser()
    for name, default in (("device", "auto"), ("precision", "bf16"), ("large", ""), ("weights", "")):
        parser.add_argument(f"--{name}", default=default)
    for name in ("rank", "batch", "answers", "steps", "epochs", "per-class", "last", "views"):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in ("drop", "freeze"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    for name in ("eager", "plain", "one-parameter"):
        parser.add_argument(f"--{name}", action="store_true")
    side = Side(parser.parse_args())
    for line in sys.stdin:
        action, *seconds = line.split()
        try:
            for figure in getattr(side, action)(*map(float, seconds)):
                send("figure", *figure)
            send("done")
        except Exception as error:
            traceback.print_exc()
            send("failed", f"{type(error).__name__}: {error}".replace("\n", " ").replace("\t", " ")[:500])


if __name__ == "__main__":
    main()
