# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a check: needy classes, suspicious photos, classes and photos that are too alike."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from onea.model.evaluation.check import ADVICE_BY_URGENCY, SHARES
from onea.presentation.tables import MISSING, Table, terminal
from onea.text import plural

if TYPE_CHECKING:
    from onea.model.evaluation.check import Check, ClassCheck
    from onea.model.evaluation.confusions import Mistakes


def print_check(console: Console, found: Check, most: int) -> None:
    """At most so many rows of each table, and one line that sums up."""
    needy = [one for one in found.classes if one.needs_attention]
    if needy:
        _print(console, _measured(needy[:most]) if found.measured else _known(needy[:most]))
        _rest(console, len(needy) - most, "class", "classes")
    _print_suspects(console, found, most)
    if found.pairs:
        pairs = [
            (pair.first, pair.second, "hardly told apart" if pair.alike else "", f"{100 * pair.overlap:.0f}")
            for pair in found.pairs[:most]
        ]
        share = "nearer to the other %" if found.measured else "overlap %"
        heads: tuple[str, ...] = ("class", "and", "", share)
        _print(console, Table.from_texts("classes that are taken for each other", heads, pairs, left=3))
        _rest(console, len(found.pairs) - most, "pair", "pairs")
    _print_mistakes(console, found.mistakes, most)
    if found.duplicates:
        duplicates = [
            (
                one.given,
                Path(one.image).name,
                one.other,
                Path(one.other_image).name,
                "yes" if one.identical else "nearly",
            )
            for one in found.duplicates[:most]
        ]
        heads = ("named", "photo", "also named", "photo", "the same")
        _print(console, Table.from_texts("photos that come under two names", heads, duplicates, left=5))
        _rest(console, len(found.duplicates) - most, "pair", "pairs")
    advice = Counter(one.advice for one in found.classes)
    summary = ", ".join(f"{advice[what]:,} {what}" for what in ADVICE_BY_URGENCY[::-1] if advice[what])
    classes = plural(len(found.classes), "class", "classes")
    console.print(f"{classes}: {summary} (version {found.version})", highlight=False)
    if not found.measured:
        console.print("give a folder of photos to find mislabelled ones and to measure each class", highlight=False)


def _measured(classes: list[ClassCheck]) -> Table:
    shares = "/".join(f"{100 * share:.0f}" for share in SHARES)
    heads = ("class", "advice", "taken for", "photos", f"correct % with {shares} % of them")
    lines = []
    for one in classes:
        curve = "  ".join(f"{100 * share:.0f}" for share in one.curve) if one.curve else MISSING
        lines.append((one.name, one.advice, one.rival or "", f"{one.photos:,}", curve))
    return Table.from_texts("classes that need something, the neediest first", heads, lines, left=3)


def _known(classes: list[ClassCheck]) -> Table:
    lines = [(one.name, one.advice, one.rival or "", f"{one.taught:,}") for one in classes]
    heads = ("class", "advice", "most like", "photos")
    return Table.from_texts("classes that need something, the neediest first", heads, lines, left=3)


def _print_suspects(console: Console, found: Check, most: int) -> None:
    if not found.suspects:
        return
    lines = [(one.given, Path(one.image).name, one.likelier, f"{one.ratio:.1f}") for one in found.suspects[:most]]
    heads = ("named", "photo", "looks like", "suspicion")
    _print(console, Table.from_texts("photos that may have the wrong name, the most suspicious first", heads, lines, 3))
    _rest(console, len(found.suspects) - most, "photo", "photos")


def _print_mistakes(console: Console, found: Mistakes, most: int) -> None:
    if found.absorbing:
        absorbing = [
            (one.name, f"{one.mistakes:,}", f"{100 * one.share:.0f}", ", ".join(one.of))
            for one in found.absorbing[:most]
        ]
        heads: tuple[str, ...] = ("class", "mistakes", "of all %", "mostly photos of")
        _print(console, Table.from_texts("classes that many mistakes end in", heads, absorbing, left=1))
    if found.misclassified:
        often = [(one.name, f"{one.mistakes:,} of {one.images:,}", one.predicted) for one in found.misclassified[:most]]
        heads = ("class", "mistakes", "mostly taken for")
        _print(console, Table.from_texts("classes that are often misclassified", heads, often, left=1))
        _rest(console, len(found.misclassified) - most, "class", "classes")
    if found.images:
        photos = plural(found.images, "held-out photo", "held-out photos")
        console.print(f"{found.mistakes:,} of {photos} misclassified", highlight=False)


def _print(console: Console, table: Table) -> None:
    console.print(terminal(table))


def _rest(console: Console, number: int, one: str, many: str) -> None:
    if number > 0:
        console.print(f"and {plural(number, one, many)} more (--most, --json)", highlight=False)
