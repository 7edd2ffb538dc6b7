# SPDX-License-Identifier: Apache-2.0
"""What pages are made of: sections of text, tables and pictures; ``html`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from onea.presentation.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Text:
    """A paragraph: the first one of a page, small print, or what a reader must not miss."""

    text: str
    kind: Literal["lead", "soft", "note"] = "soft"


@dataclass(frozen=True)
class Terms:
    """Terms, each with what it means."""

    meanings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        heading: above it.
        draw: makes it; is called with nothing and, for phones, with ``width`` in inches.
        alt: what it shows, for those who do not see it.
        caption: how to read it.
        name: of a file with it, without suffix.
    """

    heading: str
    draw: Callable[..., Figure]
    alt: str
    caption: str = ""
    name: str = ""

    def section(self, level: Literal[2, 3] = 2) -> Section:
        """The picture below its heading."""
        return Section(self.heading, [self], level)


@dataclass(frozen=True)
class Details:
    """Blocks that a reader opens on demand."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Blocks below a heading.

    Attributes:
        level: of the heading, as in HTML.
        apart: whether a line sets it off from what comes before.
    """

    heading: str
    blocks: Sequence[Block]
    level: Literal[2, 3] = 2
    apart: bool = False


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    blocks: Sequence[Block]


Block = Text | Terms | Table | Picture | Details | Section


def remarks(texts: Sequence[str]) -> list[Text]:
    """What a reader must know, the first one most of all."""
    return [Text(text, "note" if index == 0 else "soft") for index, text in enumerate(texts)]
