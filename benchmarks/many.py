"""Run many configurations in parallel processes on one machine: trials for presets, or one run of every method.

    python benchmarks/many.py SPEC.json --out DIR --workers 8

SPEC is a list of ``{"name": ..., "config": {...}}``, each config the options of ``onea run``. Runs resume, so the same
command continues after an interruption. DIR/results.jsonl gets one line per finished run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import traceback
from pathlib import Path
from typing import Any


def one(job: tuple[dict[str, Any], str]) -> dict[str, Any]:
    """Run one configuration and say how it went."""
    from onea.runs.config import make_config
    from onea.runs.engine import run

    spec, out = job
    started = time.time()
    try:
        record = run(make_config(spec["config"]), Path(out) / spec["name"])
    except Exception as error:
        reason = str(error) or traceback.format_exc()
        return {"name": spec["name"], "error": f"{type(error).__name__}: {reason[-500:]}", "s": time.time() - started}
    metrics = record["metrics"]
    return {
        "name": spec["name"],
        **{key: metrics[key] for key in ("A_T", "mean_A", "weighted_mean_A", "F")},
        "learn_s": sum(record["timings"]["learn_s"]),
        "evaluate_s": sum(record["timings"]["evaluate_s"]),
        "s": time.time() - started,
        "cost": record["cost"][-1],
    }


def main() -> None:
    """Read the list, run it, print and keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    jobs = [(spec, str(arguments.out)) for spec in json.loads(arguments.spec.read_text())]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (
        multiprocessing.get_context("spawn").Pool(arguments.workers) as pool,
        (arguments.out / "results.jsonl").open("a") as results,
    ):
        for done in pool.imap_unordered(one, jobs):
            results.write(json.dumps(done) + "\n")
            results.flush()
            print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
