# SPDX-License-Identifier: Apache-2.0
"""Find the base learning rate of every method on a network, on training images only.

    python benchmarks/presets/tuning_data.py cifar100=DIR cub200=DIR --draws 3 --to DRAWN
    python benchmarks/presets/tune_presets.py DRAWN --image-size 112 --workers 16
    python benchmarks/presets/tune_presets.py --choose [--write]

A trial learns the first tasks of a stream and classifies held-out training images, with the epochs and batch size of
the default preset. Each method is tried with rates around its present one (six for One-A+, One-A, joint training, MOS
and RanPAC, three for others) on each dataset. If the best rate (mean over the datasets) is the first or the last, one
more in that direction is tried, up to three times. Then all rates are tried on the next draw of the streams.
``--scale`` is the factor of SGD's steps relative to the previous network. It does not apply to Adam, whose steps do not
depend on the size of the gradients.

Trials run in processes that share the GPU: those of the first draw first, and of these the methods with six rates, the
longest first. Each trial becomes a row of ``--trials``; repeat the command to resume. Draws that are added to the
folder are used as well. ``--choose`` prints the rate of each method, ``--write`` also writes them into the
classes.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import numpy as np
from preset_choice import (
    COLUMNS,
    SIX_RATES,
    TRIALS,
    append,
    first_rates,
    mean_scores,
    next_rate,
    number_of_rates,
    print_rates,
    read_rows,
    trained_methods,
)
from tuning_data import Material, draws_in, material_of

from onea.errors import OneaError
from onea.options import make_options
from onea.research.methods import METHODS
from onea.research.methods.contract import Method
from onea.research.methods.presets import preset_options
from onea.research.runs.executors import multi_process_service
from onea.research.streams import Stream
from onea.vit.network_config import BUNDLED

RANDOM_FEATURES = 1000
ADAM = frozenset(("aper-finetune", "l2p", "dualprompt", "coda-prompt", "inflora"))
# Approximate cost per image and epoch in forward and backward passes; only the order of trials depends on it.
WEIGHTS = {"sema": 6.0, "joint": 3.0, "cl-lora": 2.0}
WEIGHTS |= dict.fromkeys(("mos", "icarl", "l2p", "dualprompt", "coda-prompt"), 1.5)


@dataclass(frozen=True)
class Trial:
    """A method with a learning rate, on a draw of a dataset."""

    data: str
    method: str
    rate: float
    draw: int

    @property
    def key(self) -> tuple[str, ...]:
        """The identifier of a trial in a line of text."""
        return self.data, self.method, f"{self.rate:.4g}", str(self.draw)


def options_of(material: Material, method: str, rate: float) -> Any:
    """The options of the default preset with another rate; RanPAC with fewer random features, to save time."""
    kind = METHODS.load(method)
    values = preset_options(method, "auto", material.shape) | {"learning_rate": rate}
    few = {"random_features": RANDOM_FEATURES} if hasattr(kind.Options, "random_features") else {}
    return make_options(kind.Options, values | few)


class TrialRunner:
    """The state of a worker: the network, and the images of each dataset on its device."""

    def __init__(self, backbone: str, image_size: int | None, device: str) -> None:
        from onea.runtime import make_runtime
        from onea.vit.backbones import load_backbone

        self.materials: dict[tuple[str, int], Material] = {}
        self.runtime = make_runtime(device, threads=1)
        self.vit = load_backbone(backbone, image_size)
        self.vit.cast_matrices(self.runtime.dtype, self.runtime.fp8).to(self.runtime.device)
        self._sides: dict[tuple[str, int], Any] = {}
        self._frozen: dict[tuple[str, int], float] = {}

    def run(self, trial: Trial, material: Material) -> dict[str, Any]:
        """The row of a trial."""
        which, started = (trial.data, trial.draw), time.perf_counter()
        self.materials[which] = material
        options = options_of(material, trial.method, trial.rate)
        result = {"A_T": "", "error": ""}
        try:
            result["A_T"] = f"{self._accuracy(trial.method, options, which):.2f}"
        except OneaError as error:  # the loss is not finite, which is also a result
            result["error"] = " ".join(str(error).split())[:80]
        seconds = time.perf_counter() - started
        if which not in self._frozen:
            kind = METHODS.load("simplecil")
            self._frozen[which] = self._accuracy("simplecil", kind.Options(), which)
        row = (
            *(*trial.key, options.batch_size, options.epochs, result["A_T"], f"{self._frozen[which]:.2f}"),
            *(f"{seconds:.1f}", "-".join(map(str, material.sizes)), material.train_images, material.held_out_images),
            result["error"],
        )
        return dict(zip(COLUMNS, row, strict=True))

    def _accuracy(self, method: str, options: Any, which: tuple[str, int]) -> float:
        """Accuracy in percent on the held-out images of all tasks after the last one."""
        from onea.learner.tasks import StreamPlan
        from onea.research.runs.evaluation import predict_tasks
        from onea.research.runs.setup import PreparedRun

        material = self.materials[which]
        stream = Stream(tuple(range(sum(material.sizes))), material.sizes)
        plan = StreamPlan(stream.classes, stream.tasks)
        learner: Method = METHODS.load(method)(self.vit, options, self.runtime, plan)
        train, held = self._images(which)
        prepared = PreparedRun(stream, train, held, learner, {}, material.seed)
        for index in range(stream.tasks):
            learner.learn(prepared.task(index))
        return predict_tasks(learner, held, prepared.class_ranges(stream.tasks - 1), material.seed).accuracy

    def _images(self, which: tuple[str, int]) -> Any:
        if which not in self._sides:
            import torch

            from onea.data.image_storage import PackedImages
            from onea.data.transforms import Preprocess
            from onea.research.runs.setup import ImageSubset

            material = self.materials[which]
            with np.load(material.file) as file:
                pixels, labels, held = (file[name] for name in ("pixels", "labels", "held"))
            preprocess = Preprocess(
                size=self.vit.size,
                mean=self.vit.mean,
                std=self.vit.std,
                geometry="direct",
                resize=0,
                filter="bilinear",
                mirror=material.mirror,
            )
            device = self.runtime.device
            tier = "device" if device.type == "cuda" else "host"
            images = PackedImages(pixels, preprocess, device, tier, self.runtime.pixel_dtype)  # type: ignore[arg-type]
            truth, out = torch.from_numpy(labels), torch.from_numpy(held)
            self._sides[which] = [ImageSubset(images, truth, torch.nonzero(part).flatten()) for part in (~out, out)]
        return self._sides[which]


def work(connection: Connection, backbone: str, image_size: int | None, device: str) -> None:
    """The main loop of a worker: it receives trials and sends back their rows."""
    runner = TrialRunner(backbone, image_size, device)
    while (request := connection.recv()) is not None:
        connection.send(runner.run(*request))


def run_all(waiting: list[Trial], material: Any, start: Any, workers: int, deadline: float) -> Iterator[Any]:
    """Yield each trial with its row as it finishes; the caller may add trials.

    A trial whose worker dies has no row. At the deadline, all workers are killed.
    """
    active: dict[Connection, tuple[Trial, Any]] = {}
    idle: list[tuple[Connection, Any]] = []
    try:
        while (waiting or active) and time.monotonic() < deadline:
            while waiting and len(active) < workers:
                connection, process = idle.pop() if idle else start()
                trial = waiting.pop(0)
                active[connection] = trial, process
                with contextlib.suppress(OSError):  # it died while idle, which the wait below detects
                    connection.send((trial, material(trial)))
            for ready in wait(list(active), timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
                connection = cast(Connection, ready)
                trial, process = active.pop(connection)
                try:
                    row = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    yield trial, None
                    continue
                idle.append((connection, process))
                yield trial, row
    finally:
        for connection, process in [*idle, *((connection, process) for connection, (_, process) in active.items())]:
            process.kill()
            process.join()
            connection.close()


class Queue:
    """The next trials of each method: initial rates, then rates beyond the edges, then further draws."""

    def __init__(self, arguments: argparse.Namespace, place: Path) -> None:
        wanted = arguments.methods
        self.methods = {name: kind for name, kind in trained_methods().items() if name in (wanted or [name])}
        self.materials: dict[tuple[str, int], Material] = {}
        self.waiting: list[Trial] = []
        self.pending: Counter[str] = Counter()
        self.failures: Counter[Trial] = Counter()
        self.rows = read_rows(arguments.trials)
        self._arguments, self._place = arguments, place

    def refill(self) -> None:
        """Add new draws, and plan trials for each method without pending ones."""
        for which, file in draws_in(self._arguments.drawn).items():
            if which not in self.materials and which[1] < self._arguments.draws:
                self.materials[which] = material_of(file, self._arguments.stored_size, self._place)
                print(f"{which}: {self.materials[which]}", flush=True)
        for name in self.methods:
            if not self.pending[name]:
                missing = self._missing(name)
                self.pending[name] = len(missing)
                self.waiting += missing
        self.waiting.sort(key=lambda trial: (trial.draw, trial.method not in SIX_RATES, -self.cost(trial)))

    def cost(self, trial: Trial) -> float:
        """Approximate cost in image passes."""
        material = self.materials[trial.data, trial.draw]
        options = options_of(material, trial.method, trial.rate)
        epochs = self.methods[trial.method].epochs_per_task(options, material.sizes)
        images = sum(size * times for size, times in zip(material.sizes, epochs, strict=True))
        return WEIGHTS.get(trial.method, 1.0) * images * material.train_images / sum(material.sizes)

    def _missing(self, name: str) -> list[Trial]:
        """The missing trials of a method on one draw, once its earlier draws are done."""
        own = [row for row in self.rows if row["method"] == name]
        centre = (self.methods[name].base_learning_rate or 0.01) * (1 if name in ADAM else self._arguments.scale)
        rates, first = {float(row["learning_rate"]) for row in own}, number_of_rates(name)
        if len(rates) < first:  # a base rate that has changed meanwhile must not move the grid
            rates |= set(first_rates(name, centre))
        done = {tuple(row[column] for column in COLUMNS[:4]) for row in own}
        for draw in sorted({draw for _, draw in self.materials}):
            streams = [data for data, number in self.materials if number == draw]
            trials = [Trial(data, name, rate, draw) for rate in sorted(rates) for data in streams]
            if not draw and all(trial.key in done for trial in trials):
                further = next_rate(mean_scores(own, name, draws=1), first)
                trials += [] if further is None else [Trial(data, name, further, draw) for data in streams]
            if missing := [trial for trial in trials if trial.key not in done and self.failures[trial] < 2]:
                return missing
        return []


def tune(arguments: argparse.Namespace) -> None:
    """Run all missing trials."""
    deadline = time.monotonic() + arguments.limit_seconds
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the workers
    with tempfile.TemporaryDirectory() as place, multi_process_service(arguments.device != "cpu") as service:
        os.environ.update(service)
        print("with" if service else "without", "NVIDIA MPS", flush=True)
        context = multiprocessing.get_context("spawn")

        def start() -> tuple[Connection, Any]:
            ours, theirs = context.Pipe()
            values = theirs, arguments.backbone, arguments.image_size, arguments.device
            process = context.Process(target=work, args=values, daemon=True)
            process.start()
            theirs.close()  # so that the pipe closes when the worker ends
            return ours, process

        begun, queue = time.monotonic(), Queue(arguments, Path(place))
        queue.refill()
        passes = sum(map(queue.cost, queue.waiting)) / 1e6
        print(f"{len(queue.waiting)} trials to begin with, about {passes:.1f} million image passes", flush=True)

        def material(trial: Trial) -> Material:
            return queue.materials[trial.data, trial.draw]

        for trial, row in run_all(queue.waiting, material, start, arguments.workers, deadline):
            queue.pending[trial.method] -= 1
            if row is None:
                queue.failures[trial] += 1
                print(f"{trial} failed: its process died", flush=True)
            else:
                append(arguments.trials, row)
                queue.rows.append({name: str(value) for name, value in row.items()})
                print(f"{time.monotonic() - begun:6.0f} s  {','.join(queue.rows[-1].values())}", flush=True)
            queue.refill()
        print(
            "time limit reached; repeat the command to continue" if time.monotonic() >= deadline else "done", flush=True
        )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drawn", nargs="?", type=Path, help="folder that tuning_data.py wrote")
    parser.add_argument("--methods", nargs="+", help="methods to tune; by default all")
    parser.add_argument("--trials", type=Path, default=TRIALS)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--limit-seconds", type=float, default=400.0)
    parser.add_argument("--draws", type=int, default=100, help="maximum number of streams per dataset")
    parser.add_argument("--backbone", default=BUNDLED)
    parser.add_argument("--image-size", type=int, help="side of the network's input, if not its own")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of SGD's rates, relative to the present ones")
    parser.add_argument(
        "--stored-size", type=int, default=128, help="side of stored images: the network's input x 8 / 7"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--choose", action="store_true", help="print the best rate of each method")
    parser.add_argument("--write", action="store_true", help="with --choose: also write the rates into the classes")
    arguments = parser.parse_args()
    if arguments.choose:
        print_rates(arguments.trials, arguments.write)
    elif arguments.drawn:
        tune(arguments)
    else:
        parser.error("give a folder with drawn images, or --choose")


if __name__ == "__main__":
    main()
