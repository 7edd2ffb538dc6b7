# SPDX-License-Identifier: Apache-2.0
"""What a command puts off: the compiler is loaded by what compiles, and garbage waits until all is loaded."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from onea import cli

LOAD = """if True:
    import sys
    from onea.cli.deferred import defer_compiler
    defer_compiler()
    import timm.models.vision_transformer, torch, inspect
    inspect.getmodule(sys._getframe())  # goes through all modules
    def loaded():
        return "torch._dynamo.symbolic_convert" in sys.modules
    assert not loaded(), "a network can be made without it"
    import torch._dynamo as promised
"""
USES = {
    "compiles": "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)) == 2",
    "imports more of it": "import torch._dynamo.config as c; assert sys.modules['torch._dynamo.config'] is c",
    "disables": "assert torch.compiler.disable(lambda x: x + 1)(1) == 2",
    "asks": "from torch._dynamo.utils import is_compile_supported as s; assert isinstance(s('cpu'), bool)",
}


@pytest.mark.parametrize("use", ["compiles", pytest.param("imports more of it", marks=pytest.mark.slow)])
def test_what_uses_the_compiler_gets_it(use):
    later = [code for name, code in USES.items() if name != use]
    rest = "\n".join([USES[use], "assert loaded()", "import torch._dynamo", *later])
    same = "assert torch._dynamo is sys.modules['torch._dynamo']; assert promised.config is torch._dynamo.config"
    code = f"{LOAD}\n{rest}\n{same}\nassert not type(sys.modules['torch._dynamo']).__name__ == '_Promise'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("use", ["disables", "asks"])
def test_whatever_comes_first(use):
    code = f"{LOAD}\n{USES[use]}\nassert loaded()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_answer_does_not_need_it(shop, tiny_images):
    """Loading it is a third of what the first answer would take."""
    words = ["onea", "predict", str(shop), str(tiny_images / "test/class00"), "--json", "--threads", "1"]
    code = f"import sys; sys.argv = {words!r}; from onea.cli import main; main()"
    check = "print('torch._dynamo.symbolic_convert' in sys.modules)"
    asked = f"import atexit, sys; atexit.register(lambda: {check}); {code}"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"class"') >= 3
    assert done.stdout.splitlines()[-1] == "False"


def test_garbage_is_looked_for_rarely_until_all_is_loaded() -> None:
    usual, heard = gc.get_threshold(), list(gc.callbacks)
    try:
        for _ in range(2):
            cli._collect_later()
        assert gc.callbacks.count(cli._collected) == 1
        assert gc.get_threshold()[0] == cli._LOADED > cli._OBJECTS
        gc.collect()
        assert gc.get_threshold() == (cli._OBJECTS, *usual[1:])
        assert cli._collected not in gc.callbacks, "it asks to be told once"
    finally:
        gc.callbacks[:] = heard
        gc.set_threshold(*usual)
