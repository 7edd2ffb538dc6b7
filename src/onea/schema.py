# SPDX-License-Identifier: Apache-2.0
"""Ranges of numbers in types, and checks of JSON values against types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

MAX_NUMBER = 2**53
"""Bound of all numbers in JSON; larger integers are not exact as floats."""


@dataclass(frozen=True)
class Range:
    """The allowed range of a number, as part of its type: ``rank: Annotated[int, Range(ge=1)] = 64``.

    Attributes:
        ge: greater than or equal to this.
        gt: greater than this.
        le: less than or equal to this.
        lt: less than this.
    """

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.ge <= value <= self.le and self.gt < value < self.lt

    def __str__(self) -> str:
        """The rule in words, after "it must".

        >>> print(Range(ge=1)), print(Range(ge=0)), print(Range(gt=0, le=1)), print(Range(ge=0, le=1))
        be at least 1
        not be negative
        lie in (0, 1]
        lie between 0 and 1
        (None, None, None, None)
        """
        if self.le == self.lt == math.inf:
            if self.gt > -math.inf:
                return "be positive" if self.gt == 0 else f"be above {self.gt:g}"
            return "not be negative" if self.ge == 0 else f"be at least {self.ge:g}"
        if self.gt == -math.inf and self.lt == math.inf:
            return f"lie between {self.ge:g} and {self.le:g}"
        low = f"[{self.ge:g}" if self.gt == -math.inf else f"({self.gt:g}"
        return f"lie in {low}, {self.le:g}]" if self.lt == math.inf else f"lie in {low}, {self.lt:g})"


Count = Annotated[int, Range(ge=1)]
NotNegative = Annotated[float, Range(ge=0)]
Positive = Annotated[float, Range(gt=0)]
ZeroToOne = Annotated[float, Range(ge=0, le=1)]
BelowOne = Annotated[float, Range(ge=0, lt=1)]
Fraction = Annotated[float, Range(gt=0, le=1)]


def matches(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON has a type; ``TypedDict`` and ``Annotated[..., Range(...)]`` are types as well.

    >>> matches(2, float | None), matches(True, int), matches([1, "a"], list[int]), matches([1, 2], tuple[int, int])
    (True, False, False, True)
    >>> matches(0, Count)
    False
    """
    return not mismatch(value, hint)


def mismatch(value: Any, hint: Any, name: str = "value") -> str:
    """The first part of a value read from JSON that does not match a type; empty if all parts match.

    A ``float`` may be an integer, and all numbers must be below ``MAX_NUMBER``. A ``TypedDict`` may have other keys.

    >>> mismatch({"images": [3, -1]}, dict[str, list[NotNegative]])
    "'images' is [3, -1]"
    """
    origin, inner = get_origin(hint), get_args(hint)
    wrong = f"'{name}' is {value!r:.80}"
    if origin in (Required, NotRequired):
        return mismatch(value, inner[0], name)
    if origin is Annotated:
        ranges = [extra for extra in inner[1:] if isinstance(extra, Range)]
        return "" if matches(value, inner[0]) and all(value in allowed for allowed in ranges) else wrong
    if origin in (UnionType, Union):
        return "" if any(matches(value, choice) for choice in inner) else wrong
    if is_typeddict(hint):
        return _field_mismatch(value, hint) if isinstance(value, dict) else wrong
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            return wrong
        return next(filter(None, (mismatch(item, inner[1], key) for key, item in value.items())), "")
    if origin is list:
        valid = isinstance(value, list) and all(matches(item, inner[0]) for item in value)
    elif origin is tuple:
        valid = isinstance(value, list) and len(value) == len(inner) and all(map(matches, value, inner))
    elif origin is Literal:
        valid = isinstance(value, str) and value in inner
    elif hint is float:
        valid = type(value) in (int, float) and abs(value) < MAX_NUMBER  # not for NaN
    else:
        valid = hint is Any or (type(value) is hint and (hint is not int or abs(value) < MAX_NUMBER))
    return "" if valid else wrong


def _field_mismatch(value: dict[str, Any], fields: Any) -> str:
    for name, hint in get_type_hints(fields, include_extras=True).items():
        if name in value:
            if problem := mismatch(value[name], hint, name):
                return problem
        elif get_origin(hint) is not NotRequired:
            return f"'{name}' is missing"
    return ""
