# SPDX-License-Identifier: Apache-2.0
"""Help texts: every command has valid examples, and every option a help text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from support import ROOT
from support.commands import check_command

from onea.cli.app import app
from onea.cli.examples import EXAMPLES, START
from onea.research.methods import METHODS

GROUP: Any = typer.main.get_command(app)
SOURCES = sorted(ROOT.glob("src/onea/cli/*.py"))


def test_every_command_has_examples():
    assert list(EXAMPLES) == list(GROUP.commands)


@pytest.mark.parametrize("name", GROUP.commands)
def test_the_help_of_a_command_ends_with_examples_that_it_accepts(name, onea):
    code, out, _ = onea(name, "--help")
    assert code == 0
    text = " ".join(out.partition("Examples:")[2].split())
    for line in EXAMPLES[name]:
        assert f"$ {line}" in text
        words = shlex.split(line)
        assert words[:2] == ["onea", name]
        check_command(words)


def test_the_help_of_onea_ends_with_examples(onea):
    text = " ".join(onea("--help")[1].partition("Examples:")[2].split())
    assert text.split("$ ")[1:] == [f"{line} " for line in START[:-1]] + [START[-1]]


def test_every_output_option_has_the_same_short_name():
    """No command has the same short name twice."""
    opts = {name: [opt for item in command.params for opt in item.opts] for name, command in GROUP.commands.items()}
    with_out = [name for name, own in opts.items() if "--out" in own]
    assert {"run", "merge"} <= set(with_out)
    for name in with_out:
        (out,) = (item for item in GROUP.commands[name].params if "--out" in item.opts)
        assert out.opts == ["--out", "-o"], name
        assert len(opts[name]) == len(set(opts[name])), name


def test_a_short_name_is_not_an_option_of_the_method(onea, tiny_run):
    assert onea("run", "one-a", "-o", "a", "--method-option", "1")[2].startswith("onea: Unknown option 'method_option'")
    values = [f"--{key}={tiny_run[key]}" for key in ("data", "backbone", "sizes")]
    assert onea("run", "simplecil", *values, "-o", "short", "--threads=1")[0] == 0
    assert Path("short/record.json").exists()


@pytest.mark.parametrize("name", ["", *GROUP.commands])
def test_flags_are_listed_without_a_type(name, onea, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")  # no line is broken
    out = onea(*name.split(), "--help")[1]
    command = GROUP.commands[name] if name else GROUP
    flags = [item for item in command.params if getattr(item, "is_flag", False) and not item.hidden]
    help_texts = {item.opts[0]: item.help for item in flags} | {"--help": "Show this message and exit."}
    for flag, help_text in help_texts.items():
        (line,) = re.findall(rf"^│ +{flag} (.*)│$", out, re.M)
        written = re.sub(r"--\S+|-\w\b", "", line.partition(help_text)[0])  # except its other names
        assert not written.strip(), line


@pytest.mark.parametrize("name", GROUP.commands)
def test_every_option_has_a_help_text_without_markup(name, onea):
    assert "``" not in onea(name, "--help")[1]
    hidden = {item.name for item in GROUP.commands[name].params if getattr(item, "hidden", False)}
    assert not [item.name for item in GROUP.commands[name].params if not item.help and item.name not in hidden]


@pytest.mark.parametrize("name", GROUP.commands)
def test_help_texts_are_not_parsed_as_markup(name, onea, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")  # no line is broken
    out = onea(name, "--help")[1]
    for item in GROUP.commands[name].params:
        if not getattr(item, "hidden", False):
            assert item.help in out
        if isinstance(default := getattr(item, "show_default", False), str):
            assert f"default: {default}]" in out or f"default: ({default})]" in out


@pytest.mark.parametrize("name", METHODS.builtin)
def test_options_of_a_method_are_listed_without_markup(name, onea):
    out = onea("methods", name)[1]
    assert "``" not in out
    assert "┃" not in out


@pytest.mark.parametrize(
    "words", [(), ("--operators",), ("--classifiers",), ("--datasets",), ("--metrics",), ("--backbones",)], ids=str
)
def test_every_list_has_heads_and_a_rule(words, onea):
    heads, rule, *lines = onea("methods", *words)[1].splitlines()
    assert heads.strip()
    assert set(rule.strip()) == {"─"}
    assert len(lines) > 3


def test_tables_have_the_same_style():
    """No command sets its own box style; numbers are right-aligned, as in ``Table.from_texts``."""
    for path in SOURCES:
        text = path.read_text("utf-8")
        assert not re.search(r"\bbox\s*=|rich\.box|left=len\(heads\)", text), path.name
