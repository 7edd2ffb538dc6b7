# SPDX-License-Identifier: Apache-2.0
"""The animation of the README: teach a model, predict, teach one more class, predict again, and undo the update.

    python tools/docs/animation.py

runs the commands of ``onea tour`` on its pictures and renders their outputs as an animated SVG. The outputs are also
the description of the file; ``tests/docs/test_animation.py`` compares them with those of the current program.
"""

from __future__ import annotations

import base64
import html
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

FILE = Path(__file__).parents[2] / "docs/pictures" / "teach-predict-undo.svg"
COMMANDS = (
    "onea teach tour.onea photos/monday --image-size 56",
    "onea predict tour.onea new --top 2",
    "onea teach tour.onea photos/tuesday",
    "onea predict tour.onea new/yin-yang.png --top 2",
    "onea undo tour.onea",
)
CAPTIONS = (
    "Monday: eight classes",
    "New pictures: what are they?",
    "Tuesday: one more class",
    "And now?",
    "Tuesday was a mistake",
)
MONDAY = ("spade", "heart", "diamond", "club", "sun", "cloud", "umbrella", "lightning")
SCENE = 3.6  # seconds
WIDTH, HEIGHT, EDGE, SIDE = 440, 196, 18, 44  # pixels
STILL = 1  # the scene that is shown without animation
_ROW = re.compile(r"^new/(\S+)\.png +(.+?) {2,}", re.M)
_STYLE = """
svg { --paper: #f6f8fa; --line: #d0d7de; --ink: #1f2328; --soft: #59636e; --good: #0a6640; --odd: #9a3412; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #161b22; --line: #3d444d; --ink: #f0f6fc; --soft: #9aa4b0; --good: #56d394; --odd: #ffa657; }
}
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: var(--ink); }
.muted { fill: var(--soft); } .answer { font-weight: 600; fill: var(--good); } .unknown { fill: var(--odd); }
.card { fill: var(--paper); stroke: var(--line); }
.current { fill: var(--ink); } .dot { fill: var(--line); }
"""


@dataclass(frozen=True)
class Exchange:
    """A command and its output."""

    command: str
    output: str


def run_commands() -> tuple[list[Exchange], dict[str, str]]:
    """Run the commands; returns their outputs, and thumbnails of their pictures."""
    from onea.cli.tour import _draw as draw_pictures

    with TemporaryDirectory() as folder:
        root = Path(folder)
        draw_pictures(root)
        exchanges = []
        for command in COMMANDS:
            words = [sys.executable, "-m", *shlex.split(command)]
            environment = os.environ | {"COLUMNS": "100"}
            process = subprocess.run(words, cwd=root, env=environment, check=True, capture_output=True, text=True)
            lines = process.stdout.strip().splitlines()
            exchanges.append(Exchange(command, "\n".join(line.rstrip() for line in lines)))
        new = {f"new/{path.stem}": path for path in (root / "new").iterdir()}
        taught = {path.parent.name: path for path in root.glob("photos/*day/*/0.png")}
        return exchanges, {name: _thumbnail(path) for name, path in (taught | new).items()}


def _thumbnail(path: Path) -> str:
    """A thumbnail as base64."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(path).convert("RGB").resize((2 * SIDE, 2 * SIDE)).save(buffer, "JPEG", quality=60)
    return base64.b64encode(buffer.getvalue()).decode()


def draw(exchanges: Sequence[Exchange], pictures: Mapping[str, str]) -> str:
    """The SVG."""
    scenes = [_scene(exchange, caption, pictures) for exchange, caption in zip(exchanges, CAPTIONS, strict=True)]
    total = SCENE * len(scenes)
    style, body = [_STYLE.strip()], []
    for number, (command, output) in enumerate(scenes):
        for kind, content, start in (("command", command, 0.0), ("output", output, 0.9)):
            begin, end = (100 * (SCENE * number + start) / total, 100 * (SCENE * (number + 1) - 0.15) / total)
            frames = f"0%, {begin:.2f}%, {end + 0.8:.2f}%, 100% {{ opacity: 0; }}"
            if number == len(scenes) - 1:
                frames = f"0%, {begin:.2f}%, 100% {{ opacity: 0; }}"
                end = min(end, 99.2)
            style.append(
                f"@keyframes {kind}{number} {{ {frames} {begin + 0.8:.2f}%, {end:.2f}% {{ opacity: 1; }} }}\n"
                f".{kind}{number} {{ opacity: {int(number == STILL)}; animation: {kind}{number} {total:g}s infinite; }}"
            )
            body.append(f'<g class="{kind}{number}">{content}</g>')
        x = WIDTH / 2 + 16 * (number - (len(scenes) - 1) / 2)
        body.append(f'<circle class="dot" cx="{x:g}" cy="{HEIGHT - 14}" r="3.5"/>')
        body.append(f'<circle class="current command{number}" cx="{x:g}" cy="{HEIGHT - 14}" r="3.5"/>')
    style.append("@media (prefers-reduced-motion: reduce) { g, circle { animation: none !important; } }")
    transcript = "\n".join(f"$ {exchange.command}\n{exchange.output}" for exchange in exchanges)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>A model learns, predicts, learns one more class, predicts again, and the update is undone</title>\n"
        f"<desc>{html.escape(transcript, quote=False)}</desc>\n<style>\n{chr(10).join(style)}\n</style>\n"
        f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="8"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _scene(exchange: Exchange, caption: str, pictures: Mapping[str, str]) -> tuple[str, str]:
    """The SVG of the command with its pictures, and of its output."""
    command = _text(EDGE, 30, f"# {caption}", "muted") + _text(EDGE, 52, f"$ {exchange.command}")
    rows = _ROW.findall(exchange.output)
    if rows:
        output = ""
        for number, (name, answer) in enumerate(rows):
            left = EDGE + number * 134
            command += _picture(left, 68, pictures[f"new/{name}"])
            kind = "answer unknown" if answer == "unknown" else "answer"
            output += _text(left, 132, f"{name}.png", "muted") + _text(left, 152, answer, kind)
        return command, output
    lines = [line for line in exchange.output.splitlines() if re.match(r"learned|undid|tour\.onea ", line)]
    shown = MONDAY if "monday" in exchange.command else ("yin-yang",) if "tuesday" in exchange.command else ()
    for number, name in enumerate(shown):
        command += _picture(EDGE + number * (SIDE + 7), 68, pictures[name])
    top = 134 if shown else 82
    return command, "".join(_text(EDGE, top + 20 * number, line) for number, line in enumerate(lines))


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"' + (f' class="{kind}"' if kind else "") + f">{html.escape(text)}</text>"


def _picture(x: float, y: float, data: str) -> str:
    return f'<image x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" href="data:image/jpeg;base64,{data}"/>'


def read(text: str) -> list[Exchange]:
    """The commands and outputs in the description of a file."""
    description = re.search(r"<desc>(.*?)</desc>", text, re.S)
    assert description
    parts = re.split(r"^\$ ", html.unescape(description[1]), flags=re.M)[1:]
    return [Exchange(part.partition("\n")[0], part.partition("\n")[2].strip()) for part in parts]


def main() -> None:
    """Write the file."""
    FILE.write_text(draw(*run_commands()), "utf-8")


if __name__ == "__main__":
    main()
