# SPDX-License-Identifier: Apache-2.0
"""``onea teach``, ``refresh``, ``predict`` and ``export``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onea.cli.options import (
    Device,
    MaxMegapixels,
    Model,
    MovedBackbone,
    OnBad,
    Precision,
    Threads,
    UnknownRate,
    check_image_options,
)
from onea.options import MachineOptions

if TYPE_CHECKING:
    from onea.model.answers import Answer


def teach(
    model: Annotated[Path, typer.Argument(help="Model folder, such as shop.onea; created if it does not exist.")],
    folder: Annotated[Path | None, typer.Argument(help="Folder with one folder of images for each class.")] = None,
    background: Annotated[
        Path | None,
        typer.Option(
            help="Instead of FOLDER: a folder of images that show none of the classes, searched recursively. Similar "
            "images are more often predicted 'unknown'."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the update in the history.", show_default="the name of the folder")
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="Network of a new model: the bundled one, timm architecture.tag or .safetensors file.",
            show_default="the bundled one",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Preset of a new model: fast (no training: half of the time), auto, accurate (larger "
            "images: twice the time) or paper.",
            show_default="auto",
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(
            help="Input size of a new model in pixels, a multiple of the patch size (bundled network: 14).",
            show_default="of the bundled network: 168, or 224 with the preset accurate",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Training epochs of a new model, for an update of ten classes.", show_default="by preset"),
    ] = None,
    unknown: Annotated[
        float | None,
        typer.Option(
            help="Fraction of images of known classes that may be predicted 'unknown'.",
            show_default="the model's setting, or 0.05",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Small copies of photos to store for later trainings: a number for each class, 'pending' (those of "
            "classes that no adapter was trained on, until the next training) or 0.",
            show_default="the model's setting, or 0",
        ),
    ] = None,
    memory_mb: Annotated[
        int | None,
        typer.Option(
            help="Largest number of megabytes of all stored copies.", show_default="the model's setting, or 256"
        ),
    ] = None,
    later: Annotated[
        bool, typer.Option("--later", help="Train the adapter later, at another update or with `onea refresh`.")
    ] = False,
    remember_sources: Annotated[
        bool,
        typer.Option(
            "--remember-sources",
            help="Remember the folder for `onea refresh`, in a file that is never exported or uploaded.",
        ),
    ] = False,
    on_bad: OnBad = MachineOptions.on_bad,
    max_megapixels: MaxMegapixels = None,
    device: Device = MachineOptions.device,
    precision: Precision = MachineOptions.precision,
    threads: Threads = MachineOptions.threads,
    seed: Annotated[int | None, typer.Option(help="Random seed of a new model.", show_default="0")] = None,
) -> None:
    """Add new classes to a model, or more images to its classes.

    If the command is interrupted, the model is unchanged.
    """
    import time

    started = time.perf_counter()  # before the slow imports
    from rich.console import Console

    from onea.cli.display import print_learned
    from onea.errors import OneaError
    from onea.learner.memory import parse_memory
    from onea.model.progress_bar import LearningBar
    from onea.model.storage.teaching import teach_folder

    check_image_options(on_bad, max_megapixels)
    source = background or folder
    if source is None or (folder and background):
        raise OneaError("Give a folder with one folder of images for each class, or --background and a folder.")
    if background and (later or remember_sources):
        raise OneaError("--later and --remember-sources are for classes; leave them out with --background.")
    params: dict[str, Any] = {
        "memory": None if memory is None else parse_memory(memory),
        "memory_mb": memory_mb,
        "backbone": backbone,
        "image_size": image_size,
        "preset": preset,
        "epochs": epochs,
        "seed": seed,
        "unknown": unknown,
    }
    params = {name: value for name, value in params.items() if value is not None}
    machine = {"device": device, "precision": precision, "threads": threads}
    with LearningBar() as bar:
        taught = teach_folder(
            model,
            source,
            name,
            params,
            machine,
            on_bad,
            bar,
            background=background is not None,
            later=later,
            remember=remember_sources,
        )
    print_learned(Console(), taught, model, time.perf_counter() - started)


def refresh(
    model: Model,
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders with photos that were taught, searched recursively; by default those that "
            "`onea teach --remember-sources` remembered.",
            show_default=False,
        ),
    ] = None,
    on_bad: OnBad = "skip",
    max_megapixels: MaxMegapixels = None,
    device: Device = MachineOptions.device,
    precision: Precision = MachineOptions.precision,
    threads: Threads = MachineOptions.threads,
) -> None:
    """Train a model once more on all photos at hand, without new ones, and keep the better version.

    Photos that were taught are recognised, wherever they are. Stored copies (see `onea teach --memory`) take part.
    """
    from rich.console import Console

    from onea.cli.display import print_refreshed
    from onea.model.progress_bar import LearningBar
    from onea.model.storage.teaching import refresh_folder

    check_image_options(on_bad, max_megapixels)
    machine = {"device": device, "precision": precision, "threads": threads}
    with LearningBar() as bar:
        refreshed, report, missing = refresh_folder(model, folders or [], machine, on_bad, bar)
    print_refreshed(Console(), refreshed, report, model, missing)


def predict(
    model: Model,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders, which are searched recursively.")],
    top: Annotated[int, typer.Option(help="Number of most probable classes to print.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per image.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    unknown: UnknownRate = None,
    on_bad: OnBad = MachineOptions.on_bad,
    max_megapixels: MaxMegapixels = None,
    backbone: MovedBackbone = None,
    device: Device = MachineOptions.device,
    threads: Threads = MachineOptions.threads,
) -> None:
    """Predict the classes of images.

    The verdict on an image is a class, unsure (two or three possible classes) or unknown (none of the classes).
    """
    from rich.console import Console

    from onea.cli.display import print_answers, print_skipped
    from onea.errors import OneaError
    from onea.model.estimator import load_for
    from onea.model.learning.images import find_images
    from onea.model.progress_bar import PredictionBar
    from onea.text import printable

    if as_json and as_csv:
        raise OneaError("--json and --csv cannot be combined; choose one.")
    check_image_options(on_bad, max_megapixels)
    if top < 1:
        raise OneaError(f"--top is {top}; it must be at least 1.")
    files = [file for path in images for file in find_images(path)]
    snapshot = load_for(model, backbone=backbone, device=device, threads=threads, unknown=unknown).snapshot()
    with PredictionBar() as bar:
        batch = snapshot.read(files, on_bad, bar)  # type: ignore[arg-type]
        answers = snapshot.answers(batch, top, progress=bar)
    print_skipped(batch.skipped)
    if as_json:
        import json

        for answer in answers:
            print(printable(json.dumps(answer.as_json(), ensure_ascii=False)))
    elif as_csv:
        _print_csv(answers, min(top, len(snapshot.classes)))
    else:
        print_answers(Console(), answers)


def _print_csv(answers: Sequence[Answer], classes: int) -> None:
    import csv
    import sys

    from onea.text import printable

    columns = ("image", "class", "verdict", "probability", "candidates", "none_of_these", "version")
    ranked = [name for rank in range(1, classes + 1) for name in (f"class_{rank}", f"probability_{rank}")]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*columns, *ranked])
    for answer in answers:
        candidates = "|".join(printable(name) for name, _ in answer.candidates)
        values = answer.as_json() | {"class": printable(answer.label), "candidates": candidates}
        top = [cell for name, probability in answer.top for cell in (printable(name), probability)]
        writer.writerow([*(values[column] for column in columns), *top])


def export(
    model: Model,
    to: Annotated[str, typer.Option(help="Format: onnx, or torch (for torch.export.load).")] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Exported file.",
            show_default="next to the model, such as shop-int8.onnx",
        ),
    ] = None,
    preprocess: Annotated[
        bool | None,
        typer.Option(
            help="Include resizing and cropping, so that the file takes photos of any size (uint8).",
            show_default="included with onnx, not with torch",
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(help="fp32, or int8: smaller, and faster on CPUs with VNNI; requires --to onnx and --check."),
    ] = "fp32",
    check: Annotated[
        Path | None,
        typer.Option(
            help="Folder with one folder of photos for each class, 2,000 photos or more. An int8 file is written only "
            "if it loses at most 0.5 points of accuracy on them and 97 % of the predictions agree."
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Overwrite a file of another kind or precision, or one that is not an export."),
    ] = False,
    backbone: MovedBackbone = None,
) -> None:
    """Export a model to a single ONNX or PyTorch file for any batch size.

    The file contains the network, the adapter and the prototypes. It is kept only if its answers match
    those of the model. A JSON file next to it describes the classes, the input and the output.
    """
    from onea.cli.display import class_count, print_quality
    from onea.errors import OneaError, did_you_mean
    from onea.model.estimator import load_for
    from onea.model.export import ENDINGS, default_path
    from onea.model.export import export as write
    from onea.vit.onnx import OPSET

    if to not in ENDINGS:
        raise OneaError(f"Unknown format '{to}'; {did_you_mean(to, ENDINGS)}")
    if precision not in ("fp32", "int8"):
        raise OneaError(f"--precision is '{precision}'; choose fp32 or int8.")
    snapshot = load_for(model, backbone=backbone, device="cpu").snapshot()
    path = out or default_path(model, to, precision)
    options: dict[str, Any] = {"preprocess": preprocess, "precision": precision, "check": check, "force": force}
    exported = write(snapshot, to, path, **options)  # type: ignore[arg-type]
    opset = f", opset {OPSET}" if to == "onnx" else ""
    print(f"{exported.path}: {class_count(len(snapshot.classes))}, version {snapshot.version}, {precision}{opset}")
    print(f"{exported.input}; see {exported.description}")
    if exported.quality is None:
        print(f"differs from the model by at most {exported.difference:.1g}")
    else:
        print_quality(exported.quality)
