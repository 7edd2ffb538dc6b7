# SPDX-License-Identifier: Apache-2.0
"""Two questions about One-A's merge: does alignment help, and why does gating increase forgetting?

    python benchmarks/merging/merge_variants.py run shuffled --seed 1 --data folder:cub200 --out found
    python benchmarks/merging/merge_variants.py gather found benchmarks/merging/merge_variants.csv

``run`` runs one setting (a stream, a rank, a start) with one seed and all merges below. The merges share their
adapters, which are trained once, so that only the merge can change the results. It writes
``found/SETTING-seedN.csv``; repeat the command to resume. ``gather`` combines these files in one.

Merges: ``mean`` is the class-weighted mean, ``aligned`` adds alignment, ``gated`` is One-A. ``even`` moves each matrix
as far as the gates would, but all directions equally. ``old-gated`` has gates only if the base is the merged adapter.

Columns: ``fall_new`` and ``fall_old`` are the percentage points that earlier tasks lose in merges whose base is the new
or the merged adapter. ``inside`` is the fraction of the smaller side that alignment keeps of an up-projection,
``closeness`` the mean squared cosine of the principal angles, and ``chance`` the value of both for random adapters.
``opening`` is the distance that a matrix moves, relative to the distance without gates.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from onea.files import write_atomically
from onea.metrics import forgetting_per_step
from onea.research.record import Record
from onea.vit.network_config import BUNDLED

_PLAIN = {"gating": False}
MERGES: dict[str, dict[str, Any]] = {
    "mean": {"alignment": False, **_PLAIN},
    "aligned": _PLAIN,
    "gated": {},
    "even": {"even_gates": True},
    "old-gated": {"gated_base": "accumulated"},
}
COLUMNS = (
    *("data", "setting", "seed", "merge", "A_T", "mean_A", "F", "fall_new", "fall_old", "merges_new"),
    *("inside", "closeness", "chance", "opening_down", "opening_up", "first_task", "tasks", "rank", "start"),
    *("learning_rate", "epochs", "preset", "finished", "device", "precision", "onea"),
)


@dataclass(frozen=True)
class Setting:
    """A stream and the training of adapters on it.

    Attributes:
        options: options of the run, besides those of the merge.
        seeds: its seeds; of shuffled streams, only seeds whose first task has at least ten classes.
        merges: the merges that are run.
    """

    options: Mapping[str, Any]
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    merges: Sequence[str] = field(default=tuple(MERGES))


_SHUFFLED = (1, 5, 7, 9, 11)  # of CUB-200 in 20 tasks, gamma 0.01: first tasks of 20 to 32 classes
_LATE = "20,5,5,5,5,5,5,80,6,6,6,6,6,6,6,6,6,6,5,5"  # a task of 80 classes after tasks of 50 in all
_ONE_FIRST = "1,40,2,32,1,25,2,20,2,16,2,13,3,10,3,8,4,7,4,5"
SETTINGS = {
    "shuffled": Setting({"tasks": 20}, _SHUFFLED),
    "large task late": Setting({"sizes": _LATE}),
    "descending": Setting({"tasks": 20, "order": "descending"}),
    "one class first": Setting({"sizes": _ONE_FIRST}),
    "balanced": Setting({"tasks": 20, "stream": "balanced"}),
    "50 tasks": Setting({"tasks": 50, "stream": "balanced"}),
    "rank 4": Setting({"tasks": 20, "rank": 4}, _SHUFFLED),
    "rank 16": Setting({"tasks": 20, "rank": 16}, _SHUFFLED),
    "rank 256": Setting({"tasks": 20, "rank": 256}, _SHUFFLED),
    "shared start": Setting({"tasks": 20, "start": "shared"}, _SHUFFLED),
    # The next adapter starts from the merged one here, so that merges cannot share their training.
    "merged start": Setting({"tasks": 20, "start": "merged"}, _SHUFFLED[:3], ("mean", "aligned", "gated")),
}


def row(setting: str, merge: str, record: Record) -> dict[str, Any]:
    """The results of one run."""
    metrics, options, sizes = record["metrics"], record["options"], record["stream"]["sizes"]
    merges = [task["merge"] for task in record["tasks"][1:]]
    falls = [
        (made["base"], fall) for made, fall in zip(merges, forgetting_per_step(_floats(metrics["matrix"])), strict=True)
    ]
    columns: dict[str, Any] = {"data": record["data"]["name"], "setting": setting, "merge": merge}
    columns |= {"seed": record["config"]["seed"]} | {name: metrics[name] for name in ("A_T", "mean_A", "F")}
    columns["fall_new"] = sum(float(fall) for base, fall in falls if base == "new")
    columns["fall_old"] = sum(float(fall) for base, fall in falls if base != "new")
    columns["merges_new"] = sum(base == "new" for base, _ in falls)
    kinds = {kind: [made["analysis"][kind] for made in merges] for kind in ("down", "up")}
    columns |= {name: fmean(analysis[name] for analysis in kinds["up"]) for name in ("inside", "closeness")}
    columns["chance"] = min(1.0, options["rank"] / record["backbone"]["width"])
    columns |= {
        f"opening_{kind}": fmean(analysis["opening"] for analysis in analyses) for kind, analyses in kinds.items()
    }
    columns |= {"first_task": sizes[0], "tasks": len(sizes), "preset": record["config"]["preset"]}
    columns |= {name: options[name] for name in ("rank", "start", "learning_rate", "epochs")}
    environment = record["environment"]
    columns |= {
        "finished": record["dates"]["finished"],
        "device": environment["accelerator"] or environment["processor"],
    }
    columns |= {"precision": record["runtime"]["precision"], "onea": environment["onea"]}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in columns.items()}


def _floats(matrix: Sequence[Sequence[float | None]]) -> list[list[float]]:
    return [[float("nan") if value is None else value for value in line] for line in matrix]


def run_setting(name: str, seed: int, options: Mapping[str, Any], out: Path, runs: Path) -> Path:
    """Run a setting with all of its merges unless the file with their rows exists; returns that file."""
    from onea.learner.merged_adapter import AdapterCache
    from onea.research.runs.config import make_config
    from onea.research.runs.runner import run

    stem = f"{name.replace(' ', '-')}-seed{seed}"
    file = out / f"{stem}.csv"
    if file.exists():
        return file
    setting, adapters, rows = SETTINGS[name], AdapterCache(), []
    for merge in setting.merges:
        config = make_config({"method": "one-a", "seed": seed, **setting.options, **MERGES[merge], **options})
        rows.append(row(name, merge, run(config, runs / f"{stem}-{merge}", adapter_cache=adapters, wait=True)))
        print(
            {key: rows[-1][key] for key in ("setting", "seed", "merge", "A_T", "F", "fall_new", "inside")}, flush=True
        )
    out.mkdir(parents=True, exist_ok=True)
    _write(file, rows)
    return file


def gather(folder: Path, file: Path) -> int:
    """Write the rows of all files in a folder to one file, in the order of the settings; returns their number."""
    rows = [line for part in sorted(folder.glob("*-seed*.csv")) for line in _read(part)]
    settings, merges = list(SETTINGS), list(MERGES)
    rows.sort(
        key=lambda line: (line["data"], settings.index(line["setting"]), int(line["seed"]), merges.index(line["merge"]))
    )
    _write(file, rows)
    return len(rows)


def jobs(data: str, options: str) -> list[str]:
    """The commands of all runs: the first three seeds of all settings, then the others."""
    commands = []
    for seeds in (slice(0, 3), slice(3, None)):
        for name, setting in SETTINGS.items():
            for seed in setting.seeds[seeds]:
                command = (
                    f"python benchmarks/merging/merge_variants.py run '{name}' --seed {seed} --data {data} {options}"
                )
                commands.append(command)
    return commands


def _read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(file, text.getvalue().encode())


def main() -> None:
    """Run a setting, collect results, or list all commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run one setting and seed with every merge")
    running.add_argument("setting", choices=SETTINGS)
    running.add_argument("--seed", type=int, required=True)
    running.add_argument("--data", required=True)
    running.add_argument("--backbone", default=BUNDLED)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--runs", type=Path, help="folder of records and checkpoints (default: OUT/runs)")
    running.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further options of the runs")
    gathering = commands.add_parser("gather", help="combine all rows in one file")
    gathering.add_argument("folder", type=Path)
    gathering.add_argument("file", type=Path)
    listing = commands.add_parser("list", help="print the commands of all runs")
    listing.add_argument("--data", default="folder:cub200")
    listing.add_argument("--options", default="--out found")
    arguments = parser.parse_args()
    if arguments.command == "run":
        extra = dict(pair.split("=", 1) for pair in arguments.set)
        options = {"data": arguments.data, "backbone": arguments.backbone, **extra}
        print(
            run_setting(
                arguments.setting, arguments.seed, options, arguments.out, arguments.runs or arguments.out / "runs"
            )
        )
    elif arguments.command == "gather":
        print(f"{gather(arguments.folder, arguments.file)} rows in {arguments.file}")
    else:
        print("\n".join(jobs(arguments.data, arguments.options)))


if __name__ == "__main__":
    main()
