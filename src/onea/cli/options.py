# SPDX-License-Identifier: Apache-2.0
"""Options of commands, taken from the dataclasses that they fill: name, type, default, range and meaning."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from onea.data.pixel_limit import MAX_PIXELS, MEGAPIXEL
from onea.errors import OneaError
from onea.options import MachineOptions, option_help

Command = Callable[..., None]


def meaning(kind: type, name: str) -> str:
    """What the docstring of a dataclass says about one of its fields, as the help of an option.

    >>> meaning(MachineOptions, "threads")
    'CPU threads; 0 is all.'
    """
    text = option_help(kind)[name]
    plain = re.sub(r"``(.+?)``", lambda code: f"`{code[1]}`" if " " in code[1] else code[1], text)
    return plain if text.startswith("``") else plain[:1].upper() + plain[1:]


def options_of(kind: type, leave_out: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command an option for each field of a dataclass, in place of its ``**given``.

    ``given`` holds the values of those that a user gave; the others keep the defaults of the dataclass. A field's
    ``panel`` in its metadata heads its options in the help. They stand before the keyword-only ones of the command.
    """

    def with_options(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        ours = {one.name for one in own}.union(leave_out)
        hints = get_type_hints(kind)
        fields = (field for field in dataclasses.fields(kind) if field.name not in ours)
        added = {field.name: _parameter(kind, field, hints[field.name]) for field in fields}

        @functools.wraps(command)
        def called(**values: Any) -> None:
            command(**{name: value for name, value in values.items() if name not in added or value is not None})

        first = [one.replace(kind=one.KEYWORD_ONLY) for one in own if one.kind is not one.KEYWORD_ONLY]
        last = [one for one in own if one.kind is one.KEYWORD_ONLY]
        called.__signature__ = signature.replace(parameters=[*first, *added.values(), *last])  # type: ignore[attr-defined]
        return called

    return with_options


def _parameter(kind: type, field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    optional = get_origin(hint) in (types.UnionType, Union)
    if optional:
        hint = next(one for one in get_args(hint) if one is not types.NoneType)
    dashed = field.name.replace("_", "-")
    names = [f"--{dashed}/--no-{dashed}" if optional else f"--{dashed}"] if hint is bool else []
    if get_origin(hint) is Literal:
        hint = str  # a wrong word gets our own sentence
    elif get_origin(hint) is tuple:
        hint = list[str]
    shown = field.default is not None and field.default is not False and field.default != ()
    option = typer.Option(
        *names,
        help=meaning(kind, field.name),
        show_default=str(field.default) if shown else False,
        rich_help_panel=field.metadata.get("panel"),
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, option]
    )


def check_on_bad(choice: str) -> None:
    """Refuse anything but the two things that an unreadable image can do."""
    if choice not in ("fail", "skip"):
        raise OneaError(f"--on-bad is '{choice}'; choose fail or skip.")


def _of_machine(name: str) -> Any:
    return typer.Option(help=meaning(MachineOptions, name))


# Options that several commands have.
Device = Annotated[str, _of_machine("device")]
Precision = Annotated[str, _of_machine("precision")]
Threads = Annotated[int, _of_machine("threads")]
OnBad = Annotated[str, _of_machine("on_bad")]
Model = Annotated[Path, typer.Argument(help="Model folder.")]
UnknownRate = Annotated[
    float | None,
    typer.Option("--unknown", help="Share of known images that may be answered 'unknown', instead of the model's."),
]
MovedBackbone = Annotated[str | None, typer.Option(help="Where the model's backbone file is now.")]
MaxMegapixels = Annotated[
    int | None,
    typer.Option(
        help="An image with more is refused before it is decoded; ONEA_MAX_MEGAPIXELS sets the same.",
        show_default=str(MAX_PIXELS // MEGAPIXEL),
    ),
]
