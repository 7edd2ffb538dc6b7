# SPDX-License-Identifier: Apache-2.0
"""What a history notes about photos of an update, and how it is said, in the terminal and on the page alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onea.metrics import wilson_interval
from onea.model.names import is_folder_name
from onea.text import count, printable, some

_NAMED = 3  # photos or files that a history names


def share_fields(name: str, right: int, images: int) -> dict[str, Any]:
    """A share of images and its interval; None of both where there was no image.

    >>> share_fields("held_out", 1, 2)["held_out_accuracy"], share_fields("held_out", 0, 0)
    (0.5, {'held_out_accuracy': None, 'held_out_interval': None})
    """
    if not images:
        return {f"{name}_accuracy": None, f"{name}_interval": None}
    return {f"{name}_accuracy": right / images, f"{name}_interval": list(wilson_interval(right, images))}


def conflict_fields(names: Sequence[str], labels: Sequence[str], conflicts: Mapping[int, str]) -> dict[str, Any]:
    """Photos that are also there under another class: how many, and the first of them."""
    told = [
        {"image": printable(Path(names[row]).name), "class": labels[row], "also": other}
        for row, other in sorted(conflicts.items())[:_NAMED]
    ]
    return {"two_names": len(conflicts), "conflicts": told}


def left_out_fields(files: Sequence[str]) -> dict[str, Any]:
    """Files that were left out: how many, and the first of them."""
    return {"left_out": len(files), "left_out_files": [printable(Path(name).name) for name in files[:_NAMED]]}


def group_fields(groups: Sequence[str]) -> dict[str, Any]:
    """Folders that hold class folders: how many, and the first of them."""
    return {"groups": len(groups), "group_folders": [printable(name) for name in groups[:_NAMED]]}


def held_out_share(update: Mapping[str, Any], name: str = "held_out") -> str:
    """The share of held-out photos that are right, of how many, and where the true share may lie; empty without any.

    >>> held_out_share({"held_out": 9, "held_out_accuracy": 1.0})
    '100.0 % of 9 (70 to 100)'
    """
    accuracy = update.get(f"{name}_accuracy")
    if accuracy is None:
        return ""
    images = update["held_out" if name == "held_out" else f"{name}_images"]
    low, high = wilson_interval(round(accuracy * images), images)
    return f"{100 * accuracy:.1f} % of {images:,} ({100 * low:.0f} to {100 * high:.0f})"


def held_out_sentences(update: Mapping[str, Any], *, own: bool = True) -> list[str]:
    """What held-out photos say of an update, where asked, and of all classes, where that is something else."""
    told = []
    if own and (share := held_out_share(update)):
        told.append(f"{_in_words(share)} right, among {_all(update['known'])}")
    overall = held_out_share(update, "overall")
    if overall and (not own or update["overall_images"] > update["held_out"]):
        measured, known = update["overall_classes"], update["known"]
        of = _all(known) if measured == known else f"{measured:,} of {known:,} classes"
        told.append(f"overall: {_in_words(overall)} right, of {of}")
    return told


def _in_words(share: str) -> str:
    what, _, interval = share.partition(" (")
    images = "image" if what.endswith(" of 1") else "images"
    return f"{what} held-out {images} ({interval.rstrip(')')} %, 19 times out of 20)"


def sentences(update: Mapping[str, Any]) -> list[str]:
    """What a person should know about an update besides what was learned.

    >>> sentences({"kind": "learn", "images": 9, "seen": 4})
    ['4 of 9 photos were seen before and count once']
    """
    if update["kind"] == "background" and (like := update["like_known"]):
        return [f"{like:,} of them clearly looked like a known class; if they show one, undo"]
    if update["kind"] == "rename":
        return _no_folder_name(update["classes"][1])
    if update["kind"] != "learn":
        return []
    return [*_seen(update), *_two_names(update), *_were_background(update), *folder_sentences(update)]


def told(update: Mapping[str, Any]) -> list[str]:
    """All of it: figures, and what a person should know."""
    return [*held_out_sentences(update), *sentences(update)]


def _seen(update: Mapping[str, Any]) -> list[str]:
    seen, images = update.get("seen", 0), update["images"]
    if not seen:
        return []
    if seen < images:
        return [f"{seen:,} of {count(images, 'photo', 'photos')} {_were(seen)} seen before and {_once(seen)}"]
    again = "only the adapter learned again" if update["trained"] else "nothing new was learned"
    return [
        f"{'the' if images == 1 else 'all'} {count(images, 'photo', 'photos')} {_were(images)} seen before: {again}"
    ]


def _two_names(update: Mapping[str, Any]) -> list[str]:
    found = update.get("two_names", 0)
    if not found:
        return []
    named = "; ".join(f"{one['image']}: '{one['also']}' and '{one['class']}'" for one in update["conflicts"])
    more = "; ..." if found > len(update["conflicts"]) else ""
    has = "has" if found == 1 else "have"
    return [f"{count(found, 'photo', 'photos')} {has} two class names ({named}{more}); if one is wrong, undo"]


def _were_background(update: Mapping[str, Any]) -> list[str]:
    found = update.get("were_background", 0)
    if not found:
        return []
    are = "is of a class now and no longer counts" if found == 1 else "are of a class now and no longer count"
    return [f"{count(found, 'background photo', 'background photos')} {are} as background"]


def _no_folder_name(name: str) -> list[str]:
    if is_folder_name(name):
        return []
    return [f"no folder can be called '{name}' everywhere: give photos of this class together with their labels"]


def folder_sentences(update: Mapping[str, Any]) -> list[str]:
    """How a folder was read: which of its folders are no classes, and what was left out."""
    return [*_groups(update), *_left_out(update)]


def _groups(update: Mapping[str, Any]) -> list[str]:
    if not (found := update.get("groups", 0)):
        return []
    named = some(update["group_folders"], found)
    return [f"{named} {'is a folder' if found == 1 else 'are folders'} of class folders: the classes are those inside"]


def _left_out(update: Mapping[str, Any]) -> list[str]:
    """One policy: photos in class folders are learned, whatever else lies there is left out and told."""
    found = update.get("left_out", 0)
    if not found:
        return []
    named = ", ".join(update["left_out_files"]) + (", ..." if found > len(update["left_out_files"]) else "")
    return [f"{count(found, 'file', 'files')} left out (no photo, or in no class folder): {named}"]


def _all(classes: int) -> str:
    return f"all {classes:,} classes" if classes > 1 else "1 class"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _once(number: int) -> str:
    return "counts once" if number == 1 else "count once"
