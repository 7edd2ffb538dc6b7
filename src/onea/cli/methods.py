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
        table = Table("name", "method", "passes per image after T tasks", "paper")
        for known in METHODS:
            kind = method_class(known)
            table.add_row(known, kind.title, " / ".join(f"{kind.passes(t):g}" for t in (1, 10, 40)), kind.paper)
    else:
        table = Table("option", "default", "meaning", title=f"options of {name} (presets change some defaults)")
        for option, default, meaning in describe(method_class(name).Options):
            table.add_row(f"--{option.replace('_', '-')}", str(default), meaning)
    Console().print(table)
