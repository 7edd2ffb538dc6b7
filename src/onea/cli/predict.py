# SPDX-License-Identifier: Apache-2.0
"""``onea predict``: what images show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onea.cli.options import Device, Model, MovedBackbone, OnBad, Threads
from onea.runs.config import RunConfig


def predict(
    model: Model,
    images: Annotated[list[Path], typer.Argument(help="Image files, and folders with images anywhere below.")],
    top: Annotated[int, typer.Option(help="How many of the likeliest classes to show.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="A header and one line per image.")] = False,
    on_bad: OnBad = RunConfig.on_bad,
    backbone: MovedBackbone = None,
    device: Device = RunConfig.device,
    threads: Threads = RunConfig.threads,
) -> None:
    """Say what each image shows, or that it is unknown: too far from everything that was taught."""
    import sys

    from rich.console import Console

    from onea.cli.model_display import print_answers
    from onea.errors import OneaError
    from onea.model.answers import as_rows
    from onea.model.folder import load_for
    from onea.model.images import find_images
    from onea.text import printable

    if as_json and as_csv:
        raise OneaError("--json and --csv exclude each other; give one of them.")
    if on_bad not in ("fail", "skip"):
        raise OneaError(f"--on-bad is '{on_bad}'; choose fail or skip.")
    if top < 1:
        raise OneaError(f"--top is {top}; ask for at least one class.")
    files = [file for place in images for file in find_images(place)]
    loaded = load_for(model, backbone=backbone, device=device, threads=threads).snapshot()
    batch = loaded.read(files, on_bad)  # type: ignore[arg-type]
    for line in batch.skipped:
        print(printable(f"onea: left out {line}"), file=sys.stderr)
    answers = loaded.answers(batch, top)
    if as_json:
        import json

        for row in as_rows(answers):
            print(printable(json.dumps(row, ensure_ascii=False)))
    elif as_csv:
        import csv

        shown = min(top, len(loaded.classes))
        likely = [name for place in range(1, shown + 1) for name in (f"class_{place}", f"probability_{place}")]
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["image", "answer", "version", *likely])
        for answer in answers:
            cells = [cell for name, chance in answer.top for cell in (printable(name), chance)]
            writer.writerow([answer.image, printable(answer.label), answer.version, *cells])
    else:
        print_answers(Console(), answers)
