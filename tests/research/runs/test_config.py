# SPDX-License-Identifier: Apache-2.0
"""Configurations of runs: every field is an option of the command, and a new field changes no key."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import typer
from support import ROOT

from onea.cli.app import app
from onea.cli.options import field_help, options_of
from onea.research.record import find_record_files, read_record_file
from onea.research.runs.config import NOT_OPTIONS, RunConfig
from onea.research.runs.grid import RecordStore

RESULTS = ROOT / "docs/results"
RECORDS = find_record_files(RESULTS)


@dataclass(frozen=True)
class LaterConfig(RunConfig):
    """A later version.

    Attributes:
        dropout: share of features that ``training`` leaves out.
        many: words.
        shuffle: new order in every epoch.
        fast: hurry.
    """

    dropout: float = field(default=0.25, metadata={"panel": "Machine"})
    many: tuple[str, ...] = ()
    shuffle: bool | None = None
    fast: bool = False


def test_a_later_field_is_part_of_the_key_only_if_it_differs_from_its_default() -> None:
    later, earlier = LaterConfig(seed=3, options={"rank": 4}), RunConfig(seed=3, options={"rank": 4})
    assert later.identity() == earlier.identity()
    assert later.key() == earlier.key()
    changed = LaterConfig(seed=3, options={"rank": 4}, dropout=0.5)
    assert changed.key() != earlier.key()
    assert changed.identity() == earlier.identity() | {"dropout": 0.5}


def test_a_long_dataset_name_is_truncated_to_whole_characters() -> None:
    for seed in (1, 10):
        name = RunConfig(data=f"folder:{'д' * 200}", seed=seed).folder().name
        assert 253 < len(name.encode()) <= 255  # each character has two bytes


def test_every_committed_record_belongs_to_its_configuration() -> None:
    assert len(RECORDS) > 80
    for path in RECORDS:
        recorded = read_record_file(path)["config"]
        config = RunConfig(**recorded | {"store": {"packed": "auto"}.get(recorded["store"], recorded["store"])})
        assert config.identity() == recorded
        if path.parent.parent.name == "runs":
            assert path.parent.name == config.folder().name
            assert RecordStore(path.parent.parent).find(config) is not None


def options(command: str) -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return {option.name: option for option in group.commands[command].params}


def test_every_field_of_a_run_is_an_option_with_its_meaning() -> None:
    by_name = options("run")
    for item in fields(RunConfig):
        if item.name not in NOT_OPTIONS:
            assert by_name[item.name].help == field_help(RunConfig, item.name)
            assert by_name[item.name].default is None, "a default would override the YAML file"
            assert by_name[item.name].help[-1] == "."
    assert by_name["gamma"].show_default == "0.01"
    assert by_name["threads"].show_default == "0"
    assert by_name["tasks"].show_default is False


def test_a_new_field_becomes_an_option() -> None:
    values: dict[str, Any] = {}

    @options_of(LaterConfig, leave_out=["options"])
    def command(method: str = "x", *, last: int = 1, **given: Any) -> None:
        values.update(given, method=method, last=last)

    parameters = inspect.signature(command).parameters
    assert list(parameters)[:2] == ["method", "data"]
    assert list(parameters)[-2:] == ["fast", "last"]
    kind, option = parameters["dropout"].annotation.__origin__, parameters["dropout"].annotation.__metadata__[0]
    assert kind == float | None
    assert (option.help, option.show_default) == ("Share of features that training leaves out.", "0.25")
    assert option.rich_help_panel == "Machine"
    program = typer.Typer()
    program.command()(command)
    words = ["--dropout", "0.5", "--many", "a", "--many", "b", "--no-shuffle", "--fast", "--stream", "any word"]
    program(words, standalone_mode=False)
    assert values == {
        "dropout": 0.5,
        "many": ["a", "b"],
        "shuffle": False,
        "fast": True,
        "stream": "any word",
        "method": "x",
        "last": 1,
    }


@pytest.mark.parametrize(("command", "name"), [("bench", "rank"), ("paper", "scale"), ("teach", "device")])
def test_other_commands_build_their_options_from_dataclasses(command: str, name: str) -> None:
    assert options(command)[name].help
    assert options(command)[name].help[-1] == "."
