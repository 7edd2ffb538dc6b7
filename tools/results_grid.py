# SPDX-License-Identifier: Apache-2.0
"""List and start all runs of the results page on its two main streams, and collect their records in docs/results.

    python tools/results_grid.py list --out made > jobs.txt
    python tools/results_grid.py run --out made --workers 16 [--only one-a,mos] [--compile yes]
    MADE=made make results

``list`` prints one command per line, the cheapest methods first, with the expected seconds. ``run`` runs them with a
number of workers; runs that train the same adapters train them once. Compilation takes a minute of CPU time in each
run, which is worth it on a busy GPU, even on CUB-200. Repeat the command to resume. Run both in a folder in which
``cifar100`` and ``cub200`` are the images or links to them, because records contain the paths of their options. Runs
that are already in docs/results are left out.

``make results`` begins with ``collect made``, which compresses finished records into docs/results and reports missing
ones. If all five seeds of a method have been repeated, its earlier runs are removed. Then tables, README, pages and the
site are updated (tools/docs/fill.py).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gzip
import json
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from onea.files import dump_with_checksum, write_atomically
from onea.research.record import Record, find_record_files, read_record_file, record_path
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.executors import LocalProcesses
from onea.research.runs.grid import RunJob

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
IMAGE_SIZE = 112
STREAMS = {"cifar100": 10, "cub200": 20}
SEEDS = (1, 2, 3, 4, 5)
MAX_BYTES = 15_000  # of a compressed record without the analysis of its merges
_DEFAULT_SECONDS = 200.0  # of a method without earlier runs
_WITH_CLASSIFIERS = {"classifier": "rgda", "compare_classifiers": "ncm,slda,whitened"}
_ONE_TASK = 1
# Method, options, folder in docs/results, and number of tasks if it is not that of the stream. Joint training is an
# upper bound only after the last task, so all classes come in one task.
ROWS: tuple[tuple[str, dict[str, Any], str, int | None], ...] = (
    ("simplecil", {}, "methods", None),
    ("slda", {}, "methods", None),
    ("ranpac-first", {}, "methods", None),
    ("one-a", {}, "methods", None),
    ("mos", {}, "methods", None),
    ("joint", {}, "methods", _ONE_TASK),
    ("simplecil", _WITH_CLASSIFIERS, "one-a-plus", None),
    ("first-task", _WITH_CLASSIFIERS, "one-a-plus", None),
    ("one-a-plus", {"compare_classifiers": "ncm,slda,whitened"}, "one-a-plus", None),
)


@dataclass(frozen=True)
class Job:
    """A run, its folder in docs/results, and its expected seconds."""

    config: RunConfig
    group: str
    seconds: float

    @property
    def path(self) -> Path:
        """The folder of the run, relative to docs/results or to ``--out``."""
        return Path(self.group) / "runs" / self.config.folder().name

    def command(self, out: str) -> str:
        """The shell command."""
        config, options = self.config, []
        for name, value in config.options.items():
            options += [f"--{name.replace('_', '-')}", str(value)]
        words = ["onea", "run", config.method, "--data", config.data, "--tasks", str(config.tasks)]
        words += ["--image-size", str(config.image_size), "--seed", str(config.seed), "--out", f"{out}/{self.path}"]
        return f"{shlex.join(words + options)}  # ~{self.seconds:.0f} GPU s"


def jobs() -> list[Job]:
    """All runs grouped by configuration, the cheapest configurations first."""
    times = _earlier_seconds()
    listed = []
    for method, options, group, of_row in ROWS:
        for data, of_stream in STREAMS.items():
            values = {"method": method, "data": f"folder:{data}", "tasks": of_row or of_stream, **options}
            seconds = 10 + fmean(times.get((method, data)) or [_DEFAULT_SECONDS])
            listed += [
                Job(make_config(values | {"image_size": IMAGE_SIZE, "seed": seed}), group, seconds) for seed in SEEDS
            ]
    cost: dict[str, float] = defaultdict(float)
    for job in listed:
        cost[_configuration(job)] += job.seconds
    return sorted(listed, key=lambda job: (cost[_configuration(job)], _configuration(job)))


def _configuration(job: Job) -> str:
    return f"{job.group} {job.config.method} {job.config.options}"


def _earlier_seconds() -> dict[tuple[str, str], list[float]]:
    """The seconds of earlier runs on a shared GPU, by method and dataset."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for folder in ("methods", "one-a-plus"):
        for path in find_record_files(RESULTS / folder):
            record = read_record_file(path)
            seconds = sum(sum(record["timings"][part]) for part in ("learn_s", "evaluate_s"))
            times[record["config"]["method"], record["data"]["name"]].append(seconds)
    return times


def run_missing(
    out: Path, workers: int, only: Sequence[str] = (), compiled: Literal["auto", "yes", "no"] = "auto"
) -> list[str]:
    """Run all missing runs, of some methods in this order or of all; returns the names of the failed ones."""
    selected = [job for job in missing(jobs()) if not only or job.config.method in only]
    if only:
        selected.sort(key=lambda job: only.index(job.config.method))
    else:  # three seeds of all rows first, in case time runs out, and of these the longest first
        selected.sort(key=lambda job: (job.config.seed > SEEDS[2], -job.seconds))
    failed = []
    runs = [RunJob(dataclasses.replace(job.config, compile=compiled), (out / job.path).absolute()) for job in selected]
    with closing(LocalProcesses(workers, share_adapters=True).run(runs)) as results:  # Ctrl-C ends the worker processes
        for result in results:
            name = result.job.folder.name
            print(name, result.failure or "finished", flush=True)
            failed += [name] if result.failure else []
    return failed


def missing(jobs: list[Job]) -> Iterator[Job]:
    """Runs without a record in docs/results."""
    return (job for job in jobs if not record_path(RESULTS / job.path).exists())


def collect(made: Path, results: Path = RESULTS) -> list[str]:
    """Compress finished records into docs/results; returns a line for each record with an error."""
    problems = []
    for path in find_record_files(made):
        record, name = read_record_file(path), path.parent.relative_to(made)
        text = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
        if record["status"] != "finished":
            problems.append(f"{name}: not finished")
        elif record["config"]["data"] not in {f"folder:{data}" for data in STREAMS}:
            problems.append(f"{name}: has images from {record['config']['data']}; run it beside cifar100 and cub200")
        elif (size := len(compress(json.dumps(shorten(record)).encode()))) > MAX_BYTES:
            problems.append(f"{name}: has {size:,} bytes, more than {MAX_BYTES:,}")
        else:
            if record["config"]["seed"] != SEEDS[0]:
                shorter = shorten(record)
                text = text if shorter == record else dump_with_checksum(shorter)
            (results / name).mkdir(parents=True, exist_ok=True)
            write_atomically(results / name / "record.json.gz", compress(text))
    return problems


def superseded(jobs: list[Job], results: Path = RESULTS) -> Iterator[Path]:
    """Folders of earlier runs of methods whose seeds have all been repeated."""
    repeated: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for job in jobs:
        if job.group == "methods":
            repeated[job.config.method, job.config.data].append(results / job.path)
    complete = {key for key, folders in repeated.items() if all(record_path(folder).exists() for folder in folders)}
    current = {folder for folders in repeated.values() for folder in folders}
    for path in find_record_files(results / "methods"):
        record = read_record_file(path)
        key = record["config"]["method"], f"folder:{record['data']['name']}"
        if key in complete and path.parent not in current:
            yield path.parent


def compress(text: bytes) -> bytes:
    """The text, compressed reproducibly as by ``gzip -9n``."""
    return gzip.compress(text, 9, mtime=0)


def shorten(record: Record) -> Record:
    """A record without its largest fields: the analysis of its merges, and the losses of adapters of another run."""
    shorter = copy.deepcopy(record)
    for task in shorter["tasks"]:
        (task.get("merge") or {}).pop("analysis", None)
        if task.get("training_shared"):
            task.pop("losses", None)
    return shorter


def main() -> None:
    """List missing runs, run them, or collect their records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="print the commands of all missing runs")
    listing.add_argument("--out", default="made", help="folder of the runs")
    making = commands.add_parser("run", help="run all missing runs")
    making.add_argument("--out", type=Path, default=Path("made"), help="folder of the runs")
    making.add_argument("--workers", type=int, default=1, help="number of parallel runs")
    making.add_argument("--only", default="", help="methods to run, in this order, such as one-a,mos")
    making.add_argument("--compile", default="auto", choices=("auto", "yes", "no"), help="as in onea run")
    collecting = commands.add_parser("collect", help="compress finished records into docs/results")
    collecting.add_argument("made", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "list":
        print("\n".join(job.command(arguments.out) for job in missing(jobs())))
        return
    if arguments.command == "run":
        only = [name for name in arguments.only.split(",") if name]
        if unknown := set(only) - {job.config.method for job in jobs()}:
            parser.error(f"no method {', '.join(sorted(unknown))} among the runs; `list` prints them")
        raise SystemExit(1 if run_missing(arguments.out, arguments.workers, only, arguments.compile) else 0)
    for line in collect(arguments.made):
        print(line)
    for folder in list(superseded(jobs())):
        shutil.rmtree(folder)
        print(f"{folder.name}: removed, because all its seeds were run again")
    print(f"{len(list(missing(jobs())))} of {len(jobs())} runs are missing")


if __name__ == "__main__":
    main()
