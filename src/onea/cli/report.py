# SPDX-License-Identifier: Apache-2.0
"""``onea report``: tables, curves and a page of whatever records lie in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[str, typer.Argument(help="Folder with records at any depth, or a pattern in quotes.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; by default the folder itself.")] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
) -> None:
    """Write report.html, table.md, table.tex, table.csv and a PNG of the curves about all records below a folder."""
    from onea.report.bundle import with_titles, write_report
    from onea.report.find import find_records

    records = with_titles(find_records(folder))
    target = out or (Path(folder) if Path(folder).is_dir() else Path("onea-report"))
    for path in write_report(records, target, title or f"Report of {Path(folder).resolve().name}"):
        print(path)
