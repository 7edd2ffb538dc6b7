# SPDX-License-Identifier: Apache-2.0
"""Find the base learning rate of every method: as many trials for each, on training images only.

    python benchmarks/tune_presets.py --data cifar100=DIR cub200=DIR --workers 15 --limit-seconds 400
    python benchmarks/tune_presets.py --choose [--write]

A trial learns the first tasks of a stream on some training images of each class and answers others, which are held out
of the training side; test images are never read. The stream is drawn until its first task has ten classes. Epochs and
batch size are those of the default preset's rule. Every method gets five rates around its present one, on each dataset;
where the best of them (mean over the datasets) is the first or the last, one more in that direction, again on every
dataset, up to three times.

Trials run in processes that share the GPU, the longest first. Each ends as a row of benchmarks/preset-trials.csv; the
same command goes on where it was stopped. ``--choose`` reads the rows and tells the rate of each method, ``--write``
puts them into the classes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import numpy as np
from preset_choice import COLUMNS, FACTORS, TRIALS, append, mean_scores, next_rate, read_rows, tell, trained_methods

from onea.data.dataset import Split
from onea.errors import OneaError
from onea.learner.data_rule import DataShape
from onea.options import build
from onea.research.data.pack import pack, stored_shape
from onea.research.data.sources import load_dataset
from onea.research.methods import METHODS
from onea.research.methods.contract import Method
from onea.research.methods.presets import preset_options
from onea.research.runs.mps import multi_process_service
from onea.research.streams import Stream, make_stream

BACKBONE = "vit_small_patch14_112"
FIRST_SEED = 100  # the streams that results are made of have small seeds
SHARE = (0.25, 0.36)  # of all classes that are in a trial
RANDOM_FEATURES = 1000
CLASSES_OF_TASK = 10  # on average in the whole stream
# Work beside one forward and backward pass per image and epoch, roughly; only the order of the trials depends on it.
WEIGHTS = {"sema": 6.0, "joint": 3.0, "cl-lora": 2.0, "mos": 1.5, "l2p": 1.5, "dualprompt": 1.5, "coda-prompt": 1.5}


@dataclass(frozen=True)
class Trial:
    """A method with a learning rate, on a draw of a dataset."""

    data: str
    method: str
    rate: float
    draw: int

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from the others in a row of text."""
        return self.data, self.method, f"{self.rate:.4g}", str(self.draw)


@dataclass(frozen=True)
class Material:
    """The images of the trials of a dataset, in a file that every worker reads once."""

    file: Path
    sizes: tuple[int, ...]
    train_images: int
    held_out_images: int
    seed: int
    mirror: bool

    @property
    def shape(self) -> DataShape:
        """What the rule of the default preset looks at."""
        return DataShape(self.train_images, sum(self.sizes), len(self.sizes))

    def options(self, method: str, rate: float) -> Any:
        """Those of the default preset with another rate; RanPAC has fewer random features, or it would take longest."""
        kind = METHODS.load(method)
        values = preset_options(method, "auto", self.shape) | {"learning_rate": rate}
        few = {"random_features": RANDOM_FEATURES} if hasattr(kind.Options, "random_features") else {}
        return build(kind.Options, values | few)


def draw_stream(classes: int, draw: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Seed, class order and sizes of the first tasks of a step-imbalanced stream that begins with ten classes or more.

    With a small task among them, where there are three or more: methods are to be tuned for uneven streams.
    """
    tasks = max(2, round(classes / CLASSES_OF_TASK))
    few, first = max(2, round(0.4 * tasks)), min(CLASSES_OF_TASK, classes // 4)
    for seed in count(FIRST_SEED):
        stream = make_stream(classes=classes, tasks=tasks, gamma=0.01, seed=seed)
        sizes = stream.sizes[:few]
        uneven = few < 3 or min(sizes) <= 3
        if sizes[0] >= first and uneven and (few < 3 or SHARE[0] <= sum(sizes) / classes <= SHARE[1]):
            draw -= 1
            if draw < 0:
                return seed, stream.class_order[: sum(sizes)], sizes
    raise AssertionError("there is always one more seed")


def prepare(name: str, path: str, draw: int, place: Path, arguments: argparse.Namespace) -> Material:
    """Read the images of a dataset's trials, once for all workers."""
    dataset = load_dataset(f"folder:{path}")
    seed, order, sizes = draw_stream(len(dataset.classes), draw)
    numbers = np.random.default_rng(seed)
    rows, labels, held = [], [], []
    for position, label in enumerate(order):
        own = numbers.permutation(np.flatnonzero(dataset.train.labels == label))
        out = min(max(1, round(arguments.holdout * len(own))), arguments.most_held_out)
        chosen = own[: out + arguments.per_class]
        rows += chosen.tolist()
        labels += [position] * len(chosen)
        held += [True] * out + [False] * (len(chosen) - out)
    side = dataset.train
    files = None if side.files is None else tuple(side.files[row] for row in rows)
    pixels = None if side.pixels is None else side.pixels[rows]
    split = Split(np.array(labels), files, pixels)
    stored = arguments.stored_size
    packed = pack(split, stored, cache=place, on_bad="fail", shape=stored_shape([split], stored))
    file = place / f"{name}-{draw}.npz"
    np.savez(file, pixels=packed.pixels, labels=np.array(labels), held=np.array(held))
    return Material(file, sizes, len(held) - sum(held), sum(held), seed, dataset.mirror)


class Bench:
    """What a worker keeps between trials: the network, and the images of each dataset on its device."""

    def __init__(self, materials: dict[tuple[str, int], Material], backbone: str, device: str) -> None:
        from onea.runtime import make_runtime
        from onea.vit.backbones import load_backbone

        self.materials, self.runtime = materials, make_runtime(device, threads=1)
        self.vit = load_backbone(backbone)
        self.vit.keep_matrices_in(self.runtime.dtype, self.runtime.fp8).to(self.runtime.device)
        self._sides: dict[tuple[str, int], Any] = {}
        self._frozen: dict[tuple[str, int], float] = {}

    def run(self, trial: Trial) -> dict[str, Any]:
        """A row about a trial."""
        which = trial.data, trial.draw
        material, started = self.materials[which], time.perf_counter()
        options = material.options(trial.method, trial.rate)
        found = {"A_T": "", "error": ""}
        try:
            found["A_T"] = f"{self._accuracy(trial.method, options, which):.2f}"
        except OneaError as error:  # the loss is not finite: as good an answer as any
            found["error"] = " ".join(str(error).split())[:80]
        seconds = time.perf_counter() - started
        if which not in self._frozen:
            kind = METHODS.load("simplecil")
            self._frozen[which] = self._accuracy("simplecil", kind.Options(), which)
        row = (
            *(*trial.key, options.batch_size, options.epochs, found["A_T"], f"{self._frozen[which]:.2f}"),
            *(f"{seconds:.1f}", "-".join(map(str, material.sizes)), material.train_images, material.held_out_images),
            found["error"],
        )
        return dict(zip(COLUMNS, row, strict=True))

    def _accuracy(self, method: str, options: Any, which: tuple[str, int]) -> float:
        """Percent of the held-out images of all tasks that are answered right after the last one."""
        from onea.learner.tasks import StreamPlan
        from onea.research.runs.evaluation import answer_tasks
        from onea.research.runs.setup import Prepared

        material = self.materials[which]
        stream = Stream(tuple(range(sum(material.sizes))), material.sizes)
        plan = StreamPlan(stream.classes, stream.tasks)
        learner: Method = METHODS.load(method)(self.vit, options, self.runtime, plan)
        train, held = self._images(which)
        prepared = Prepared(stream, train, held, learner, {}, material.seed)
        for index in range(stream.tasks):
            learner.learn(prepared.task(index))
        found = answer_tasks(learner, held, prepared.class_ranges(stream.tasks - 1), material.seed)
        return 100 * float((next(iter(found.answers.values())) == found.truth).double().mean())

    def _images(self, which: tuple[str, int]) -> Any:
        if which not in self._sides:
            import torch

            from onea.data.image_storage import PackedImages
            from onea.data.transforms import Preprocess
            from onea.research.runs.setup import Side

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
            self._sides[which] = [Side(images, truth, torch.nonzero(part).flatten()) for part in (~out, out)]
        return self._sides[which]


def work(connection: Connection, materials: dict[tuple[str, int], Material], backbone: str, device: str) -> None:
    """The life of a worker: trials come one by one, and a row goes back for each."""
    bench = Bench(materials, backbone, device)
    while (trial := connection.recv()) is not None:
        connection.send(bench.run(trial))


def run_all(waiting: deque[Trial], start: Any, workers: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Rows as they come, until none waits; whoever gets one may add trials.

    A worker that dies costs its trial, and nothing is left running at the deadline.
    """
    active: dict[Connection, tuple[Trial, Any]] = {}
    idle: list[tuple[Connection, Any]] = []
    try:
        while (waiting or active) and time.monotonic() < deadline:
            while waiting and len(active) < workers:
                connection, process = idle.pop() if idle else start()
                connection.send(waiting[0])
                active[connection] = waiting.popleft(), process
            for ready in wait(list(active), timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
                connection = cast(Connection, ready)
                trial, process = active.pop(connection)
                try:
                    row = connection.recv()
                except (EOFError, OSError):
                    print(f"{trial} died with its process, and is left out", flush=True)
                    process.join()
                    continue
                idle.append((connection, process))
                yield row
    finally:
        for connection, process in [*idle, *((one, process) for one, (_, process) in active.items())]:
            process.kill()
            process.join()
            connection.close()


def tune(arguments: argparse.Namespace) -> None:
    """Run whatever is missing."""
    deadline = time.monotonic() + arguments.limit_seconds
    paths = dict(one.split("=", 1) for one in arguments.data)
    chosen = {name: kind for name, kind in trained_methods().items() if name in (arguments.methods or [name])}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the workers
    with tempfile.TemporaryDirectory() as place, multi_process_service(arguments.device != "cpu") as service:
        os.environ.update(service)
        materials = {
            (name, draw): prepare(name, path, draw, Path(place), arguments)
            for name, path in paths.items()
            for draw in range(arguments.draws)
        }
        for (name, draw), material in materials.items():
            print(f"{name}, draw {draw}: seed {material.seed}, {material}", flush=True)
        context = multiprocessing.get_context("spawn")

        def start() -> tuple[Connection, Any]:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(theirs, materials, arguments.backbone, arguments.device), daemon=True
            )
            process.start()
            theirs.close()  # so that its death closes the pipe
            return ours, process

        def cost(trial: Trial) -> float:
            material = materials[trial.data, trial.draw]
            epochs = chosen[trial.method].epochs(material.options(trial.method, trial.rate), material.sizes)
            images = sum(size * times for size, times in zip(material.sizes, epochs, strict=True))
            return WEIGHTS.get(trial.method, 1.0) * images * material.train_images / sum(material.sizes)

        known = read_rows(arguments.trials)

        def missing(name: str) -> list[Trial]:
            """Trials that a method lacks: of its first rates, or of one more."""
            own = [row for row in known if row["method"] == name]
            rates = {float(row["learning_rate"]) for row in own}
            if len(rates) < len(FACTORS):  # otherwise a base rate that has been chosen since would move the grid
                rates |= {float(f"{(chosen[name].base_rate or 0.01) * factor:.4g}") for factor in FACTORS}
            done = {tuple(row[column] for column in COLUMNS[:4]) for row in own}
            every = [Trial(data, name, rate, draw) for rate in sorted(rates) for data, draw in materials]
            if not (found := [one for one in every if one.key not in done]):
                more = next_rate(mean_scores(own, name))
                found = [] if more is None else [Trial(data, name, more, draw) for data, draw in materials]
            return found

        begun = time.monotonic()
        every = [one for name in chosen for one in missing(name)]
        waiting = deque(sorted(every, key=lambda one: (one.draw, -cost(one))))
        open_trials = Counter(one.method for one in waiting)
        passes = sum(cost(one) for one in waiting) / 1e6
        print(f"{len(waiting)} trials, about {passes:.1f} million image passes", flush=True)
        for row in run_all(waiting, start, arguments.workers, deadline):
            append(arguments.trials, row)
            known.append({name: str(value) for name, value in row.items()})
            print(f"{time.monotonic() - begun:6.0f} s  {','.join(known[-1].values())}", flush=True)
            open_trials[row["method"]] -= 1
            if not open_trials[row["method"]]:
                more = missing(row["method"])
                waiting.extendleft(more)
                open_trials[row["method"]] = len(more)
        print("time is up; the same command goes on from here" if time.monotonic() >= deadline else "done", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=[], help="NAME=FOLDER for each dataset")
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--trials", type=Path, default=TRIALS)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--limit-seconds", type=float, default=400.0)
    parser.add_argument("--draws", type=int, default=1, help="streams of each dataset")
    parser.add_argument("--per-class", type=int, default=60, help="training images of a class, at most")
    parser.add_argument("--holdout", type=float, default=0.25, help="share of a class's images that is held out")
    parser.add_argument("--most-held-out", type=int, default=50, help="images of a class, at most")
    parser.add_argument("--backbone", default=BACKBONE)
    parser.add_argument(
        "--stored-size", type=int, default=128, help="side of stored images: the network's input x 8 / 7"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--choose", action="store_true", help="tell the rates that the trials speak for")
    parser.add_argument("--write", action="store_true", help="with --choose: put them into the classes")
    arguments = parser.parse_args()
    if arguments.choose:
        tell(arguments.trials, arguments.write)
    elif arguments.data:
        tune(arguments)
    else:
        parser.error("give --data NAME=FOLDER ..., or --choose")


if __name__ == "__main__":
    main()
