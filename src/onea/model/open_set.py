# SPDX-License-Identifier: Apache-2.0
"""How well a model tells what it was taught from all else: the measures, at its own threshold and at any."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onea import openset


@dataclass(frozen=True)
class OpenSet:
    """How well a model tells images of classes that it knows from images of nothing that it was taught.

    Attributes:
        known: familiarity of each image of a known class.
        nearest: whether the most probable class of each of them is its own.
        unknown: familiarity of each image of nothing that was taught.
        threshold: the familiarity below which the model answers ``unknown``; minus infinity where it never does.
    """

    known: Tensor
    nearest: Tensor
    unknown: Tensor
    threshold: float

    @property
    def answers_unknown(self) -> bool:
        """Whether the model answers ``unknown`` at all."""
        return self.threshold > -math.inf

    @property
    def auroc(self) -> float:
        """Probability that a known image looks more familiar than an unknown one."""
        return openset.auroc(self.known, self.unknown)

    @property
    def false_positive_rate(self) -> float:
        """Share of unknown images that look familiar where 95 % of the known ones do."""
        return openset.false_positive_rate(self.known, self.unknown)

    @property
    def caught(self) -> float:
        """Share of unknown images that the model answers ``unknown``."""
        return openset.share_below(self.unknown, self.threshold)

    @property
    def false_alarms(self) -> float:
        """Share of known images that the model answers ``unknown``."""
        return openset.share_below(self.known, self.threshold)

    @property
    def correct(self) -> float:
        """Share of known images that the model answers with their own class: its accuracy."""
        return float((self.nearest & (self.known >= self.threshold)).double().mean())

    def as_json(self) -> dict[str, Any]:
        """The measures by name; those at the model's threshold are null where it has none."""
        own = self.answers_unknown
        return {
            "known_images": len(self.known),
            "unknown_images": len(self.unknown),
            "auroc": self.auroc,
            "fpr95": self.false_positive_rate,
            "oscr": self.curve.area,
            "caught": self.caught if own else None,
            "false_alarms": self.false_alarms if own else None,
        }

    @property
    def curve(self) -> openset.OpenSetCurve:
        """Known images answered with their class against unknown ones taken for known, as the threshold moves."""
        return openset.open_set_curve(self.known, self.nearest, self.unknown)
