# SPDX-License-Identifier: Apache-2.0
"""``onea info``, ``classes``, ``history``, ``undo``, ``forget``, ``rename``: what a model is, and small changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from onea.cli.options import Model
from onea.text import plural, printable

if TYPE_CHECKING:
    from onea.model.state import State


def info(
    model: Model,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the earlier versions, too, and name one that is damaged.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Say what a model knows, how it learns and answers, and on which network; only the model folder is loaded."""
    import json

    from rich.console import Console

    from onea.cli.model_display import print_info
    from onea.model.reports import network_advice, training_advice
    from onea.model.storage import folder as folders

    manifest, state = folders.read_present(model)
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
        "remarks": [*network_advice(state.backbone), *training_advice(state.classes, state.adapter_images)],
    }
    if verify:
        facts["verified"] = folders.verify(model)
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        print_info(Console(), model, facts)


def classes(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, as GET /classes of a service has it.")] = (
        False
    ),
) -> None:
    """List the classes of a model, with the number of images that each was taught with."""
    import json

    from rich.console import Console

    from onea.cli.model_display import print_classes
    from onea.model.storage.folder import read_manifest, read_state

    state = read_state(model, read_manifest(model).versions.present)
    known = [{"name": name, "images": images} for name, images in zip(state.classes, state.images, strict=True)]
    if as_json:
        told = {"version": state.version, "count": len(known), "classes": known}
        print(printable(json.dumps(told, ensure_ascii=False)))
    else:
        print_classes(Console(), known)


def history(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="All that is noted, as JSON.")] = False,
) -> None:
    """Show every update of a model, and which versions can be gone back to."""
    import json

    from rich.console import Console

    from onea.cli.model_display import print_history
    from onea.model.storage.folder import read_manifest, read_state

    kept = read_manifest(model).versions.kept
    updates = read_state(model, kept[-1]).updates
    if as_json:
        print(json.dumps({"version": kept[-1], "kept": kept, "updates": updates}, indent=1))
    else:
        print_history(Console(), updates, kept)


def undo(model: Model) -> None:
    """Go back to before the last update."""
    from onea.model.storage.folder import undo as go_back

    undone, now = go_back(model)
    print(f"undid version {undone.version} ({printable(undone.update)})")
    print(f"{model} is at version {now.version} again and knows {plural(len(now.classes), 'class', 'classes')}")


def forget(
    model: Model,
    classes: Annotated[list[str], typer.Argument(help="Classes no longer to answer.")],
    everywhere: Annotated[
        bool,
        typer.Option("--everywhere", help="Remove earlier versions and the names in the history: there is no undo."),
    ] = False,
) -> None:
    """No longer answer some classes. What the adapter learned from their images stays in it."""
    from onea.model.reports import notes
    from onea.model.storage.erasure import erase
    from onea.model.storage.folder import change

    def next_state(before: State, version: int, date: str) -> State:
        return erase(before, classes, version, date) if everywhere else before.forget(classes, version, date)

    state = change(model, next_state, keep=0 if everywhere else None)
    gone = printable(", ".join(dict.fromkeys(classes)))
    print(f"{model} no longer answers {gone}; it knows {plural(len(state.classes), 'class', 'classes')} now")
    for remark in notes(state.updates[-1]):
        print(remark)


def rename(
    model: Model,
    old: Annotated[str, typer.Argument(help="What the class is called now.")],
    new: Annotated[str, typer.Argument(help="What it shall be called.")],
    merge: Annotated[bool, typer.Option("--merge", help="NEW is a class, too: make the two one.")] = False,
) -> None:
    """Call a class by another name, or make two classes one."""
    from onea.model.reports import notes
    from onea.model.storage.folder import change

    def next_state(before: State, version: int, date: str) -> State:
        return (before.merge_classes if merge else before.rename)(old, new, version, date)

    state = change(model, next_state)
    now = f"; it knows {plural(len(state.classes), 'class', 'classes')} now" if merge else ""
    print(printable(f"{model} now calls '{old}' '{new}'{now}"))
    for remark in notes(state.updates[-1]):
        print(printable(remark))
