# SPDX-License-Identifier: Apache-2.0
"""Accuracy of faster computation: FP8, adapters in the last blocks with cached tokens, and 8-bit weights.

    python benchmarks/speed/precision_quality.py --data folder:cifar100:10 folder:cub200:20 [--originals FILE] \
        [--method one-a] [--workers 14] [--out quality.csv]

Each dataset has its number of tasks after the last colon. One-A+, or another method that merges adapters, learns each
stream with each seed in bf16, in FP8, and with adapters in the last blocks. With ``--originals``, a file of the
bundled network's weights in floats, SimpleCIL learns the streams of the first seed with these and with the bundled
network. Finished runs are not repeated. Prints A_T and mean A of each run as CSV, then the mean difference to bf16
over the seeds, or of 8-bit weights to the originals.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path
from typing import Any

from onea.research.data import data_name
from onea.research.record import Record
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.executors import LocalProcesses
from onea.research.runs.grid import Failure, GridProgress, RecordStore, run_grid
from onea.vit.network_config import BUNDLED, IMAGE_SIZE


class Lines(GridProgress):
    """Progress that prints a line to stderr for each finished run."""

    def end(self, config: RunConfig, result: Record | Failure) -> None:
        """Print the result."""
        outcome = str(result) if isinstance(result, Failure) else f"A_T {result['metrics']['A_T']:.2f}"
        print(config.folder().name, outcome, file=sys.stderr, flush=True)


def configs(arguments: argparse.Namespace) -> dict[tuple[str, str, int], RunConfig]:
    """All runs by dataset, variant and seed."""
    runs: dict[tuple[str, str, int], RunConfig] = {}
    last = {"adapter_blocks": arguments.last, "cached_views": arguments.views, "patch_drop_rate": arguments.drop}
    last["freeze_at"] = arguments.freeze
    dropped = f", {arguments.drop:.0%} of the patches dropped" if arguments.drop else ""
    start = f" after {arguments.freeze:.0%}" if arguments.freeze else ""
    name = f"last {arguments.last} blocks{start}, {arguments.views} views{dropped}"
    ways: dict[str, dict[str, Any]] = {
        arguments.precision: {"precision": arguments.precision},
        "fp8": {"precision": "fp8"},
        name: {"precision": arguments.precision, **last},
        f"{name}, fp8": {"precision": "fp8", **last},
    }
    for entry in arguments.data:
        data, _, tasks = entry.rpartition(":")
        stream = {"data": data, "tasks": int(tasks), "device": arguments.device, "compile": "no"}
        for way in arguments.ways.split(",") if arguments.ways else ():
            name = list(ways)[("base", "fp8", "last", "last-fp8").index(way)]
            for seed in arguments.seeds:
                run = {"method": arguments.method, "backbone": arguments.backbone, "seed": seed, **stream, **ways[name]}
                runs[data_name(data), name, seed] = make_config(run)
        if arguments.originals:
            for name, file in (("float", f"plain:{arguments.originals}"), ("8 bits", BUNDLED)):
                run = {"method": "simplecil", "backbone": file, "seed": 1, "precision": arguments.precision, **stream}
                runs[data_name(data), f"{BUNDLED} in {name}", 1] = make_config(run | {"image_size": IMAGE_SIZE})
    return runs


def main() -> None:
    """Run all missing runs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="dataset:TASKS")
    parser.add_argument("--originals", type=Path, help="file of the original weights")
    parser.add_argument("--method", default="one-a-plus", help="method that learns the streams")
    parser.add_argument("--ways", default="base,fp8,last", help="ways of computation; empty for none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--backbone", default=BUNDLED)
    parser.add_argument("--precision", default="bf16", help="precision of all ways but fp8")
    parser.add_argument("--last", type=int, default=3)
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument(
        "--drop", type=float, default=0.0, help="fraction of the patches left out with adapters in the last blocks"
    )
    parser.add_argument("--freeze", type=float, default=0.0, help="fraction of the epochs in which all blocks learn")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--runs", type=Path, default=Path("runs/precision-quality"))
    parser.add_argument("--out", type=Path, default=Path("precision-quality.csv"))
    arguments = parser.parse_args()
    wanted, store = configs(arguments), RecordStore(arguments.runs)
    # The longest first, so that all workers end at about the same time.
    order = sorted(wanted, key=lambda key: (wanted[key].method == "simplecil", wanted[key].data, "last" in key[1]))
    run_grid([wanted[key] for key in order], store, LocalProcesses(arguments.workers), Lines())
    records = {key: record for key, config in wanted.items() if (record := store.find(config))}
    with arguments.out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("data", "method", "way", "seed", "A_T", "mean_A", "learn_s", "difference"))
        for (data, way, seed), record in records.items():
            metrics, learned = record["metrics"], sum(record["timings"]["learn_s"])
            values = (f"{metrics['A_T']:.2f}", f"{metrics['mean_A']:.2f}", f"{learned:.1f}")
            table.writerow((data, record["config"]["method"], way, seed, *values, ""))
        for data, way in dict.fromkeys((data, way) for data, way, _ in records):
            base = way.replace("in 8 bits", "in float") if "in 8 bits" in way else arguments.precision
            seeds = [seed for seed in arguments.seeds if {(data, way, seed), (data, base, seed)} <= records.keys()]
            changes = [
                records[data, way, seed]["metrics"]["A_T"] - records[data, base, seed]["metrics"]["A_T"]
                for seed in seeds
            ]
            if changes and way != base:
                method = records[data, way, seeds[0]]["config"]["method"]
                change = f"{statistics.mean(changes):+.2f}"
                table.writerow((data, method, f"{way} - {base}", f"{len(changes)} seeds", "", "", "", change))
    print(arguments.out.read_text(), end="")


if __name__ == "__main__":
    main()
