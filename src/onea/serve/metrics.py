"""Counters of the service as Prometheus reads them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping

Labels = tuple[tuple[str, str], ...]
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts and distributions; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._help: dict[str, str] = {}
        self._counts: dict[str, dict[Labels, float]] = {}
        self._spreads: dict[str, dict[Labels, _Spread]] = {}

    def count(self, name: str, help: str, by: float = 1, **labels: str) -> None:
        """Add to a counter."""
        key = tuple(labels.items())
        with self._lock:
            self._help.setdefault(name, help)
            counts = self._counts.setdefault(name, {})
            counts[key] = counts.get(key, 0) + by

    def observe(self, name: str, help: str, value: float, bounds: Iterable[float], **labels: str) -> None:
        """Add to a distribution."""
        key = tuple(labels.items())
        with self._lock:
            self._help.setdefault(name, help)
            self._spreads.setdefault(name, {}).setdefault(key, _Spread(tuple(bounds))).add(value)

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Everything in the text format of Prometheus, with these present values: name to help and value.

        >>> metrics = Metrics()
        >>> metrics.count("images_total", "Images answered.", 3)
        >>> print(metrics.text({"version": ("Of the model.", 2)}), end="")
        # HELP version Of the model.
        # TYPE version gauge
        version 2
        # HELP images_total Images answered.
        # TYPE images_total counter
        images_total 3
        """
        lines = []
        for name, (help, value) in gauges.items():
            lines += [f"# HELP {name} {help}", f"# TYPE {name} gauge", f"{name} {value:g}"]
        with self._lock:
            for name, counts in self._counts.items():
                lines += [f"# HELP {name} {self._help[name]}", f"# TYPE {name} counter"]
                lines += [f"{name}{_written(labels)} {value:.12g}" for labels, value in counts.items()]
            for name, spreads in self._spreads.items():
                lines += [f"# HELP {name} {self._help[name]}", f"# TYPE {name} histogram"]
                lines += [line for labels, spread in spreads.items() for line in spread.lines(name, labels)]
        return "\n".join(lines) + "\n"


class _Spread:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: Labels) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f"{name}_bucket{_written((*labels, ('le', bound)))} {total}")
        return [*lines, f"{name}_sum{_written(labels)} {self._sum:.9g}", f"{name}_count{_written(labels)} {total}"]


def _written(labels: Labels) -> str:
    """Labels in braces; their values are names of ours, which need no escaping."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}" if labels else ""
