# SPDX-License-Identifier: Apache-2.0
"""A class that is forgotten everywhere: what is left of it is what the adapter and the shared covariance learned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onea.errors import OneaError, did_you_mean
from onea.model.names import folded
from onea.model.state import KNOWS_NOTHING, NOTHING_NAMED, State, Update, noted

UNNAMED = "(forgotten)"  # stands in a history for the name of a class


def erased(state: State, names: Sequence[str], version: int, date: str) -> State:
    """The next state, without these classes and without their names, also where they were forgotten before.

    Undo must end here: earlier versions have all of it.
    """
    if not names:
        raise OneaError(NOTHING_NAMED)
    asked = dict.fromkeys(names)
    for name in asked:
        _check_mentioned(name, state)
    kept = [row for row, name in enumerate(state.classes) if name not in asked]
    called = _earlier_names(asked, state.updates) - {state.classes[row] for row in kept}
    note = noted("forget", version, date, [], len(kept)) | {"everywhere": len(asked)}
    updates = tuple(_without_names(update, called) for update in state.updates)
    reduced = replace(state, updates=updates, merged=_unnamed(state.merged, called))
    return reduced.reduced(kept, version, note)


def _check_mentioned(name: str, state: State) -> None:
    """Refuse a class that nothing is kept of, or whose images are in another one."""
    if name in state.classes:
        return
    known = dict.fromkeys([*state.classes, *(name for update in state.updates for name in update["classes"])])
    known.pop(UNNAMED, None)
    if not known:
        raise OneaError(KNOWS_NOTHING)
    if name not in known:
        raise OneaError(f"The model does not know '{name}'; {did_you_mean(name, list(known))}")
    if inside := _classes_with_images_of(name, state.updates) & set(state.classes):
        raise OneaError(f"Images of '{name}' are in '{min(inside)}' by now; name that class to forget them.")


def _classes_with_images_of(name: str, updates: Sequence[Update]) -> set[str]:
    """The classes that have images which were taught as this one, after it was renamed or joined with another."""
    found: set[str] = set()
    for update in updates:
        classes = update["classes"]
        if update["kind"] == "rename":
            if classes[0] in found:
                found = found - {classes[0]} | {classes[1]}
        elif update["kind"] == "forget":
            found -= set(classes)
        elif name in classes:
            found.add(name)
    return found


def _earlier_names(names: Collection[str], updates: Sequence[Update]) -> set[str]:
    """These names, and those that their classes had before they were renamed or joined.

    >>> sorted(_earlier_names(["pear"], [{"kind": "rename", "classes": ["pera", "pear"]}]))
    ['pear', 'pera']
    """
    found = set(names)
    for update in reversed(updates):
        if update["kind"] == "rename" and update["classes"][1] in found:
            found.add(update["classes"][0])
    return found


def _without_names(update: Update, names: Collection[str]) -> Update:
    """An update of a history that names none of these classes.

    >>> told = {"version": 3, "name": "ripe pears", "classes": ["pear", "fig"], "fewest": {"pear": 2}}
    >>> _without_names(told, ["pear"])
    {'version': 3, 'name': 'update 3', 'classes': ['(forgotten)', 'fig'], 'fewest': {}}
    """
    cleaned = update | {"classes": [UNNAMED if name in names else name for name in update["classes"]]}
    if "fewest" in update:
        cleaned["fewest"] = {name: images for name, images in update["fewest"].items() if name not in names}
    if any(folded(name) in folded(update.get("name", "")) for name in names):
        cleaned["name"] = f"update {update['version']}"
    return cleaned


def _unnamed(merged: Mapping[str, int], names: Collection[str]) -> dict[str, int]:
    """The images of each class inside the adapter, some of them under numbers, with which a merge counts the same.

    >>> _unnamed({"apple": 5, " 1": 4, "pear": 3}, {"pear"})
    {'apple': 5, ' 1': 4, ' 2': 3}
    """
    found = {name: images for name, images in merged.items() if name not in names}
    for name in merged.keys() & set(names):
        number = next(number for number in range(1, len(merged) + 1) if f" {number}" not in found)
        found[f" {number}"] = merged[name]  # no class can be called so, because of the space
    return found
