# SPDX-License-Identifier: Apache-2.0
"""The generated content of README and pages is up to date with records and measurements."""

from __future__ import annotations

import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tools/docs"))
import charts
import fill
import measured
import results

from onea.research.record import Record
from onea.research.record_metrics import metric
from onea.research.report.compare import compare

WITH = [page for page in fill.PAGES if fill.WRITTEN.search(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", WITH, ids=lambda page: str(page.relative_to(ROOT)))
def test_written_content_is_up_to_date(page: Path) -> None:
    text = page.read_text("utf-8")
    assert fill.updated(text) == text, "run `make results`"


def test_an_edited_number_is_restored() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    places = {
        mark.start(3) + number.end() - 1
        for mark in fill.WRITTEN.finditer(text)
        for number in re.finditer(r"\d+\.\d+", mark[3])
    }
    assert len(places) > 25
    edited = "".join(str((int(letter) + 1) % 10) if at in places else letter for at, letter in enumerate(text))
    assert edited != text
    assert fill.updated(edited) == text


def test_every_placeholder_is_closed_and_names_a_function() -> None:
    for page in fill.PAGES:
        text = page.read_text("utf-8")
        names = re.findall(r"<!-- written: (\S+)", text)
        assert len(names) == len(fill.WRITTEN.findall(text)) == text.count("<!-- end -->"), page
        assert {*names} <= fill.CONTENT.keys()


@pytest.mark.parametrize("page", WITH, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_number_was_measured(page: Path) -> None:
    without = [mark[1] for mark in fill.WRITTEN.finditer(page.read_text("utf-8")) if measured.NOT_MEASURED in mark[3]]
    assert not without


@pytest.fixture
def _no_caches() -> Iterator[None]:
    yield
    results.runs.cache_clear()


def replace_records(records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "records", lambda: tuple(records))
    results.runs.cache_clear()


@pytest.mark.usefixtures("_no_caches")
def test_the_network_is_that_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [record | {"config": record["config"] | {"backbone": "another"}} for record in results.records()]
    replace_records(other, monkeypatch)
    text = fill.updated((ROOT / "README.md").read_text("utf-8"))
    assert "The\nnetwork is <!-- written: network -->`another`<!-- end -->" in text


@pytest.mark.usefixtures("_no_caches")
def test_few_methods_are_enough_for_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that have not been run are marked, and have no charts."""
    few = [record for record in results.records() if results.METHODS["simplecil"].matches(record)]
    replace_records(few, monkeypatch)
    text = fill.updated((ROOT / "README.md").read_text("utf-8"))
    assert "<!-- written: accuracy one-a-plus cifar100 -->not run<!-- end -->" in text
    for name in ("results cifar100", "methods", "expect", *charts.CHARTS):
        assert "nan" not in fill.content(name)


@pytest.mark.usefixtures("_no_caches")
def test_further_classifiers_of_a_run_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    further = [record for record in results.records() if not record["cost"]]
    assert further
    replace_records(further, monkeypatch)
    row = next(line for line in fill.content("results cub200").splitlines() if line.startswith("| SimpleCIL"))
    assert row.endswith("|  |  |"), "their cost was not measured"
    assert "SimpleCIL" not in fill.content("chart-cost")


def test_comparisons_and_pages_print_the_same_intervals() -> None:
    first, second = (results.runs("cifar100")[key] for key in (results.ONE_A, results.PLUS))
    rows = {row.name: row.interval for row in compare([*first.seeds.values()], [*second.seeds.values()]).rows}
    for name in ("A_T", "mean_A", "F"):
        change = results.difference(first, second, name)
        assert rows[metric(name).heading] == (change.low, change.high)


def test_methods_of_one_seed_are_hollow_in_the_chart_of_costs() -> None:
    found = [each for data in results.DATA for key, each in results.runs(data).items() if key != results.JOINT]
    assert fill.content("chart-cost").count("dot hollow") == 2 * sum(len(each.seeds) == 1 for each in found)


@pytest.mark.parametrize("module", [charts, fill, measured, results])
def test_doctests(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
