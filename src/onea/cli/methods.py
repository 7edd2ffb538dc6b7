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
        table = Table.grid(padding=(0, 2))
        table.add_row("", "passes per image are after 1, 10 and 40 tasks; *: in the One-A paper's tables")
        for known in METHODS.names:
            kind = method_class(known)
            passes = ", ".join(f"{kind.passes(kind.Options(), tasks):g}" for tasks in (1, 10, 40))
            where = f", {kind.paper.removeprefix('https://')}" if kind.paper else ""
            about = f"{kind.title}{'*' if kind.in_paper else ''}: {passes} passes{where}"
            table.add_row(f"[bold]{known}", f"{about}\n[dim]trains {kind.trains}\nkeeps {kind.stores}")
    else:
        table = Table("option", "default", "meaning", title=f"options of {name} (presets change some defaults)")
        for option, default, meaning in describe(method_class(name).Options):
            table.add_row(f"--{option.replace('_', '-')}", str(default), meaning)
    Console().print(table)
