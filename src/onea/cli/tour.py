# SPDX-License-Identifier: Apache-2.0
"""``onea tour``: the commands for models, run one after the other on pictures that come with onea."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from onea.errors import OneaError, install_command

_TUESDAY = "☯"  # taught on Tuesday, the other classes on Monday
_SUITS = {"♠": "spade", "♥": "heart", "♦": "diamond", "♧": "club"}
_WEATHER = {"☀": "sun", "☁": "cloud", "☂": "umbrella", "⚡": "lightning"}
_NAMES = _SUITS | _WEATHER | {_TUESDAY: "yin-yang"}
_FAMILIES = {"suits": "".join(_SUITS), "weather": "".join(_WEATHER), "yin-yang": _TUESDAY}
_NEW = "♥☁" + _TUESDAY
_TRAIN_IMAGES, _TEST_IMAGES = 10, 3  # of each class
_MODEL, _SIZE = "tour.onea", ("--image-size", "56")  # large enough for these pictures


def tour(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the pictures and the model.")] = Path("onea-tour"),
) -> None:
    """Show teach, predict, evaluate, undo and serve in a minute, on bundled pictures.

    Every command is printed before it runs. The folder is kept, so that you can continue with its model.
    """
    from onea.files import check_writable

    onea = context.find_root().command
    check_writable(out)
    if (out / _MODEL).exists() or (out / "photos").exists():
        raise OneaError(f"{out} contains an earlier tour; delete it, or choose another --out.")
    _print_comment("draw pictures of nine symbols, with one folder for each class")
    _draw(out)
    with contextlib.chdir(out):
        print(f"$ cd {shlex.quote(str(out))}", flush=True)
        _print_comment("Monday: teach eight classes. 56 pixels suffice for drawings; photos need the default")
        _run(onea, "teach", _MODEL, "photos/monday", *_SIZE)
        _print_comment("predict new pictures; the yin-yang is none of the eight classes")
        _run(onea, "predict", _MODEL, "new", "--top", "2")
        _print_comment("Tuesday: add a class, without the pictures of the other classes")
        _run(onea, "teach", _MODEL, "photos/tuesday")
        _run(onea, "predict", _MODEL, "new/yin-yang.png", "--top", "2")
        _print_comment("measure the accuracy on pictures in other typefaces")
        _run(onea, "evaluate", _MODEL, "photos/test")
        _print_comment("undo the update of Tuesday")
        _run(onea, "undo", _MODEL)
        _run(onea, "history", _MODEL)
        _print_comment("predict over HTTP; the service also has a web page")
        _serve()
    print()
    _print_comment(f"to continue: cd {shlex.quote(str(out))}; for a model of your own photos: onea teach --help")


def _draw(out: Path) -> None:
    """Write the pictures, in folders as for ``onea teach``."""
    from PIL import Image

    from onea.data.glyphs import draw_glyphs

    for split, char, number, pixels in draw_glyphs(_FAMILIES, _TRAIN_IMAGES, _TEST_IMAGES):
        name = _NAMES[char]
        day = "tuesday" if char == _TUESDAY else "monday"
        if split == "train":
            file = out / "photos" / day / name / f"{number}.png"
        elif number == 0 and char in _NEW:
            file = out / "new" / f"{name}.png"
        else:
            file = out / "photos/test" / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(file)


def _print_comment(text: str) -> None:
    print(f"\n# {text}", flush=True)


def _run(onea: Any, *words: str) -> None:
    """Print a command of onea and run it in this process; a failure ends the tour."""
    print(f"$ onea {shlex.join(words)}", flush=True)
    code = onea.main([*words], prog_name="onea", standalone_mode=False)
    if code:
        raise typer.Exit(code)


def _serve() -> None:
    """Start the service, send it a picture, and stop it."""
    words = ["serve", _MODEL, "--port", "0"]
    print(f"$ onea {shlex.join(words)}", flush=True)
    try:
        import onea.serve.service  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"skipped, because {error.name} is not installed; install it with:\n{install_command('serve')}")
        return
    command = [sys.executable, "-m", "onea", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            first, second = process.stdout.readline(), process.stdout.readline()
            print(first.rstrip(), second.rstrip(), sep="\n")
            if (curl := shutil.which("curl")) and " at " in first:
                address = f"{first.rpartition(' at ')[2].strip()}/predict?top=2"
                print(f"\n$ curl -F images=@new/heart.png '{address}'", flush=True)
                subprocess.run([curl, "--silent", "--show-error", "-F", "images=@new/heart.png", address], check=False)
                print("\n^C", flush=True)
        finally:
            process.terminate()
