# SPDX-License-Identifier: Apache-2.0
"""``onea evaluate``: how well a model does on images whose class is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onea.cli.options import Device, Model, MovedBackbone, Threads
from onea.runs.config import RunConfig


def evaluate(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="Folder with one folder of images for each class.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Picture of the confusions.")] = Path("confusion.png"),
    backbone: MovedBackbone = None,
    device: Device = RunConfig.device,
    threads: Threads = RunConfig.threads,
) -> None:
    """Ask a model about images whose class is known: a table of classes, the worst first, and a confusion picture."""
    from rich.console import Console

    from onea.cli.model_display import print_evaluation
    from onea.files import check_writable
    from onea.model.confusion import confusion_picture
    from onea.model.evaluation import evaluate as ask
    from onea.model.folder import load_for
    from onea.report.style import save

    check_writable(out.parent)
    loaded = load_for(model, backbone=backbone, device=device, threads=threads)
    found = ask(loaded.snapshot(), folder)
    print_evaluation(Console(), found)
    print(save(confusion_picture(found), out))
