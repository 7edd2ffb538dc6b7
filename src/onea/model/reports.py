# SPDX-License-Identifier: Apache-2.0
"""Reports on updates and photos, as lines for the terminal and the web page of the service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onea.metrics import wilson_interval
from onea.model.held_out import Accuracy
from onea.model.names import is_folder_name
from onea.model.state import State
from onea.text import list_names, plural, printable

_MAX_NAMED = 3  # photos, files or classes in one line
MIN_ADVISED = 10  # photos of a class
_INTERVAL = "95 % confidence interval"


@dataclass(frozen=True)
class Conflict:
    """A photo that also exists with another class.

    Attributes:
        image: name of the photo.
        label: class that it was taught as.
        other: the other class.
    """

    image: str
    label: str
    other: str


@dataclass(frozen=True)
class PhotoReport:
    """Names of photos and files of an update; the history of the model has only their numbers.

    Attributes:
        skipped: ``path: reason`` of each photo that could not be read.
        conflicts: photos that also exist with another class.
        ignored_files: files without the ending of an image, or outside the class folders.
        group_folders: folders that contain class folders.
    """

    skipped: tuple[str, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    ignored_files: tuple[str, ...] = ()
    group_folders: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of photos and files, as in the history."""
        return {name: len(getattr(self, name)) for name in ("skipped", "conflicts", "ignored_files", "group_folders")}


_NO_REPORT = PhotoReport()


def accuracy_fields(name: str, accuracy: Accuracy) -> dict[str, Any]:
    """An accuracy and its confidence interval as fields of the history; null if there are too few images.

    >>> accuracy_fields("held_out", Accuracy(10, 20, 2))["held_out_accuracy"]
    0.5
    >>> accuracy_fields("held_out", Accuracy(0, 4, 2))
    {'held_out_accuracy': None, 'held_out_interval': None}
    """
    interval = None if accuracy.value is None else list(wilson_interval(accuracy.correct, accuracy.images))
    return {f"{name}_accuracy": accuracy.value, f"{name}_interval": interval}


def few_photos_fields(images: Mapping[str, int]) -> dict[str, Any]:
    """The number of classes with few images, and those with the fewest images, as fields of the history.

    >>> few_photos_fields({"kiwi": 10, "lemon": 9})
    {'few_photos': 1, 'fewest': {'lemon': 9}}
    """
    few = sorted((name for name in images if images[name] < MIN_ADVISED), key=lambda name: images[name])
    return {"few_photos": len(few), "fewest": {name: images[name] for name in few[:_MAX_NAMED]}}


def format_accuracy(update: Mapping[str, Any], name: str = "held_out") -> str:
    """An accuracy in the history with its number of images and confidence interval; empty if it was not measured.

    >>> format_accuracy({"held_out": 9, "held_out_accuracy": 1.0})
    '100.0 % of 9 (70 to 100)'
    """
    return _format(update, name, "{accuracy:.1f} % of {images:,} ({low:.0f} to {high:.0f})")


def _format(update: Mapping[str, Any], name: str, template: str) -> str:
    accuracy = update.get(f"{name}_accuracy")
    if accuracy is None:
        return ""
    images = update["held_out" if name == "held_out" else f"{name}_images"]
    low, high = wilson_interval(round(accuracy * images), images)
    return template.format(accuracy=100 * accuracy, images=images, low=100 * low, high=100 * high)


def accuracy_lines(update: Mapping[str, Any], *, of_update: bool = True) -> list[str]:
    """Accuracies after an update: on its held-out images (if ``of_update``) and on those of all classes."""
    classes = plural(update["known"], "class", "classes")
    template = f"{{accuracy:.1f}} % of {{images:,}} {{kind}} ({_INTERVAL} {{low:.0f}} to {{high:.0f}} %)"
    lines = []
    if of_update and (held_out := _format(update, "held_out", template.replace("{kind}", "images"))):
        lines.append(f"held-out accuracy {held_out}, among {classes}")
    overall = _format(update, "overall", template.replace("{kind}", "held-out images"))
    if overall and (not of_update or update["overall_images"] > update["held_out"]):
        measured = update["overall_classes"]
        coverage = f"all {classes}" if measured == update["known"] else f"{measured:,} of {classes}"
        lines.append(f"overall accuracy {overall}, of {coverage}{_change(update, 'overall')}")
    validated = _format(update, "cross_validated", template.replace("{kind}", "images"))
    if of_update and validated and update.get("held_out_accuracy") is None:
        adapter = ", with an adapter trained on them" if update["trained"] else ""
        change = _change(update, "cross_validated")
        lines.append(f"cross-validated accuracy {validated}, among {classes}{adapter}{change}")
    return lines


def _change(update: Mapping[str, Any], name: str) -> str:
    """The comparison with the accuracy on the same images before the update, if that was measured."""
    if (before := update.get(f"{name}_before")) is None:
        return ""
    improved = "" if update[f"{name}_accuracy"] > before else "; no improvement, undo restores the earlier version"
    return f"; before this update {100 * before:.1f} %{improved}"


_ERASED = "earlier versions and the names in the history were removed: undo cannot go back beyond this update"
_NOT_ERASED = "versions kept for undo still contain it; --everywhere (everywhere=true) removes it from them as well"


def notes(update: Mapping[str, Any], report: PhotoReport = _NO_REPORT) -> list[str]:
    """Notes on an update, except for accuracies; with names of photos if there is a report.

    >>> notes({"kind": "learn", "images": 9, "repeated": 4})
    ['repeated photos, counted once: 4 of 9']
    """
    if update["kind"] == "forget":
        return [_ERASED if "everywhere" in update else _NOT_ERASED]
    if update["kind"] == "rename":
        name = update["classes"][1]
        if is_folder_name(name):
            return []
        return [f"'{name}' is not a portable folder name: to teach photos of it, pass labels to learn() in Python"]
    if update["kind"] == "background":
        similar = update["resembling_known"]
        return [f"images that clearly resemble a known class: {similar:,}; undo if they show it"] if similar else []
    images, repeated, relabelled = (update.get(name, 0) for name in ("images", "repeated", "relabelled_background"))
    lines = []
    if update.get("distinguished"):
        lines.append("the features already distinguish these classes: no adapter was trained")
    if repeated == images:
        learned = "only the adapter was trained again" if update["trained"] else "nothing new was learned"
        lines.append(f"all photos are repeated: {learned}")
    elif repeated:
        lines.append(f"repeated photos, counted once: {repeated:,} of {images:,}")
    if conflicts := update.get("conflicts", 0):
        pairs = [f"{_file_name(pair.image)}: '{pair.other}' and '{pair.label}'" for pair in report.conflicts]
        lines.append(
            f"photos with two class names: {conflicts:,}{_in_brackets(pairs, conflicts, '; ')}; undo if one is wrong"
        )
    if relabelled:
        lines.append(f"background photos that now belong to a class, and no longer to the background: {relabelled:,}")
    lines += _folder_notes(
        update.get("ignored_files", 0), report.ignored_files, update.get("group_folders", 0), report.group_folders
    )
    if (few := update.get("few_photos", 0)) and repeated < images:
        fewest = sorted(update["fewest"].items(), key=lambda item: item[1])
        named = list_names([f"'{name}' ({number})" for name, number in fewest], few)
        lines.append(f"few photos: {named}; {MIN_ADVISED} or more per class are advisable")
    return lines


def report_lines(update: Mapping[str, Any], report: PhotoReport = _NO_REPORT) -> list[str]:
    """Lines about the accuracies of an update, and notes."""
    return [*accuracy_lines(update), *notes(update, report)]


def folder_notes(ignored_files: Sequence[str], group_folders: Sequence[str]) -> list[str]:
    """Notes on a folder: group folders and ignored files."""
    return _folder_notes(len(ignored_files), ignored_files, len(group_folders), group_folders)


def _folder_notes(ignored: int, files: Sequence[str], groups: int, folders: Sequence[str]) -> list[str]:
    lines = []
    if groups:
        lines.append(
            f"folders of class folders: {groups:,}{_in_brackets([printable(name) for name in folders], groups)}"
        )
    if ignored:
        names = _in_brackets([_file_name(file) for file in files], ignored)
        lines.append(f"files ignored (not images, or outside the class folders): {ignored:,}{names}")
    return lines


def _in_brackets(names: Sequence[str], total: int, separator: str = ", ") -> str:
    """The first names in brackets; empty if there are none."""
    shown = [*names[:_MAX_NAMED], *(["..."] if total > _MAX_NAMED else [])]
    return f" ({separator.join(shown)})" if names else ""


def _file_name(path: str) -> str:
    return printable(Path(path).name)


_UNTRAINED = (
    "Its adapter has never been trained, since that takes several classes at once: {remedy}, and its accuracy may "
    "improve."
)
_PARTLY_TRAINED = (
    "Its adapter was trained on {trained} of its {classes} classes: {remedy}, and its accuracy will most likely "
    "improve."
)
_REFRESH = "if you still have the photos, run `onea refresh MODEL FOLDER`"


def training_advice(state: State) -> list[str]:
    """How to improve a model whose adapter was trained on few of its classes; nothing if its preset never trains.

    Nothing either if stored copies wait for the next training.
    """
    classes = state.classes
    trained = sum(name in state.adapter_images for name in classes)
    if not state.options["train"] or state.exemplars or len(classes) < 2 or 2 * trained >= len(classes):
        return []
    template = _PARTLY_TRAINED if trained else _UNTRAINED
    return [template.format(trained=trained, classes=len(classes), remedy=_REFRESH)]


def find_conflicts(names: Sequence[str], labels: Sequence[str], others: Mapping[int, str]) -> tuple[Conflict, ...]:
    """The conflicts of photos, from the other class of each position."""
    return tuple(Conflict(names[row], labels[row], other) for row, other in sorted(others.items()) if row < len(names))
