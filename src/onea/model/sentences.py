# SPDX-License-Identifier: Apache-2.0
"""What there is to say about an update, in whole sentences; the terminal and the page show the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onea.text import count


def sentences(update: Mapping[str, Any]) -> list[str]:
    """What a person should know about an update besides what was learned.

    >>> sentences({"kind": "learn", "images": 9, "seen": 4})
    ['4 of 9 photos were seen before and count once']
    """
    return [] if update["kind"] != "learn" else [*_seen(update), *_two_names(update), *_left_out(update)]


def _seen(update: Mapping[str, Any]) -> list[str]:
    seen, images = update.get("seen", 0), update["images"]
    if not seen:
        return []
    if seen < images:
        return [f"{seen:,} of {count(images, 'photo', 'photos')} {_were(seen)} seen before and {_once(seen)}"]
    again = "only the adapter learned from them again" if update["trained"] else "nothing new was learned"
    return [f"all {count(images, 'photo', 'photos')} were seen before: {again}"]


def _two_names(update: Mapping[str, Any]) -> list[str]:
    found = update.get("two_names", 0)
    if not found:
        return []
    named = "; ".join(f"{one['image']}: '{one['also']}' and '{one['class']}'" for one in update["conflicts"])
    more = "; ..." if found > len(update["conflicts"]) else ""
    has = "has" if found == 1 else "have"
    return [f"{count(found, 'photo', 'photos')} {has} two class names ({named}{more}); if one is wrong, undo"]


def _left_out(update: Mapping[str, Any]) -> list[str]:
    """One policy: photos in class folders are learned, whatever else lies there is left out and told."""
    found = update.get("left_out", 0)
    if not found:
        return []
    named = ", ".join(update["left_out_files"]) + (", ..." if found > len(update["left_out_files"]) else "")
    return [f"{count(found, 'file', 'files')} left out (no photo, or in no class folder): {named}"]


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _once(number: int) -> str:
    return "counts once" if number == 1 else "count once"
