# SPDX-License-Identifier: Apache-2.0
"""Options as dataclasses, built from names and text; errors suggest the nearest valid name."""

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
LARGEST = 2**32 - 1  # integer; the largest seed
_MAX_FLOAT = 1e38  # about the largest float32
_SAFE_THREADS = 256  # supported by every system
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class MachineOptions:
    """Device options that research runs and models share.

    Attributes:
        precision: precision of the computation: ``bf16``, ``fp32`` or ``auto`` (bf16 if supported); ``fp8`` is bf16
            with FP8 products of frozen weights, on NVIDIA GPUs that support it.
        device: ``cpu``, ``cuda``, ... or ``auto`` (a GPU if there is one).
        threads: number of CPU threads; 0 uses all.
        on_bad: how to handle unreadable images: ``fail`` or ``skip``.
    """

    precision: Literal["auto", "fp8", "bf16", "fp32"] = "auto"
    device: str = "auto"
    threads: int = 0
    on_bad: Literal["fail", "skip"] = "fail"


class Validated:
    """Base of dataclasses that checks the ``Range`` in the types of their fields."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, allowed in _ranges(kind).items():
            if (value := getattr(self, name)) not in allowed:
                raise OneaError(f"{name} is {value}; it must {allowed}.")


@cache
def _ranges(kind: type) -> dict[str, Range]:
    ranges: dict[str, Range] = {}
    for parent in reversed(kind.__mro__):
        for name, hint in get_type_hints(parent, include_extras=True).items():
            for extra in getattr(hint, "__metadata__", ()):
                if isinstance(extra, Range):
                    ranges[name] = extra
    return ranges


def normalise_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with dashes in their names replaced by underscores."""
    return {name.replace("-", "_"): value for name, value in values.items()}


def with_defaults(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a class: these values, and the defaults of the others."""
    return {field.name: field.default for field in dataclasses.fields(kind)} | normalise_names(values)


def make_options(kind: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass ``kind`` from values or text; dashes in names count as underscores."""
    fields = {field.name for field in _fields(kind)}
    hints = get_type_hints(kind)
    converted = {}
    for name, value in normalise_names(values).items():
        if name not in fields:
            raise OneaError(f"Unknown option '{name}'; {did_you_mean(name, fields) if fields else 'there are none.'}")
        converted[name] = _convert(name, value, hints[name])
    return kind(**converted)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Convert a value to a plain type or a ``Literal``, each optionally ``| None``."""
    if get_origin(hint) in (types.UnionType, Union):
        if value is None or value == "none":
            return None
        hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if isinstance(value, bool) and "yes" in choices:  # YAML reads yes and no as booleans
            value = "yes" if value else "no"
        if value not in choices:
            raise OneaError(f"{name} is '{truncate(value)}'; choose one of: {', '.join(choices)}.")
        return value
    if hint is bool:
        return _convert_bool(name, value)
    if isinstance(value, bool) and hint is not str:
        raise OneaError(f"{name} is {value}; it needs {_type_name(hint)}.")
    try:
        number = hint(value)
    except (TypeError, ValueError, OverflowError):
        raise OneaError(f"{name} is '{truncate(value)}'; it needs {_type_name(hint)}.") from None
    if hint is int and abs(number) > LARGEST:
        raise OneaError(f"{name} is {truncate(value)}; it needs a whole number of at most {LARGEST:,}.")
    if hint is float and not math.isfinite(number):
        raise OneaError(f"{name} is {truncate(value)}; it needs a finite number.")
    if hint is float and abs(number) > _MAX_FLOAT:
        raise OneaError(f"{name} is {truncate(value)}; it needs a number of at most {_MAX_FLOAT:g}.")
    if hint is int and isinstance(value, float) and number != value:
        raise OneaError(f"{name} is {value}; it needs a whole number.")
    return number


def _convert_bool(name: str, value: Any) -> bool:
    word = str(value).lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise OneaError(f"{name} is '{truncate(value)}'; it needs true or false.")


def _type_name(hint: Any) -> str:
    return {int: "a whole number", float: "a number"}.get(hint, "text")


def check_threads(threads: int) -> None:
    """Refuse an invalid number of CPU threads; 0 means all."""
    maximum = max(_SAFE_THREADS, os.cpu_count() or 1)
    if not 0 <= threads <= maximum:
        raise OneaError(f"threads is {truncate(threads)}; give a number from 1 to {maximum}, or 0 for all.")


def parse_arguments(arguments: list[str]) -> dict[str, Any]:
    """Command-line arguments as a mapping.

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
    """Options as comma-separated ``name=value`` pairs.

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
    """Name, default and description of every option."""
    descriptions = option_help(kind)
    return [(field.name, field.default, descriptions.get(field.name, "")) for field in _fields(kind)]


@cache
def option_help(kind: type) -> dict[str, str]:
    """The description of every option, from the ``Attributes`` sections of a class and its bases."""
    descriptions: dict[str, str] = {}
    for parent in kind.__mro__:
        descriptions = _attributes(parent.__doc__ or "") | descriptions
    for name, allowed in _ranges(kind).items():
        descriptions[name] = f"{descriptions.get(name, '')} It must {allowed}.".lstrip()
    return descriptions


def _fields(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a dataclass; other classes, such as a third-party operator, have no options."""
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _attributes(docstring: str) -> dict[str, str]:
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2]  # Python 3.13 removes indentation
    descriptions: dict[str, str] = {}
    for line in section.splitlines():
        text = line.strip()
        if match := re.match(r"(\w+): (.*)", text) if line.startswith(" " * 4) and line[4:5] != " " else None:
            descriptions[match[1]] = match[2]
        elif text and descriptions:
            last = next(reversed(descriptions))
            descriptions[last] += " " + text
    return descriptions
