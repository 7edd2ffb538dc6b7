"""All commands. Their modules import nothing heavy; the work is imported when a command runs."""

from __future__ import annotations

import typer

from onea.cli.compare import compare
from onea.cli.demo import demo
from onea.cli.merge import merge
from onea.cli.methods import methods
from onea.cli.paper import paper
from onea.cli.report import report
from onea.cli.run import run
from onea.cli.stream import stream

app = typer.Typer(
    help="Learn new classes in batches of any size with one adapter on a frozen vision transformer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_LOOSE = {"allow_extra_args": True, "ignore_unknown_options": True}  # a method's or operator's own options

app.command()(demo)
app.command(context_settings=_LOOSE)(run)
app.command()(stream)
app.command()(methods)
app.command(context_settings=_LOOSE)(merge)
app.command()(paper)
app.command()(report)
app.command()(compare)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from onea.version import __version__

        print(__version__)
        raise typer.Exit
