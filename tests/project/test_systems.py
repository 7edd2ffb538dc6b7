# SPDX-License-Identifier: Apache-2.0
"""Windows and macOS, as far as Linux can simulate them: modules and functions that they lack are removed.

Libraries are imported first, since they look after themselves. Then modules that only POSIX has cannot be imported any
more, functions that Windows has not are deleted from ``os`` and ``signal``, and folders cannot be opened.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys

from support import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))

# By Python's own documentation ("Availability: Unix", "not Windows"). O_NONBLOCK, WNOHANG and statvfs stay: those parts
# of filelock, subprocess and shutil that are for Linux need them.
MODULES = "fcntl resource pwd grp termios tty pty syslog crypt nis spwd ossaudiodev readline curses posix"
OS = """
    sched_getaffinity sched_setaffinity sched_yield getuid geteuid getgid getegid getgroups getlogin getpgid getpgrp
    getsid setsid setuid setgid setpgid fork forkpty killpg kill nice wait wait3 wait4 sysconf sysconf_names confstr
    pathconf getloadavg chown lchown fchown fchmod mkfifo mknod chroot sync ttyname openpty pread
    pwrite preadv pwritev posix_fallocate posix_fadvise posix_spawn sendfile lockf uname getxattr setxattr memfd_create
    eventfd O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_SYNC O_DSYNC O_NOCTTY O_PATH O_TMPFILE EX_OK
"""
NUM_SIGNALS = "SIGKILL SIGHUP SIGQUIT SIGALRM SIGUSR1 SIGUSR2 SIGCHLD SIGPIPE SIGTSTP SIGCONT alarm setitimer pause"
LIBRARIES = """
    torch torch.distributed torch.utils.data torch._dynamo torchvision torchvision.transforms.v2 torchvision.datasets
    timm accelerate accelerate.tracking safetensors.torch numpy.random PIL.Image PIL.ImageFont typer.main rich.console
    rich.live rich.progress matplotlib.figure matplotlib.backends.backend_agg yaml filelock huggingface_hub
    multiprocessing.connection multiprocessing.context concurrent.futures.process asyncio subprocess tempfile shutil
    importlib.resources fastapi uvicorn python_multipart
"""
OPTIONAL = "fastapi uvicorn python_multipart starlette onnx onnxruntime ray"

ELSEWHERE = """
import importlib, importlib.abc, json, os, pkgutil, signal, sys

modules, functions, signals, libraries, optional = (names.split() for names in json.loads(sys.argv[1]))

def load(name):
    try:
        importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in optional:
            raise

for name in libraries:
    load(name)

class Nowhere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

for name in modules:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Nowhere())
for holder, names in ((os, functions), (signal, signals)):
    for name in names:
        if hasattr(holder, name):
            delattr(holder, name)

real = os.open
def no_folders(path, *rest, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return real(path, *rest, **named)
os.open = no_folders
"""

IMPORT_ALL = """
import onea

found = [found.name for found in pkgutil.walk_packages(onea.__path__, "onea.", onerror=load)]
for name in found:
    if not name.endswith("__main__"):
        load(name)
print(len(found))
"""

USE = """
from pathlib import Path
import onea
from onea.research.runs.config import make_config
from onea.research.runs.runner import run

images, vit, folder = json.loads(sys.argv[2])
values = {"method": "simplecil", "data": "folder:" + images, "backbone": vit, "sizes": "3,1,2", "precision": "fp32"}
record = run(make_config(values), Path(folder, "run"))
assert record["status"] == "finished"
assert record["memory"]["peak_bytes"][0] == {}, "Windows does not tell"
assert run(make_config(values), Path(folder, "run")) == record

model = onea.OneA(backbone=vit, epochs=1, precision="fp32")
files = sorted(Path(images, "train").rglob("*.png"))[:12]
labels = [file.parent.name for file in files]
model.partial_fit(files, labels)
model.save(Path(folder, "shop.onea"))
loaded = onea.load(Path(folder, "shop.onea"), precision="fp32")
assert list(loaded.predict(files)) == list(model.predict(files))
loaded.partial_fit(files[:6], labels[:6])
loaded.save(Path(folder, "shop.onea"))
print("used")
"""


def on_another_system(code: str, *arguments: str) -> str:
    names = json.dumps([MODULES, OS, NUM_SIGNALS, LIBRARIES, OPTIONAL])
    command = [sys.executable, "-c", ELSEWHERE + code, names, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_can_be_imported_on_every_system():
    assert int(on_another_system(IMPORT_ALL)) == sum(
        path.name != "__init__.py" or path.parent.name != "onea" for path in SOURCES
    )


def test_runs_and_models_are_written_and_read_on_every_system(tiny_images, tiny_vit, tmp_path):
    assert on_another_system(USE, json.dumps([str(tiny_images), tiny_vit, str(tmp_path)])) == "used\n"


def test_no_module_imports_a_posix_module_at_the_top():
    """Even if a library has imported it before."""
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not set(names) & set(MODULES.split()), path


def test_text_files_do_not_depend_on_the_locale():
    """Every access to a text file names its encoding, because the default of Windows differs."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="read_text" | "write_text"), keywords=given):
                    assert "encoding" in {keyword.arg for keyword in given}, f"{path}:{node.lineno}"


def test_a_folder_has_its_name_on_windows_too(monkeypatch):
    from onea.research.data import data_name

    monkeypatch.setattr("os.sep", "\\")
    assert data_name("folder:C:\\photos\\hats\\") == "hats"
    assert data_name("folder:C:/photos/hats") == "hats"


def test_pipes_may_have_another_class(tiny_run, tmp_path, monkeypatch):
    """As on Windows."""
    from onea.research.runs import executors
    from onea.research.runs.config import make_config
    from onea.research.runs.grid import RunJob

    class Other:
        pass

    monkeypatch.setattr(executors, "Connection", Other)
    config = make_config(tiny_run | {"method": "simplecil", "options": {}})
    (result,) = executors.LocalProcesses(1).run([RunJob(config, tmp_path / "o")])
    assert result.failure is None
