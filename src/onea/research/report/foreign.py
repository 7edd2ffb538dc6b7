# SPDX-License-Identifier: Apache-2.0
"""Results that others report, from a CSV file, as rows of the tables of the same dataset and stream."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onea.errors import OneaError, did_you_mean, truncate
from onea.files import read_regular
from onea.options import LARGEST
from onea.presentation.tables import Row, Table
from onea.research.report.aggregate import Setting, stream_name, summarise

_REQUIRED = ("method", "dataset", "stream", "seed", "A_T")
_METRICS = {"A_T": "A_T", "A_mean": "mean_A"}  # their columns, and our names of the metrics
_MAX_BYTES = 10_000_000
_NOTE = "Rows marked as reported have results of others, which were not measured here and are not ranked."
Place = tuple[str, str]  # a dataset, and a stream as in the title of its table


@dataclass(frozen=True)
class ForeignResult:
    """One row of the file: one method on one stream with one seed.

    Attributes:
        metrics: values in percent by our names of the metrics.
    """

    method: str
    dataset: str
    stream: str
    seed: int
    metrics: dict[str, float]


def read_results(path: Path) -> list[ForeignResult]:
    """The rows of a CSV file.

    Raises:
        OneaError: a column is missing or unknown, or a row has a wrong value or repeats another one.
    """
    try:
        text = read_regular(path, _MAX_BYTES, follow=True).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text), restval="", skipinitialspace=True)
        columns, lines = tuple(reader.fieldnames or ()), [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise OneaError(f"{path} is not a CSV file in UTF-8; save it as one.") from error
    _check_columns(path, columns)
    results: dict[tuple[str, str, str, int], ForeignResult] = {}
    for number, row in lines:
        result = _result(row, f"Line {number} of {path}")
        key = (result.method, result.dataset, result.stream, result.seed)
        if key in results:
            raise OneaError(
                f"Line {number} of {path} repeats method, dataset, stream and seed of another line; remove one."
            )
        results[key] = result
    return list(results.values())


def add_results(
    table: Table,
    metrics: Sequence[str],
    setting: Setting,
    results: Iterable[ForeignResult],
    settings: Sequence[Setting],
) -> Table:
    """A table of a setting with a row for each method of the results on its dataset and stream.

    The rows do not compete for the best value, because their runs were not made here.

    Args:
        table: the table.
        metrics: our names of the metrics in its columns.
        setting: the setting of the table.
        results: results on any dataset and stream.
        settings: the settings of all tables.
    """
    by_method: dict[str, list[ForeignResult]] = defaultdict(list)
    for result in results:
        if _place(result) == _place_of(setting) and _tables(_place(result), settings) == 1:
            by_method[result.method].append(result)
    rows = [_row(method, metrics, same) for method, same in by_method.items()]
    return replace(table, rows=(*table.rows, *rows), notes=(*table.notes, _NOTE)) if rows else table


def not_shown(results: Iterable[ForeignResult], settings: Sequence[Setting]) -> list[str]:
    """A sentence for each dataset and stream of the results that no table shows."""
    known = "; ".join(f"{dataset}: {stream}" for dataset, stream in dict.fromkeys(map(_place_of, settings)))
    reasons = {
        0: f"because no table has these; write dataset and stream as in the title of a table ({known}).",
        2: "because different streams have that name; make one report for each.",
    }
    return [
        f"Results on '{truncate(place[0])}' with the stream '{truncate(place[1])}' are not shown, {reasons[tables]}"
        for place in dict.fromkeys(map(_place, results))
        if (tables := min(_tables(place, settings), 2)) != 1
    ]


def _tables(place: Place, settings: Sequence[Setting]) -> int:
    """The number of different streams with this name; settings that differ in the network have the same stream."""
    streams = set()
    for setting in settings:
        if _place_of(setting) == place:
            record = setting.groups[0].records[0]
            sizes, samples = record["stream"]["sizes"], record["stream"].get("samples") or ()
            streams.add((record["data"].get("fingerprint"), tuple(sorted(sizes)), tuple(sorted(samples))))
    return len(streams)


def _place(result: ForeignResult) -> Place:
    return result.dataset, result.stream


def _place_of(setting: Setting) -> Place:
    record = setting.groups[0].records[0]
    return str(record["data"]["name"]), stream_name(record)


def _row(method: str, metrics: Sequence[str], results: Sequence[ForeignResult]) -> Row:
    numbers = [[result.metrics[name] for result in results if name in result.metrics] for name in metrics]
    return Row(f"{method} (reported)", tuple(replace(summarise(values), competes=False) for values in numbers))


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    allowed = (*_REQUIRED, *(name for name in _METRICS if name not in _REQUIRED))
    if len(set(columns)) < len(columns):
        raise OneaError(f"{path} has two columns of the same name; remove one.")
    if missing := [name for name in _REQUIRED if name not in columns]:
        raise OneaError(f"{path} has no column '{missing[0]}'; its first line must have {', '.join(_REQUIRED)}.")
    if unknown := [name for name in columns if name not in allowed]:
        raise OneaError(f"{path} has an unknown column '{truncate(unknown[0])}'; {did_you_mean(unknown[0], allowed)}")


def _result(row: dict[str, str], where: str) -> ForeignResult:
    if None in row:
        raise OneaError(f"{where} has more values than columns; put values that contain commas in quotes.")
    for name in ("method", "dataset", "stream"):
        if not row[name].strip():
            raise OneaError(f"{where} has no {name}; add it.")
    seed = row["seed"].strip()
    if not (seed.isascii() and seed.isdigit()) or len(seed) > len(str(LARGEST)) or int(seed) > LARGEST:
        raise OneaError(f"{where} has the seed '{truncate(seed)}'; write a whole number from 0 to {LARGEST:,}.")
    metrics = {ours: _percent(row[name], name, where) for name, ours in _METRICS.items() if row.get(name, "").strip()}
    if "A_T" not in metrics:
        raise OneaError(f"{where} has no A_T; add the accuracy after the last task in percent.")
    method, dataset, stream = (row[name].strip() for name in ("method", "dataset", "stream"))
    return ForeignResult(method, dataset, stream, int(seed), metrics)


def _percent(text: str, name: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 100:
        raise OneaError(f"{where} has {name} '{truncate(text)}'; write a number of percent from 0 to 100.")
    return number
