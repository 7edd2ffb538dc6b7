# SPDX-License-Identifier: Apache-2.0
"""Erasure: remove classes from a model and their names from its history; adapter and covariance are unchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onea.errors import OneaError, did_you_mean
from onea.model.names import normalise
from onea.model.state import NO_CLASS_NAMED, NO_CLASSES, State, Update, history_entry

UNNAMED = "(forgotten)"  # replaces the name of a class in a history


def erase(state: State, names: Sequence[str], version: int, date: str) -> State:
    """The next state without these classes and without their names; classes that were forgotten before may be given.

    Undo must not go back beyond this version, because earlier versions contain the classes.
    """
    if not names:
        raise OneaError(NO_CLASS_NAMED)
    requested = dict.fromkeys(names)
    for name in requested:
        _check_mentioned(name, state)
    kept = [row for row, name in enumerate(state.classes) if name not in requested]
    removed = _earlier_names(requested, state.updates) - {state.classes[row] for row in kept}
    entry = history_entry("forget", version, date, [], len(kept)) | {"everywhere": len(requested)}
    updates = tuple(_remove_names(update, removed) for update in state.updates)
    unnamed = replace(state, updates=updates, adapter_images=_number_names(state.adapter_images, removed))
    return unnamed.keep_classes(kept, version, entry)


def _check_mentioned(name: str, state: State) -> None:
    """Refuse a name that the model does not contain, or a class whose images are in another class now."""
    if name in state.classes:
        return
    mentioned = dict.fromkeys([*state.classes, *(name for update in state.updates for name in update["classes"])])
    mentioned.pop(UNNAMED, None)
    if not mentioned:
        raise OneaError(NO_CLASSES)
    if name not in mentioned:
        raise OneaError(f"The model has no class '{name}'; {did_you_mean(name, list(mentioned))}")
    if current := _classes_with_images_of(name, state.updates) & set(state.classes):
        raise OneaError(f"Images of '{name}' now belong to '{min(current)}'; name that class to forget them.")


def _classes_with_images_of(name: str, updates: Sequence[Update]) -> set[str]:
    """The classes that now have the images that were taught as this one, after renaming and merging."""
    classes: set[str] = set()
    for update in updates:
        if update["kind"] == "rename":
            old, new = update["classes"]
            if old in classes:
                classes = classes - {old} | {new}
        elif update["kind"] == "forget":
            classes -= set(update["classes"])
        elif name in update["classes"]:
            classes.add(name)
    return classes


def _earlier_names(names: Collection[str], updates: Sequence[Update]) -> set[str]:
    """These names, and those that their classes had before they were renamed or merged.

    >>> sorted(_earlier_names(["pear"], [{"kind": "rename", "classes": ["pera", "pear"]}]))
    ['pear', 'pera']
    """
    all_names = set(names)
    for update in reversed(updates):
        if update["kind"] == "rename" and update["classes"][1] in all_names:
            all_names.add(update["classes"][0])
    return all_names


def _remove_names(update: Update, names: Collection[str]) -> Update:
    """An update of a history without these names.

    >>> update = {"version": 3, "name": "ripe pears", "classes": ["pear", "fig"], "fewest": {"pear": 2}}
    >>> _remove_names(update, ["pear"])
    {'version': 3, 'name': 'update 3', 'classes': ['(forgotten)', 'fig'], 'fewest': {}}
    """
    cleaned = update | {"classes": [UNNAMED if name in names else name for name in update["classes"]]}
    if "fewest" in update:
        cleaned["fewest"] = {name: images for name, images in update["fewest"].items() if name not in names}
    if any(normalise(name) in normalise(update.get("name", "")) for name in names):
        cleaned["name"] = f"update {update['version']}"
    return cleaned


def _number_names(images: Mapping[str, int], names: Collection[str]) -> dict[str, int]:
    """Numbers of images of each class, with some names replaced by numbers, so that merges are weighted as before.

    >>> _number_names({"apple": 5, " 1": 4, "pear": 3}, {"pear"})
    {'apple': 5, ' 1': 4, ' 2': 3}
    """
    numbered = {name: count for name, count in images.items() if name not in names}
    for name in images.keys() & set(names):
        number = next(number for number in range(1, len(images) + 1) if f" {number}" not in numbered)
        numbered[f" {number}"] = images[name]  # no class can have this name, because of the space
    return numbered
