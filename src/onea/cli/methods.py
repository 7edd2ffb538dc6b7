"""``onea methods``: what can be run, and with which options."""

from __future__ import annotations

from typing import Annotated

import typer


def methods(
    name: Annotated[str | None, typer.Argument(help="List the options of this method.")] = None,
) -> None:
    """List the methods, or the options of one."""
    from rich.console import Console
    from rich.table import Table

    from onea.methods import METHODS, method_class
    from onea.options import describe

    if name is None:
        table = Table("name", "method", "trains", "keeps", "passes after\n1 / 10 / 40 tasks", "in the\npaper", "paper")
        for known in METHODS.names:
            kind = method_class(known)
            passes = " / ".join(f"{kind.passes(tasks):g}" for tasks in (1, 10, 40))
            reported = "yes" if kind.in_paper else ""
            table.add_row(known, kind.title, kind.trains, kind.stores, passes, reported, kind.paper)
    else:
        table = Table("option", "default", "meaning", title=f"options of {name} (presets change some defaults)")
        for option, default, meaning in describe(method_class(name).Options):
            table.add_row(f"--{option.replace('_', '-')}", str(default), meaning)
    Console().print(table)
