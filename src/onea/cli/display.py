# SPDX-License-Identifier: Apache-2.0
"""What the commands about a model print: updates, predictions, evaluations, checks and the history."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as TerminalTable
from rich.text import Text

from onea.data.file_checks import group_by_reason
from onea.model.evaluation.check import ADVICE_BY_URGENCY, SHARES
from onea.model.learning.memory_report import memory_hint, memory_lines
from onea.model.reports import accuracy_lines, report_lines, training_advice
from onea.presentation.tables import MISSING, Table, terminal, terminal_style
from onea.text import plural, printable
from onea.vit.backbones import short_digest

if TYPE_CHECKING:
    from onea.model.answers import Answer
    from onea.model.estimator import OneA
    from onea.model.evaluation.check import Check, ClassCheck
    from onea.model.evaluation.confusions import Mistakes
    from onea.model.evaluation.evaluation import Evaluation, Mistake
    from onea.model.evaluation.metrics import OpenSet, Quality
    from onea.model.learning.refresh import RefreshReport

_MAX_NAMED = 5  # classes on one line
_MIN_PATH = 20  # characters of a path that are always shown
_GAPS = 6  # between four columns
_UNLIMITED = 100_000  # columns of a terminal


def shown(text: str, style: str = "") -> Text:
    """Untrusted text, such as the name of a class, without markup and control characters."""
    return Text(printable(text), style)


def print_line(console: Console, line: str) -> None:
    """Print untrusted text on one line, however long it is."""
    console.print(shown(line), soft_wrap=True)


def print_skipped(skipped: Sequence[str]) -> None:
    """Print to stderr which images were left out, and why."""
    for line in group_by_reason(skipped):
        print(printable(f"onea: left out {line}"), file=sys.stderr)


def class_count(classes: int) -> str:
    """A number of classes with its noun."""
    return plural(classes, "class", "classes")


# onea teach


def print_learned(console: Console, model: OneA, path: Path, seconds: float) -> None:
    """Print the result of an update; ``seconds`` include loading and saving."""
    update = model.history[-1]
    if update["kind"] == "background":
        learned = plural(update["images"], "background image", "background images")
    else:
        learned = _learned_classes(update)
    skipped = plural(update["skipped"], "unreadable image", "unreadable images")
    lines = [f"learned {learned} in {seconds:.1f} s" + (f"; {skipped} left out" if update["skipped"] else "")]
    lines += [f"left out {line}" for line in group_by_reason(model.last_report.skipped)]
    lines += report_lines(update, model.last_report)
    state = model.snapshot().state
    lines += training_advice(state) + memory_lines(state, model.memory)
    if len(state.updates) == 1:
        lines += memory_hint(state)
    lines.append(f"{path} now has {class_count(update['known'])} (version {model.version})")
    for line in lines:
        print_line(console, line)


# onea refresh


def print_refreshed(console: Console, model: OneA, report: RefreshReport, path: Path, missing: Sequence[Path]) -> None:
    """Print the result of a refresh: what was trained on, and the accuracy before and after."""
    from onea.model.learning.refresh import refresh_lines

    for folder in missing:
        print_line(console, f"{folder} no longer exists and was left out")
    for line in group_by_reason(model.last_report.skipped):
        print_line(console, f"left out {line}")
    for line in [*refresh_lines(report), f"{path} is at version {model.version}"]:
        print_line(console, line)


def _learned_classes(update: dict[str, Any]) -> str:
    again = len(update["classes"]) - update["new_classes"]
    new = plural(update["new_classes"], "new class", "new classes") if update["new_classes"] else ""
    known = plural(again, "known class", "known classes") + " again" if again else ""
    return f"{' and '.join(filter(None, (new, known)))} from {plural(update['images'], 'image', 'images')}"


# onea info, classes, history


def print_info(console: Console, path: Path, facts: Mapping[str, Any]) -> None:
    """Print the size, the network and the settings of a model, and advice."""
    images, background = plural(facts["images"], "image", "images"), facts["background_images"]
    if background:
        images += f" and {plural(background, 'background image', 'background images')}"
    network, rate = facts["backbone"], facts["unknown"]
    blocks = f"the first {plural(network['depth'], 'block', 'blocks')} of " if "depth" in network else ""
    unknown = f"{100 * rate:g} % of images of known classes" if rate else "never"
    lines = [
        f"{path}: {class_count(facts['classes'])} from {images}, in "
        f"{plural(facts['updates'], 'update', 'updates')} (version {facts['version']})",
        f"network: {blocks}{network['name']}, {network['input']} x {network['input']} pixels, sha256 "
        f"{short_digest(network['sha256'])}",
        f"preset: {facts['preset']}; classifier: {facts['readout']}; predicted unknown: {unknown}",
        *facts["remarks"],
    ]
    if "verified" in facts:
        lines.append(f"verified versions: {', '.join(map(str, facts['verified']))}")
    for line in lines:
        print_line(console, line)


def print_classes(console: Console, classes: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each class."""
    lines = [(info["name"], f"{info['images']:,}") for info in classes]
    console.print(terminal(Table.from_texts("", ("class", "images"), lines)))


def print_history(console: Console, updates: Sequence[dict[str, Any]], kept: Sequence[int]) -> None:
    """Print all updates, in a table if it fits, and the versions that undo can restore."""
    from onea.model.storage.card import history_row

    heads = ("version", "date", "update", "classes", "images", "known", "held-out\naccuracy", "seconds")
    rows = map(history_row, updates)
    lines = [[version, date[:10], *rest, accuracy, seconds] for version, date, *rest, accuracy, _, seconds in rows]
    table = terminal(Table.from_texts("", heads, lines, text_columns=3))
    if _fits(console, table):
        console.print(table)
    else:
        for version, date, name, *cells in lines:
            *counts, accuracy, seconds = (
                f"{head} {cell}".replace("\n", " ") if cell else "" for head, cell in zip(heads[3:], cells, strict=True)
            )
            counted = ", ".join(filter(None, (*counts, seconds)))
            _print_block(console, shown(f"{version}  {date}  {name}"), [counted, accuracy])
    measured = [update for update in updates if update.get("overall_accuracy") is not None][-1:]
    for update in measured:
        version = "" if update is updates[-1] else f" of version {update['version']}"  # classes may have been removed
        console.print("".join(accuracy_lines(update, of_update=False)) + version, highlight=False)
    earlier = ", ".join(map(str, kept[:-1])) or "none"
    console.print(f"current version {kept[-1]}; undo can restore: {earlier}", highlight=False)


# onea predict


def print_answers(console: Console, answers: Sequence[Answer]) -> None:
    """Print the verdict on each image, and the probabilities of the best classes and of none of them.

    Prints a table with a row for each image or, if the names are too long for it, several lines for each image.
    """
    none = [f"{100 * answer.none:.1f} %" for answer in answers]
    likely = [[f"{name} {100 * chance:.1f} %" for name, chance in answer.top] for answer in answers]
    room = console.width - _GAPS - len("none of these") - max((len(str(answer)) for answer in answers), default=0)
    images = min(max((len(answer.image) for answer in answers), default=0), max(_MIN_PATH, console.width // 3))
    wide = all(len(", ".join(classes)) + images <= room for classes in likely)
    room += 0 if wide else len(" these")
    cells = [(", " if wide else "\n").join(classes) for classes in likely]  # one class per line rather than wrapped
    longest = max(_MIN_PATH, room - max((len(line) for cell in cells for line in cell.split("\n")), default=0))
    table = TerminalTable(**terminal_style())
    for heading in ("image", "answer", "none of these" if wide else "none of\nthese", "probabilities"):
        table.add_column(heading, no_wrap=True, justify="right" if heading.startswith("none") else "left")
    for answer, chance, cell in zip(answers, none, cells, strict=True):
        image = answer.image if len(answer.image) <= longest else f"…{answer.image[1 - longest :]}"
        table.add_row(shown(image), _verdict(answer), chance, Text("\n").join(map(shown, cell.split("\n"))))
    if _fits(console, table):
        console.print(table)
        return
    for answer, chance, classes in zip(answers, none, likely, strict=True):
        _print_block(console, shown(f"{answer.image}: ") + _verdict(answer), [f"none of these {chance}", *classes])


def _verdict(answer: Answer) -> Text:
    return shown(str(answer), {"answer": "bold", "unsure": "", "unknown": "dim"}[answer.verdict])


# onea evaluate


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Print every class, the worst first, the most frequent mistakes, and the accuracy."""
    lines = [
        (name, str(counts.images), f"{100 * counts.accuracy:.1f}", str(counts.wrong), str(counts.unknown))
        for name, counts in evaluation.worst_first()
    ]
    _print_table(console, "", ("class", "images", "correct %", "wrong", "unknown"), lines)
    if mistakes := [(name, predicted, str(images)) for name, predicted, images in evaluation.confusions()]:
        _print_table(console, "most frequent mistakes", ("class", "predicted", "images"), mistakes, text_columns=2)
    if untaught := [evaluation.by_class[name] for name in evaluation.untaught_classes]:
        images, unknown = sum(counts.images for counts in untaught), sum(counts.unknown for counts in untaught)
        names = ", ".join(evaluation.untaught_classes[:_MAX_NAMED]) + (", ..." if len(untaught) > _MAX_NAMED else "")
        line = f"untaught classes, not counted: {names}; {unknown:,} of {plural(images, 'image', 'images')}"
        console.print(shown(f"{line} predicted unknown"))
    console.print(str(evaluation), highlight=False)
    for remark in evaluation.remarks:
        print_line(console, remark)


def print_mistakes(console: Console, mistakes: Sequence[Mistake]) -> None:
    """Print a line for each misclassified image."""
    for mistake in mistakes:
        print_line(console, f"{mistake.image}: predicted {mistake.predicted} ({100 * mistake.probability:.0f} %)")
    if not mistakes:
        print_line(console, "no misclassified images")


def print_open_set(console: Console, measures: OpenSet) -> None:
    """Print how well images of known classes are distinguished from unknown ones, by familiarity."""
    has_threshold = measures.has_threshold
    lines = [
        ("AUROC: a known image is more familiar than an unknown one", measures.auroc),
        ("FPR95: unknown images as familiar as 95 % of the known ones", measures.false_positive_rate),
        ("OSCR: area under the open-set curve", measures.curve.area),
        ("unknown images predicted unknown", measures.unknown_rejected if has_threshold else None),
        ("known images predicted unknown", measures.known_rejected if has_threshold else None),
    ]
    cells = [(name, "no threshold" if share is None else f"{100 * share:.1f}") for name, share in lines]
    title = f"{plural(len(measures.known), 'known image', 'known images')} and {len(measures.unknown):,} unknown"
    _print_table(console, title, ("measure", "%"), cells)


# onea check


def print_check(console: Console, check: Check, most: int) -> None:
    """Print at most ``most`` rows of each table, and a summary."""
    urgent = [entry for entry in check.classes if entry.needs_attention]
    if urgent:
        _print_urgent(console, urgent[:most], check.measured)
        _print_rest(console, len(urgent) - most, "class", "classes")
    if check.suspects:
        suspects = [
            (suspect.given, Path(suspect.image).name, suspect.likelier, f"{suspect.ratio:.1f}")
            for suspect in check.suspects[:most]
        ]
        heads: tuple[str, ...] = ("label", "photo", "likely label", "suspicion")
        _print_table(
            console, "photos that may be mislabelled, the most suspicious first", heads, suspects, text_columns=3
        )
        _print_rest(console, len(check.suspects) - most, "photo", "photos")
    if check.pairs:
        pairs = [
            (pair.first, pair.second, "hardly distinguishable" if pair.alike else "", f"{100 * pair.overlap:.0f}")
            for pair in check.pairs[:most]
        ]
        _print_table(console, "classes that overlap", ("class", "and", "", "overlap %"), pairs, text_columns=3)
        _print_rest(console, len(check.pairs) - most, "pair", "pairs")
    _print_held_out_mistakes(console, check.mistakes, most)
    if check.duplicates:
        duplicates = [
            (
                duplicate.given,
                Path(duplicate.image).name,
                duplicate.other,
                Path(duplicate.other_image).name,
                "yes" if duplicate.identical else "nearly",
            )
            for duplicate in check.duplicates[:most]
        ]
        heads = ("label", "photo", "label", "photo", "identical")
        _print_table(console, "photos with two labels", heads, duplicates, text_columns=5)
        _print_rest(console, len(check.duplicates) - most, "pair", "pairs")
    advice = Counter(entry.advice for entry in check.classes)
    summary = ", ".join(f"{advice[kind]:,} {kind}" for kind in ADVICE_BY_URGENCY[::-1] if advice[kind])
    console.print(shown(f"{class_count(len(check.classes))}: {summary} (version {check.version})"))
    if not check.measured:
        print_line(console, "give a folder of photos to measure each class and to find mislabelled photos")


def _print_urgent(console: Console, classes: Sequence[ClassCheck], measured: bool) -> None:
    if measured:
        shares = "/".join(f"{100 * share:.0f}" for share in SHARES)
        curves = ("  ".join(f"{100 * share:.0f}" for share in entry.curve or ()) or MISSING for entry in classes)
        heads = ["class", "advice", "confused with", "photos", f"correct % with {shares} % of them"]
        lines = [
            [entry.name, entry.advice, entry.rival or "", f"{entry.photos:,}", curve]
            for entry, curve in zip(classes, curves, strict=True)
        ]
    else:
        heads = ["class", "advice", "most similar", "photos"]
        lines = [[entry.name, entry.advice, entry.rival or "", f"{entry.taught:,}"] for entry in classes]
    _print_table(console, "classes to improve, the most urgent first", heads, lines, text_columns=3)


def _print_held_out_mistakes(console: Console, mistakes: Mistakes, most: int) -> None:
    if mistakes.absorbing:
        absorbing = [
            (entry.name, f"{entry.mistakes:,}", f"{100 * entry.share:.0f}", ", ".join(entry.of))
            for entry in mistakes.absorbing[:most]
        ]
        heads: tuple[str, ...] = ("class", "mistakes", "of all %", "true classes")
        _print_table(console, "classes that many images are misclassified as", heads, absorbing)
    if mistakes.misclassified:
        often = [
            (entry.name, f"{entry.mistakes:,} of {entry.images:,}", entry.predicted)
            for entry in mistakes.misclassified[:most]
        ]
        _print_table(console, "classes that are often misclassified", ("class", "mistakes", "mostly as"), often)
        _print_rest(console, len(mistakes.misclassified) - most, "class", "classes")
    if mistakes.images:
        photos = plural(mistakes.images, "held-out photo", "held-out photos")
        print_line(console, f"{mistakes.mistakes:,} of {photos} misclassified")


def _print_rest(console: Console, number: int, singular: str, plural_form: str) -> None:
    if number > 0:
        print_line(console, f"and {plural(number, singular, plural_form)} more (--most, --json)")


# onea export


def print_quality(quality: Quality) -> None:
    """Print what an int8 file loses on labelled photos, with confidence bounds if they are few."""
    from onea.model.evaluation.metrics import RECOMMENDED_PHOTOS

    before, after = (100 * accuracy for accuracy in quality.accuracy)
    photos, agreement = plural(quality.photos, "photo", "photos"), 100 * quality.agreement
    print(f"{photos}: {after:.1f} % correct, {before:.1f} % in fp32; {agreement:.1f} % of the predictions agree")
    if quality.photos < RECOMMENDED_PHOTOS:
        loss, agreement = (100 * bound for bound in quality.confidence_bounds)
        print(
            f"95 % confidence bounds from {photos}: at most {max(0.0, loss):.1f} points lost, at least {agreement:.1f} "
            f"% of the answers the same; {RECOMMENDED_PHOTOS:,} or more photos give narrower bounds"
        )


def _print_table(
    console: Console, title: str, heads: Sequence[str], lines: Sequence[Sequence[str]], text_columns: int = 1
) -> None:
    console.print(terminal(Table.from_texts(title, heads, lines, text_columns=text_columns)))


def _fits(console: Console, table: TerminalTable) -> bool:
    """Whether all cells fit on one line."""
    unlimited = console.options.update(width=_UNLIMITED)
    return Measurement.get(console, unlimited, table).maximum <= console.width


def _print_block(console: Console, first: Text, lines: Sequence[str]) -> None:
    """Print a line, and the others that are not empty indented below it."""
    console.print(first)
    for line in filter(None, lines):
        console.print(Padding(shown(line), (0, 0, 0, 3)))
