# SPDX-License-Identifier: Apache-2.0
"""Error messages: one sentence that says what is wrong and what to do."""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

_MAX_NAMES = 40  # per message
_MAX_VALUE = 80  # characters per value in a message
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class OneaError(ValueError):
    """Invalid input. The message is complete; the command line prints it and exits with 2.

    >>> from onea.research.data.sources import load_dataset
    >>> try:
    ...     load_dataset("cifar10")
    ... except OneaError as error:
    ...     print(error)
    Unknown dataset 'cifar10'; did you mean 'cifar100'?
    """


MEMORY_REMEDY = "close other programs, use fewer images, a smaller batch size or rank, or use a larger machine."
OUT_OF_MEMORY = f"There is not enough memory for this; {MEMORY_REMEDY}"


class OutOfMemory(MemoryError):  # noqa: N818 - as torch calls it
    """Out of memory; the input may be valid. The message is complete."""


def truncate(value: object) -> str:
    """A value as text, cut to a length that fits into a message.

    >>> truncate(12), len(truncate("a" * 5000))
    ('12', 83)
    """
    text = str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known name, or all known names.

    >>> did_you_mean("gama", ["gamma", "tasks"])
    "did you mean 'gamma'?"
    >>> did_you_mean("zzz", ["gamma", "tasks"])
    'known: gamma, tasks.'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"known: {', '.join(names[:_MAX_NAMES])}{more}."


def import_extra(module: str, extra: str) -> Any:
    """Import a module that an optional extra of onea installs.

    Raises:
        OneaError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise OneaError(f"This needs {package}, which is not installed; run: {install_command(extra)}") from error


def install_command(extra: str) -> str:
    """The pip command that installs the packages of an extra for the running Python.

    Packages are listed individually, because onea is not on PyPI.
    """
    packages = dict.fromkeys(_packages(extra))
    return shlex.join([sys.executable or "python", "-m", "pip", "install", *packages])


def _packages(extra: str) -> Iterator[str]:
    """The packages of an extra from the metadata of the installed onea; an extra may include others."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        needed = requires("onea") or []
    except PackageNotFoundError:  # run from a checkout that was not installed
        yield f".[{extra}]"
        return
    for line in needed:
        package, _, condition = line.partition(";")
        if not re.search(rf"""extra\s*==\s*["']{extra}["']""", condition):
            continue
        if inner := re.match(r"onea\[(.+)\]", package):
            for name in inner[1].split(","):
                yield from _packages(name)
        else:
            yield package.strip()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; torch and Pillow have it only in their messages."""
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in _NO_MEMORY)
