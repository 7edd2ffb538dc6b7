# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests: a tiny network, tiny images, and an environment that is the same everywhere."""

from __future__ import annotations

import copy
import functools
import gc
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings
from support.tiny import write_tiny_images, write_tiny_vit

# Variables that may be set in the shell, and those that torchrun sets for its child processes.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "XDG_CACHE_HOME", "MATPLOTLIBRC", "MPLBACKEND", "PYTHONWARNINGS")
_COLOURS = ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS")
for _name in [name for name in os.environ if name.startswith("ONEA_") or name in (*_VARIABLES, *_COLOURS)]:
    del os.environ[_name]
_OUTCOMES = "outcomes"  # a property of reports
_CACHE = tempfile.TemporaryDirectory(prefix="onea-tests-")
os.environ |= {
    "ONEA_CACHE": _CACHE.name,
    "COLUMNS": "80",
    # Ray reads both once per process, when it is first imported: clusters of these tests accept only this process and
    # its children, and no token is read from or written to the home folder.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
if not os.environ.get("TEST_ON_GPU"):  # set by `make test-gpu`; all other tests compare numbers on the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tests in bf16 must run everywhere, even if the CPU reports AMX but cannot run it (onea.cpu).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in background jobs of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")
    parser.addoption("--write-golden", action="store_true", help="rewrite the golden record from this run")
    parser.addoption("--float-weights", metavar="FILE", help="rewrite the reference features from these weights")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in random order")


def pytest_configure(config: pytest.Config) -> None:
    # The same examples on all machines, without deadlines; the slow suite generates new ones.
    settings.register_profile(
        "onea",
        deadline=None,
        database=None,
        derandomize=not config.getoption("--slow"),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("onea")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: one more process than cores, because some tests wait for a clock, a disk or another process."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_unconfigure() -> None:
    _CACHE.cleanup()
    gc.unfreeze()  # some libraries report leaked objects at exit


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        rng, file_order = random.Random(seed), {}
        items.sort(key=lambda item: (file_order.setdefault(item.path, rng.random()), rng.random()))
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="takes minutes: run with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The outcomes of the slow tests, by kind and in total (see ``record_outcomes``)."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    last = [report for report in reports if getattr(report, "when", "") == "teardown"]
    recorded = [value for report in last for name, value in report.user_properties if name == _OUTCOMES]
    if not recorded or not config.getoption("--slow"):
        return
    terminalreporter.section("outcomes of the slow tests")
    for kind in sorted({kind for kind, _, _ in recorded}):
        rows = [(label, outcomes) for other, label, outcomes in recorded if other == kind]
        total: Counter[str] = Counter()
        for _, outcomes in rows:
            total.update(outcomes)
        for label, outcomes in [*rows, ("total", total)] if len(rows) > 1 else rows:
            summary = ", ".join(f"{number:,} {name}" for name, number in outcomes.items())
            terminalreporter.write_line(f"{kind}, {label}: {summary}")


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests, a million objects, from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _reset_torch() -> Iterator[None]:
    """Start each test with the same random state and number of threads of PyTorch."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record the number of inputs of a kind with each outcome; the slow suite prints them at the end."""

    def note(kind: str, label: str, outcomes: dict[str, int]) -> None:
        record_property(_OUTCOMES, [kind, label, outcomes])

    return note


@pytest.fixture(scope="session")
def tiny_vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("vit") / "tiny.safetensors"
    write_tiny_vit(path)
    return str(path)


@pytest.fixture(scope="session")
def tiny_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_tiny_images(root)
    return root


@pytest.fixture
def tiny_run(shared_tiny_run: dict[str, Any]) -> dict[str, Any]:
    """Values of a run that takes a second; tests change some of them."""
    return copy.deepcopy(shared_tiny_run)


@pytest.fixture(scope="session")
def shared_tiny_run(tiny_vit: str, tiny_images: Path) -> dict[str, Any]:
    """The same values, for fixtures that do not change them."""
    options = {"rank": 4, "learning_rate": 0.05, "batch_size": 8, "epochs": 2, "min_epochs": 1, "max_epochs": 3}
    return {
        "method": "one-a",
        "data": f"folder:{tiny_images}",
        "backbone": tiny_vit,
        "sizes": "3,1,2",
        "device": "cpu",
        "precision": "fp32",
        "threads": 1,
        "options": options,
    }


_built = functools.cache(typer.main.get_command)  # typer would build all commands again at every call


@pytest.fixture
def onea(monkeypatch, tmp_path, capsys):
    """Run the command in an empty folder; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("ONEA_MAX_MEGAPIXELS", "")  # a command may set it for the process
    monkeypatch.setattr(typer.main, "get_command", _built)

    from onea.cli import main

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onea", *arguments])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="session")
def _taught(tmp_path_factory: pytest.TempPathFactory, tiny_vit: str, tiny_images: Path) -> Path:
    from support.serving import teach_first

    path = tmp_path_factory.mktemp("taught") / "shop.onea"
    teach_first(path, tiny_images, tiny_vit)
    return path


@pytest.fixture(scope="session")
def _taught_slowly(tmp_path_factory: pytest.TempPathFactory, tiny_vit: str, tiny_images: Path) -> Path:
    from support.serving import teach_first

    path = tmp_path_factory.mktemp("slow") / "shop.onea"
    teach_first(path, tiny_images, tiny_vit, epochs=200)
    return path


@pytest.fixture
def shop(_taught: Path, tmp_path: Path) -> Path:
    """A copy of a model folder with class00 to class03, which learns within a second."""
    return Path(shutil.copytree(_taught, tmp_path / "models" / "shop.onea"))


@pytest.fixture
def slow_shop(_taught_slowly: Path, tmp_path: Path) -> Path:
    """The same with many epochs, so that a training job of many images takes long enough to be interrupted."""
    return Path(shutil.copytree(_taught_slowly, tmp_path / "models" / "shop.onea"))
