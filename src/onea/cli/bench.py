# SPDX-License-Identifier: Apache-2.0
"""``onea bench``: how fast this machine learns and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_NOT_OF_A_STREAM = ("rank", "batch", "workers", "tasks", "seconds", "quick")


def bench(
    context: typer.Context,
    backbone: Annotated[
        str,
        typer.Option(help="Embedded name, timm architecture (random weights), architecture.tag or .safetensors."),
    ] = "vit_small_d6_patch14_84",
    rank: Annotated[int, typer.Option(help="Width of the adapter's bottleneck.")] = 128,
    batch: Annotated[int, typer.Option(help="Images per training step.")] = 128,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    precision: Annotated[str, typer.Option(help="Of the fast column: auto, bf16 or fp32.")] = "auto",
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Of the fast column; by default what a run does.")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 is all.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that feed the plain loop; 0 is one per core, at most 8.")] = 0,
    tasks: Annotated[int, typer.Option(help="Tasks of the run that shows growth; 0 leaves it out.")] = 40,
    data: Annotated[
        str | None,
        typer.Option(help="Instead of all that, time One-A on this dataset: 10 tasks, the paper's epochs."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="About how long one measurement takes. [5; quick: 0.5]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer batch sizes, shorter epochs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the CSV. [benchmarks/ if it exists, else here]")] = None,
) -> None:
    """Measure training, inference, merge, memory and growth, next to plain baselines in the same run.

    Leaves a CSV whose name carries the hardware. See docs/speed.md for how to read it.
    """
    from rich.console import Console

    from onea.bench.run import bench as measure
    from onea.bench.scene import BenchConfig
    from onea.bench.stream import stream_bench
    from onea.cli.bench_display import print_result
    from onea.errors import OneaError
    from onea.files import check_writable
    from onea.options import build

    if data:
        sources = {name: context.get_parameter_source(name) for name in _NOT_OF_A_STREAM}
        given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
        if given:
            raise OneaError(f"--{given[0]} has no effect with --data, which runs One-A as its preset says; drop it.")
    values = {
        "backbone": backbone,
        "rank": rank,
        "batch": batch,
        "device": device,
        "precision": precision,
        "compile": compiled,
        "threads": threads,
        "workers": workers,
        "tasks": tasks,
        "seconds": seconds if seconds is not None else 0.5 if quick else 5.0,
        "quick": quick,
    }
    config = build(BenchConfig, values)
    folder = out or (Path("benchmarks") if Path("benchmarks").is_dir() else Path())
    check_writable(folder)
    console = Console(stderr=True)
    with console.status("preparing") as status:
        tell = status.update
        result = stream_bench(config, data, folder, tell) if data else measure(config, tell)
    print_result(result)
    print(result.write(folder))
