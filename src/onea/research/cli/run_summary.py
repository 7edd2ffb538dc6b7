# SPDX-License-Identifier: Apache-2.0
"""The table of a finished run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from onea.cli.display import shown
from onea.presentation.formats import terminal
from onea.presentation.table import NOTHING, Table
from onea.research.record import Record, record_path
from onea.research.record_metrics import headline_metrics
from onea.text import count


def print_summary(record: Record, folder: Path) -> None:
    """One table: what each task brought and where the run ended."""
    metrics, console = record["metrics"], Console()
    steps = {"A_t %": metrics["A"], "class-balanced %": metrics["balanced_A"]}
    steps |= {"open-set AUROC %": record["open_set"]} if record.get("open_set") else {}
    heads, lines = ("task", "classes", "images", *steps), []
    for number, (task, *values) in enumerate(zip(record["tasks"], *steps.values(), strict=True), 1):
        name = f"{number}" if task["name"] == f"task {number}" else f"{number} {task['name']}"
        shares = (NOTHING if value is None else f"{value:.2f}" for value in values)
        lines.append((name, str(task["classes"]), str(task["images"]), *shares))
    console.print(terminal(Table.of_texts(_title(record), heads, lines)))
    shown_metrics = headline_metrics([record], machine_dependent=False).values()
    numbers = (f"{metric.title} {metric.text(record)}" for metric in shown_metrics)
    console.print(Text("   ".join(numbers)), highlight=False)
    if skipped := record["data"].get("skipped"):
        left_out = count(len(skipped), "image that cannot be read was", "images that cannot be read were")
        console.print(f"{left_out} left out; the record names {'it' if len(skipped) == 1 else 'them'}.", soft_wrap=True)
    console.print(shown(f"record: {record_path(folder)}"), soft_wrap=True)


def _title(record: Record) -> str:
    config = record["config"]
    return f"{config['method']} on {config['data']}, seed {config['seed']}, {record['backbone']['name']}"
