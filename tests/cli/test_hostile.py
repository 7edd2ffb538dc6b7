# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments for every option of every command: no traceback, and nothing is written."""

from __future__ import annotations

import dataclasses
import inspect
import os
import stat
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from support.commands import COMMANDS
from support.malformed import aliases
from support.tiny import needs_unicode

from onea.errors import OneaError
from onea.merging import OPERATORS, make_operator, operator_class
from onea.research.methods import METHODS, method_class
from onea.research.runs.config import make_config, read_yaml
from onea.research.streams import MAX_CLASSES, parse_sizes
from onea.runtime import make_runtime
from onea.vit.backbones import load_backbone

# Outside the range of every option; slow commands get only these, because a valid value would run for minutes.
ALWAYS_INVALID = ["9" * 25, "-" + "9" * 25, "nan", "inf", "1e308", "9" * 5000, "-1"]
SOMETIMES_INVALID = ["0", "2147483648"]
FAST_COMMANDS = ("run", "stream", "paper", "merge")

LONG = "a" * 5000
PATHS = [LONG, "b/" * 3000 + "c", "nul\0byte", "\udcff\udcfe", "/dev/null/x", "/dev/zero"]
SOURCES = [
    f"{LONG}.safetensors",
    "x\0.safetensors",
    f"folder:{LONG}",
    f"list:{LONG},{LONG}",
    "list:/dev/zero",
    "list:\0",
]

SIZES = ("--sizes", "--classes", "--samples")  # numbers in a text
TESTED_ELSEWHERE = {"serve"}  # it waits for requests; tests/serve checks its options


def options(kinds: tuple[str, ...], commands: tuple[str, ...]) -> list[tuple[str, str]]:
    """Command and option of every option whose type is one of these."""
    pairs = []
    for name in commands:
        command = inspect.unwrap(COMMANDS[name].callback, stop=lambda each: hasattr(each, "__signature__"))
        taken = inspect.signature(command, eval_str=True).parameters
        for option in COMMANDS[name].params:
            hint = taken[option.name].annotation if option.name in taken else ""
            kind = str(getattr(hint, "__origin__", hint))  # without its help
            if option.opts[0].startswith("--") and any(word in kind for word in kinds):
                pairs.append((name, option.opts[0]))
    return pairs


NUMBERS = options(("int", "float"), ("run", "stream", "bench", "paper", "demo", "merge"))
TEXTS = options(("Path", "str"), tuple(sorted(COMMANDS.keys() - TESTED_ELSEWHERE)))


@pytest.fixture
def base(tiny_run, tiny_vit, tiny_images, tmp_path_factory) -> dict[str, list[str]]:
    """Arguments with which each command does little or nothing."""
    nowhere = str(tmp_path_factory.mktemp("nowhere") / "nothing")
    sources = ["--data", f"folder:{tiny_images}", "--backbone", tiny_vit]
    return {
        "run": ["simplecil", *sources, "--sizes", "3,1,2", "--precision", "fp32", "--threads", "1"],
        "stream": [],
        "bench": ["--backbone", tiny_vit, "--quick", "--tasks", "0"],
        "paper": ["proxies", *sources, "--tasks", "3", "--dry-run"],
        "demo": [],
        "merge": [f"{nowhere}.safetensors", f"{nowhere}.safetensors", "--out", f"{nowhere}-merged.safetensors"],
        "report": [nowhere],
        "compare": [nowhere, nowhere],
        "methods": [],
        "teach": [nowhere, nowhere],
        "predict": [nowhere, nowhere],
        "evaluate": [nowhere, nowhere],
        "export": [nowhere, nowhere],
        "forget": [nowhere, "class"],
        "rename": [nowhere, "class", "other"],
        "undo": [nowhere],
        "history": [nowhere],
        "info": [nowhere],
        "classes": [nowhere],
        "tour": ["--out", nowhere],
        "check": [nowhere, nowhere],
        "refresh": [nowhere, nowhere],
    }


def refused_or_done(onea, tmp_path: Path, *words: str) -> int:
    code, _, err = onea(*words)
    assert code in (0, 2), words
    if code == 2:
        assert err.strip(), words
        assert "Traceback" not in err, words
        assert list(tmp_path.iterdir()) == [], words
    else:
        for path in sorted(tmp_path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    return code


def test_every_command_is_tried(base):
    assert base.keys() | TESTED_ELSEWHERE == COMMANDS.keys()
    assert len(NUMBERS) > 25
    assert {("run", "--threads"), ("run", "--cache-gb"), ("bench", "--threads"), ("paper", "--seeds")} <= {*NUMBERS}
    assert {("run", "--out"), ("run", "--config"), ("run", "--backbone"), ("merge", "--out")} <= {*TEXTS}


@pytest.mark.parametrize(("command", "option"), NUMBERS, ids=map(" ".join, NUMBERS))
def test_numbers(command, option, onea, base, tmp_path):
    for value in [*ALWAYS_INVALID, *SOMETIMES_INVALID] if command in FAST_COMMANDS else ALWAYS_INVALID:
        code = refused_or_done(onea, tmp_path, command, *base[command], f"{option}={value}")
        assert code == 2 or command in FAST_COMMANDS, (option, value)


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("run", "--threads", "-1"),
        ("run", "--threads", "9" * 25),
        ("bench", "--threads", "-1"),
        ("run", "--cache-gb", "1e308"),
        ("run", "--budget", "1e308"),
        ("run", "--sizes", "9" * 25),
        ("stream", "--sizes", "9" * 25),
        ("stream", "--sizes", ",".join(["9" * 4300] * 20)),
        ("stream", "--classes", "9" * 25),
        ("run", "--out", LONG),
        ("stream", "--out", LONG),
        ("paper", "--out", LONG),
        ("demo", "--out", LONG),
        ("demo", "--seed", "-1"),
        ("bench", "--workers", "-1"),
        ("paper", "--seeds", "9" * 25),
        ("paper", "--workers", "9" * 25),
        ("merge", "--classes", f"{'9' * 25},1"),
        ("merge", "--classes", "1," + "9" * 400),
    ],
)
def test_one_sentence(command, option, value, onea, base, tmp_path):
    code, _, err = onea(command, *base[command], f"{option}={value}")
    assert code == 2
    assert err.startswith("onea: ")
    assert len(err.strip().splitlines()) == 1
    assert len(err) < 400, "a long value is truncated"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "option"), TEXTS, ids=map(" ".join, TEXTS))
def test_texts_and_paths(command, option, onea, base, tmp_path):
    values = [LONG, "nul\0byte"]  # others may be good folders, and a bench or a demo takes long
    if option in SIZES:
        values = ALWAYS_INVALID
    elif command not in ("bench", "demo") and option in ("--data", "--root", "--backbone", "--config", "--out"):
        values = PATHS + SOURCES if option in ("--data", "--backbone") else PATHS
    for value in values:
        if (command, value) != ("tour", "\udcff\udcfe"):  # a valid folder: the whole tour would run
            refused_or_done(onea, tmp_path, command, *base[command], f"{option}={value}")


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - TESTED_ELSEWHERE - {"bench", "demo", "stream"}))
def test_arguments(command, onea, base, tmp_path):
    for value in PATHS:
        refused_or_done(onea, tmp_path, command, value, *base[command][1:])


@pytest.mark.parametrize("name", METHODS.builtin)
def test_options_of_methods(name):
    kind = method_class(name).Options
    check_options(kind, lambda values: make_config({"method": name} | values))


@pytest.mark.parametrize("name", OPERATORS.builtin)
def test_options_of_operators(name):
    check_options(operator_class(name), lambda values: make_operator(name, **values))


def check_options(kind: type, make: Any) -> None:
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    for option in [field.name for field in fields if get_type_hints(kind)[field.name] in (int, float)]:
        for value in ("9" * 50, "-" + "9" * 50, "nan", "inf", "1e308", "-1e308", "x", ""):
            with pytest.raises(OneaError):
                make({option: value})


@pytest.mark.parametrize(("option", "value"), [("kappa", -1), ("quantile", 2)])
def test_an_invalid_merge_is_refused_before_training(option, value):
    with pytest.raises(OneaError, match=option):
        make_config({"method": "one-a", option: value})


def test_rates_are_not_negative():
    with pytest.raises(OneaError, match="alignment_learning_rate is -1"):
        make_config({"method": "mos", "alignment_learning_rate": -1})


# what cannot be read


def test_a_backbone_file_that_cannot_be_read(tiny_vit, tmp_path):
    copy = tmp_path / "own.safetensors"
    if os.geteuid() == 0:  # root reads everything but this
        if not Path("/proc/self/mem").exists():
            pytest.skip("root may read every file here")
        copy.symlink_to("/proc/self/mem")
    else:
        copy.write_bytes(Path(tiny_vit).read_bytes())
        copy.chmod(stat.S_IWUSR)
    with pytest.raises(OneaError, match=r"Backbone file .*own\.safetensors cannot be read \(.*\); make it readable"):
        load_backbone(str(copy))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "a: " * 5_000,
        "seed: 2021-13-45",
        "tasks: 2021-99-99 25:61:61",
        "seed: !!int x",
        "sizes: [[1, 2], {3: 4}]",
        "data: {a: b}",
        "method: [one-a]",
        "options: {1: 2}",
        "options: {rank: {}}",
        "backbone: !!binary x",
        'data: "a\\0b"',
        'root: "a\\0b"',
        "a: &a [*a]\nseed: *a",
        f"seed: {'9' * 5000}",
        "precision: 1e400",
        "threads: -1",
        "#" * 1_000_001,
        "? [a]\n: b",
        "seed: !!timestamp x",
        "seed: !!bool x",
        "seed: !!int ''",
        aliases(12, "[x]", "[{}]", "seed"),
        aliases(12, "{x: 1}", "{{<<: [{}]}}", "options"),
    ],
)
def test_malicious_config_files(text, onea, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    code, _, err = onea("run", "--config", "run.yaml", "--data", "folder:missing")
    assert code == 2
    assert err.startswith("onea: ")
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a device without an end")
def test_an_endless_config_file():
    with pytest.raises(OneaError, match="larger than a megabyte"):
        read_yaml(Path("/dev/zero"))


def test_sizes_are_read_or_refused_quickly():
    assert parse_sizes("3,1,2") == (3, 1, 2)
    assert sum(parse_sizes(",".join(["1000"] * 1000))) == MAX_CLASSES
    for text in (str(MAX_CLASSES + 1), "9" * 25, "1," + "9" * 4000, "9" * 5000, "-" + "9" * 25):
        with pytest.raises(OneaError):
            parse_sizes(text)


@pytest.mark.parametrize("threads", [-1, 10**25, 2**31, 100_000])
def test_impossible_threads_are_refused_everywhere(threads):
    with pytest.raises(OneaError, match="threads is"):
        make_runtime("cpu", "fp32", threads)
    with pytest.raises(OneaError, match="threads is"):
        make_config({"threads": threads})


@needs_unicode
def test_the_default_folder_of_a_run_is_a_valid_name(tmp_path):
    for name in ("é" * 120, "a" * 250, "b" * 10):
        folder = make_config({"data": f"folder:{tmp_path / name}"}).folder()
        (tmp_path / folder).mkdir(parents=True)
    assert "-bbbbbbbbbb-seed1-" in folder.name
    with pytest.raises(OneaError, match="data has a character that is not allowed in a path"):
        make_config({"data": "folder:\ud800"})


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    ],
)
def test_error_message_without_memory(error, onea, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("onea.research.streams.step_sizes", fail)
    monkeypatch.setattr("onea.research.streams.step_sizes", fail)
    code, _, err = onea("stream")
    assert code == 3
    assert err.startswith("onea: There is not enough memory for this; close other programs")
    monkeypatch.setattr("onea.research.streams.step_sizes", lambda *_: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["onea", "stream"])
    from onea.cli import main

    with pytest.raises(ZeroDivisionError):
        main()
