# SPDX-License-Identifier: Apache-2.0
"""What a command delays: the import of the compiler, and the first garbage collection."""

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
    import torch._dynamo as placeholder
"""
USES = {
    "compiles": "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)) == 2",
    "imports more of it": "import torch._dynamo.config as c; assert sys.modules['torch._dynamo.config'] is c",
    "disables": "assert torch.compiler.disable(lambda x: x + 1)(1) == 2",
    "asks": "from torch._dynamo.utils import is_compile_supported as s; assert isinstance(s('cpu'), bool)",
}


@pytest.mark.parametrize("use", ["compiles", pytest.param("imports more of it", marks=pytest.mark.slow)])
def test_first_use_loads_the_compiler(use):
    later = [code for name, code in USES.items() if name != use]
    rest = "\n".join([USES[use], "assert loaded()", "import torch._dynamo", *later])
    same = "assert torch._dynamo is sys.modules['torch._dynamo']; assert placeholder.config is torch._dynamo.config"
    code = f"{LOAD}\n{rest}\n{same}\nassert not type(sys.modules['torch._dynamo']).__name__ == '_Placeholder'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("use", ["disables", "asks"])
def test_any_first_use_loads_the_compiler(use):
    code = f"{LOAD}\n{USES[use]}\nassert loaded()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_prediction_does_not_load_the_compiler(shop, tiny_images):
    """Its import would take a third of the time of the first prediction."""
    words = ["onea", "predict", str(shop), str(tiny_images / "test/class00"), "--json", "--threads", "1"]
    code = f"import sys; sys.argv = {words!r}; from onea.cli import main; main()"
    check = "print('torch._dynamo.symbolic_convert' in sys.modules)"
    program = f"import atexit, sys; atexit.register(lambda: {check}); {code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"class"') >= 3
    assert done.stdout.splitlines()[-1] == "False"


def test_garbage_collection_is_delayed_until_imports_are_complete() -> None:
    usual, callbacks = gc.get_threshold(), list(gc.callbacks)
    try:
        for _ in range(2):
            cli._delay_garbage_collection()
        assert gc.callbacks.count(cli._after_collection) == 1
        assert gc.get_threshold()[0] == cli._FIRST_COLLECTION > cli._COLLECTIONS
        gc.collect()
        assert gc.get_threshold() == (cli._COLLECTIONS, *usual[1:])
        assert cli._after_collection not in gc.callbacks, "once"
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*usual)
