# SPDX-License-Identifier: Apache-2.0
"""``onea bench``: training and inference speed on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onea.cli.options import options_of
from onea.research.bench.config import BenchConfig

_NO_EFFECT = {
    "data": ("rank", "batch", "workers", "tasks", "seconds", "quick", "official"),
    "export": ("batch", "precision", "compile", "tasks", "workers", "official"),
    "scale": tuple(name for name in BenchConfig.__dataclass_fields__ if name != "threads"),
}


@options_of(BenchConfig)
def bench(
    *,
    data: Annotated[
        str | None,
        typer.Option(help="Instead, time a run of One-A on this dataset, with 10 tasks and the epochs of the paper."),
    ] = None,
    export: Annotated[
        bool,
        typer.Option(
            "--export",
            help="Instead, time inference of exported models on the CPU: PyTorch, ONNX Runtime in fp32 and int8, and "
            "OpenVINO if it is installed.",
        ),
    ] = False,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="CLASSES",
            help="Instead, measure models with these numbers of classes, such as 10,1000,10000: loading, answers, one "
            "more class, memory and disk space.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder for the CSV file.", show_default="the working folder"),
    ] = Path(),
    **options: Any,
) -> None:
    """Benchmark training, inference, merging and memory against plain PyTorch and timm.

    Also measures how time and memory grow with the number of tasks. Writes a CSV file named after the hardware.
    """
    from rich.console import Console

    from onea.errors import OneaError
    from onea.files import check_writable
    from onea.options import make_options
    from onea.research.bench.exported import export_bench
    from onea.research.bench.results import print_result
    from onea.research.bench.run import bench as measure
    from onea.research.bench.run import stream_bench
    from onea.research.bench.scale import parse_classes, scale_bench

    modes = [name for name, value in (("data", data), ("export", export), ("scale", scale)) if value]
    if len(modes) > 1:
        raise OneaError(f"--{modes[0]} and --{modes[1]} cannot be combined; choose one.")
    mode = modes[0] if modes else ""
    if unused := next((name for name in _NO_EFFECT.get(mode, ()) if name in options), None):
        raise OneaError(f"--{unused} has no effect with --{mode}; leave it out.")
    if options.get("quick"):
        options.setdefault("seconds", BenchConfig.seconds / 10)
    config = make_options(BenchConfig, options)
    check_writable(out)
    console = Console(stderr=True)
    with console.status("preparing") as status:
        if data:
            result = stream_bench(config, data, out, status.update)
        elif scale:
            result = scale_bench(config, parse_classes(scale), status.update)
        else:
            result = (export_bench if export else measure)(config, status.update)
    print_result(result)
    print(result.write(out))
