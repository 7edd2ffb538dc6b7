# SPDX-License-Identifier: Apache-2.0
"""Commands work offline: any DNS look-up or connection ends the process; HOME is empty."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support import ROOT
from support.adapters import write_matrices
from support.commands import COMMANDS, in_one_process
from support.models import onnx_runtime_or_skip
from support.offline import KERNEL_GUARDS, STOPPED

from onea.files import cache_folder

GUARD = ROOT / "tests/support/offline.py"
SETTINGS = ("ONEA_", "XDG_", "ORT_", "MPL", "HF_", "TORCH", "TRITON")  # where caches are, and what calls out

# Every command with words that make it do all that it does; those of one group run in one process, in this order.
PHOTOS = (
    "teach shop.onea {images}/train --backbone {vit}",
    "teach shop.onea --background {images}/test/class00",
    "refresh shop.onea {images}/train",
    "predict shop.onea {images}/test",
    "evaluate shop.onea {images}/test",
    "check shop.onea {images}/train",
    "info shop.onea",
    "classes shop.onea",
    "history shop.onea",
    "rename shop.onea class00 zero",
    "forget shop.onea class01",
    "undo shop.onea",
    "forget shop.onea class01 --everywhere",
    "export shop.onea --to onnx",
)
RESEARCH = (
    "methods",
    "stream --classes 6 --tasks 3 --out pictures",
    "run simplecil --data folder:{images} --backbone {vit} --sizes 3,1,2 --out runs/a",
    "run slda --data folder:{images} --backbone {vit} --sizes 3,1,2 --out runs/b",
    "report runs",
    "compare runs/a runs/b",
    "paper proxies --data folder:{images} --backbone {vit} --tasks 3 --dry-run",
    "merge a.safetensors b.safetensors --classes 4,5 -o merged.safetensors",
)
LONG = (
    "demo",
    "bench --backbone {vit} --quick --export --rank 4 --seconds 0.01",
    "paper proxies --data folder:{images} --backbone {vit} --tasks 3 --out results",
    "run one-a-plus --data folder:{images} --backbone {vit} --sizes 3,1,2 --track tensorboard",
    "export shop.onea --to torch",
)
WITH_WORKERS = ("bench --backbone {vit} --quick --tasks 0",)  # of a DataLoader, which it compares with
BY_ITSELF = ("serve", "tour")  # below


def test_every_command_is_here():
    assert {words.split()[0] for words in (*PHOTOS, *RESEARCH, *LONG, *WITH_WORKERS)} | {*BY_ITSELF} == COMMANDS.keys()


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty HOME, and no setting of the shell or of the tests that moves a cache out of it."""
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        monkeypatch.delenv(name)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    write_matrices(Path("a.safetensors"), 1)
    write_matrices(Path("b.safetensors"), 2)
    return tmp_path / "home"


@pytest.fixture
def run(home, tiny_images, tiny_vit):
    """Run commands in one guarded process; below HOME there is nothing but the cache afterwards."""

    def call(*commands: str, allowed: tuple[str, ...] = ()) -> None:
        words = [line.format(images=tiny_images, vit=tiny_vit).split() for line in commands]
        for command, (code, out, err) in zip(words, in_one_process(words, before=[GUARD, *allowed]), strict=True):
            assert code == 0, (command, out, err)
        check_home(home)

    return call


def check_home(home: Path) -> None:
    cache = cache_folder()
    assert cache.is_relative_to(home)
    left = [path for path in home.rglob("*") if path.is_file() and not path.is_relative_to(cache)]
    assert left == []


def test_a_model(run):
    onnx_runtime_or_skip()
    run(*PHOTOS)


def test_research(run):
    run(*RESEARCH)


@pytest.mark.slow
def test_long_commands(run):
    onnx_runtime_or_skip()
    pytest.importorskip("tensorboard")
    run(PHOTOS[0], *LONG)


@pytest.mark.slow
def test_commands_with_workers(run):
    run(*WITH_WORKERS, allowed=("--workers",))


@pytest.mark.slow
def test_the_tour(home):
    """It asks its own service, so connections within the machine are allowed."""
    pytest.importorskip("fastapi")
    [(code, out, err)] = in_one_process([["tour"]], before=[GUARD, "--loopback"])
    assert code == 0, (out, err)
    check_home(home)


def test_the_service(home, shop, tiny_vit):
    pytest.importorskip("fastapi")
    code = "import sys; sys.argv = ['onea', *sys.argv[1:]]; from onea.cli import main; main()"
    words = [sys.executable, str(GUARD), "-c", code, "serve", str(shop), "--port", "0", "--backbone", tiny_vit]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = re.search(r"http://\S+", process.stdout.readline())
            assert address
            for page in ("/", "/classes", "/history", "/metrics"):
                assert httpx.get(f"{address[0]}{page}", timeout=120).status_code == 200, page
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode in (0, -signal.SIGTERM)
    check_home(home)


LOOK_UP = "socket.getaddrinfo('nowhere.invalid', 80)"
CONNECTION = "socket.create_connection(('127.0.0.1', 9))"
IN_C = (
    "ctypes.CDLL(None).getaddrinfo(b'nowhere.invalid', b'80', None, ctypes.byref(ctypes.c_void_p()))",
    r"ctypes.CDLL(None).connect(socket.socket().fileno(), b'\2\0\0\11\177\0\0\1' + bytes(8), 16)",
)


def guarded(code: str, *allowed: str) -> int:
    words = [sys.executable, GUARD, *allowed, "-c", f"import ctypes, socket; {code}"]
    return subprocess.run(words, capture_output=True).returncode


def test_the_guard_stops_what_python_and_other_code_asks_of_the_network():
    assert guarded(LOOK_UP) == guarded(CONNECTION) == STOPPED
    assert guarded(CONNECTION, "--workers") == (-signal.SIGSYS if KERNEL_GUARDS else STOPPED)
    assert guarded("socket.create_server(('127.0.0.1', 0))") == 0
    if KERNEL_GUARDS:
        for allowed in ((), ("--workers",)):
            assert [guarded(code, *allowed) for code in IN_C] == [-signal.SIGSYS, -signal.SIGSYS]
        assert guarded(IN_C[0], "--loopback") == -signal.SIGSYS


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "docs", "benchmarks"])
def test_onnx_runtime_is_imported_in_one_place(folder):
    """Where its telemetry is switched off first."""
    imports = re.compile(
        r"import .*onnxruntime|from onnxruntime|(import_module|importorskip|import_extra)\(.onnxruntime"
    )
    places = [file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".md", ".ipynb")]
    for file in places:
        text = file.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if imports.search(line)]
        if file.name == "onnx.py":
            assert lines == [
                '    import_extra("onnxruntime", "export").disable_telemetry_events()  # if it was imported before'
            ]
        elif file.name == "models.md":
            assert lines == ["import onnxruntime"]
            assert re.search(
                r'^os\.environ\["ORT_DISABLE_TELEMETRY"\] = "1".*\nimport onnxruntime$', file.read_text(), re.M
            )
        elif file != Path(__file__):
            assert not lines, file
