# SPDX-License-Identifier: Apache-2.0
"""All commands. Their modules import nothing heavy; the work is imported when a command runs.

Commands of research are found by name, so that nothing of a model depends on research.
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
from onea.cli.check import check
from onea.cli.examples import EXAMPLES, START, epilog
from onea.cli.merge import merge
from onea.cli.model import evaluate, export, predict, teach
from onea.cli.serve import serve
from onea.cli.tour import tour
from onea.files import check_path


def _flags_alone(parameters: list[Any]) -> list[Any]:
    """Parameters of which flags do not look as if they took a value: some versions of Typer write ``--json <bool>``."""
    for one in parameters:
        if getattr(one, "is_flag", False):
            one.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_alone(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_alone(super().get_params(ctx))


app = typer.Typer(
    cls=_Group,
    epilog=epilog(START),
    help="Teach a model your photos, a few classes at a time, and ask it what a new photo shows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_LOOSE = {"allow_extra_args": True, "ignore_unknown_options": True}  # a method's or operator's own options
_KEPT = "finished tasks are kept, and the same command continues"
_AS_IT_WAS = "the model is as it was"


def _guarded(command: Callable[..., None], kept: str) -> Callable[..., None]:
    """Refuse paths that cannot be, and say on Ctrl-C that nothing is lost; typer would leave without a word."""

    @functools.wraps(command)
    def guarded(*arguments: Any, **options: Any) -> None:
        try:
            _check_paths(options.values())
            command(*arguments, **options)
            print(end="", flush=True)  # a full disk is told here, and not when the process ends
        except KeyboardInterrupt:
            typer.echo(f"onea: stopped; {kept}.", err=True)
            raise typer.Exit(130) from None

    return guarded


def _check_paths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _check_paths(value)
        elif isinstance(value, Path):
            check_path(value)


_research = importlib.import_module("onea.research.cli")
_PHOTOS = (teach, predict, evaluate, check, info, classes, history, undo, forget, rename, export, serve, tour)

for person, kept, commands in (
    ("Your photos", _AS_IT_WAS, _PHOTOS),
    ("Research", _KEPT, _research.COMMANDS),
    ("Merging and engineering", "there is no result", (merge, _research.bench)),
):
    for each in commands:
        settings = _LOOSE if each.__name__ in ("run", "merge") else {}
        told = epilog(EXAMPLES[each.__name__])
        named = app.command(cls=_Command, rich_help_panel=person, context_settings=settings, epilog=told)
        named(_guarded(each, kept))


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from onea import __version__

        print(__version__)
        raise typer.Exit
