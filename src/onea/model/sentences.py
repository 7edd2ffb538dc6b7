# SPDX-License-Identifier: Apache-2.0
"""What an update found, in sentences, in the terminal and on the page alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onea.errors import OneaError
from onea.metrics import wilson_interval
from onea.model.held_out import ENOUGH
from onea.model.names import is_folder_name
from onea.text import list_names, plural, printable
from onea.vit.backbones import noted_file, shortened
from onea.vit.embedded import DEFAULT, FAST, in_float16
from onea.vit.weight_files import split_file_name

_NAMED = 3  # photos, files or classes in one sentence
MANY = 10  # photos; a class with fewer has few


@dataclass(frozen=True)
class Conflict:
    """A photo that is also there under another class.

    Attributes:
        image: its name.
        label: the class that it was taught as.
        other: the other class.
    """

    image: str
    label: str
    other: str


@dataclass(frozen=True)
class PhotoReport:
    """What was found among the photos and files of an update. The history of the model has the counts alone.

    Attributes:
        skipped: ``path: reason`` of each photo that could not be read.
        conflicts: photos that are also there under another class.
        left_out: files that are no photos by their ending, or lie in no class folder.
        groups: folders that hold class folders.
    """

    skipped: tuple[str, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    left_out: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many of each there are, by the names that a history has for them."""
        return {
            "skipped": len(self.skipped),
            "two_names": len(self.conflicts),
            "left_out": len(self.left_out),
            "groups": len(self.groups),
        }


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
    named = list_names([f"'{name}' ({images})" for name, images in fewest], found)
    return [f"few photos: {named}; {MANY} or more of a class are advisable"]


def _seen(update: Mapping[str, Any]) -> list[str]:
    seen, images = update.get("seen", 0), update["images"]
    if not seen:
        return []
    if seen < images:
        return [f"{seen:,} of {plural(images, 'photo', 'photos')} {_were(seen)} seen before and {_once(seen)}"]
    again = "only the adapter learned again" if update["trained"] else "nothing new was learned"
    return [
        f"{'the' if images == 1 else 'all'} {plural(images, 'photo', 'photos')} {_were(images)} seen before: {again}"
    ]


def _two_names(found: int, conflicts: Sequence[Conflict]) -> list[str]:
    if not found:
        return []
    named = [f"{_file(one.image)}: '{one.other}' and '{one.label}'" for one in conflicts[:_NAMED]]
    shown = f" ({'; '.join(named)}{'; ...' if found > _NAMED else ''})" if named else ""
    has = "has" if found == 1 else "have"
    return [f"{plural(found, 'photo', 'photos')} {has} two class names{shown}; if one is wrong, undo"]


def _were_background(update: Mapping[str, Any]) -> list[str]:
    found = update.get("were_background", 0)
    if not found:
        return []
    are = "is of a class now and no longer counts" if found == 1 else "are of a class now and no longer count"
    return [f"{plural(found, 'background photo', 'background photos')} {are} as background"]


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
    named = list_names([printable(name) for name in groups[:_NAMED]], found) if groups else f"{found:,}"
    return [f"{named} {'is a folder' if found == 1 else 'are folders'} of class folders: the classes are those inside"]


def _left_out(found: int, files: Sequence[str]) -> list[str]:
    """One policy: photos in class folders are learned, whatever else lies there is left out and told."""
    if not found:
        return []
    named = f": {', '.join(map(_file, files[:_NAMED]))}{', ...' if found > _NAMED else ''}" if files else ""
    return [f"{plural(found, 'file', 'files')} left out (no photo, or in no class folder){named}"]


def _file(path: str) -> str:
    return printable(Path(path).name)


def _all(classes: int) -> str:
    return f"all {classes:,} classes" if classes > 1 else "1 class"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _once(number: int) -> str:
    return "counts once" if number == 1 else "count once"


def conflicts_of(names: Sequence[str], labels: Sequence[str], others: Mapping[int, str]) -> tuple[Conflict, ...]:
    """Photos, by their row, that are also there under another class."""
    return tuple(Conflict(names[row], labels[row], other) for row, other in sorted(others.items()))


_STANDS_IN = "Its network comes in eight bits instead of sixteen by now; its answers are practically the same."
_BETTER = f"A new model, taught the same photos, would answer better: its network would be {DEFAULT}."

_UNTRAINED = (
    "Its adapter has never been trained, since that takes several classes at once: teach the next ones together, or "
    "all photos again in one folder, and it will answer better."
)
_PARTLY = (
    "Its adapter was trained on {trained} of its {classes} classes: if you still have all photos, teach them again in "
    "one folder, and it will most likely answer better."
)


def advice(classes: Sequence[str], merged: Mapping[str, int]) -> list[str]:
    """What would help a model of these classes, whose adapter was trained on so many images of each.

    >>> advice(["apple", "pear"], {"apple": 5, "pear": 5}), advice(["apple"], {})
    ([], [])
    >>> len(advice(["apple", "pear"], {}))
    1
    >>> advice(["apple", "pear", "plum", "fig", "kiwi"], {"apple": 5, "pear": 5})[0].partition(":")[0]
    'Its adapter was trained on 2 of its 5 classes'
    """
    trained = sum(name in merged for name in classes)
    if len(classes) < 2 or 2 * trained >= len(classes):
        return []
    return [_PARTLY.format(trained=trained, classes=len(classes)) if trained else _UNTRAINED]


def located(backbone: Mapping[str, Any], folder: Path) -> str:
    """What to load the network of the model in a folder by: its name, or the path of its file on this machine.

    Raises:
        OneaError: the file is neither where it was last used nor beside the folder.
    """
    name: str = backbone["name"]
    if split_file_name(name) is None:
        return name
    beside = folder.absolute().parent / name
    path = noted_file(backbone["sha256"]) or (beside if beside.is_file() else None)
    if path is None:
        raise OneaError(
            f"The network of {folder} is the file {name} (sha256 {shortened(backbone['sha256'])}), which is not where "
            'it was last used on this machine; put it beside the model folder, or give it with backbone="...".'
        )
    return str(path)


def remarks(backbone: Mapping[str, Any]) -> list[str]:
    """Sentences about the network of a model, as its folder notes it.

    >>> remarks({"name": "vit_small_patch14_112", "sha256": "31562e"})
    []
    """
    told = [_STANDS_IN] if taught_before(backbone) else []
    return [*told, _BETTER] if backbone["name"] == FAST else told


def taught_before(backbone: Mapping[str, Any]) -> bool:
    """Whether a model was taught when an embedded network had 16 bits, and nobody could choose among two of them."""
    return in_float16(backbone["name"], backbone["sha256"])
