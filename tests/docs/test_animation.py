# SPDX-License-Identifier: Apache-2.0
"""The animation of the README: up to date, small, without scripts, and with the outputs of the commands."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

from support import ROOT

sys.path.insert(0, str(ROOT / "tools/docs"))
import animation

TEXT = animation.FILE.read_text("utf-8")


def templates(text: str) -> set[str]:
    """Lines without the parts that depend on network and machine: numbers, answers, spacing."""
    lines = (re.sub(r"^(new/\S+\.png) .*", r"\1 ANSWER", line) for line in text.splitlines())
    return {" ".join(re.sub(r"\d+(\.\d+)?", "#", line).split()) for line in lines if line.strip("─ ")}


def test_file_is_up_to_date():
    names = [*animation.MONDAY, "yin-yang", "new/cloud", "new/heart", "new/yin-yang"]
    exchanges = animation.read(TEXT)
    placeholders = re.findall(r"base64,([^\"]+)", animation.draw(exchanges, {name: name for name in names}))
    pictures = dict(zip(placeholders, re.findall(r"base64,([^\"]+)", TEXT), strict=True))
    assert animation.draw(exchanges, pictures) == TEXT


def test_file_is_small_and_self_contained():
    assert len(TEXT.encode()) < 60_000
    root = ElementTree.fromstring(TEXT)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "title", "desc", "style", "rect", "g", "text", "image", "circle"}
    assert all(
        value.startswith("data:") for element in root.iter() for name, value in element.items() if name == "href"
    )
    assert "prefers-color-scheme: dark" in TEXT
    assert "prefers-reduced-motion" in TEXT
    widest = max(map(len, re.findall(r"<text[^>]*>([^<]*)<", TEXT)))
    assert 2 * animation.EDGE + widest * 0.62 * 13 <= animation.WIDTH + animation.EDGE, "a line is too long"


def test_texts_are_the_outputs_of_the_commands(onea, tiny_vit):
    """On a tiny network, whose outputs differ only in numbers and answers."""
    from pathlib import Path

    from onea.cli import tour

    tour._draw(Path())
    printed = {}
    for command in animation.COMMANDS:
        words = command.split()[1:]
        if "monday" in command:
            words += ["--backbone", tiny_vit, "--epochs", "1"]
        code, out, err = onea(*words)
        assert code == 0, err
        printed[command] = out
    shown = {exchange.command: exchange.output for exchange in animation.read(TEXT)}
    assert list(shown) == list(animation.COMMANDS)
    for command, text in shown.items():
        assert templates(text) <= templates(printed[command]), command


def test_the_commands_are_those_of_the_tour():
    from pathlib import Path

    from onea.cli import tour

    assert animation.COMMANDS[0].endswith(" ".join(tour._SIZE))
    source = Path(tour.__file__ or "").read_text("utf-8")
    for command in animation.COMMANDS:
        words = [word for word in command.split()[1:] if word not in ("tour.onea", *tour._SIZE)]
        assert re.search(r'_run\(onea, "' + '".*"'.join(map(re.escape, words)), source), command
    assert {tour._NAMES[char] for char in "".join(tour._FAMILIES.values()) if char != "☯"} == {*animation.MONDAY}
