# SPDX-License-Identifier: Apache-2.0
"""``onea evaluate`` and ``check``: how accurate a model is, and what would improve it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onea.cli.options import (
    Device,
    Json,
    MaxMegapixels,
    Model,
    MovedBackbone,
    OnBad,
    Threads,
    check_image_options,
)
from onea.errors import OneaError
from onea.options import MachineOptions

if TYPE_CHECKING:
    from onea.model.evaluation.check import Check


def evaluate(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="Folder with one folder of images for each class.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File for the figure of the confusion matrix.",
            show_default="confusion.png, if it can be written",
        ),
    ] = None,
    unknown: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of images of untaught classes, searched recursively: also measure how well these are "
            "distinguished from known classes, and draw a second figure (confusion-unknown.png). Or a number: the "
            "fraction of images of known classes that may be predicted 'unknown'. Give the option twice for both."
        ),
    ] = None,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="List the misclassified images, the most confident predictions first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. Figures are drawn only with --out.")] = False,
    on_bad: OnBad = MachineOptions.on_bad,
    max_megapixels: MaxMegapixels = None,
    backbone: MovedBackbone = None,
    device: Device = MachineOptions.device,
    threads: Threads = MachineOptions.threads,
) -> None:
    """Measure the accuracy of a model on labelled images.

    Prints the accuracy of each class, the worst first, and draws the confusion matrix.
    """
    import json
    import sys

    from rich.console import Console

    from onea.cli.display import print_evaluation, print_mistakes, print_open_set, print_skipped
    from onea.model.estimator import load_for
    from onea.model.evaluation.evaluation import evaluate as measure
    from onea.model.evaluation.pictures import confusion_picture, open_set_picture
    from onea.model.learning.images import CLASS_FOLDERS, check_folder
    from onea.model.progress_bar import PredictionBar
    from onea.presentation.style import save
    from onea.text import printable

    check_folder(folder, CLASS_FOLDERS)
    figure = None if as_json and not out else _figure_path(out)
    check_image_options(on_bad, max_megapixels)
    rate, unknown_folder = _rate_and_folder(unknown or [])
    snapshot = load_for(model, backbone=backbone, device=device, threads=threads, unknown=rate).snapshot()
    with PredictionBar() as bar:
        evaluation = measure(snapshot, folder, unknown=unknown_folder, on_bad=on_bad, progress=bar)  # type: ignore[arg-type]
    print_skipped(evaluation.skipped)
    if as_json:
        print(printable(json.dumps(evaluation.as_json(), ensure_ascii=False)))
    else:
        print_evaluation(Console(), evaluation)
        if wrong:
            print_mistakes(Console(), evaluation.mistakes)
        if evaluation.open_set:
            print_open_set(Console(), evaluation.open_set)
    if figure:
        paths = [save(confusion_picture(evaluation), figure)]
        if evaluation.open_set:
            second = figure.with_name(f"{figure.stem}-unknown{figure.suffix}")
            paths.append(save(open_set_picture(evaluation.open_set), second))
        print(*paths, sep="\n", file=sys.stderr if as_json else sys.stdout)


def _figure_path(out: Path | None) -> Path | None:
    """The path of the figure: ``out`` or, if the working folder can be written, confusion.png."""
    from onea.files import check_writable

    if out and out.is_dir():
        raise OneaError(f"{out} is a folder; name a file in it, such as {out / 'confusion.png'}.")
    path = out or Path("confusion.png")
    try:
        check_writable(path.parent)
    except OneaError:
        if out:
            raise
        return None
    return path


def _rate_and_folder(values: list[str]) -> tuple[float | None, Path | None]:
    """The number and the folder among the values of --unknown."""
    rates, folders = [], []
    for value in values:
        try:
            rates.append(float(value))
        except ValueError:
            folders.append(Path(value))
    if len(rates) > 1 or len(folders) > 1:
        raise OneaError("--unknown takes at most one number and one folder.")
    return rates[0] if rates else None, folders[0] if folders else None


def check(
    model: Model,
    folder: Annotated[
        Path | None, typer.Argument(help="Folder with one folder of photos for each class, taught or not.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the figures.")] = Path("check"),
    most: Annotated[int, typer.Option(help="Maximum number of rows of each table.")] = 20,
    as_json: Json = False,
    on_bad: OnBad = MachineOptions.on_bad,
    max_megapixels: MaxMegapixels = None,
    backbone: MovedBackbone = None,
    device: Device = MachineOptions.device,
    threads: Threads = MachineOptions.threads,
) -> None:
    """Find classes that need more photos, classes that overlap, and mislabelled photos.

    Without a folder, only the statistics in the model are checked, which reveal nothing about individual photos.
    """
    import json
    import sys

    from rich.console import Console

    from onea.cli.display import print_check, print_skipped
    from onea.files import check_writable
    from onea.model.estimator import load_for
    from onea.model.evaluation.check import check_model, check_photos
    from onea.model.learning.images import CLASS_FOLDERS, check_folder, read_labelled
    from onea.model.reports import folder_notes
    from onea.model.state import NO_CLASSES
    from onea.model.storage.folder import read_manifest, read_state
    from onea.text import printable

    check_image_options(on_bad, max_megapixels)
    if most < 1:
        raise OneaError(f"--most is {most}; it must be at least 1.")
    figures: list[Path] = []
    if folder is None:
        state = read_state(model, read_manifest(model).versions.current)
        if not state.classes:
            raise OneaError(NO_CLASSES)
        result = check_model(state)
    else:
        check_folder(folder, CLASS_FOLDERS)
        check_writable(out)
        snapshot = load_for(model, backbone=backbone, device=device, threads=threads).snapshot()
        batch = read_labelled(folder, None, snapshot.side, on_bad)  # type: ignore[arg-type]
        print_skipped(batch.skipped)
        for line in folder_notes(batch.ignored_files, batch.group_folders):
            print(f"onea: {line}", file=sys.stderr)
        result = check_photos(snapshot, batch)
        figures = _draw(result, out)
    if as_json:
        print(printable(json.dumps(result.as_json() | {"pictures": list(map(str, figures))}, ensure_ascii=False)))
    else:
        print_check(Console(), result, most)
        for path in figures:
            print(path)


def _draw(result: Check, out: Path) -> list[Path]:
    """Write the figures for which there is something to draw."""
    from onea.model.evaluation.pictures import MAX_PHOTOS, PHOTO_SIDE, curves_picture, suspects_picture
    from onea.model.learning.images import read_unlabelled
    from onea.presentation.style import save

    suspects = result.suspects[:MAX_PHOTOS]
    photos = read_unlabelled([suspect.image for suspect in suspects], PHOTO_SIDE).pixels
    figures = {
        "learning-curves.png": curves_picture(result),
        "suspicious-photos.png": suspects_picture(suspects, photos),
    }
    return [save(figure, out / name) for name, figure in figures.items() if figure]
