# SPDX-License-Identifier: Apache-2.0
"""Options as dataclasses: made from loose names and text, with errors that name the nearest valid one."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onea.errors import OneaError, did_you_mean, truncate
from onea.schema import Range

T = TypeVar("T")
LARGEST = 2**32 - 1  # of a whole number: the largest seed; nothing that is counted comes near it
_FARTHEST = 1e38  # of any number: what tensors can hold
_THREADS = 256  # no system fails to start so many
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class MachineOptions:
    """Defaults and meanings of options that research runs and models share.

    Attributes:
        precision: of the computation: ``bf16``, ``fp32`` or ``auto`` (bf16 where the chip has it); ``fp8`` is bf16 with
            products of frozen weights in eight bits, on an NVIDIA GPU that has them.
        device: ``cpu``, ``cuda``, ... or ``auto``.
        threads: CPU threads; 0 is all.
        on_bad: how to handle unreadable images: ``fail`` or ``skip``.
    """

    precision: Literal["auto", "fp8", "bf16", "fp32"] = "auto"
    device: str = "auto"
    threads: int = 0
    on_bad: Literal["fail", "skip"] = "fail"


class Validated:
    """Base of dataclasses with a ``Range`` in the type of some fields; a subclass that redeclares a field keeps it."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, allowed in _ranges(kind).items():
            if (value := getattr(self, name)) not in allowed:
                raise OneaError(f"{name} is {value}; it must {allowed}.")


@cache
def _ranges(kind: type) -> dict[str, Range]:
    found: dict[str, Range] = {}
    for parent in reversed(kind.__mro__):
        for name, hint in get_type_hints(parent, include_extras=True).items():
            for extra in getattr(hint, "__metadata__", ()):
                if isinstance(extra, Range):
                    found[name] = extra
    return found


def upgraded(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under the present names of the options of ``kind``, which may have had others in earlier versions."""
    named = {name.replace("-", "_"): value for name, value in values.items()}
    return dict(kind.upgraded(named)) if hasattr(kind, "upgraded") else named


def with_defaults(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """All options of ``kind``: those of an earlier version under their present names, else the defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return defaults | upgraded(kind, values)


def make_options(kind: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass ``kind``; dashes in names are underscores, text is read as the field's type."""
    fields = {field.name for field in _fields(kind)}
    hints = get_type_hints(kind)
    read = {}
    for name, value in upgraded(kind, values).items():
        if name not in fields:
            raise OneaError(f"Unknown option '{name}'; {did_you_mean(name, fields) if fields else 'there are none.'}")
        read[name] = _read(name, value, hints[name])
    return kind(**read)


def _read(name: str, value: Any, hint: Any) -> Any:
    """``value`` as the type ``hint``: a plain type, a choice of words, or one of these or None."""
    if get_origin(hint) in (types.UnionType, Union):
        if value is None or value == "none":
            return None
        hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if isinstance(value, bool) and "yes" in choices:  # which YAML makes of a plain yes or no
            value = "yes" if value else "no"
        if value not in choices:
            raise OneaError(f"{name} is '{truncate(value)}'; choose one of: {', '.join(choices)}.")
        return value
    if hint is bool:
        return _read_bool(name, value)
    if isinstance(value, bool) and hint is not str:
        raise OneaError(f"{name} is {value}; it needs {_wanted(hint)}.")
    try:
        number = hint(value)
    except (TypeError, ValueError, OverflowError):
        raise OneaError(f"{name} is '{truncate(value)}'; it needs {_wanted(hint)}.") from None
    if hint is int and abs(number) > LARGEST:
        raise OneaError(f"{name} is {truncate(value)}; it needs a whole number of at most {LARGEST:,}.")
    if hint is float and not math.isfinite(number):
        raise OneaError(f"{name} is {truncate(value)}; it needs a finite number.")
    if hint is float and abs(number) > _FARTHEST:
        raise OneaError(f"{name} is {truncate(value)}; it needs a number of at most {_FARTHEST:g}.")
    if hint is int and isinstance(value, float) and number != value:
        raise OneaError(f"{name} is {value}; it needs a whole number.")
    return number


def _read_bool(name: str, value: Any) -> bool:
    word = str(value).lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise OneaError(f"{name} is '{truncate(value)}'; it needs true or false.")


def _wanted(hint: Any) -> str:
    return {int: "a whole number", float: "a number"}.get(hint, "text")


def check_threads(threads: int) -> None:
    """Refuse a number of CPU threads that the system would not give; 0 stands for all."""
    most = max(_THREADS, os.cpu_count() or 1)
    if not 0 <= threads <= most:
        raise OneaError(f"threads is {truncate(threads)}; give a number from 1 to {most}, or 0 for all.")


def parse_arguments(arguments: list[str]) -> dict[str, Any]:
    """Loose command-line arguments as a mapping.

    >>> parse_arguments(["--rank", "64", "--kappa=5", "--no-gating", "--shared-init"])
    {'rank': '64', 'kappa': '5', 'gating': False, 'shared_init': True}
    """
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise OneaError(f"'{word}' is not an option; options start with --.")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            values[name] = value
        elif rest and not rest[0].startswith("--"):
            values[name] = rest.pop(0)
        elif name.startswith("no_"):
            values[name.removeprefix("no_")] = False
        else:
            values[name] = True
    return values


def parse_pairs(text: str, name: str = "the text") -> dict[str, str]:
    """Options in one word.

    >>> parse_pairs("density=0.2, scale=0.6")
    {'density': '0.2', 'scale': '0.6'}
    """
    pairs = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise OneaError(f"{name} has '{truncate(part)}'; write name=value pairs such as density=0.2,scale=0.6.")
        pairs[key] = value
    return pairs


def list_options(kind: type) -> list[tuple[str, Any, str]]:
    """Name, default and meaning of every option."""
    known = option_help(kind)
    return [(field.name, field.default, known.get(field.name, "")) for field in _fields(kind)]


@cache
def option_help(kind: type) -> dict[str, str]:
    """The meaning of every option by name, from the ``Attributes`` sections of a class and its bases."""
    found: dict[str, str] = {}
    for parent in kind.__mro__:
        found = _attributes(parent.__doc__ or "") | found
    for name, allowed in _ranges(kind).items():
        found[name] = f"{found.get(name, '')} It must {allowed}.".lstrip()
    return found


def _fields(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a dataclass; another class, such as an operator of somebody else, has no options."""
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _attributes(docstring: str) -> dict[str, str]:
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[
        2
    ]  # since Python 3.13 it comes without indentation
    option_help: dict[str, str] = {}
    for line in section.splitlines():
        text = line.strip()
        if match := re.match(r"(\w+): (.*)", text) if line.startswith(" " * 4) and line[4:5] != " " else None:
            option_help[match[1]] = match[2]
        elif text and option_help:
            last = next(reversed(option_help))
            option_help[last] += " " + text
    return option_help
