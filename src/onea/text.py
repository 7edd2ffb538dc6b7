# SPDX-License-Identifier: Apache-2.0
"""Formatting of text: untrusted strings, plurals, lists of names, timestamps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime

_MAX_WORD, _KEEP = 300, 100  # characters


def printable(text: str) -> str:
    r"""Text with control and direction characters as JSON escapes; valid JSON remains valid.

    >>> print(printable("Apfel\x1b[2J 苹果\n\u202e"))
    Apfel\u001b[2J 苹果\n\u202e
    """
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def single_line(text: str) -> str:
    r"""A message on one line with overlong words shortened.

    >>> len(single_line(f"Class '{'9' * 5000}' is\nunknown."))
    222
    """
    return re.sub(rf"\S{{{_MAX_WORD},}}", lambda word: f"{word[0][:_KEEP]}...{word[0][-_KEEP:]}", printable(text))


def plural(number: int, noun: str, plural_noun: str) -> str:
    """A number with its noun in the singular or plural.

    >>> plural(1, "class", "classes"), plural(1200, "class", "classes")
    ('1 class', '1,200 classes')
    """
    return f"{number:,} {noun if number == 1 else plural_noun}"


def list_names(names: Sequence[str], total: int | None = None, limit: int = 5) -> str:
    """The first ``limit`` names of a list, and the number of other names.

    >>> list_names(["kiwi", "lemon", "plum"]), list_names(["kiwi", "lemon", "plum"], limit=1)
    ('kiwi, lemon and plum', 'kiwi and 2 more')
    >>> list_names(["kiwi"], total=1_200)
    'kiwi and 1,199 more'
    """
    total = len(names) if total is None else total
    shown = list(names[:limit])
    last = f"{total - len(shown):,} more" if total > len(shown) else shown.pop()
    return f"{', '.join(shown)} and {last}" if shown else last


def utc_timestamp() -> str:
    """The current time in UTC in ISO format, to the second.

    >>> utc_timestamp().endswith("+00:00")
    True
    """
    return datetime.now(UTC).isoformat(timespec="seconds")
