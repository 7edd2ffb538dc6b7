# SPDX-License-Identifier: Apache-2.0
"""``onea check``: whether each class is taught well enough, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onea.cli.options import (
    Device,
    MaxMegapixels,
    Model,
    MovedBackbone,
    OnBad,
    Threads,
    check_on_bad,
)
from onea.data.pixel_limit import allow_megapixels
from onea.options import MachineOptions

if TYPE_CHECKING:
    from onea.model.evaluation.check import Check


def check(
    model: Model,
    folder: Annotated[
        Path | None, typer.Argument(help="Folder with one folder of images for each class, taught or about to be.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures.")] = Path("check"),
    most: Annotated[int, typer.Option(help="How many rows of each table to show.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="All that was found, as JSON.")] = False,
    on_bad: OnBad = MachineOptions.on_bad,
    max_megapixels: MaxMegapixels = None,
    backbone: MovedBackbone = None,
    device: Device = MachineOptions.device,
    threads: Threads = MachineOptions.threads,
) -> None:
    """Say which classes need more photos, which are taken for each other, and which photos may have the wrong name.

    Without a folder only what the model has kept can tell: numbers of photos, and classes that overlap.
    """
    import json
    import sys

    from rich.console import Console

    from onea.cli.check_display import print_check
    from onea.data.image_files import group_by_reason
    from onea.errors import OneaError
    from onea.files import check_writable
    from onea.model.estimator import load_for
    from onea.model.evaluation.check import check_model, check_photos
    from onea.model.learning.images import CLASS_FOLDERS, check_folder, read_labelled
    from onea.model.reports import folder_notes
    from onea.model.state import NO_CLASSES
    from onea.model.storage.folder import read_manifest, read_state
    from onea.text import printable

    check_on_bad(on_bad)
    allow_megapixels(max_megapixels)
    if most < 1:
        raise OneaError(f"--most is {most}; ask for at least one row.")
    if folder is None:
        state = read_state(model, read_manifest(model).versions.present)
        if not state.classes:
            raise OneaError(NO_CLASSES)
        found = check_model(state)
        pictures = []
    else:
        check_folder(folder, CLASS_FOLDERS)
        check_writable(out)
        loaded = load_for(model, backbone=backbone, device=device, threads=threads).snapshot()
        batch = read_labelled(folder, None, loaded.side, on_bad)  # type: ignore[arg-type]
        for line in group_by_reason(batch.skipped):
            print(printable(f"onea: left out {line}"), file=sys.stderr)
        for line in folder_notes(batch.ignored_files, batch.group_folders):
            print(f"onea: {line}", file=sys.stderr)
        found = check_photos(loaded, batch)
        pictures = _draw(found, out)
    if as_json:
        print(printable(json.dumps(found.as_json() | {"pictures": list(map(str, pictures))}, ensure_ascii=False)))
    else:
        print_check(Console(), found, most)
        for path in pictures:
            print(path)


def _draw(found: Check, out: Path) -> list[Path]:
    """Write the pictures that there is something to draw for."""
    from onea.model.evaluation.pictures import MOST_PHOTOS, PHOTO_SIDE, curves_picture, suspects_picture
    from onea.model.learning.images import read_unlabelled
    from onea.presentation.style import save

    shown = found.suspects[:MOST_PHOTOS]
    photos = read_unlabelled([one.image for one in shown], PHOTO_SIDE).pixels
    drawn = {"learning-curves.png": curves_picture(found), "suspicious-photos.png": suspects_picture(shown, photos)}
    return [save(figure, out / name) for name, figure in drawn.items() if figure]
