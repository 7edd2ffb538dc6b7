# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a model: what was learned, answers, evaluations and the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as TerminalTable
from rich.text import Text

from onea.cli.display import shown
from onea.data.image_files import group_by_reason
from onea.model.reports import accuracy_lines, report_lines, training_advice
from onea.presentation.tables import Table, terminal, terminal_style
from onea.text import plural
from onea.vit.backbones import short_digest

_NAMED = 5  # classes in one line
_SHORTEST = 20  # characters of a path that are always shown
_GAPS = 6  # between four columns
_UNLIMITED = 100_000  # columns of a terminal

if TYPE_CHECKING:
    from onea.model.answers import Answer
    from onea.model.estimator import OneA
    from onea.model.evaluation.evaluation import Evaluation, Mistake
    from onea.model.evaluation.metrics import OpenSet, Quality


def print_learned(console: Console, model: OneA, path: Path, seconds: float) -> None:
    """What an update brought, and how long all of it took."""
    update = model.history[-1]
    if update["kind"] == "background":
        learned = plural(update["images"], "background image", "background images")
    else:
        learned = _learned_classes(update)
    line = f"learned {learned} in {seconds:.1f} s"
    if update["skipped"]:
        line += f"; {plural(update['skipped'], 'unreadable image', 'unreadable images')} left out"
    console.print(line, highlight=False, markup=False)
    for skipped in group_by_reason(model.last_report.skipped):
        console.print(shown(f"left out {skipped}"), soft_wrap=True)
    for line in report_lines(update, model.last_report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    state = model.snapshot().state
    for remark in training_advice(state.classes, state.adapter_images):
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    known = plural(update["known"], "class", "classes")
    console.print(shown(f"{path} now knows {known} (version {model.version})"), soft_wrap=True)


def print_info(console: Console, path: Path, facts: Mapping[str, Any]) -> None:
    """What a model is, in a few lines, and what to know about its network."""
    images, background = plural(facts["images"], "image", "images"), facts["background_images"]
    behind = f" and {plural(background, 'background image', 'background images')}" if background else ""
    network, rate = facts["backbone"], facts["unknown"]
    used = f"the first {plural(network['depth'], 'block', 'blocks')} of " if "depth" in network else ""
    unknown = f"{100 * rate:g} % of known images may be answered unknown" if rate else "never unknown"
    lines = [
        f"{path} knows {plural(facts['classes'], 'class', 'classes')} from {images}{behind}, in "
        f"{plural(facts['updates'], 'update', 'updates')} (version {facts['version']})",
        f"network: {used}{network['name']}, {network['input']} x {network['input']} pixels, sha256 "
        f"{short_digest(network['sha256'])}",
        f"learns by the preset {facts['preset']}; answers by {facts['readout']}; {unknown}",
        *facts["remarks"],
    ]
    if "verified" in facts:
        lines.append(f"versions that were read and are whole: {', '.join(map(str, facts['verified']))}")
    for line in lines:
        console.print(shown(line), soft_wrap=True)


def print_classes(console: Console, known: Sequence[Mapping[str, Any]]) -> None:
    """A line for each class."""
    lines = [(one["name"], f"{one['images']:,}") for one in known]
    console.print(terminal(Table.from_texts("", ("class", "images"), lines)))


def _learned_classes(update: dict[str, Any]) -> str:
    """The classes of an update in words."""
    again = len(update["classes"]) - update["new_classes"]
    what = plural(update["new_classes"], "new class", "new classes") if update["new_classes"] else ""
    more = plural(again, "known class", "known classes") + " again" if again else ""
    return f"{' and '.join(part for part in (what, more) if part)} from {plural(update['images'], 'image', 'images')}"


def print_answers(console: Console, answers: Sequence[Answer]) -> None:
    """A line for each image: the verdict, and the probabilities of none of the classes and of the best ones.

    Where names are too long for that, some lines for each image.
    """
    none = [f"{100 * answer.none:.1f} %" for answer in answers]
    likely = [[f"{name} {100 * chance:.1f} %" for name, chance in answer.top] for answer in answers]
    room = console.width - _GAPS - len("none of these") - max((len(str(answer)) for answer in answers), default=0)
    images = min(max((len(answer.image) for answer in answers), default=0), max(_SHORTEST, console.width // 3))
    wide = all(len(", ".join(one)) + images <= room for one in likely)
    room += 0 if wide else len(" these")
    cells = [(", " if wide else "\n").join(one) for one in likely]  # one below the other rather than broken
    longest = max(_SHORTEST, room - max((len(line) for cell in cells for line in cell.split("\n")), default=0))
    table = TerminalTable(**terminal_style())
    for heading in ("image", "answer", "none of these" if wide else "none of\nthese", "probabilities"):
        table.add_column(heading, no_wrap=True, justify="right" if heading.startswith("none") else "left")
    for answer, chance, cell in zip(answers, none, cells, strict=True):
        image = answer.image if len(answer.image) <= longest else f"…{answer.image[1 - longest :]}"
        table.add_row(shown(image), _verdict(answer), chance, Text("\n").join(map(shown, cell.split("\n"))))
    if _fits(console, table):
        console.print(table)
        return
    for answer, chance, one in zip(answers, none, likely, strict=True):
        _print_block(console, shown(f"{answer.image}: ") + _verdict(answer), [f"none of these {chance}", *one])


def _verdict(answer: Answer) -> Text:
    return shown(str(answer), {"answer": "bold", "unsure": "", "unknown": "dim"}[answer.verdict])


def print_evaluation(console: Console, found: Evaluation) -> None:
    """Every class, the worst first; the most frequent mistakes; and the sum of it."""
    lines = [
        (name, str(one.images), f"{100 * one.accuracy:.1f}", str(one.wrong), str(one.unknown))
        for name, one in found.worst_first()
    ]
    console.print(terminal(Table.from_texts("", ("class", "images", "correct %", "wrong", "unknown"), lines)))
    if mistakes := [(name, answer, str(times)) for name, answer, times in found.confusions()]:
        confused = Table.from_texts("most frequent mistakes", ("is", "taken for", "images"), mistakes, left=2)
        console.print(terminal(confused))
    if never := [found.by_class[name] for name in found.untaught_classes]:
        images, caught = (sum(getattr(one, part) for one in never) for part in ("images", "unknown"))
        names = ", ".join(found.untaught_classes[:_NAMED]) + (", ..." if len(never) > _NAMED else "")
        console.print(
            shown(
                f"never taught, not counted: {names}; {caught:,} of their {plural(images, 'image', 'images')} answered "
                "unknown"
            )
        )
    console.print(str(found), highlight=False)
    for remark in found.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)


def print_mistakes(console: Console, mistakes: Sequence[Mistake]) -> None:
    """A line for each image that is taken for another class."""
    for one in mistakes:
        line = f"{one.image}: taken for {one.predicted} ({100 * one.probability:.0f} %)"
        console.print(shown(line), soft_wrap=True)
    if not mistakes:
        console.print("no image is taken for another class", highlight=False)


def print_open_set(console: Console, found: OpenSet) -> None:
    """How well images of known classes are told from unknown ones, at any threshold and at the model's own."""
    own = found.has_threshold
    lines = [
        ("AUROC: a known image is more familiar than an unknown one", found.auroc),
        ("FPR95: unknown images as familiar as 95 % of the known ones", found.false_positive_rate),
        ("OSCR: area below the open-set curve", found.curve.area),
        ("unknown images answered unknown, at the model's threshold", found.unknown_rejected if own else None),
        ("known images answered unknown, at the model's threshold", found.known_rejected if own else None),
    ]
    cells = [(name, "it has none" if share is None else f"{100 * share:.1f}") for name, share in lines]
    title = f"{plural(len(found.known), 'known image', 'known images')} against {len(found.unknown):,} unknown"
    console.print(terminal(Table.from_texts(title, ("measure", "%"), cells)))


def print_history(console: Console, updates: Sequence[dict[str, Any]], kept: Sequence[int]) -> None:
    """All updates, in a table where it fits, and the versions that undo can go back to."""
    from onea.model.storage.card import history_row

    heads = ("version", "date", "what", "classes", "images", "known", "held-out\naccuracy", "seconds")
    rows = map(history_row, updates)
    lines = [[version, date[:10], *rest, right, seconds] for version, date, *rest, right, _, seconds in rows]
    table = Table.from_texts("", heads, lines, left=3)
    drawn = terminal(table)
    if _fits(console, drawn):
        console.print(drawn)
    else:
        for version, date, what, *cells in lines:
            *counts, right, seconds = (
                f"{head} {cell}".replace("\n", " ") if cell else "" for head, cell in zip(heads[3:], cells, strict=True)
            )
            counted = ", ".join(filter(None, (*counts, seconds)))
            _print_block(console, shown(f"{version}  {date}  {what}"), [counted, right])
    measured = [update for update in updates if update.get("overall_accuracy") is not None][-1:]
    for update in measured:
        then = "" if update is updates[-1] else f" of version {update['version']}"  # classes may have gone since
        console.print("".join(accuracy_lines(update, of_update=False)) + then, highlight=False)
    earlier = ", ".join(map(str, kept[:-1])) or "none"
    console.print(f"present version {kept[-1]}; undo can go back to: {earlier}", highlight=False)


def _fits(console: Console, table: TerminalTable) -> bool:
    """Whether a table needs no broken cell."""
    unlimited = console.options.update(width=_UNLIMITED)
    return Measurement.get(console, unlimited, table).maximum <= console.width


def _print_block(console: Console, first: Text, lines: Sequence[str]) -> None:
    """A line and what belongs to it, indented; empty ones do not count."""
    console.print(first)
    for line in filter(None, lines):
        console.print(Padding(shown(line), (0, 0, 0, 3)))


def print_quality(found: Quality) -> None:
    """What a file in eight bits loses on labelled photos, and what they can promise where they are few."""
    from onea.model.evaluation.metrics import RECOMMENDED_PHOTOS

    before, after = (100 * accuracy for accuracy in found.accuracy)
    photos = plural(found.photos, "photo", "photos")
    same = f"{100 * found.agreement:.1f} % of the answers the same"
    print(f"{photos}: {after:.1f} % correct, {before:.1f} % in fp32; {same}")
    if found.photos < RECOMMENDED_PHOTOS:
        loss, agreement = (100 * bound for bound in found.confidence_bounds)
        print(
            f"{photos} can promise (95 % confidence) at most {max(0.0, loss):.1f} points lost and {agreement:.1f} % of "
            f"the answers the same; {RECOMMENDED_PHOTOS:,} or more tell better"
        )
