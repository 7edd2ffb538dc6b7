"""Text that came from somebody else, made fit to be shown."""

from __future__ import annotations

import json


def printable(text: str) -> str:
    r"""The same text with what a terminal might obey instead of showing (control characters, changes of direction, ...)
    as JSON's escapes; JSON itself stays valid.

    >>> print(printable("Apfel\x1b[2J 苹果\n\u202e"))
    Apfel\u001b[2J 苹果\n\u202e
    """
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
