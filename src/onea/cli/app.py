# SPDX-License-Identifier: Apache-2.0
"""The command-line application. Commands import their dependencies when they run, so that ``--help`` is fast.

The research commands are imported by name, because no module of a model may import research.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from onea.cli.admin import classes, forget, history, info, rename, undo
from onea.cli.evaluate import check, evaluate
from onea.cli.examples import EXAMPLES, START, epilog
from onea.cli.merge import merge
from onea.cli.model import export, predict, refresh, teach
from onea.cli.serve import serve
from onea.cli.tour import tour
from onea.files import check_path


class _PlainFlags:
    """Mixin of commands without the ``<bool>`` that some versions of Typer print after a flag."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class _Command(_PlainFlags, TyperCommand):
    pass


class _Group(_PlainFlags, TyperGroup):
    pass


app = typer.Typer(
    cls=_Group,
    epilog=epilog(START),
    help="Image classification that learns new classes from your photos, a few at a time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _guarded(command: Callable[..., None], on_interrupt: str) -> Callable[..., None]:
    """The command, with a check of its paths, and a message on Ctrl-C instead of Typer's silent exit."""

    @functools.wraps(command)
    def guarded(*arguments: Any, **options: Any) -> None:
        try:
            _check_paths(options.values())
            command(*arguments, **options)
            print(end="", flush=True)  # a full disk is reported here rather than when the process ends
        except KeyboardInterrupt:
            typer.echo(f"onea: interrupted; {on_interrupt}.", err=True)
            raise typer.Exit(130) from None

    return guarded


def _check_paths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _check_paths(value)
        elif isinstance(value, Path):
            check_path(value)


_research = importlib.import_module("onea.research.cli")
_MODEL_COMMANDS = (
    *(teach, predict, evaluate, check, refresh, info, classes, history, undo, forget, rename, export, serve, tour),
)
_ANY_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}  # for options of a method or an operator

for panel, on_interrupt, commands in (
    ("Models", "the model is unchanged", _MODEL_COMMANDS),
    ("Research", "finished tasks are kept; repeat the command to resume", _research.COMMANDS),
    ("Merging and benchmarks", "no result was written", (merge, _research.bench)),
):
    for command in commands:
        name = command.__name__
        settings = _ANY_OPTIONS if name in ("run", "merge") else {}
        register = app.command(
            cls=_Command, rich_help_panel=panel, context_settings=settings, epilog=epilog(EXAMPLES[name])
        )
        register(_guarded(command, on_interrupt))


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from onea import __version__

        print(__version__)
        raise typer.Exit
