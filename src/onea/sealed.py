# SPDX-License-Identifier: Apache-2.0
"""JSON files with a checksum of what they say: whatever happens to one, it is what was written or it is refused."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

SEAL = "content_sha256"
"""Name under which a file has its checksum."""
_CLOSE: dict[str, Any] = {"separators": (",", ":"), "allow_nan": False}


class Damage(Exception):  # noqa: N818 - a reason, which becomes part of a sentence
    """The damage of a file, in words."""


def seal(content: Mapping[str, Any]) -> bytes:
    """A JSON file with these values and a new checksum; NaN is refused, because JSON has none."""
    values = {name: value for name, value in content.items() if name != SEAL}
    return written({**values, SEAL: _digest(values)})


def written(content: Mapping[str, Any]) -> bytes:
    """A JSON file with a line for each value: easy to look at, and records with many numbers stay small."""
    lines = (f"{json.dumps(name)}:{json.dumps(value, **_CLOSE)}" for name, value in content.items())
    return ("{" + ",\n".join(lines) + "}\n").encode()


def unseal(content: bytes) -> dict[str, Any]:
    """The values in a file that ``seal`` made.

    Raises:
        Damage: they are not those.
    """
    found = parsed(content)
    check_seal(found)
    return found


def parsed(content: bytes) -> dict[str, Any]:
    """The values in a JSON file, their checksum included; of JSON's numbers only those that Python has."""
    try:
        found = json.loads(content, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        raise Damage("not JSON") from None
    if not isinstance(found, dict):
        raise Damage("no JSON object")
    return found


def check_seal(found: dict[str, Any]) -> None:
    """Take the checksum off these values, and refuse them if it is another one."""
    if found.pop(SEAL, None) != _digest(found):
        raise Damage("it is not what was written, says its checksum")


def _digest(content: Mapping[str, Any]) -> str:
    """sha256 of values, whatever the order and the white space they are written with."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number
