# SPDX-License-Identifier: Apache-2.0
"""Names of classes: validation, and conversion from and to labels, which are strings or integers."""

from __future__ import annotations

import re
import reprlib
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onea.data.folders import is_ignored
from onea.errors import OneaError

UNKNOWN = "unknown"
UNKNOWN_NUMBER = -1  # if classes are numbers
_MAX_CHARS = 200
_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"  # what decoders put in place of invalid bytes
_MAX_FOLDER_BYTES = 255
_INVALID_FOLDER_NAME = re.compile(
    r'.*[/\\:*?"<>|]|.*\.$|(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.I
)  # most of these on Windows only
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # as Python writes a number that numpy can hold


def class_name(label: Any) -> str:
    """The class name of a label; whole numbers are written without a fraction, True and False as 1 and 0.

    >>> [class_name(label) for label in ("apple", 3, 3.0, True)]
    ['apple', '3', '3', '1']
    """
    label = _to_python(label)
    if is_integer(label):
        return str(int(label))
    if is_missing(label):
        raise OneaError(
            f"Unknown label type: {label}, which stands for a missing label; leave out images without a label, and "
            "give strings or integers, one for each image."
        )
    if isinstance(label, float | complex | list | tuple | bytes):
        raise OneaError(f"Unknown label type: {reprlib.repr(label)}; give strings or integers, one for each image.")
    return str(label)


def is_missing(label: Any) -> bool:
    """Whether this is a missing label of Python, NumPy or pandas.

    >>> [is_missing(label) for label in (None, float("nan"), np.datetime64("NaT"), "nan", 0)]
    [True, True, True, False, False]
    """
    if label is None or type(label).__name__ in ("NAType", "NaTType"):
        return True
    return not isinstance(label, str | list | tuple) and bool(label != label)


def is_integer(label: Any) -> bool:
    """Whether a label is a whole number."""
    label = _to_python(label)
    return isinstance(label, int) or (isinstance(label, float) and label.is_integer())


def as_integers(names: Sequence[str]) -> npt.NDArray[np.int64] | None:
    """Class names as numbers, ``unknown`` as -1; None if one of them is not a number.

    >>> as_integers(["7", "unknown", "10"])
    array([ 7, -1, 10])
    >>> as_integers(["7", "007"])
    """
    numbers = [str(UNKNOWN_NUMBER) if name == UNKNOWN else name for name in names]
    return np.array(numbers, dtype=np.int64) if all(map(_NUMBER.fullmatch, numbers)) else None


def check_integer_labels(names: Sequence[str], integer_labels: bool, unknown: float | None) -> None:
    """Refuse the class -1 if classes are numbers and it is the prediction for unknown images.

    >>> check_integer_labels(["-1", "1"], integer_labels=True, unknown=0)
    >>> check_integer_labels(["-1", "1"], integer_labels=True, unknown=0.05)
    Traceback (most recent call last):
    onea.errors.OneaError: A class cannot be -1, which is predicted for unknown images; renumber it or set unknown=0.
    """
    if unknown and integer_labels and str(UNKNOWN_NUMBER) in names and as_integers(names) is not None:
        raise OneaError(
            f"A class cannot be {UNKNOWN_NUMBER}, which is predicted for unknown images; renumber it or set unknown=0."
        )


def check_names(names: Sequence[str], known: Iterable[str]) -> None:
    """Refuse names that are empty, unprintable, wrongly decoded or reserved, or differ from another only in case.

    >>> check_names(["apple"], ["apple", "pear"])
    >>> check_names(["Apple"], ["apple"])
    Traceback (most recent call last):
    onea.errors.OneaError: Class 'Apple' differs from 'apple' only in case or accent encoding; use one of the two.
    """
    seen = {normalise(name): name for name in known}
    for name in names:
        if not name.strip() or name != name.strip() or not name.isprintable() or len(name) > _MAX_CHARS:
            raise OneaError(
                f"{name[:_MAX_CHARS]!r} cannot be a class name; use 1 to {_MAX_CHARS} printable characters, without "
                "spaces at either end."
            )
        if _UNDECODABLE in name and name not in seen.values():
            raise OneaError(f"'{name}' cannot be a class name, because it was not valid UTF-8; send it in UTF-8.")
        if normalise(name) == UNKNOWN:
            raise OneaError(f"A class cannot be called '{name}', which is predicted for unknown images; rename it.")
        _check_spelling(name, seen.setdefault(normalise(name), name))


def check_spelling(names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that differ from those of known classes only in case or encoding.

    >>> check_spelling(["apple", "plum"], ["apple", "pear"])
    >>> check_spelling(["Pear"], ["apple", "pear"])
    Traceback (most recent call last):
    onea.errors.OneaError: Class 'Pear' differs from 'pear' only in case or accent encoding; use one of the two.
    """
    seen = {normalise(name): name for name in known}
    for name in names:
        _check_spelling(name, seen.get(normalise(name), name))


def is_folder_name(name: str) -> bool:
    """Whether this is a valid name of a visible folder on Linux, macOS and Windows.

    >>> [is_folder_name(name) for name in ("kiwi", "T-shirt/top", "..", "aux", "\u82f9" * 100, "auxiliary", ".hidden")]
    [True, False, False, False, False, True, False]
    """
    return not (is_ignored(name) or len(name.encode()) > _MAX_FOLDER_BYTES or _INVALID_FOLDER_NAME.match(name))


def _check_spelling(name: str, other: str) -> None:
    if other != name:
        raise OneaError(f"Class '{name}' differs from '{other}' only in case or accent encoding; use one of the two.")


def _to_python(label: Any) -> Any:
    """A label as a Python object, from NumPy or torch."""
    return label.tolist() if hasattr(label, "tolist") else label


def normalise(name: str) -> str:
    """A name in a form for comparison: without case, and with accents encoded in one way."""
    return unicodedata.normalize("NFKC", name).casefold()
