# SPDX-License-Identifier: Apache-2.0
"""The model card: what a model knows and how it came to know it, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence

from onea.classifiers.familiarity import WEIGHTED_SIGNALS, fit_weights
from onea.model.sentences import held_out_share
from onea.model.state import State, Update
from onea.model.storage.history_picture import history_picture
from onea.model.storage.layout import CARD, PICTURE
from onea.text import plural, printable
from onea.vit.network_config import licence_notice

_FRONT = """---
library_name: onea
pipeline_tag: image-classification
tags:
- class-incremental-learning
- one-a
---
"""


def card_files(state: State, name: str) -> dict[str, bytes]:
    """The model card and its picture, by the names of their files."""
    return {PICTURE: history_picture(state.updates), CARD: card(state, name).encode()}


def card(state: State, name: str) -> str:
    """The model card in Markdown."""
    title = printable(name).removesuffix(".onea") or "model"
    classes, behind = plural(len(state.classes), "class", "classes"), state.background_images
    images, updates = (
        plural(sum(state.images), "image", "images"),
        plural(len(state.updates), "update", "updates"),
    )
    background = f" and with {plural(behind, 'image', 'images')} of none of them" if behind else ""
    adapted = "one adapter" if state.adapter else "statistics of features, without an adapter"
    lines = [
        _FRONT,
        f"# {title}",
        "",
        f"Knows {classes}, taught with {images} in {updates} (version {state.version}){background}, without keeping "
        f"any image: {adapted} on the frozen "
        f"`{printable(state.backbone['name'])}` (sha256 `{printable(state.backbone['sha256'][:16])}…`).",
        "",
        *_licence(state),
        "```python",
        "import onea",
        "",
        f"model = onea.load({printable(json.dumps(name, ensure_ascii=False))})",
        'model.predict(["photo.jpg"])',
        "```",
        "",
        "## History",
        "",
        f"![Classes and held-out accuracy after each update]({PICTURE})",
        "",
        *history_table(state.updates),
        "",
        "Held-out accuracy: the share of images of that update kept out of training that are answered with their "
        "class, among all classes known by then and with `unknown` off; in brackets where it lies for all such photos, "
        "19 times out of 20. Overall: of held-out images of all updates and classes, answered by that version. Images "
        "that look alike were kept out together, to stand for photos of another day. A class that was forgotten is no "
        "longer answered; what the adapter learned from its images stays in it.",
        "",
        *_unknown(state),
        "## Classes",
        "",
        f"{', '.join(_escaped(name) for name in state.classes) or 'None'}.",
        "",
    ]
    return "\n".join(lines)


def _licence(state: State) -> list[str]:
    """Under which licence the network's weights are, where that is known."""
    licence = state.backbone.get("licence")
    return [f"The network is not part of the model. {licence_notice(printable(licence))}", ""] if licence else []


def _unknown(state: State) -> list[str]:
    """How known images are told from others, where it was measured."""
    if not len(state.margins):
        return []
    if len(state.classes) == 1:
        return ["## Unknown images", "", "Told by their distance to the only class.", ""]
    weights = fit_weights(state.margins, state.hidden).tolist()
    told = ", ".join(f"{name} {weight:.2f}" for name, weight in zip(WEIGHTED_SIGNALS, weights, strict=True))
    return [
        "## Unknown images",
        "",
        f"Told by a weighted sum of signals ({told}), fitted to "
        f"{plural(len(state.margins), 'image', 'images')} of known classes and "
        f"{plural(len(state.hidden), 'image', 'images')} of classes that were left out for it.",
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
        forgot = ", ".join(update["classes"]) or f"{plural(update.get('everywhere', 0), 'class', 'classes')} everywhere"
        what = (
            f"forgot {forgot}"
            if update["kind"] == "forget"
            else f"{'joined' if update.get('joined') else 'renamed'} {' to '.join(update['classes'])}"
        )
        return version, date, what, "", "", str(update["known"]), "", "", ""
    again = len(update["classes"]) - update["new_classes"]
    classes = f"+{update['new_classes']}" + (f", {again} again" if again else "")
    cells = (version, date, update["name"], classes, f"{update['images']:,}", str(update["known"]))
    return (*cells, held_out_share(update), held_out_share(update, "overall"), f"{update['seconds']:.1f}")


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = printable(text)
    for mark in "\\`*_[]<>|#":
        text = text.replace(mark, "\\" + mark)
    return text
