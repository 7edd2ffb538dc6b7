# SPDX-License-Identifier: Apache-2.0
"""Run many configurations in parallel processes on one machine: trials for presets, or one run of every method.

    python benchmarks/many.py SPEC.json --out DIR --workers 8

SPEC is a list of ``{"name": ..., "config": {...}}``, each config the options of ``onea run``. Runs resume, so the same
command continues after an interruption. DIR/results.jsonl is rewritten with one line per run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from onea.files import write_atomically
from onea.research.cli.paper_display import GridDisplay
from onea.research.runs.config import RunConfig, make_config
from onea.research.runs.executors import LocalProcesses
from onea.research.runs.grid import RecordStore, run_grid


def line(name: str, config: RunConfig, store: RecordStore) -> dict[str, Any]:
    """What is known about one configuration."""
    record = store.find(config)
    if record is None:
        return {"name": name, "error": str(store.failure(config))}
    times, metrics = record["timings"], record["metrics"]
    return {
        "name": name,
        **{key: metrics[key] for key in ("A_T", "mean_A", "weighted_mean_A", "F")},
        "learn_s": sum(times["learn_s"]),
        "evaluate_s": sum(times["evaluate_s"]),
        "cost": record["cost"][-1],
    }


def main() -> None:
    """Read the list, run it, keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    configs = {spec["name"]: make_config(spec["config"]) for spec in json.loads(arguments.spec.read_text())}
    store = RecordStore(arguments.out)
    with GridDisplay() as display:
        run_grid(list(configs.values()), store, LocalProcesses(arguments.workers), display)
    lines = [json.dumps(line(name, config, store)) + "\n" for name, config in configs.items()]
    write_atomically(arguments.out / "results.jsonl", "".join(lines).encode())


if __name__ == "__main__":
    main()
