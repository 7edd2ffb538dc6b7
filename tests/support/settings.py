# SPDX-License-Identifier: Apache-2.0
"""Run the test suite under every setting in which it must pass; prints one line for each run.

    python tests/support/settings.py                          every setting, several in one run
    python tests/support/settings.py old-cpu shuffled+ascii   two runs, one of them with two settings
    python tests/support/settings.py old-cpu -- tests/vit/test_vit.py -x   with other arguments for pytest

`make test-settings` and `make test-settings ONLY="old-cpu shuffled"` do the same. The output of pytest is kept in
build/settings/.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "settings"
SEED = int(time.time()) % 100_000
BF16_PRODUCT = "import torch; x = torch.ones(128, 384).bfloat16(); assert torch.nn.functional.linear(x, x)[0, 0] == 384"


@dataclass(frozen=True)
class Setting:
    """An environment for the test suite.

    Attributes:
        variables: additional environment variables.
        arguments: for pytest.
        needs: a program that must succeed with these variables, and the reason for skipping the setting if it fails.
        pythons: names of interpreters, of which the first available one is used; by default, the current one.
        odd: whether to run as ``nobody`` or as root without capabilities, with an odd path for temporary files and a
            read-only home folder.
    """

    variables: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    needs: tuple[str, str] | None = None
    pythons: tuple[str, ...] = ()
    odd: bool = False

    def __or__(self, other: Setting) -> Setting:
        return Setting(
            self.variables | other.variables,
            self.arguments + other.arguments,
            self.needs or other.needs,
            self.pythons or other.pythons,
            self.odd or other.odd,
        )


OLD_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
ODD_VARIABLES = {
    "LC_ALL": "tr_TR.UTF-8",
    "LANGUAGE": "tr",
    "TZ": "Pacific/Chatham",  # 13:45 ahead in summer
    "TERM": "dumb",
    "COLUMNS": "20",
    "LINES": "5",
    "FORCE_COLOR": "1",
    "CI": "1",
    "PYTHONWARNINGS": "default",
    "CUDA_VISIBLE_DEVICES": "3",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "ONEA_CACHE": "/nowhere/cache",
    "ONEA_DATA": "/nowhere/data",
    "ONEA_TOKEN": "short",
    "XDG_CACHE_HOME": "/nowhere/xdg",
    "MPLBACKEND": "TkAgg",
}
SETTINGS = {
    "parallel": Setting(arguments=("-n", "2")),
    "one-thread": Setting({"OMP_NUM_THREADS": "1"}),
    "four-threads": Setting({"OMP_NUM_THREADS": "4"}),
    "shuffled": Setting(arguments=("--shuffle", str(SEED))),
    "onednn-avx2": Setting({"ONEDNN_MAX_CPU_ISA": "AVX2"}),  # `auto` is fp32, as on a CPU without bf16
    "onednn-all": Setting({"ONEDNN_MAX_CPU_ISA": "ALL"}, needs=(BF16_PRODUCT, "bf16 does not work on this machine")),
    "aten-avx2": Setting({"ATEN_CPU_CAPABILITY": "avx2"}),
    "aten-default": Setting({"ATEN_CPU_CAPABILITY": "default"}),
    "old-cpu": Setting(OLD_CPU),
    "ascii": Setting({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),  # text files are not UTF-8
    "odd-surroundings": Setting(ODD_VARIABLES, odd=True),
    "python3.11": Setting(pythons=("python3.11",)),
    "newest-python": Setting(pythons=("python3.15", "python3.14", "python3.13", "python3.12")),
}
# Every setting at least once in few runs; after a failure, try the settings of the run one by one.
RUNS = (
    "parallel+onednn-avx2+python3.11",
    "parallel+four-threads+aten-default+shuffled",
    "parallel+aten-avx2+odd-surroundings",
    "parallel+old-cpu+newest-python",
    "parallel+one-thread+ascii",
    "parallel+onednn-all",
)


def setting_of(run: str) -> Setting:
    """The combination of the settings in the name of a run."""
    return reduce(or_, (SETTINGS[name] for name in run.split("+")))


class UnavailableError(Exception):
    """The setting is not available on this machine."""


def python_of(setting: Setting) -> str:
    """The interpreter of a setting, with all packages installed."""
    if not setting.pythons:
        return sys.executable
    reasons = []
    for name in setting.pythons:
        if name == f"python{sys.version_info.major}.{sys.version_info.minor}":
            return sys.executable
        found = shutil.which(name)
        if not found or not succeeds([found, "-c", ""]):  # a version manager may have the name but not the interpreter
            reasons.append(f"{name} is not on the PATH")
        elif not install(found, KEPT / name):
            reasons.append(f"packages cannot be installed for {name} ({KEPT / name}.log)")
        else:
            return str(KEPT / name / "bin" / "python")
    raise UnavailableError(", ".join(reasons))


def install(interpreter: str, place: Path) -> bool:
    """Create a virtual environment for the tests unless it is up to date; returns whether this succeeded."""
    note, wanted = place / "installed", hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        wanted.update((ROOT / name).read_bytes())
    if note.exists() and note.read_text() == wanted.hexdigest():
        return True
    place.mkdir(parents=True, exist_ok=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-c", "constraints.txt", "-e", ".[dev]"]
    with place.with_name(f"{place.name}.log").open("wb") as log:
        for command in ([interpreter, "-m", "venv", "--clear", str(place)], pip):
            if subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode:
                return False
    note.write_text(wanted.hexdigest())
    return True


def succeeds(command: Sequence[str], **options: Any) -> bool:
    """Whether a command can be run and succeeds."""
    try:
        return subprocess.run(command, capture_output=True, **options).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


@contextmanager
def odd_environment(python: str) -> Iterator[tuple[dict[str, str], list[str], dict[str, Any]]]:
    """Variables, a command prefix and the options of ``subprocess.run`` for an odd setting."""
    elsewhere = Path("/dev/shm")  # another file system, if it exists
    with tempfile.TemporaryDirectory(dir=elsewhere if elsewhere.is_dir() else None) as folder:
        base = Path(folder)
        home, temporary = base / "home", base / f"onea's (tests) + [ünïcödé 日本] {'long ' * 12}"
        for path in (home, temporary):
            path.mkdir()
        variables = {"HOME": str(home), "TMPDIR": str(temporary)}
        before, how = [], {"umask": 0o077}
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
            if succeeds([python, "-c", "import torch"], cwd=ROOT, **nobody):
                how |= nobody
                for path in (base, temporary):
                    os.chown(path, 65534, 65534)
            elif shutil.which("setpriv"):
                before = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
            else:
                raise UnavailableError("run as another user than root, or install setpriv")
        home.chmod(0o555)
        yield variables, before, how


def run(name: str, setting: Setting, arguments: Sequence[str]) -> bool:
    """Run the suite under a setting and print the outcome; returns False if it failed."""
    started = time.monotonic()
    try:
        python = python_of(setting)
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | setting.variables
        if setting.needs and not succeeds([python, "-c", setting.needs[0]], env=environment):
            raise UnavailableError(setting.needs[1])
        command = [python, "-m", "pytest", "-q", *setting.arguments, *arguments]
        log = KEPT / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            common: dict[str, Any] = {"cwd": ROOT, "stdout": output, "stderr": subprocess.STDOUT}
            if setting.odd:
                with odd_environment(python) as (variables, before, how):
                    done = subprocess.run([*before, *command], env=environment | variables, **common, **how)
            else:
                done = subprocess.run(command, env=environment, **common)
    except UnavailableError as reason:
        report(name, "skipped", 0, str(reason))
        return True
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    passed = done.returncode == 0
    report(name, "passed" if passed else "FAILED", time.monotonic() - started, lines[-1].strip("= "))
    if not passed:
        print(*(f"    {line}" for line in lines if line.startswith(("FAILED ", "ERROR tests"))), f"    {log}", sep="\n")
    return passed


def report(name: str, outcome: str, seconds: float, more: str) -> None:
    """Print a line about a run."""
    print(f"{name:<44} {outcome:<8} {seconds:6.0f} s  {more}", flush=True)


def main(words: Sequence[str]) -> int:
    """Run the suite; returns 1 if it failed in any run, 2 for an unknown setting."""
    cut = words.index("--") if "--" in words else len(words)
    wanted, arguments = words[:cut] or RUNS, words[cut + 1 :]
    names = {name for run in wanted for name in run.split("+")}
    if unknown := sorted(names - set(SETTINGS)):
        print(f"There is no setting {unknown[0]}; choose from {', '.join(SETTINGS)}.", file=sys.stderr)
        return 2
    if "shuffled" in names:
        print(f"random order: --shuffle {SEED}", flush=True)
    outcomes = [run(name, setting_of(name), arguments) for name in wanted]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
