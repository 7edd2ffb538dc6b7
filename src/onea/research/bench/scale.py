# SPDX-License-Identifier: Apache-2.0
"""Time, memory and disk space of a model by its number of classes.

The classes are synthetic: features from Gaussians, with the covariance of real features, in the real statistics. All
else is real: photos, network, update, folder and answers.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import onea
from onea import OneA, seeds
from onea.errors import OneaError, truncate
from onea.model.evaluation.check import check_model
from onea.model.held_out import HeldOutImages
from onea.model.state import State
from onea.model.storage import folder
from onea.model.storage.folder import Manifest, model_params
from onea.model.versions import Versions
from onea.research.bench.config import BenchConfig
from onea.research.bench.results import SCALE, BenchResult, Row, load_average
from onea.research.bench.run import OnStatus
from onea.research.runs.runner import environment, peak_memory

PHOTOS = 20  # of each class
_REAL_CLASSES = 3
_HELD_OUT = 4  # photos of a class
_SPREAD = 3.0  # standard deviations between classes, in those within a class
_SIDE = 256
_BLOCK = 500  # classes
_REPEATS = 15
_MAX_CLASSES = 100_000

Photos = list[npt.NDArray[np.uint8]]


def parse_classes(text: str) -> tuple[int, ...]:
    """Numbers of classes from text.

    >>> parse_classes("10,1000")
    (10, 1000)
    """
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and 2 <= int(word) <= _MAX_CLASSES for word in words):
        raise OneaError(
            f"--scale is '{truncate(text)}'; give numbers of classes from 2 to {_MAX_CLASSES:,}, separated by commas, "
            "such as 10,1000."
        )
    return tuple(map(int, words))


def scale_bench(config: BenchConfig, sizes: Sequence[int], on_status: OnStatus = lambda text: None) -> BenchResult:
    """Measure models with these numbers of classes, each in a new process."""
    load, rows = load_average(), []
    for classes in sizes:
        on_status(f"{classes:,} classes")
        with tempfile.TemporaryDirectory() as place:
            for measure in (_write_model, _measure_model):
                # A new process, because the peak memory of a process never decreases.
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    rows += pool.submit(measure, Path(place) / "model.onea", classes, config.threads).result()
    runtime = config.runtime(same_numerics=False)
    facts = environment(runtime.device)
    return BenchResult(config, rows, "preset fast", runtime.precision, False, load, facts, SCALE)


def grow(state: State, classes: int) -> State:
    """A state with synthetic classes up to this number."""
    real, statistics = len(state.classes), state.statistics
    generator = seeds.generator(0, 0, "synthetic classes")
    root = torch.linalg.cholesky(statistics.covariance()).float().T
    centre, width = statistics.means.mean(0), statistics.width
    held_out, views = state.held_out, int(state.options["views"])
    fingerprints = torch.randint(-(2**62), 2**62, ((classes - real) * PHOTOS, 2), generator=generator)
    for start in range(real, classes, _BLOCK):
        rows = torch.arange(start, min(start + _BLOCK, classes))
        means = centre + _SPREAD * torch.randn(len(rows), width, generator=generator) @ root
        features = means[:, None] + torch.randn(len(rows), PHOTOS, width, generator=generator) @ root
        statistics = statistics.add(
            features.flatten(0, 1).repeat(views, 1), rows.repeat_interleave(PHOTOS).repeat(views)
        )
        kept = features[:, :_HELD_OUT].flatten(0, 1).bfloat16().float()[:, None].expand(-1, views, -1)
        kept_fingerprints = fingerprints.view(-1, PHOTOS, 2)[rows - real, :_HELD_OUT].flatten(0, 1)
        held_out = held_out.with_newer(HeldOutImages(kept, rows.repeat_interleave(_HELD_OUT), kept_fingerprints))
    names = [f"synthetic {row:06}" for row in range(real, classes)]
    update = {**state.updates[-1], "name": "synthetic", "classes": names, "new_classes": len(names)}
    update |= {"known": classes, "images": len(fingerprints)}
    return replace(
        state,
        classes=(*state.classes, *names),
        statistics=statistics.compact(),
        held_out_features=held_out.features,
        held_out_rows=held_out.rows,
        held_out_fingerprints=held_out.fingerprints,
        fingerprints=torch.cat([state.fingerprints, fingerprints]),
        fingerprint_rows=torch.cat([state.fingerprint_rows, torch.arange(real, classes).repeat_interleave(PHOTOS)]),
        updates=(*state.updates, update),
    )


def _photos(row: int) -> Photos:
    """Photos of one class: a pattern with noise."""
    random = np.random.default_rng(row)
    pattern = random.integers(40, 216, (8, 8, 3)).repeat(_SIDE // 8, 0).repeat(_SIDE // 8, 1)
    noise = random.integers(-40, 41, (PHOTOS, _SIDE, _SIDE, 3))
    return list((pattern + noise).astype(np.uint8))


def _write_model(place: Path, classes: int, threads: int) -> list[Row]:
    """Write a model with this number of classes; returns its size on disk."""
    model = OneA(preset="fast", threads=threads)
    for row in range(min(_REAL_CLASSES, classes - 1)):
        model.learn(_photos(row), [f"real {row}"] * PHOTOS)
    state = model.snapshot().state
    if classes - 1 > len(state.classes):
        state = grow(state, classes - 1)
    state = replace(state, version=1)
    folder.write(place, state, Manifest(Versions((1,), 1), model_params(model)), [state])
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    return [_row("one version on disk", classes, size / 1e6, "MB")]


def _measure_model(place: Path, classes: int, threads: int) -> list[Row]:
    """Load a model, answer, add one more class, and check it."""
    seconds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = action()
        seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    photos = _photos(classes)
    model = timed("load", lambda: onea.load(place, threads=threads))
    loaded = peak_memory(torch.device("cpu")).get("host")
    for photo in (photos[0], *photos[:_REPEATS]):
        timed("predict one photo", partial(model.predict, [photo]))
    timed("one more class", lambda: model.learn(photos, ["one more"] * PHOTOS))
    learned = peak_memory(torch.device("cpu")).get("host")
    timed("check", lambda: check_model(model.snapshot().state))
    rows = [
        _row("load", classes, seconds["load"][0], "s"),
        _row("predict one photo", classes, 1000 * sorted(seconds["predict one photo"][1:])[_REPEATS // 2], "ms"),
        _row("one more class", classes, seconds["one more class"][0], "s"),
        _row("check", classes, seconds["check"][0], "s"),
    ]
    for name, peak in (("load: peak memory", loaded), ("one more class: peak memory", learned)):
        if peak is not None:  # not on Windows
            rows.append(_row(name, classes, peak / 1e9, "GB"))
    return rows


def _row(measure: str, classes: int, value: float, unit: str) -> Row:
    return Row(measure, f"{classes:,} classes", "onea", value, unit)
