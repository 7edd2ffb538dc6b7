# SPDX-License-Identifier: Apache-2.0
"""List and run all runs of the results page on its two main streams, and collect their records in docs/results.

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
from onea.research.methods import METHODS
from onea.research.record import Record, find_record_files, read_record_file, record_path
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.executors import LocalProcesses
from onea.research.runs.grid import RunJob

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
NETWORK = "vit_small_patch14_112"
STREAMS = {"cifar100": 10, "cub200": 20}
SEEDS = (1, 2, 3, 4, 5)
MAX_BYTES = 15_000  # of a compressed record without the analysis of its merges
_DEFAULT_SECONDS = 200.0  # of a method without earlier runs
_COMPARED = {"classifier": "rgda", "compare_classifiers": "ncm,slda,whitened"}
# In addition to the plain runs of all methods: classifiers on frozen features and on three kinds of adapters.
FURTHER_RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("simplecil", _COMPARED),
    ("first-task", _COMPARED),
    ("one-a-plus", {"compare_classifiers": "ncm,slda,whitened"}),
    ("one-a-plus", {"min_share": 1.0, "compare_classifiers": "ncm,ranpac"}),
    ("one-a", _COMPARED),
)
_ELSEWHERE = ("one-a-plus", "first-task", "adapter")  # the first two are in the runs with several classifiers


@dataclass(frozen=True)
class Job:
    """A run, its folder in docs/results, and its expected seconds."""

    config: RunConfig
    group: str
    seconds: float

    @property
    def place(self) -> Path:
        """The folder of the run, relative to docs/results or to ``--out``."""
        return Path(self.group) / "runs" / self.config.folder().name

    def command(self, out: str) -> str:
        """The shell command."""
        config, options = self.config, []
        for name, value in config.options.items():
            options += [f"--{name.replace('_', '-')}", str(value)]
        words = ["onea", "run", config.method, "--data", config.data, "--tasks", str(config.tasks)]
        words += ["--backbone", config.backbone, "--seed", str(config.seed), "--out", f"{out}/{self.place}", *options]
        return f"{shlex.join(words)}  # ~{self.seconds:.0f} GPU s"


def jobs() -> list[Job]:
    """All runs, the cheapest methods first, grouped by configuration."""
    wanted: list[tuple[str, dict[str, Any], str]] = []
    wanted += ((name, {}, "methods") for name in METHODS.builtin if name not in _ELSEWHERE)
    wanted += ((name, options, "one-a-plus") for name, options in FURTHER_RUNS)
    times = _earlier_seconds()
    found = []
    for method, options, group in wanted:
        for data, tasks in STREAMS.items():
            values = {"method": method, "data": f"folder:{data}", "tasks": tasks, "backbone": NETWORK, **options}
            seconds = 10 + fmean(times.get((method, data)) or [_DEFAULT_SECONDS])
            found += [Job(make_config(values | {"seed": seed}), group, seconds) for seed in SEEDS]
    cost: dict[str, float] = defaultdict(float)
    for job in found:
        cost[_kind(job)] += job.seconds
    return sorted(found, key=lambda job: (cost[_kind(job)], _kind(job)))


def _kind(job: Job) -> str:
    return f"{job.group} {job.config.method} {job.config.options}"


def _earlier_seconds() -> dict[tuple[str, str], list[float]]:
    """The seconds of earlier runs on a shared GPU, by method and dataset."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for folder in ("methods", "one-a-plus"):
        for path in find_record_files(RESULTS / folder):
            record = read_record_file(path)
            took = sum(sum(record["timings"][part]) for part in ("learn_s", "evaluate_s"))
            # The current preset trains about twice as long on CIFAR-100, and a third longer on CUB-200.
            longer = {"cifar100": 2.0, "cub200": 1.35}[record["data"]["name"]]
            current = record["config"]["backbone"] == NETWORK or "epochs" not in record["options"]
            found[record["config"]["method"], record["data"]["name"]].append(took * (1 if current else longer))
    return found


def make(
    out: Path, workers: int, only: Sequence[str] = (), compiled: Literal["auto", "yes", "no"] = "auto"
) -> list[str]:
    """Run all missing runs, of some methods in this order or of all; returns the names of the failed ones."""
    wanted = [job for job in missing(jobs()) if not only or job.config.method in only]
    if only:
        wanted.sort(key=lambda job: only.index(job.config.method))
    failed = []
    given = [RunJob(dataclasses.replace(job.config, compile=compiled), (out / job.place).absolute()) for job in wanted]
    with closing(LocalProcesses(workers, share_adapters=True).run(given)) as results:  # Ctrl-C ends its processes
        for result in results:
            name = result.job.folder.name
            print(name, result.failure or "finished", flush=True)
            failed += [name] if result.failure else []
    return failed


def missing(among: list[Job]) -> Iterator[Job]:
    """Runs without a record in docs/results."""
    return (job for job in among if not record_path(RESULTS / job.place).exists())


def collect(made: Path, results: Path = RESULTS) -> list[str]:
    """Compress finished records into docs/results; returns a line for each record with an error."""
    wrong = []
    for path in find_record_files(made):
        record, place = read_record_file(path), path.parent.relative_to(made)
        text = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
        if record["status"] != "finished":
            wrong.append(f"{place}: not finished")
        elif record["config"]["data"] not in {f"folder:{data}" for data in STREAMS}:
            wrong.append(f"{place}: names the images {record['config']['data']}; run it beside cifar100 and cub200")
        elif (size := len(packed(json.dumps(shortened(record)).encode()))) > MAX_BYTES:
            wrong.append(f"{place}: takes {size:,} bytes, more than {MAX_BYTES:,}")
        else:
            if record["config"]["seed"] != SEEDS[0]:
                shorter = shortened(record)
                text = text if shorter == record else dump_with_checksum(shorter)
            (results / place).mkdir(parents=True, exist_ok=True)
            write_atomically(results / place / "record.json.gz", packed(text))
    return wrong


def superseded(among: list[Job], results: Path = RESULTS) -> Iterator[Path]:
    """Folders of earlier runs of methods whose seeds have all been repeated."""
    again: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for job in among:
        if job.group == "methods":
            again[job.config.method, job.config.data].append(results / job.place)
    whole = {kind for kind, places in again.items() if all(record_path(place).exists() for place in places)}
    present = {place for places in again.values() for place in places}
    for path in find_record_files(results / "methods"):
        record = read_record_file(path)
        kind = record["config"]["method"], f"folder:{record['data']['name']}"
        if kind in whole and path.parent not in present:
            yield path.parent


def packed(text: bytes) -> bytes:
    """Compressed reproducibly, as by ``gzip -9n``."""
    return gzip.compress(text, 9, mtime=0)


def shortened(record: Record) -> Record:
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
    ways = parser.add_subparsers(dest="way", required=True)
    listing = ways.add_parser("list", help="print the commands of all missing runs")
    listing.add_argument("--out", default="made", help="folder of the runs")
    making = ways.add_parser("run", help="run all missing runs")
    making.add_argument("--out", type=Path, default=Path("made"), help="folder of the runs")
    making.add_argument("--workers", type=int, default=1, help="number of parallel runs")
    making.add_argument("--only", default="", help="methods, in this order: one-a,mos")
    making.add_argument("--compile", default="auto", choices=("auto", "yes", "no"), help="as in onea run")
    collecting = ways.add_parser("collect", help="compress finished records into docs/results")
    collecting.add_argument("made", type=Path)
    given = parser.parse_args()
    if given.way == "list":
        print("\n".join(job.command(given.out) for job in missing(jobs())))
        return
    if given.way == "run":
        only = [name for name in given.only.split(",") if name]
        if unknown := set(only) - {job.config.method for job in jobs()}:
            parser.error(f"no method {', '.join(sorted(unknown))} among the runs; `list` shows them")
        raise SystemExit(1 if make(given.out, given.workers, only, given.compile) else 0)
    for line in collect(given.made):
        print(line)
    for folder in list(superseded(jobs())):
        shutil.rmtree(folder)
        print(f"{folder.name}: run again, removed")
    print(f"{len(list(missing(jobs())))} of {len(jobs())} runs are missing")


if __name__ == "__main__":
    main()
