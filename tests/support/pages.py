# SPDX-License-Identifier: Apache-2.0
"""The examples in README and docs: fenced blocks, the instruction in the comment above, and the commands inside."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import takewhile
from pathlib import Path
from types import ModuleType

from support import ROOT

PAGES = tuple(sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/README.md")]))
SHELL = ("sh", "bash", "console")
_SETTING = re.compile(r"[A-Z_]+=")  # of the shell, before a command or alone
_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<how>[^\n]+?) -->\n)?^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        how: ``run`` (run it), ``exact`` (run it and compare the output), ``parse`` (the default), or the test file that
            runs it.
    """

    page: Path
    line: int
    language: str
    how: str
    text: str

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command, without comments and with the variables of the block filled in."""
        variables: dict[str, str] = {}
        for line in self._lines():
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            words = shlex.split(line, comments=True)
            settings = list(takewhile(_SETTING.match, words))
            if len(words) > len(settings):
                yield words[len(settings) :]
            else:
                variables |= dict(word.split("=", 1) for word in settings)

    def _lines(self) -> Iterator[str]:
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            yield from line.split(" && ")

    def exchanges(self) -> list[tuple[list[str], str]]:
        """The commands of a console block, each with its output."""
        parts = re.split(r"^\$ ", self.text, flags=re.M)[1:]
        return [(shlex.split(part.partition("\n")[0]), part.partition("\n")[2].strip()) for part in parts]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks with a language, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["language"], match["how"] or "parse", match["text"])
        for match in _BLOCK.finditer(text)
    ]


def script(name: str, folder: str = "tools/docs") -> ModuleType:
    """A module of tools/ or benchmarks/, which are not packages."""
    spec = spec_from_file_location(f"{Path(folder).name}_{name}", ROOT / folder / f"{name}.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need it there
    spec.loader.exec_module(module)
    return module
