# SPDX-License-Identifier: Apache-2.0
"""Synthetic records, and readers of the figures and pages made from them."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from typing import Any

import numpy as np
import torch

from onea.files import CHECKSUM
from onea.merging.analysis import analyse
from onea.merging.one_a import OneAMerge
from onea.merging.operator import Sizes
from onea.metrics import summarise
from onea.research.record import FORMAT

Record = dict[str, Any]
NINE = (4, 11, 2, 9, 1, 6, 5, 8, 4)
NAMES = ("suits", "greek", "dice", "digits", "yin-yang", "chess", "weather", "georgian", "music")
VOID = {"meta", "img", "source", "br"}
VOLATILE = ("timings", "memory", "dates", "environment", "stamps", CHECKSUM)  # differ between equal runs


def comparable_fields(record: Record) -> Record:
    """The fields of a record that are equal, bit for bit, for two runs with the same configuration."""
    return {key: copy.deepcopy(value) for key, value in record.items() if key not in VOLATILE}


def record(
    method: str = "one-a",
    sizes: tuple[int, ...] = NINE,
    names: tuple[str, ...] = NAMES,
    done: int | None = None,
    share: float = 0.8,
    seed: int = 1,
    **extra: Any,
) -> Record:
    """A record as a run would write it, with ten test images per class, of which about ``share`` are correct."""
    steps, total = done or len(sizes), [10] * sum(sizes)
    rng = np.random.RandomState(seed)
    correct = [rng.binomial(10, share, sum(sizes[: k + 1])).tolist() for k in range(steps)]
    tasks = [
        {"name": names[t] if names else f"task {t + 1}", "classes": sizes[t], "images": 12 * sizes[t]}
        for t in range(steps)
    ]
    return {
        "format": FORMAT,
        "status": "finished" if steps == len(sizes) else "running",
        "config": {"method": method, "data": "toy", "seed": seed, "gamma": 0.01, "tasks": None, "options": {}},
        "data": {
            "name": "toy",
            "fingerprint": "f" * 64,
            "classes": [f"class {c}" for c in range(sum(sizes))],
            "train_images": 12 * sum(sizes),
            "test_images": sum(total),
            "skipped": [],
        },
        "backbone": {"name": "tiny", "sha256": "ab" * 32, "input": 84},
        "stream": {"class_order": list(range(sum(sizes))), "sizes": list(sizes), "names": list(names), "samples": None},
        "options": {"rank": 64},
        "runtime": {"device": "cpu", "precision": "fp32", "threads": 2},
        "total": total,
        "correct": correct,
        "tasks": tasks,
        "metrics": summarise(correct, total, sizes),
        "timings": {"learn_s": [2.0] * steps, "evaluate_s": [0.5] * steps},
        "memory": {"peak_bytes": []},
        "dates": {"started": "2026-01-01T00:00:00+00:00", "resumed": [], "finished": None},
        "environment": {"onea": "0.1.0", "torch": "2", "processor": "chip", "cores": 2, "accelerator": None},
    } | extra


def method_lines(axes: Any) -> list[Any]:
    lines = [line for line in axes.lines if str(line.get_gid()).startswith("method-")]
    return sorted(lines, key=lambda line: line.get_gid())


class Reader(HTMLParser):
    """Collects the tags and the visible text of a page, and checks that all tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def having(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


SIZES = Sizes(5, 2, 50, 20)


def side(seed: int, layers: int = 2, rank: int = 6, width: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"down.weight": (rank, width), "down.bias": (rank,), "up.weight": (width, rank), "up.bias": (width,)}
    names = [(f"blocks.{layer}.{name}", shape) for layer in range(layers) for name, shape in shapes.items()]
    return {name: torch.randn(*shape, generator=generator) for name, shape in names}


def analysed(rank: int = 6, width: int = 10) -> Record:
    """A record with the analysis of the merges of its last two tasks."""
    made = record(sizes=(3, 1, 2), names=())
    for task, seed in ((1, 0), (2, 2)):
        merges = OneAMerge().fusions(side(seed, 2, rank, width), side(seed + 1, 2, rank, width), SIZES)
        made["tasks"][task]["merge"] = {"base": "accumulated", "analysis": analyse(merges)}
    return made
