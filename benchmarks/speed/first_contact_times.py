# SPDX-License-Identifier: Apache-2.0
"""Time of ``make demo`` and ``make test`` after installation, with and without bf16 instructions.

    python benchmarks/speed/first_contact_times.py [demo] [test] [--out benchmarks/speed/first_contact_times.csv]

Run it with the Python of ``.venv`` on an idle machine. On a processor with bf16, both commands run twice, the second
time without AVX-512 and so without bf16. Each run is a line of the CSV, from which ``make results`` fills in a sentence
of README; the last line of each command is used.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from onea import cpu
from onea.research.bench.results import hardware_name
from onea.research.runs.runner import environment

ROOT = Path(__file__).parents[2]
COLUMNS = ("command", "bf16", "seconds", "hardware", "load", "torch")
# Instruction sets of oneDNN, PyTorch's kernels and MKL.
WITHOUT = {cpu.ISA_VARIABLE: "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def main() -> None:
    """Time the selected commands, and append the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="demo or test; by default both")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - {"demo", "test"}:
        parser.error(f"{', '.join(sorted(unknown))}: choose demo or test")
    machine = environment(torch.device("cpu"))
    hardware = hardware_name(machine)
    rows: list[tuple[str, ...]] = []
    for what in arguments.what or ("demo", "test"):
        for bf16 in (True, False) if cpu.has_bf16() else (False,):
            limits = WITHOUT if cpu.has_bf16() and not bf16 else {}
            load, seconds = os.getloadavg()[0], timed(what, os.environ | limits)
            row = (f"make {what}", "yes" if bf16 else "no", f"{seconds:.0f}", hardware, f"{load:.2f}", machine["torch"])
            print(*row, sep=", ", flush=True)
            rows.append(row)
    _append(arguments.out, rows)  # at the end, because `make test` compares README with this file


def timed(what: str, variables: dict[str, str]) -> float:
    """Seconds of a successful run; the demo runs in an empty folder, because it does not repeat finished runs."""
    with tempfile.TemporaryDirectory() as folder:
        demo = [str(ROOT / ".venv/bin/onea"), "demo", "--out", folder]
        started = time.perf_counter()
        subprocess.run(demo if what == "demo" else ["make", what], cwd=ROOT, env=variables, check=True)
        return time.perf_counter() - started


def _append(path: Path, rows: list[tuple[str, ...]]) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        if not file.tell():
            lines.writerow(COLUMNS)
        lines.writerows(rows)


if __name__ == "__main__":
    main()
