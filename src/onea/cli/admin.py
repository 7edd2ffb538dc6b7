# SPDX-License-Identifier: Apache-2.0
"""``onea info``, ``classes``, ``history``, ``undo``, ``forget`` and ``rename``: commands that need no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from onea.cli.options import Json, Model
from onea.text import plural, printable

if TYPE_CHECKING:
    from onea.model.state import State


def info(
    model: Model,
    verify: Annotated[bool, typer.Option("--verify", help="Also verify the checksums of earlier versions.")] = False,
    as_json: Json = False,
) -> None:
    """Show the size, network and settings of a model."""
    import json

    from rich.console import Console

    from onea.cli.display import print_info
    from onea.model.exemplars import count_bytes, count_images
    from onea.model.learning.memory_report import memory_lines
    from onea.model.reports import training_advice
    from onea.model.storage import folder as folders

    manifest, state = folders.read_current(model)
    facts = {
        "version": state.version,
        "classes": len(state.classes),
        "images": sum(state.images),
        "background_images": state.background_images,
        "updates": len(state.updates),
        "preset": manifest.params["preset"],
        "readout": state.readout,
        "unknown": manifest.params["unknown"],
        "backbone": {**state.backbone, "input": state.preprocess["size"]},
        "memory": {
            "setting": manifest.params["memory"],
            "copies": count_images(state.exemplars),
            "classes": len(state.exemplars),
            "bytes": count_bytes(state.exemplars),
        },
        "remarks": training_advice(state) + (memory_lines(state, manifest.params["memory"]) or ["No photo is stored."]),
    }
    if verify:
        facts["verified"] = folders.verify(model)
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        print_info(Console(), model, facts)


def classes(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, like GET /classes of `onea serve`.")] = False,
) -> None:
    """List the classes of a model with the number of training images of each."""
    import json

    from rich.console import Console

    from onea.cli.display import print_classes
    from onea.model.storage.folder import read_manifest, read_state

    state = read_state(model, read_manifest(model).versions.current)
    listed = [{"name": name, "images": images} for name, images in zip(state.classes, state.images, strict=True)]
    if as_json:
        document = {"version": state.version, "count": len(listed), "classes": listed}
        print(printable(json.dumps(document, ensure_ascii=False)))
    else:
        print_classes(Console(), listed)


def history(model: Model, as_json: Json = False) -> None:
    """List the updates of a model, and the versions that `onea undo` can restore."""
    import json

    from rich.console import Console

    from onea.cli.display import print_history
    from onea.model.storage.folder import read_manifest, read_state

    kept = read_manifest(model).versions.kept
    updates = read_state(model, kept[-1]).updates
    if as_json:
        print(json.dumps({"version": kept[-1], "kept": kept, "updates": updates}, indent=1))
    else:
        print_history(Console(), updates, kept)


def undo(model: Model) -> None:
    """Undo the last update: restore the version before it."""
    from onea.model.storage.folder import undo as restore

    undone, state = restore(model)
    print(f"undid version {undone.version} ({printable(undone.update)})")
    print(f"{model} is at version {state.version} again, with {plural(len(state.classes), 'class', 'classes')}")


def forget(
    model: Model,
    classes: Annotated[list[str], typer.Argument(help="Classes to remove.")],
    everywhere: Annotated[
        bool,
        typer.Option(
            "--everywhere",
            help="Also remove earlier versions and the names in the history. This cannot be undone.",
        ),
    ] = False,
) -> None:
    """Remove classes from a model. The adapter, which also learned from their images, does not change."""
    from onea.model.storage.erasure import erase

    def next_state(before: State, version: int, date: str) -> State:
        return erase(before, classes, version, date) if everywhere else before.forget(classes, version, date)

    _change(model, next_state, f"removed {', '.join(dict.fromkeys(classes))}", keep=0 if everywhere else None)


def rename(
    model: Model,
    old: Annotated[str, typer.Argument(help="Current name of the class.")],
    new: Annotated[str, typer.Argument(help="New name of the class.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge the class into the existing class NEW.")] = False,
) -> None:
    """Rename a class, or merge it into another class."""

    def next_state(before: State, version: int, date: str) -> State:
        return (before.merge_classes if merge else before.rename)(old, new, version, date)

    _change(model, next_state, f"merged '{old}' into '{new}'" if merge else f"renamed '{old}' to '{new}'")


def _change(
    model: Model, next_state: Callable[[State, int, str], State], summary: str, keep: int | None = None
) -> None:
    from onea.model.reports import notes
    from onea.model.storage.folder import change

    state = change(model, next_state, keep)
    number = plural(len(state.classes), "class", "classes")
    print(printable(f"{summary}; {model} now has {number} (version {state.version})"))
    for note in notes(state.updates[-1]):
        print(printable(note))
