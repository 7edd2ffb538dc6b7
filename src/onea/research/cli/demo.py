# SPDX-License-Identifier: Apache-2.0
"""``onea demo``: three methods on the embedded images, side by side, and a page about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from onea.research.runs.config import RunConfig, make_config

DATA = "glyphs-mini"
METHODS = ("simplecil", "one-a", "running-mean")
SHOWN = ("one-a", "simplecil", "running-mean")  # the page emphasises the first one


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs, figure and page.")] = Path("onea-demo"),
    seed: Annotated[int, typer.Option(help="Decides class order and every draw.")] = RunConfig.seed,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the demo's earlier runs there first.")] = False,
) -> None:
    """Teach small symbols in nine uneven tasks to three methods; no download, some minutes of a CPU.

    The same command again continues an interrupted demo and does not repeat a finished one.
    """
    from rich.console import Console

    from onea.files import write_text
    from onea.learner.merged_adapter import AdapterCache
    from onea.presentation import style
    from onea.research.cli.demo_display import DemoDisplay, planned_tasks, print_results
    from onea.research.methods import method_class
    from onea.research.record import read_record
    from onea.research.report import curves
    from onea.research.report.run_page import run_page
    from onea.research.runs.runner import run

    configs = {name: make_config({"method": name, "data": DATA, "seed": seed}) for name in METHODS}
    _open(out, fresh)
    # The running mean is to differ from One-A in its merge alone, so it takes One-A's training.
    one_a = method_class("one-a")
    training = {"learning_rate": one_a.base_learning_rate, "single_class": one_a.Options().single_class}
    configs["running-mean"] = replace(configs["running-mean"], options=training)
    titles = {name: method_class(name).title for name in METHODS}
    earlier = {name: read_record(out / name) for name in METHODS}
    console, adapter_cache = Console(), AdapterCache()  # shared: both merges get the same adapters
    with DemoDisplay(titles, *planned_tasks(DATA, seed, list(earlier.values())), console) as display:
        records = {
            name: run(configs[name], out / name, display.start(name, earlier[name]), adapter_cache) for name in METHODS
        }
    shown = [records[name] | {"title": titles[name], "paper": method_class(name).paper} for name in SHOWN]
    figure = style.save(curves.accuracy_curves(shown), out / "accuracy.png")
    write_text(out / "report.html", run_page(shown, "onea demo"))
    print_results(shown, [figure, out / "report.html"], console)


def _open(out: Path, fresh: bool) -> None:
    """Make the folder and, if asked, delete the demo's runs in it, file by file: whatever else lies there stays."""
    from onea.errors import OneaError
    from onea.files import check_no_model
    from onea.locks import folder_lock
    from onea.research.record import FILES, leftovers, read_record

    check_no_model(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OneaError(f"{out} cannot be a folder ({error.strerror}); choose another --out.") from error
    for folder in (out / name for name in METHODS if fresh):
        if (record := read_record(folder)) and record["config"]["method"] == folder.name:
            with folder_lock(folder):  # not while another demo is at it
                for file in [*(folder / name for name in FILES), *leftovers(folder)]:
                    file.unlink(missing_ok=True)
