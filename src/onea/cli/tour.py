# SPDX-License-Identifier: Apache-2.0
"""``onea tour``: a model is taught, asked, measured, taken back and served, while one watches."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from onea.errors import OneaError, install_command

_FAMILIES = {"suits": "♠♥♦♧", "weather": "☀☁☂⚡", "yin-yang": "☯"}
_NAMES = dict(
    zip(
        "♠♥♦♧☀☁☂⚡☯",
        ["spade", "heart", "diamond", "club", "sun", "cloud", "umbrella", "lightning", "yin-yang"],
        strict=True,
    )
)
_LATER = "☯"  # arrives on Tuesday
_NEW = "♥☁" + _LATER
_TAUGHT, _ASKED = 10, 3  # pictures of each class
_MODEL, _NETWORK = "tour.onea", "fast"


def tour(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for pictures and model.")] = Path("onea-tour"),
) -> None:
    """Watch it all within a minute: teach, predict, evaluate, undo and serve, on pictures that come with onea.

    Every command is shown before it runs; afterwards the folder is yours to go on with.
    """
    from onea.files import check_writable

    onea = context.find_root().command
    check_writable(out)
    if (out / _MODEL).exists() or (out / "photos").exists():
        raise OneaError(f"{out} holds an earlier tour; delete it, or choose another --out.")
    _say("pictures of nine symbols, a folder for each, and some more to ask about")
    _draw(out)
    with contextlib.chdir(out):
        print(f"$ cd {shlex.quote(str(out))}", flush=True)
        _say("Monday: eight classes arrive. The small network is quick; without --backbone it is the accurate one")
        _run(onea, "teach", _MODEL, "photos/monday", "--backbone", _NETWORK)
        _say("what do new pictures show? It has never seen a yin-yang")
        _run(onea, "predict", _MODEL, "new", "--top", "2")
        _say("Tuesday: one more class, in seconds; what was known stays known")
        _run(onea, "teach", _MODEL, "photos/tuesday")
        _run(onea, "predict", _MODEL, "new/yin-yang.png", "--top", "2")
        _say("how good is it, on pictures drawn in other typefaces?")
        _run(onea, "evaluate", _MODEL, "photos/test")
        _say("Tuesday was a mistake: back to before it")
        _run(onea, "undo", _MODEL)
        _run(onea, "history", _MODEL)
        _say("the same over HTTP, with a page for the browser")
        _serve()
    print()
    _say(f"that was it. cd {shlex.quote(str(out))} and go on, or teach a model your own photos: onea teach --help")


def _draw(out: Path) -> None:
    """The pictures in folders, as a user would have them."""
    from PIL import Image

    from onea.data.glyphs import draw_glyphs

    for split, char, number, pixels in draw_glyphs(_FAMILIES, _TAUGHT, _ASKED):
        name = _NAMES[char]
        day = "tuesday" if char == _LATER else "monday"
        if split == "train":
            file = out / "photos" / day / name / f"{number}.png"
        elif number == 0 and char in _NEW:
            file = out / "new" / f"{name}.png"
        else:
            file = out / "photos/test" / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(file)


def _say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def _run(onea: Any, *words: str) -> None:
    """Show a command of onea and run it here; one that fails ends the tour."""
    print(f"$ onea {shlex.join(words)}", flush=True)
    code = onea.main([*words], prog_name="onea", standalone_mode=False)
    if code:
        raise typer.Exit(code)


def _serve() -> None:
    """Start the service, ask it once, and stop it."""
    words = ["serve", _MODEL, "--port", "0"]
    print(f"$ onea {shlex.join(words)}", flush=True)
    try:
        import onea.serve.service  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"serving needs {error.name}, which is not installed; the tour goes on without. To install it:")
        print(install_command("serve"))
        return
    with _started([sys.executable, "-m", "onea", *words]) as lines:
        first = next(lines, "")
        print(first.rstrip(), next(lines, "").rstrip(), sep="\n")
        if (curl := shutil.which("curl")) and " at " in first:
            address = f"{first.rpartition(' at ')[2].strip()}/predict?top=2"
            print(f"\n$ curl -F images=@new/heart.png '{address}'", flush=True)
            subprocess.run([curl, "--silent", "--show-error", "-F", "images=@new/heart.png", address], check=False)
            print("\n^C", flush=True)


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[Iterator[str]]:
    """The lines that a process prints for as long as it is entered."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout)
        finally:
            process.terminate()
