# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and options made from the fields of a dataclass."""

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

from onea.data.pixel_limit import DEFAULT_MAX_PIXELS, MEGAPIXEL, allow_megapixels
from onea.errors import OneaError
from onea.options import MachineOptions, option_help

Command = Callable[..., None]


def field_help(kind: type, name: str) -> str:
    """The description of a field in the docstring of its dataclass, as the help text of an option.

    >>> field_help(MachineOptions, "threads")
    'Number of CPU threads; 0 uses all.'
    """
    text = option_help(kind)[name]
    plain = re.sub(r"``(.+?)``", lambda code: f"`{code[1]}`" if " " in code[1] else code[1], text)
    return plain if text.startswith("``") else plain[:1].upper() + plain[1:]


def options_of(kind: type, leave_out: Collection[str] = ()) -> Callable[[Command], Command]:
    """Decorator that gives a command an option for each field of a dataclass, in place of its ``**options``.

    The command receives only the options that the user gave. They are listed before its keyword-only parameters, below
    the ``panel`` in the metadata of their field.
    """

    def add_options(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        taken = {parameter.name for parameter in own}.union(leave_out)
        hints = get_type_hints(kind)
        fields = (field for field in dataclasses.fields(kind) if field.name not in taken)
        added = {field.name: _parameter(kind, field, hints[field.name]) for field in fields}

        @functools.wraps(command)
        def called(**values: Any) -> None:
            command(**{name: value for name, value in values.items() if name not in added or value is not None})

        keyword_only = inspect.Parameter.KEYWORD_ONLY
        first = [parameter.replace(kind=keyword_only) for parameter in own if parameter.kind is not keyword_only]
        last = [parameter for parameter in own if parameter.kind is keyword_only]
        called.__signature__ = signature.replace(parameters=[*first, *added.values(), *last])  # type: ignore[attr-defined]
        return called

    return add_options


def _parameter(kind: type, field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    optional = get_origin(hint) in (types.UnionType, Union)
    if optional:
        hint = next(member for member in get_args(hint) if member is not types.NoneType)
    dashed = field.name.replace("_", "-")
    names = [f"--{dashed}/--no-{dashed}" if optional else f"--{dashed}"] if hint is bool else []
    if get_origin(hint) is Literal:
        hint = str  # make_options checks it, with a better message
    elif get_origin(hint) is tuple:
        hint = list[str]
    has_default = field.default is not None and field.default is not False and field.default != ()
    option = typer.Option(
        *names,
        help=field_help(kind, field.name),
        show_default=str(field.default) if has_default else False,
        rich_help_panel=field.metadata.get("panel"),
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, option]
    )


def check_image_options(on_bad: str, max_megapixels: int | None) -> None:
    """Refuse unknown values of --on-bad, and set the limit of pixels."""
    if on_bad not in ("fail", "skip"):
        raise OneaError(f"--on-bad is '{on_bad}'; choose fail or skip.")
    allow_megapixels(max_megapixels)


def _machine_option(name: str) -> Any:
    return typer.Option(help=field_help(MachineOptions, name))


# Options that several commands have.
Device = Annotated[str, _machine_option("device")]
Precision = Annotated[str, _machine_option("precision")]
Threads = Annotated[int, _machine_option("threads")]
OnBad = Annotated[str, _machine_option("on_bad")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[Path, typer.Argument(help="Model folder.")]
UnknownRate = Annotated[
    float | None,
    typer.Option(
        "--unknown",
        help="Fraction of images of known classes that may be predicted 'unknown'.",
        show_default="the model's setting",
    ),
]
MovedBackbone = Annotated[str | None, typer.Option(help="New path of the model's backbone file, if it was moved.")]
MaxMegapixels = Annotated[
    int | None,
    typer.Option(
        help="Maximum size of an image in megapixels, checked before decoding. Also set by ONEA_MAX_MEGAPIXELS.",
        show_default=str(DEFAULT_MAX_PIXELS // MEGAPIXEL),
    ),
]
