# SPDX-License-Identifier: Apache-2.0
"""The copies of photos that a model stores, and the classes that wait for a training, as lines for people."""

from __future__ import annotations

from collections.abc import Collection

from onea.data.small_copies import max_bytes
from onea.learner.memory import Memory, Waiting
from onea.model.exemplars import count_bytes, count_images
from onea.model.reports import MIN_ADVISED
from onea.model.state import State
from onea.text import plural

_NO_MEMORY = (
    "No photo is stored. With --memory 10, ten small copies of each class are ({kilobytes} KB a class), and many small "
    "updates become nearly as accurate as one large update."
)


def waiting_classes(state: State, names: Collection[str] = ()) -> Waiting:
    """The classes that no adapter was trained on, of those with stored copies and those of an update."""
    untrained = sum(name not in state.adapter_images for name in {*names, *state.exemplars})
    return Waiting(untrained, len({*state.classes, *names}))


def stored_copies(state: State) -> str:
    """A sentence about the photos that the model stores."""
    if not state.exemplars:
        return "No photo is stored."
    copies = plural(count_images(state.exemplars), "small copy", "small copies")
    classes, size = plural(len(state.exemplars), "class", "classes"), count_bytes(state.exemplars)
    shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{-(-size // 1000)} KB"
    return f"The model stores {copies} of photos of {classes} ({shown})."


def memory_lines(state: State, memory: Memory) -> list[str]:
    """Lines about stored copies, and the classes that wait for a training; empty if the preset never trains."""
    if not state.options["train"] or (memory == 0 and not state.exemplars):
        return []
    waiting = waiting_classes(state)
    trigger = float(state.options["trigger"])
    lines = [stored_copies(state)]
    if waiting.classes:
        due = f"at {waiting.due_at(trigger):,}"
        if waiting.is_due(trigger):
            due = "now: at the next update, or with `onea refresh`"
        known = plural(waiting.known, "class", "classes")
        lines.append(f"Classes that wait for training: {waiting.classes:,} of {known}; it is due {due}.")
    return lines


def memory_hint(state: State) -> list[str]:
    """What stored copies would bring, for a new model that stores none; nothing if its preset never trains."""
    if not state.options["train"] or state.exemplars:
        return []
    return [_NO_MEMORY.format(kilobytes=round(MIN_ADVISED * max_bytes(state.preprocess["side"]) / 1000))]
