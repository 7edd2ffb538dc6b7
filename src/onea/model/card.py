# SPDX-License-Identifier: Apache-2.0
"""The model card: what a model knows and how it came to know it, in Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from onea.classifiers.familiarity import WEIGHTED, fitted_weights
from onea.metrics import wilson_interval
from onea.model.layout import PICTURE
from onea.model.sentences import held_out_share
from onea.model.state import State, Update
from onea.report import style
from onea.text import count, printable
from onea.vit.licences import about

_FRONT = """---
library_name: onea
pipeline_tag: image-classification
tags:
- class-incremental-learning
- one-a
---
"""
_MOST_BARS = 60


def card(state: State, name: str) -> str:
    """The model card in Markdown."""
    name = printable(name)
    title = name.removesuffix(".onea") or "model"
    learned = [update for update in state.updates if update["kind"] == "learn"]
    images = sum(update["images"] - update.get("seen", 0) for update in learned)
    behind = state.background_images
    background = f" and with {count(behind, 'image', 'images')} of none of them" if behind else ""
    adapted = "one adapter" if state.adapter else "statistics of features, without an adapter"
    lines = [
        _FRONT,
        f"# {title}",
        "",
        f"Knows {len(state.classes):,} classes, taught with {images:,} images in {len(learned):,} updates "
        f"(version {state.version}){background}, without keeping any image: {adapted} on the frozen "
        f"`{printable(state.backbone['name'])}` (sha256 `{printable(state.backbone['sha256'][:16])}…`).",
        "",
        *_licence(state),
        "```python",
        "import onea",
        "",
        f'model = onea.load("{name}")',
        'model.predict(["photo.jpg"])',
        "```",
        "",
        "## History",
        "",
        f"![Classes and held-out accuracy after each update]({PICTURE})",
        "",
        *history_table(state.updates),
        "",
        "Held-out accuracy: of images of that update kept out of training, answered among all classes known by then; "
        "in brackets where it lies for all such photos, 19 times out of 20. Overall: of held-out images of all "
        "updates and classes, answered by that version. Images that look alike were kept out together, to stand for "
        "photos of another day. A class that was forgotten is no longer answered; what the adapter learned from its "
        "images stays in it.",
        "",
        *_unknown(state),
        "## Classes",
        "",
        ", ".join(_escaped(name) for name in state.classes) + ".",
        "",
    ]
    return "\n".join(lines)


def _licence(state: State) -> list[str]:
    """Under which licence the network's weights are, where that is known."""
    licence = state.backbone.get("licence")
    return [f"The network is not part of the model. {about(printable(licence))}", ""] if licence else []


def _unknown(state: State) -> list[str]:
    """How known images are told from others, where it was measured."""
    if len(state.familiar) or not len(state.margins):
        return []
    if len(state.classes) == 1:
        return ["## Unknown images", "", "Told by their distance to the only class.", ""]
    weights = fitted_weights(state.margins, state.hidden).tolist()
    told = ", ".join(f"{name} {weight:.2f}" for name, weight in zip(WEIGHTED, weights, strict=True))
    return [
        "## Unknown images",
        "",
        f"Told by a weighted sum of signals ({told}), fitted to "
        f"{count(len(state.margins), 'image', 'images')} of known classes and "
        f"{count(len(state.hidden), 'image', 'images')} of classes that were left out for it.",
        "",
    ]


def history_table(updates: Sequence[Update]) -> list[str]:
    """The history as lines of a Markdown table."""
    heads = "| version | date | what | classes | images | known | held-out accuracy | overall | seconds |"
    lines = [heads, "|" + "---|" * 9]
    return lines + ["| " + " | ".join(_escaped(cell) for cell in history_row(update)) + " |" for update in updates]


def history_row(update: Update) -> tuple[str, ...]:
    """One update as cells: version, date, what, classes, images, known, held-out accuracy, overall, seconds."""
    version, date = str(update["version"]), update["date"][:16].replace("T", " ")
    if update["kind"] == "background":
        cells = (version, date, f"background: {update['name']}", "", f"{update['images']:,}", str(update["known"]))
        return (*cells, "", "", f"{update['seconds']:.1f}")
    if update["kind"] != "learn":
        what = (
            f"forgot {', '.join(update['classes'])}"
            if update["kind"] == "forget"
            else "renamed {} to {}".format(*update["classes"])
        )
        return version, date, what, "", "", str(update["known"]), "", "", ""
    again = len(update["classes"]) - update["new_classes"]
    classes = f"+{update['new_classes']}" + (f", {again} again" if again else "")
    cells = (version, date, update["name"], classes, f"{update['images']:,}", str(update["known"]))
    return (*cells, held_out_share(update), held_out_share(update, "overall"), f"{update['seconds']:.1f}")


def history_picture(state: State) -> bytes:
    """Two panels over the updates, as PNG: classes that arrived and classes known; held-out images that are right."""
    updates = state.updates[-_MOST_BARS:]
    steps = range(len(updates))
    with style.themed():
        figure = style.blank(7.4, 4.2)
        figure.set_layout_engine(None)  # it would draw everything twice, at every update
        figure.subplots_adjust(left=0.1, right=0.98, top=0.97, bottom=0.115, hspace=0.13)
        above, below = figure.subplots(2, 1, sharex=True)
        above.bar(steps, [update.get("new_classes", 0) for update in updates], color=style.PALETTE[0], label="new")
        above.plot(steps, [update["known"] for update in updates], color=style.PALETTE[1], marker="o", label="known")
        above.set_ylabel("classes")
        above.legend(loc="upper left")
        for name, images, shift, label in (
            ("held_out", "held_out", -0.12, "of the update"),
            ("overall", "overall_images", 0.12, "of all classes"),
        ):
            colour = style.PALETTE[2 if name == "held_out" else 1]
            # Dots with their intervals: of few photos, a line between two of them says nothing.
            found = [
                (step + shift, update[f"{name}_accuracy"], update[images])
                for step, update in zip(steps, updates, strict=True)
                if update.get(f"{name}_accuracy") is not None
            ]
            for place, accuracy, n in found:
                low, high = wilson_interval(round(accuracy * n), n)
                below.plot([place, place], [100 * low, 100 * high], color=colour, linewidth=1.4)
            if not found:
                continue
            points = [place for place, _, _ in found], [100 * accuracy for _, accuracy, _ in found]
            below.plot(*points, color=colour, marker="o", linestyle="", label=label)
        if below.get_legend_handles_labels()[0]:
            below.legend(loc="lower left", ncols=2)
        below.set_ylim(0, 104)
        below.set_ylabel("held-out images right, %")
        below.set_xlabel("version")
        shown = [step for step in steps if len(updates) <= 20 or step % 5 == 0]
        below.set_xticks(shown, [str(updates[step]["version"]) for step in shown])
        below.set_xlim(-0.5, max(len(updates), 4) - 0.5)  # a single bar need not fill the picture
        above.yaxis.get_major_locator().set_params(integer=True)
        for axes in (above, below):
            axes.grid(axis="y")
        return _png(figure)


def _png(figure: Any) -> bytes:
    content = BytesIO()
    figure.savefig(content, format="png", dpi=style.DPI)
    return content.getvalue()


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = printable(text)
    for mark in "\\`*_[]<>|#":
        text = text.replace(mark, "\\" + mark)
    return text
