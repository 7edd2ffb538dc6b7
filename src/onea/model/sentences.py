# SPDX-License-Identifier: Apache-2.0
"""What an update found, in sentences, in the terminal and on the page alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onea.metrics import wilson_interval
from onea.model.names import is_folder_name
from onea.model.photo_report import Conflict, PhotoReport
from onea.model.rolling import ENOUGH
from onea.text import count, printable, some

_NAMED = 3  # photos, files or classes in one sentence
MANY = 10  # photos; a class with fewer has few
_NO_NAMES = PhotoReport()


def share_fields(name: str, right: int, images: int) -> dict[str, Any]:
    """A share of images and its interval; None of both where there are too few images for a share that means anything.

    >>> share_fields("held_out", 10, 20)["held_out_accuracy"], share_fields("held_out", 0, 4)
    (0.5, {'held_out_accuracy': None, 'held_out_interval': None})
    """
    if images < ENOUGH:
        return {f"{name}_accuracy": None, f"{name}_interval": None}
    return {f"{name}_accuracy": right / images, f"{name}_interval": list(wilson_interval(right, images))}


def few_photos_fields(images: Mapping[str, int]) -> dict[str, Any]:
    """Classes that have few images: how many, and the first of those with the fewest.

    >>> few_photos_fields({"kiwi": 10, "lemon": 9})
    {'few_photos': 1, 'fewest': {'lemon': 9}}
    """
    few = sorted((name for name in images if images[name] < MANY), key=lambda name: images[name])
    return {"few_photos": len(few), "fewest": {name: images[name] for name in few[:_NAMED]}}


def held_out_share(update: Mapping[str, Any], name: str = "held_out") -> str:
    """The share of held-out photos that are correct, of how many, and where the true share may lie; empty without any.

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
        told.append(f"{_in_words(share)} correct, among {_all(update['known'])}")
    overall = held_out_share(update, "overall")
    if overall and (not own or update["overall_images"] > update["held_out"]):
        measured, known = update["overall_classes"], update["known"]
        of = _all(known) if measured == known else f"{measured:,} of {known:,} classes"
        told.append(f"overall: {_in_words(overall)} correct, of {of}{_since(update, 'overall')}")
    if own and update.get("held_out_accuracy") is None and (share := held_out_share(update, "cross_validated")):
        by = ", by an adapter that was trained on them" if update["trained"] else ""
        right = f"{_in_words(share, 'taught')} correct without their own series, among {_all(update['known'])}{by}"
        told.append(f"cross-validated: {right}{_since(update, 'cross_validated')}")
    return told


def _in_words(share: str, which: str = "held-out") -> str:
    what, _, interval = share.partition(" (")
    return f"{what} {which} images ({interval.rstrip(')')} %, 19 times out of 20)"


def _since(update: Mapping[str, Any], name: str) -> str:
    """What the same images were before the update, where they can be compared."""
    if (before := update.get(f"{name}_before")) is None:
        return ""
    gained = "" if update[f"{name}_accuracy"] > before else ": it gained nothing, and undo takes it back"
    return f"; {100 * before:.1f} % before this update{gained}"


_ERASED = "earlier versions and the names in the history were removed: undo cannot go back from here"
_NOT_ERASED = (
    "versions kept for undo still hold it; forget it with --everywhere (everywhere=true) to remove it there, too"
)


def sentences(update: Mapping[str, Any], report: PhotoReport = _NO_NAMES) -> list[str]:
    """What a person should know about an update besides what was learned; photos by name where a report has them.

    >>> sentences({"kind": "learn", "images": 9, "seen": 4})
    ['4 of 9 photos were seen before and count once']
    """
    if update["kind"] == "background" and (like := update["like_known"]):
        return [f"{like:,} of them clearly looked like a known class; if they show one, undo"]
    if update["kind"] == "forget":
        return [_ERASED if "everywhere" in update else _NOT_ERASED]
    if update["kind"] == "rename":
        return _no_folder_name(update["classes"][1])
    if update["kind"] != "learn":
        return []
    return [
        *_seen(update),
        *_two_names(update.get("two_names", 0), report.conflicts),
        *_were_background(update),
        *_groups(update.get("groups", 0), report.groups),
        *_left_out(update.get("left_out", 0), report.left_out),
        *(_few_photos(update) if update.get("seen", 0) < update["images"] else []),
    ]


def told(update: Mapping[str, Any], report: PhotoReport = _NO_NAMES) -> list[str]:
    """All of it: figures, and what a person should know."""
    return [*held_out_sentences(update), *sentences(update, report)]


def _few_photos(update: Mapping[str, Any]) -> list[str]:
    if not (found := update.get("few_photos", 0)):
        return []
    fewest = sorted(update["fewest"].items(), key=lambda one: one[1])
    named = some([f"'{name}' ({images})" for name, images in fewest], found)
    return [f"few photos: {named}; {MANY} or more of a class are advisable"]


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


def _two_names(found: int, conflicts: Sequence[Conflict]) -> list[str]:
    if not found:
        return []
    named = [f"{_file(one.image)}: '{one.other}' and '{one.label}'" for one in conflicts[:_NAMED]]
    shown = f" ({'; '.join(named)}{'; ...' if found > _NAMED else ''})" if named else ""
    has = "has" if found == 1 else "have"
    return [f"{count(found, 'photo', 'photos')} {has} two class names{shown}; if one is wrong, undo"]


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


def folder_sentences(left_out: Sequence[str], groups: Sequence[str]) -> list[str]:
    """How a folder was read: which of its folders are no classes, and what was left out."""
    return [*_groups(len(groups), groups), *_left_out(len(left_out), left_out)]


def _groups(found: int, groups: Sequence[str]) -> list[str]:
    if not found:
        return []
    named = some([printable(name) for name in groups[:_NAMED]], found) if groups else f"{found:,}"
    return [f"{named} {'is a folder' if found == 1 else 'are folders'} of class folders: the classes are those inside"]


def _left_out(found: int, files: Sequence[str]) -> list[str]:
    """One policy: photos in class folders are learned, whatever else lies there is left out and told."""
    if not found:
        return []
    named = f": {', '.join(map(_file, files[:_NAMED]))}{', ...' if found > _NAMED else ''}" if files else ""
    return [f"{count(found, 'file', 'files')} left out (no photo, or in no class folder){named}"]


def _file(path: str) -> str:
    return printable(Path(path).name)


def _all(classes: int) -> str:
    return f"all {classes:,} classes" if classes > 1 else "1 class"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _once(number: int) -> str:
    return "counts once" if number == 1 else "count once"
