# SPDX-License-Identifier: Apache-2.0
"""``onea bench``: how fast this machine learns and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onea.bench.config import BenchConfig
from onea.cli.options import options_of

_NOT_OF_A_STREAM = ("rank", "batch", "workers", "tasks", "seconds", "quick", "official")


@options_of(BenchConfig)
def bench(
    *,
    data: Annotated[
        str | None,
        typer.Option(help="Instead of all that, time One-A on this dataset: 10 tasks, the paper's epochs."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the CSV.", show_default="benchmarks/ if it exists, else here")
    ] = None,
    **given: Any,
) -> None:
    """Measure training, inference, merge, memory and growth, next to plain baselines in the same run.

    Leaves a CSV whose name carries the hardware. See docs/speed.md for how to read it.
    """
    from rich.console import Console

    from onea.bench.run import bench as measure
    from onea.bench.stream import stream_bench
    from onea.cli.bench_display import print_result
    from onea.errors import OneaError
    from onea.files import check_writable
    from onea.options import build

    if wrong := next((name for name in _NOT_OF_A_STREAM if data and name in given), None):
        raise OneaError(f"--{wrong} has no effect with --data, which runs One-A as its preset says; drop it.")
    if given.get("quick"):
        given.setdefault("seconds", BenchConfig.seconds / 10)
    config = build(BenchConfig, given)
    folder = out or (Path("benchmarks") if Path("benchmarks").is_dir() else Path())
    check_writable(folder)
    console = Console(stderr=True)
    with console.status("preparing") as status:
        on_status = status.update
        result = stream_bench(config, data, folder, on_status) if data else measure(config, on_status)
    print_result(result)
    print(result.write(folder))
