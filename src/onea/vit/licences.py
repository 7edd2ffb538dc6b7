# SPDX-License-Identifier: Apache-2.0
"""What the licences of pretrained weights ask of those who pass on what is made with them."""

from __future__ import annotations

_FREE = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0")
_TERMS = {
    "dinov3-license": (
        "DINOv3's licence binds whoever passes on its weights or what is made with them: hand on the licence itself, "
        "name DINOv3, and keep to the uses it allows (ai.meta.com/resources/models-and-libraries/dinov3-license)."
    ),
    "cc-by-nc-4.0": "They are not for commercial use (creativecommons.org/licenses/by-nc/4.0).",
    "fair-noncommercial-research-license": "They are for research, and not for commercial use.",
}


def terms(licence: str) -> str:
    """What to mind before weights, or what is made with them, are passed on; empty where naming the licence is enough.

    >>> terms("apache-2.0")
    ''
    >>> terms("apple-ascl")
    'Read its terms before you pass on what is made with them.'
    """
    if licence in _FREE:
        return ""
    if not licence or licence == "unknown":
        return "Ask those who made them before you pass on what is made with them."
    return _TERMS.get(licence, "Read its terms before you pass on what is made with them.")


def about(licence: str) -> str:
    """A licence and its terms in a sentence or two about weights.

    >>> about("mit")
    'Its weights are under mit.'
    """
    known = licence and licence != "unknown"
    named = f"Its weights are under {licence}." if known else "The licence of its weights is not known."
    return f"{named} {terms(licence)}".strip()
