# SPDX-License-Identifier: Apache-2.0
"""``onea teach``, ``predict``, ``evaluate`` and ``export``: a model of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    check_on_bad,
)
from onea.data.pixel_limit import allow_megapixels
from onea.options import MachineOptions


def teach(
    model: Annotated[Path, typer.Argument(help="Model folder, such as shop.onea; made if it does not exist.")],
    folder: Annotated[Path | None, typer.Argument(help="Folder with one folder of images for each class.")] = None,
    background: Annotated[
        Path | None,
        typer.Option(
            help="Instead of FOLDER: a folder with images, anywhere below, that show none of the classes. What looks "
            "like them is answered 'unknown' sooner."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the history calls this; by default the folder's name.")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="Of a new model: embedded name (fast: a quarter of the work, less accurate), timm architecture.tag or "
            ".safetensors file. By default the accurate embedded one."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Of a new model: auto, thorough (five times the work, all blocks) or paper.", show_default="auto"
        ),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Of a new model: side in pixels of what the backbone looks at, if not its own.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Of a new model: passes over ten classes' images; by default chosen for you.")
    ] = None,
    unknown: Annotated[
        float | None,
        typer.Option(
            help="Share of known images that may be answered 'unknown'.", show_default="0.05, or as the model has it"
        ),
    ] = None,
    on_bad: OnBad = MachineOptions.on_bad,
    max_megapixels: MaxMegapixels = None,
    device: Device = MachineOptions.device,
    precision: Precision = MachineOptions.precision,
    threads: Threads = MachineOptions.threads,
    seed: Annotated[int | None, typer.Option(help="Of a new model: decides every draw.", show_default="0")] = None,
) -> None:
    """Teach a model the classes in a folder: add to what it knows. A class it knows gets more evidence.

    Interrupted at any moment, the model is as it was before.
    """
    import time

    started = time.perf_counter()  # a person also waits for what is loaded
    from rich.console import Console

    from onea.cli.model_display import print_learned
    from onea.errors import OneaError
    from onea.model.progress_bar import LearningBar
    from onea.model.storage.teaching import teach_folder

    check_on_bad(on_bad)
    allow_megapixels(max_megapixels)
    places = [place for place in (folder, background) if place is not None]
    if len(places) != 1:
        raise OneaError("Give a folder with one folder of images for each class, or --background and a folder.")
    new = {"backbone": backbone, "image_size": image_size, "preset": preset, "epochs": epochs, "seed": seed}
    given = new | {"unknown": unknown}
    machine = {"device": device, "precision": precision, "threads": threads}
    chosen = {key: value for key, value in given.items() if value is not None}
    with LearningBar() as bar:
        taught = teach_folder(model, places[0], name, chosen, machine, on_bad, bar, background=background is not None)
    print_learned(Console(), taught, model, time.perf_counter() - started)


def predict(
    model: Model,
    images: Annotated[list[Path], typer.Argument(help="Image files, and folders with images anywhere below.")],
    top: Annotated[int, typer.Option(help="How many of the most probable classes to show.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="A header and one line per image.")] = False,
    unknown: UnknownRate = None,
    on_bad: OnBad = MachineOptions.on_bad,
    max_megapixels: MaxMegapixels = None,
    backbone: MovedBackbone = None,
    device: Device = MachineOptions.device,
    threads: Threads = MachineOptions.threads,
) -> None:
    """One verdict for each image: a class, unsure between two or three, or unknown: like nothing that was taught."""
    import sys

    from rich.console import Console

    from onea.cli.model_display import print_answers
    from onea.data.image_files import group_by_reason
    from onea.errors import OneaError
    from onea.model.estimator import load_for
    from onea.model.learning.images import find_images
    from onea.model.progress_bar import AskingBar
    from onea.text import printable

    if as_json and as_csv:
        raise OneaError("--json and --csv exclude each other; give one of them.")
    check_on_bad(on_bad)
    allow_megapixels(max_megapixels)
    if top < 1:
        raise OneaError(f"--top is {top}; ask for at least one class.")
    files = [file for place in images for file in find_images(place)]
    loaded = load_for(model, backbone=backbone, device=device, threads=threads, unknown=unknown).snapshot()
    with AskingBar() as bar:
        batch = loaded.read(files, on_bad, bar)  # type: ignore[arg-type]
        answers = loaded.answers(batch, top, progress=bar)
    for line in group_by_reason(batch.skipped):
        print(printable(f"onea: left out {line}"), file=sys.stderr)
    if as_json:
        import json

        for answer in answers:
            print(printable(json.dumps(answer.as_json(), ensure_ascii=False)))
    elif as_csv:
        import csv

        places = range(1, min(top, len(loaded.classes)) + 1)
        likely = [name for place in places for name in (f"class_{place}", f"probability_{place}")]
        writer = csv.writer(sys.stdout, lineterminator="\n")
        head = ("image", "class", "verdict", "probability", "candidates", "none_of_these", "version")
        writer.writerow([*head, *likely])
        for answer in answers:
            shown = {
                "class": printable(answer.label),
                "candidates": "|".join(printable(n) for n, _ in answer.candidates),
            }
            row = answer.as_json() | shown
            cells = [cell for name, chance in answer.top for cell in (printable(name), chance)]
            writer.writerow([*(row[name] for name in head), *cells])
    else:
        print_answers(Console(), answers)


def evaluate(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="Folder with one folder of images for each class.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Picture of the confusions.", show_default="confusion.png where it can be written"
        ),
    ] = None,
    unknown: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder with images, anywhere below, of nothing that was taught: also say how well they are told from "
            "the others, with a picture beside that of the confusions (confusion-unknown.png). A number is the share "
            "of known images that may be answered 'unknown', instead of the model's; both may be given."
        ),
    ] = None,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="List the images that are taken for another class, the surest first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON; a picture only with --out.")] = False,
    on_bad: OnBad = MachineOptions.on_bad,
    max_megapixels: MaxMegapixels = None,
    backbone: MovedBackbone = None,
    device: Device = MachineOptions.device,
    threads: Threads = MachineOptions.threads,
) -> None:
    """Ask a model about images whose class is known: a table of classes, the worst first, and a confusion picture."""
    import json
    import sys

    from rich.console import Console

    from onea.cli.model_display import print_evaluation, print_mistakes, print_open_set
    from onea.data.image_files import group_by_reason
    from onea.model.estimator import load_for
    from onea.model.evaluation.evaluation import evaluate as ask
    from onea.model.evaluation.pictures import confusion_picture, open_set_picture
    from onea.model.learning.images import CLASS_FOLDERS, check_folder
    from onea.model.progress_bar import AskingBar
    from onea.presentation.style import save
    from onea.text import printable

    check_folder(folder, CLASS_FOLDERS)
    picture = _picture(out, as_json)
    check_on_bad(on_bad)
    allow_megapixels(max_megapixels)
    rate, strangers = _rate_and_folder(unknown or [])
    loaded = load_for(model, backbone=backbone, device=device, threads=threads, unknown=rate)
    current = loaded.snapshot()
    with AskingBar() as bar:
        found = ask(current, folder, unknown=strangers, on_bad=on_bad, progress=bar)  # type: ignore[arg-type]
    for line in group_by_reason(found.skipped):
        print(printable(f"onea: left out {line}"), file=sys.stderr)
    if as_json:
        print(printable(json.dumps(found.as_json(), ensure_ascii=False)))
    else:
        print_evaluation(Console(), found)
        if wrong:
            print_mistakes(Console(), found.mistakes)
        if found.open_set:
            print_open_set(Console(), found.open_set)
    if picture:
        drawn = [(confusion_picture(found), picture)]
        if found.open_set:
            beside = picture.with_name(f"{picture.stem}-unknown{picture.suffix}")
            drawn.append((open_set_picture(found.open_set), beside))
        for figure, path in drawn:
            print(save(figure, path), file=sys.stderr if as_json else sys.stdout)


def _picture(asked: Path | None, as_json: bool) -> Path | None:
    """Where the picture goes: where it is asked for, or here if one may write here and a person looks."""
    from onea.errors import OneaError
    from onea.files import check_writable

    if asked:
        if asked.is_dir():
            raise OneaError(f"{asked} is a folder; name a file in it, such as {asked / 'confusion.png'}.")
        check_writable(asked.parent)
        return asked
    if as_json:
        return None
    here = Path("confusion.png")
    try:
        check_writable(here.parent)
    except OneaError:
        return None
    return here


def _rate_and_folder(given: list[str]) -> tuple[float | None, Path | None]:
    """A rate and a folder among what --unknown was given, each at most once."""
    from onea.errors import OneaError

    rates, folders = [], []
    for word in given:
        try:
            rates.append(float(word))
        except ValueError:
            folders.append(Path(word))
    if len(rates) > 1 or len(folders) > 1:
        raise OneaError("--unknown takes one number and one folder at most.")
    return rates[0] if rates else None, folders[0] if folders else None


def export(
    model: Model,
    to: Annotated[str, typer.Option(help="onnx (ONNX Runtime and others) or torch (torch.export.load).")] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File; by default beside the model, such as shop.onnx or shop-int8.onnx."),
    ] = None,
    preprocess: Annotated[
        bool | None,
        typer.Option(
            help="Whether the file takes photos of any size (uint8), or squares of pixels that you cut yourself.",
            show_default="of any size with onnx, squares with torch",
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="fp32, or int8: smaller and faster on CPUs that have VNNI; needs onnx and --check.")
    ] = "fp32",
    check: Annotated[
        Path | None,
        typer.Option(
            help="Folder with one folder of photos for each class, best 2,000 or more: int8 is written only if it "
            "loses at most 0.5 points of accuracy on them and gives 97 % the same answer."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that is there, also one of another kind or precision.")
    ] = False,
    backbone: MovedBackbone = None,
) -> None:
    """Write a model as one file: preprocessing, network, adapter and prototypes in one graph, for any batch size.

    The file is kept only if its answers are the model's. A description (classes, input, output) lies beside it as JSON.
    """
    from onea.cli.model_display import print_quality
    from onea.errors import OneaError, did_you_mean
    from onea.model.estimator import load_for
    from onea.model.export import ENDINGS, default_place
    from onea.model.export import export as write
    from onea.text import plural
    from onea.vit.onnx import OPSET

    if to not in ENDINGS:
        raise OneaError(f"Unknown format '{to}'; {did_you_mean(to, ENDINGS)}")
    if precision not in ("fp32", "int8"):
        raise OneaError(f"--precision is '{precision}'; choose fp32 or int8.")
    loaded = load_for(model, backbone=backbone, device="cpu").snapshot()
    place = out or default_place(model, to, precision)
    wishes: dict[str, Any] = {"preprocess": preprocess, "precision": precision, "check": check, "force": force}
    done = write(loaded, to, place, **wishes)  # type: ignore[arg-type]
    opset = f", opset {OPSET}" if to == "onnx" else ""
    known = plural(len(loaded.classes), "class", "classes")
    print(f"{done.path}: {known}, version {loaded.version}, {precision}{opset}")
    print(f"{done.input}; see {done.description}")
    if done.quality is None:
        print(f"differs from the model by at most {done.difference:.1g}")
    else:
        print_quality(done.quality)
