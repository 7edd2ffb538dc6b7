"""What a class may be called."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from onea.errors import OneaError

UNKNOWN = "unknown"
_LONGEST = 200


def check_names(names: Sequence[str], known: Iterable[str]) -> None:
    """Refuse names that are empty, unprintable, reserved, or differ from another only in case.

    >>> check_names(["apple"], ["apple", "pear"])
    >>> check_names(["Apple"], ["apple"])
    Traceback (most recent call last):
    onea.errors.OneaError: Class 'Apple' differs from 'apple' only in case or accents' encoding; use one of the two.
    """
    seen = {_folded(name): name for name in known}
    for name in names:
        if not name.strip() or name != name.strip() or not name.isprintable() or len(name) > _LONGEST:
            raise OneaError(
                f"{name[:_LONGEST]!r} cannot be a class name; use 1 to {_LONGEST} printable characters, no space at "
                "either end."
            )
        if _folded(name) == UNKNOWN:
            raise OneaError(f"A class cannot be called '{name}': that is the answer to strange images; rename it.")
        other = seen.setdefault(_folded(name), name)
        if other != name:
            raise OneaError(
                f"Class '{name}' differs from '{other}' only in case or accents' encoding; use one of the two."
            )


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()
