# SPDX-License-Identifier: Apache-2.0
"""``onea demo``: a comparison of three methods on the bundled images, with a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onea.research.runs.config import RunConfig, make_config

if TYPE_CHECKING:
    from rich.console import Console

    from onea.research.record import Record

DATA = "glyphs-mini"
IMAGE_SIZE = 56  # pixels; larger inputs are slower, and the symbols need no more
METHODS = ("simplecil", "one-a", "running-mean")
REPORT_ORDER = ("one-a", "simplecil", "running-mean")  # the report emphasises the first one


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs, the figure and the report.")] = Path(
        "onea-demo"
    ),
    seed: Annotated[int, typer.Option(help="Random seed.")] = RunConfig.seed,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete earlier runs of the demo in that folder first.")
    ] = False,
) -> None:
    """Compare three methods on small images of symbols in nine tasks of different sizes.

    It needs no download and takes a few minutes on a CPU. Repeat the command to resume an interrupted demo.
    """
    from rich.console import Console

    from onea.files import write_text
    from onea.learner.merged_adapter import AdapterCache
    from onea.presentation import style
    from onea.research.cli.display import DemoDisplay
    from onea.research.methods import method_class
    from onea.research.record import read_record
    from onea.research.report import curves
    from onea.research.report.run_page import run_page
    from onea.research.runs.runner import run

    configs = {
        name: make_config({"method": name, "data": DATA, "image_size": IMAGE_SIZE, "seed": seed}) for name in METHODS
    }
    _prepare_folder(out, fresh)
    # Only the merge of the running mean differs from One-A, so it gets One-A's training.
    one_a = method_class("one-a")
    training = {"learning_rate": one_a.base_learning_rate, "single_class": one_a.Options().single_class}
    configs["running-mean"] = replace(configs["running-mean"], options=training)
    titles = {name: method_class(name).title for name in METHODS}
    earlier = {name: read_record(out / name) for name in METHODS}
    console, adapter_cache = Console(), AdapterCache()  # shared: both merges get the same adapters
    with DemoDisplay(titles, console) as display:
        records = {
            name: run(configs[name], out / name, display.start(name, earlier[name]), adapter_cache) for name in METHODS
        }
    reported = [records[name] | {"title": titles[name], "paper": method_class(name).paper} for name in REPORT_ORDER]
    figure = style.save(curves.accuracy_curves(reported), out / "accuracy.png")
    write_text(out / "report.html", run_page(reported, "onea demo"))
    print_results(reported, [figure, out / "report.html"], console)


def _prepare_folder(out: Path, fresh: bool) -> None:
    """Create the folder; with ``fresh``, delete the files of the demo's runs in it but nothing else."""
    from onea.errors import OneaError
    from onea.files import check_no_model
    from onea.locks import folder_lock
    from onea.research.record import FILES, leftovers, read_record

    check_no_model(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OneaError(f"{out} cannot be created ({error.strerror}); choose another --out.") from error
    for folder in (out / name for name in METHODS if fresh):
        if (record := read_record(folder)) and record["config"]["method"] == folder.name:
            with folder_lock(folder):  # not while another process writes to it
                for file in [*(folder / name for name in FILES), *leftovers(folder)]:
                    file.unlink(missing_ok=True)


def print_results(records: Sequence[Record], files: Sequence[Path], console: Console) -> None:
    """Print the results table and the paths of the files."""
    from rich.text import Text

    from onea.presentation.tables import terminal
    from onea.research.report.aggregate import results_table
    from onea.research.report.html import two_lines

    results = results_table(records)
    table = terminal(results, star=not console.color_system)  # a star for the best value where there is no colour
    table.title = Text("Result\n", "bold")
    table.columns[0].style, table.columns[0].no_wrap = "bold", True
    for column in table.columns[1:]:
        column.header, column.vertical = two_lines(str(column.header)), "bottom"
    console.print(table)
    for note in results.row_notes:
        console.print(Text(f"\n{note}", "dim"))
    console.print()
    for file in files:
        console.print(str(file), highlight=False, markup=False, soft_wrap=True)
