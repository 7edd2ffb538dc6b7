# SPDX-License-Identifier: Apache-2.0
"""``onea teach``: classes from a folder of class folders into a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onea.cli.options import Device, OnBad, Precision, Threads
from onea.runs.config import RunConfig


def teach(
    model: Annotated[Path, typer.Argument(help="Model folder, such as shop.onea; made if it does not exist.")],
    folder: Annotated[Path, typer.Argument(help="Folder with one folder of images for each class.")],
    name: Annotated[str | None, typer.Option(help="What the history calls this; by default the folder's name.")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="Of a new model: embedded name, timm architecture.tag or .safetensors file."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Of a new model: passes over ten classes' images; by default chosen for you.")
    ] = None,
    unknown: Annotated[
        float | None, typer.Option(help="Share of known images that may be answered 'unknown'. [0.05]")
    ] = None,
    on_bad: OnBad = RunConfig.on_bad,
    device: Device = RunConfig.device,
    precision: Precision = RunConfig.precision,
    threads: Threads = RunConfig.threads,
    seed: Annotated[int | None, typer.Option(help="Of a new model: decides every draw. [0]")] = None,
) -> None:
    """Teach a model the classes in a folder; it keeps all it knew before. A class it knows gets more evidence.

    Interrupted at any moment, the model is as it was before.
    """
    from rich.console import Console

    from onea.cli.model_display import TeachDisplay, print_learned
    from onea.model.workshop import teach_folder

    given = {"backbone": backbone, "epochs": epochs, "unknown": unknown, "seed": seed}
    machine = {"device": device, "precision": precision, "threads": threads}
    chosen = {key: value for key, value in given.items() if value is not None}
    with TeachDisplay() as display:
        taught = teach_folder(model, folder, name, chosen, machine, on_bad, display)
    print_learned(Console(), taught, model)
