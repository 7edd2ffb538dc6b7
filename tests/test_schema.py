# SPDX-License-Identifier: Apache-2.0
"""Values read from JSON against declared types."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from onea.schema import MAX_NUMBER, Count, Range, matches, mismatch


class Stream(TypedDict):
    sizes: list[Count]
    names: NotRequired[list[str] | None]


class Record(TypedDict):
    status: Literal["running", "finished"]
    stream: Stream


GOOD: dict[str, Any] = {"status": "running", "stream": {"sizes": [1, 2]}, "another": None}


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, int),
        (1, float),
        (None, float | None),
        ({"a": 1}, dict),
        ({"a": 1}, dict[str, Any]),
        ([[1.5]], list[list[float]]),
        ("yes", Literal["yes", "no"]),
        (3, Annotated[int, Range(ge=0, lt=4)]),
        (GOOD, Record),
        (GOOD["stream"] | {"names": None}, Stream),
    ],
)
def test_a_value_of_the_type_matches(value, hint):
    assert mismatch(value, hint) == ""


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        (False, float),
        (1.0, int),
        (float("nan"), float),
        (float("inf"), float),
        (MAX_NUMBER, int),
        (-MAX_NUMBER, float),
        ("1", int),
        (None, str),
        ([], dict),
        ((1,), list[int]),
        ({"a": "b"}, dict[str, int]),
        ([1], tuple[int, int]),
        (["yes"], Literal["yes", "no"]),
        (4, Annotated[int, Range(ge=0, lt=4)]),
        (None, Annotated[int, Range(ge=0)]),
        ([], Record),
    ],
)
def test_a_value_of_another_type_does_not_match(value, hint):
    assert not matches(value, hint)


def test_a_mismatch_contains_the_name_of_the_field():
    assert mismatch({"status": "running"}, Record) == "'stream' is missing"
    assert mismatch(GOOD | {"status": "lost"}, Record) == "'status' is 'lost'"
    assert mismatch(GOOD | {"stream": {"sizes": [0]}}, Record) == "'sizes' is [0]"
