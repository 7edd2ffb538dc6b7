# SPDX-License-Identifier: Apache-2.0
"""``onea info``, ``history``, ``undo``, ``forget`` and ``rename``: what a model is, and small changes to it."""

from __future__ import annotations

from typing import Annotated

import typer

from onea.cli.options import Model
from onea.text import printable


def info(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Say what a model knows, how it answers and on which network; nothing is loaded but the model folder."""
    import json

    from rich.console import Console

    from onea.cli.model_display import print_info
    from onea.model.folder import read_manifest, read_state
    from onea.model.network import remarks

    manifest = read_manifest(model)
    state = read_state(model, manifest.versions.present)
    facts = {
        "version": state.version,
        "classes": len(state.classes),
        "images": sum(state.images),
        "background_images": state.background_images,
        "updates": len(state.updates),
        "readout": state.readout,
        "unknown": manifest.params["unknown"],
        "backbone": {**state.backbone, "input": state.preprocess["size"]},
        "remarks": remarks(state.backbone),
    }
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        print_info(Console(), model, facts)


def history(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="All that is noted, as JSON.")] = False,
) -> None:
    """Show every update of a model, and which versions can be gone back to."""
    import json

    from rich.console import Console

    from onea.cli.model_display import print_history
    from onea.model.folder import read_manifest, read_state

    kept = read_manifest(model).versions.kept
    updates = read_state(model, kept[-1]).updates
    if as_json:
        print(json.dumps({"version": kept[-1], "kept": kept, "updates": updates}, indent=1))
    else:
        print_history(Console(), updates, kept)


def undo(model: Model) -> None:
    """Go back to before the last update."""
    from onea.model.folder import undo as go_back

    undone, now = go_back(model)
    print(f"undid version {undone.version} ({printable(undone.what)})")
    print(f"{model} is at version {now.version} again and knows {len(now.classes):,} classes")


def forget(model: Model, classes: Annotated[list[str], typer.Argument(help="Classes no longer to answer.")]) -> None:
    """No longer answer some classes. What the adapter learned from their images stays in it."""
    from onea.model.folder import change

    state = change(model, lambda before, version, date: before.without(classes, version, date))
    gone = printable(", ".join(classes))
    print(f"{model} no longer answers {gone}; it knows {len(state.classes):,} classes now")


def rename(
    model: Model,
    old: Annotated[str, typer.Argument(help="What the class is called now.")],
    new: Annotated[str, typer.Argument(help="What it shall be called.")],
) -> None:
    """Call a class by another name."""
    from onea.model.folder import change

    change(model, lambda before, version, date: before.renamed(old, new, version, date))
    print(printable(f"{model} now calls '{old}' '{new}'"))
