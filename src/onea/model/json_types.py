# SPDX-License-Identifier: Apache-2.0
"""Whether a value of JSON is of a type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

MOST = 2**53  # of anything that is counted; larger whole numbers are no longer exact as fractions


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type.

    >>> fits(2, float | None), fits(True, int), fits([1, "a"], list[int]), fits([1, 2], tuple[int, int])
    (True, False, False, True)
    """
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (UnionType, Union):
        return any(fits(value, each) for each in inner)
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind is list:
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if kind is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(fits, value, inner))
    if kind in (dict, Mapping):
        return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values())
    if hint is Any:
        return True
    if hint is float:
        return type(value) is float or (type(value) is int and abs(value) < MOST)
    return type(value) is hint


def is_text(value: Any) -> bool:
    """Whether all text in a value of JSON can be written as such: half of a character cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
