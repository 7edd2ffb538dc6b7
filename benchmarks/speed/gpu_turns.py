# SPDX-License-Identifier: Apache-2.0
"""An old commit and the current code, measured in turn on one GPU: training, inference, a stream, one image, memory.

    mkdir OLD && git archive 1a2ee9f src | tar x -C OLD
    PYTHONPATH=src python benchmarks/speed/gpu_turns.py --old OLD [--only train,infer] [--out turns.csv]

Each side is a process with its own code. All sides of a section are prepared in parallel (compilation takes a minute)
and measured in turn, one at a time, so that a slowdown of the machine affects all of them. Results are written at
once; the medians, and their ratios to the old commit or another baseline, follow at the end. Where only the time is
measured, weights and images are random. A section that fails or exceeds its time limit is reported and skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SMALL = "vit_small_patch14_dinov2"
FP8 = ("--precision", "fp8")


class Section(NamedTuple):
    """A measurement: its sides, number and length of turns, and the baseline of each side."""

    sides: dict[str, tuple[str, ...]]
    turns: int
    seconds: float
    limit: int  # seconds from the start of its processes
    against: str = "old"


def sections(arguments: argparse.Namespace) -> dict[str, Section]:
    """All sections by name; sides of the same name in ``train`` and ``infer`` are one process."""
    last = tuple(f"--{name}={getattr(arguments, name)}" for name in ("last", "views", "drop", "freeze"))
    name = f"new last {arguments.last}" + (f" after {arguments.freeze:.0%}" if arguments.freeze else "") + ", cached"
    large = {"old": (), "new": (), "new fp8": FP8}
    trained = large | {name: last, f"{name}, fp8": (*last, *FP8)}
    many = {"old": (), "new": (), "new one parameter": ("--one-parameter",)}
    return {
        "train": Section(trained, arguments.turns, arguments.seconds, 240),
        "infer": Section(large, arguments.turns, arguments.seconds, 180),
        "one": Section({"old": (), "new": ()}, 3, arguments.seconds, 60),
        "memory": Section({"plain": ("--plain",), "old": (), "new": ()}, 1, 0, 60, "plain"),
        "small": Section(many, arguments.turns, arguments.seconds, 150),
        "stream": Section({"old": (), "new": ()}, arguments.stream_turns, 0, 420),
    }


def without_prefix(sides: dict[str, tuple[str, ...]], prefix: str) -> dict[str, tuple[str, ...]]:
    """The sides whose names do not have this prefix."""
    return {name: extra for name, extra in sides.items() if not name.startswith(prefix)}


class SideError(Exception):
    """A side failed."""


class Worker:
    """A process that measures one side, and its output lines."""

    def __init__(self, root: Path, arguments: list[str], log: Path):
        environment = os.environ | {"PYTHONPATH": str(root / "src"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        command = [sys.executable, "-u", str(HERE / "gpu_turns_work.py"), *arguments]
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read_lines, daemon=True).start()

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@\t"):
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def request(self, *words: object) -> None:
        """Send a request; ``result`` waits for its result."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(*words, file=self.process.stdin, flush=True)

    def result(self, deadline: float) -> list[list[str]]:
        """The figures of the last request.

        Raises:
            SideError: the side failed, ended, or took too long.
        """
        figures: list[list[str]] = []
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise SideError("took too long") from None
            if line is None:
                raise SideError(f"ended with status {self.process.wait()}")
            _, kind, *rest = line.split("\t")
            if kind == "failed":
                raise SideError(*rest)
            if kind == "done":
                return figures
            figures.append(rest)

    def stop(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Table:
    """The CSV, written line by line, and the figures in it."""

    def __init__(self, path: Path):
        self._file = path.open("w", newline="")
        self._csv = csv.writer(self._file, lineterminator="\n")
        self.values: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._write("section", "what", "side", "turn", "value", "unit")

    def add(self, section: str, side: str, turn: int, figures: list[list[str]]) -> None:
        """Write the figures of one turn; turn 0 is the preparation."""
        for what, value, unit in figures:
            if turn:
                self.values[section, what, unit][side].append(float(value))
            self._write(section, what, side, turn, f"{float(value):.6g}", unit)

    def remark(self, section: str, side: str, text: str) -> None:
        """Write an error or another remark."""
        self._write(section, text, side, "", "", "")

    def summarise(self, section: str, against: str) -> None:
        """Medians, and ratios to one side's."""
        for (name, what, unit), sides in self.values.items():
            if name != section:
                continue
            medians = {side: statistics.median(numbers) for side, numbers in sides.items()}
            for side, value in medians.items():
                self._write(section, what, side, "median", f"{value:.6g}", unit)
                if side != against and medians.get(against):
                    self._write(section, what, side, f"ratio to {against}", f"{value / medians[against]:.4f}", "times")

    def _write(self, *cells: object) -> None:
        self._csv.writerow(cells)
        self._file.flush()
        print(*cells, sep=",", flush=True)


def measure(
    section: str,
    plan: Section,
    workers: dict[tuple[str, ...], Worker],
    table: Table,
    start: Callable[[str, tuple[str, ...]], Worker],
) -> None:
    """Prepare all sides of a section in parallel, then measure them in turn; a failed side is left out."""
    deadline = time.monotonic() + plan.limit
    shared = "large" if section in ("train", "infer") else section
    sides: dict[str, Worker] = {}
    for name, extra in plan.sides.items():
        key = (shared, name)
        if key not in workers:
            workers[key] = start(name, extra)
        sides[name] = workers[key]

    def collect(name: str, turn: int) -> None:
        try:
            table.add(section, name, turn, sides[name].result(deadline))
        except SideError as failure:
            table.remark(section, name, f"failed: {failure}")
            sides.pop(name).stop()
            workers.pop((shared, name))

    for worker in sides.values():
        worker.request(f"prepare_{section}")
    started = time.monotonic()
    for name in list(sides):
        collect(name, 0)
    table.remark(section, "all", f"ready after {time.monotonic() - started:.0f} s")
    for turn in range(1, plan.turns + 1):
        for name in list(sides):
            sides[name].request(section, plan.seconds)
            collect(name, turn)
    table.summarise(section, plan.against)


def expanded_weights(folder: Path) -> Path:
    """The bundled small network as a plain file, which the old commit can read, too."""
    from safetensors.torch import save_file

    from onea.vit.backbones import load_backbone

    path = folder / f"{SMALL}.safetensors"
    tensors = {name: value.contiguous() for name, value in load_backbone(SMALL).vit.state_dict().items()}
    save_file(tensors, path)
    return path


def main() -> None:
    """Measure the selected sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="checkout of the old commit")
    parser.add_argument("--only", default="train,infer,one,memory,small,stream", help="sections to measure")
    parser.add_argument("--without", default="", help="prefix of the sides to leave out")
    parser.add_argument("--out", type=Path, default=Path("gpu-turns.csv"), help="a log is written beside it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--large", default="vit_base_patch16_224", help="timm architecture, random weights")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--answers", type=int, default=256, help="batch size of inference")
    parser.add_argument("--steps", type=int, default=16, help="steps of an epoch of the large network")
    parser.add_argument("--last", type=int, default=3, help="last blocks with an adapter, in some sides")
    parser.add_argument("--views", type=int, default=4, help="fixed views of each image in these sides")
    parser.add_argument("--drop", type=float, default=0.0, help="fraction of the patches that these sides leave out")
    parser.add_argument("--freeze", type=float, default=0.0, help="fraction of the epochs in which all blocks learn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    parser.add_argument("--epochs", type=int, default=25, help="E0 of the stream; 25 is the paper's")
    parser.add_argument(
        "--per-class", type=int, default=500, help="training images per class of the stream; below 100 for a test run"
    )
    parser.add_argument("--stream-turns", type=int, default=1)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--eager", action="store_true", help="compile nothing, for a test run")
    arguments = parser.parse_args()
    chosen, known = arguments.only.split(","), sections(arguments)
    if unknown := set(chosen) - set(known):
        parser.error(f"no section {', '.join(unknown)}; choose from {', '.join(known)}")
    if arguments.without:
        known = {
            name: plan._replace(sides=without_prefix(plan.sides, arguments.without)) for name, plan in known.items()
        }
    table, log = Table(arguments.out), arguments.out.with_suffix(".log")
    log.write_text("")
    with tempfile.TemporaryDirectory() as folder:
        common = ["--device", arguments.device, "--large", arguments.large, "--precision", arguments.precision]
        if {"small", "stream"} & set(chosen):
            common += ["--weights", str(expanded_weights(Path(folder)))]
        for name in ("rank", "batch", "answers", "steps", "epochs", "per-class"):
            common += [f"--{name}", str(getattr(arguments, name.replace("-", "_")))]
        common += ["--eager"] if arguments.eager else []

        def start(name: str, extra: tuple[str, ...]) -> Worker:
            return Worker(arguments.old.resolve() if name == "old" else ROOT, [*common, *extra], log)

        workers: dict[tuple[str, ...], Worker] = {}
        try:
            for section in known:
                if section not in chosen:
                    continue
                measure(section, known[section], workers, table, start)
                if section != "train" or "infer" not in chosen:
                    for worker in workers.values():  # finished sections must not take memory or time
                        worker.stop()
                    workers.clear()
        finally:
            for worker in workers.values():
                worker.stop()


if __name__ == "__main__":
    main()
