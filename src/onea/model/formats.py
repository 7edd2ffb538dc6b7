# SPDX-License-Identifier: Apache-2.0
"""What older model folders say, in the words of today's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onea.model.fingerprints import NO_PRINTS
from onea.model.state import NO_HELD, NO_ROWS, NO_SIGNALS, Update, merged_under, merged_with
from onea.tensors import Tensors

FORMAT = 4
EARLIER_SIGNALS = (3, 6)  # how many there were in earlier folders of format 3
_READOUTS = {"cosine": "ncm", "whitened": "uncentred"}  # as formats 1 and 2 called them
_PRESETS = {"auto": "thorough", "small": "thorough", "quick": "auto"}  # as formats 1 to 3 called them


def modern_readout(name: str, number: int) -> str:
    """The present name of a readout in a file of this format."""
    return _READOUTS.get(name, name) if number < 3 else name


def was_called(preset: str, name: object) -> bool:
    """Whether earlier folders had this name for a preset that has another now.

    >>> was_called("thorough", "auto"), was_called("auto", "auto")
    (True, False)
    """
    return (name, preset) in _PRESETS.items()


def modern_params(written: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Parameters in a file of this format as today's; before 3 an image was looked at once."""
    if number >= FORMAT:
        return dict(written)
    preset = written.get("preset", "auto")
    found = {**written, "preset": _PRESETS.get(str(preset), preset)}
    if number >= 3:
        return found
    return {"views": 1, **found, "readout": modern_readout(str(written.get("readout", "whitened")), number)}


def modern(written: Mapping[str, Any]) -> dict[str, Any]:
    """``state.json`` of any format as that of ``FORMAT``.

    1 noted how many classes and images are inside the adapter, and a class as often as it was taught. Its history tells
    which they are.
    """
    merged = _merged(written["updates"]) if written["format"] < 2 else dict(written["merged"])
    if not all(isinstance(images, int) and images > 0 for images in merged.values()):
        raise ValueError("the images of a class are no number")
    return {"numbers": False, **written, "merged": merged}


def modern_tensors(written: Tensors) -> Tensors:
    """The tensors of a state as today's; signals that mean something else now are measured anew by the next update."""
    found = {"hidden": NO_SIGNALS, "hidden_rows": NO_ROWS, "background": written["prototypes"][:0], **written}
    found = {"fingerprints": NO_PRINTS, "fingerprint_rows": NO_ROWS, "held": NO_HELD, "held_rows": NO_ROWS, **found}
    found = {"held_prints": NO_PRINTS, **found}
    if found["margins"].dim() > 1 and found["margins"].shape[1] in EARLIER_SIGNALS:
        found |= {"margins": NO_SIGNALS, "margin_rows": NO_ROWS, "hidden": NO_SIGNALS, "hidden_rows": NO_ROWS}
    return found


def _merged(updates: Sequence[Update]) -> dict[str, int]:
    """The images of each class inside the adapter; an update's count as if its classes had equally many."""
    merged: dict[str, int] = {}
    for update in updates:
        names = update["classes"]
        if update["kind"] == "rename":
            merged = merged_under(merged, *names)
        elif update["kind"] == "learn" and update["trained"] and names:
            each, rest = divmod(update["images"] - update["held_out"], len(names))
            merged = merged_with(merged, {name: each + (number < rest) for number, name in enumerate(names)})
    return merged
