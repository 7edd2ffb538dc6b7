# SPDX-License-Identifier: Apache-2.0
"""How long ``make demo`` and ``make test`` take once everything is installed, with bf16 instructions and without.

    python benchmarks/first_contact_times.py [demo] [test] [--out benchmarks/first-contact-times.csv]

Run it with the Python of ``.venv`` while nothing else runs. A processor with bf16 runs both twice, the second time with
the instructions of one without AVX-512, which has no bf16. Each run is a line of the CSV; the last line printed is the
sentence of README, from all lines of this machine.
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
from onea.bench.rows import hardware_of
from onea.runs.record import environment

ROOT = Path(__file__).parents[1]
COLUMNS = ("command", "bf16", "seconds", "hardware", "load", "torch")
# What oneDNN, PyTorch's own kernels and MKL may use.
WITHOUT = {cpu.ISA_VARIABLE: "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def main() -> None:
    """Time what was asked for, note it, and say it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["demo", "test"], choices=["demo", "test"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/first-contact-times.csv")
    arguments = parser.parse_args()
    about = environment(torch.device("cpu"))
    hardware = hardware_of(about, about["cores"])
    for what in arguments.what:
        for bf16 in (True, False) if cpu.has_bf16() else (False,):
            limits = WITHOUT if cpu.has_bf16() and not bf16 else {}
            load, seconds = os.getloadavg()[0], timed(what, os.environ | limits)
            row = (f"make {what}", "yes" if bf16 else "no", f"{seconds:.0f}", hardware, f"{load:.2f}", about["torch"])
            _note(arguments.out, row)
            print(*row, sep=", ", flush=True)
    print(sentence(arguments.out, hardware))


def timed(what: str, surroundings: dict[str, str]) -> float:
    """Seconds of one run, which must succeed; the demo runs in an empty folder, as it does not repeat itself."""
    with tempfile.TemporaryDirectory() as folder:
        demo = [str(ROOT / ".venv/bin/onea"), "demo", "--out", folder]
        started = time.perf_counter()
        subprocess.run(demo if what == "demo" else ["make", what], cwd=ROOT, env=surroundings, check=True)
        return time.perf_counter() - started


def sentence(path: Path, hardware: str) -> str:
    """What README says of this machine; the latest line of each run counts."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["hardware"] == hardware]
    latest = {(row["command"], row["bf16"]): f"{float(row['seconds']) / 60:.1f}" for row in rows}
    parts = []
    for command in ("make demo", "make test"):
        times = {"yes": "with bf16 instructions", "no": "without"}
        told = [f"{latest[command, key]} minutes {words}" for key, words in times.items() if (command, key) in latest]
        parts += [f"`{command}` takes {' and '.join(told)}"] if told else []
    return f"Once installed, on {hardware}, {', '.join(parts)} ([measured](benchmarks/{path.name}))."


def _note(path: Path, row: tuple[str, ...]) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        if not file.tell():
            lines.writerow(COLUMNS)
        lines.writerow(row)


if __name__ == "__main__":
    main()
