# SPDX-License-Identifier: Apache-2.0
"""The model card in Markdown: the classes of a model and its history."""

from __future__ import annotations

import json
from collections.abc import Sequence

from onea.classifiers.familiarity import WEIGHTED_SIGNALS, fit_weights
from onea.model.learning.memory_report import stored_copies
from onea.model.reports import format_accuracy
from onea.model.state import State, Update
from onea.model.storage.history_picture import history_picture
from onea.model.storage.layout import CARD, PICTURE
from onea.text import plural, printable
from onea.vit.network_config import licence_notice

_CARD = """---
library_name: onea
pipeline_tag: image-classification
tags:
- class-incremental-learning
- one-a
---

# {title}

{classes}, taught with {images} in {updates} (version {version}){background}. {stored} The model is {kind} \
on the frozen network `{network}` (sha256 `{digest}…`).
{licence}
```python
import onea

model = onea.load({path})
model.predict(["photo.jpg"])
```

## History

![Classes and held-out accuracy after each update]({picture})

{history}

Held-out accuracy: on images of that update that were held out of training, among all classes at that time and with \
`unknown` off; in brackets the 95 % confidence interval. Overall: on held-out images of all updates and classes, with \
that version. Similar images were held out together, to stand for photos of another day. A forgotten class is no \
longer predicted; what the adapter learned from its images stays in it.
{unknown}
## Classes

{names}.
"""
_UNKNOWN = """
## Unknown images

Detected by a weighted sum of signals ({weights}), fitted to {known} of known and {left_out} of left-out classes.
"""
_UNKNOWN_OF_ONE_CLASS = """
## Unknown images

Detected by their distance to the only class.
"""


def card_files(state: State, name: str) -> dict[str, bytes]:
    """The model card and its picture, by the names of their files."""
    return {PICTURE: history_picture(state.updates), CARD: card(state, name).encode()}


def card(state: State, name: str) -> str:
    """The model card in Markdown."""
    licence, background = state.backbone.get("licence"), state.background_images
    return _CARD.format(
        title=printable(name).removesuffix(".onea") or "model",
        classes=plural(len(state.classes), "class", "classes"),
        images=plural(sum(state.images), "image", "images"),
        updates=plural(len(state.updates), "update", "updates"),
        version=state.version,
        background=f" and with {plural(background, 'image', 'images')} of none of them" if background else "",
        stored=stored_copies(state),
        kind="one adapter" if state.adapter else "statistics of features, without an adapter,",
        network=printable(state.backbone["name"]),
        digest=printable(state.backbone["sha256"][:16]),
        licence=f"\nThe network is not part of the model. {licence_notice(printable(licence))}\n" if licence else "",
        path=printable(json.dumps(name, ensure_ascii=False)),
        picture=PICTURE,
        history="\n".join(history_table(state.updates)),
        unknown=_unknown(state),
        names=", ".join(map(_escaped, state.classes)) or "None",
    )


def _unknown(state: State) -> str:
    """The section on the detection of unknown images; empty if that is not calibrated."""
    if not len(state.held_out_signals):
        return ""
    if len(state.classes) == 1:
        return _UNKNOWN_OF_ONE_CLASS
    weights = fit_weights(state.held_out_signals, state.left_out_signals).tolist()
    return _UNKNOWN.format(
        weights=", ".join(f"{name} {weight:.2f}" for name, weight in zip(WEIGHTED_SIGNALS, weights, strict=True)),
        known=plural(len(state.held_out_signals), "image", "images"),
        left_out=plural(len(state.left_out_signals), "image", "images"),
    )


def history_table(updates: Sequence[Update]) -> list[str]:
    """The history as lines of a Markdown table."""
    header = "| version | date | update | classes | images | known | held-out accuracy | overall | seconds |"
    rows = ("| " + " | ".join(map(_escaped, history_row(update))) + " |" for update in updates)
    return [header, "|" + "---|" * 9, *rows]


def history_row(update: Update) -> tuple[str, ...]:
    """The cells of one update, in the columns of ``history_table``."""
    version, date, known = str(update["version"]), update["date"][:16].replace("T", " "), str(update["known"])
    names = update["classes"]
    if update["kind"] == "forget":
        forgotten = ", ".join(names) or f"{plural(update.get('everywhere', 0), 'class', 'classes')} everywhere"
        return version, date, f"forgot {forgotten}", "", "", known, "", "", ""
    if update["kind"] == "rename":
        renamed = f"merged {' into '.join(names)}" if update.get("merged") else f"renamed {' to '.join(names)}"
        return version, date, renamed, "", "", known, "", "", ""
    images, seconds = f"{update['images']:,}", f"{update['seconds']:.1f}"
    if update["kind"] == "background":
        return version, date, f"background: {update['name']}", "", images, known, "", "", seconds
    if update["kind"] == "refresh":
        photos = f"{update['images'] + update['replayed']:,}"
        return version, date, update["name"], "", photos, known, "", format_accuracy(update, "overall"), seconds
    again = len(names) - update["new_classes"]
    classes = f"+{update['new_classes']}" + (f", {again} again" if again else "")
    accuracies = format_accuracy(update), format_accuracy(update, "overall")
    return version, date, update["name"], classes, images, known, *accuracies, seconds


def _escaped(text: str) -> str:
    """Text with Markdown's special characters escaped."""
    text = printable(text)
    for mark in "\\`*_[]<>|#":
        text = text.replace(mark, "\\" + mark)
    return text
