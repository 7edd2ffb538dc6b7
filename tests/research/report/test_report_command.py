# SPDX-License-Identifier: Apache-2.0
"""``onea report``: the files of any set of records, and the self-contained page."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from support.records import NINE, Reader, analysed, method_lines, record
from typer.testing import CliRunner

from onea.errors import OneaError
from onea.presentation.tables import Table, TableColumn, Value
from onea.research.cli.report import report as command
from onea.research.report.aggregate import setting_names, settings
from onea.research.report.curves import banded_curves
from onea.research.report.experiment_page import experiment_page, with_titles, write_report
from onea.research.report.heat_maps import matrix_panels
from onea.research.report.html import Picture
from onea.research.runs.config import make_config
from onea.research.runs.runner import run

Record = dict[str, Any]


def two_methods(seeds: tuple[int, ...] = (1, 2)) -> list[Record]:
    return [record(m, seed=seed, share=share) for seed in seeds for m, share in (("one-a", 0.8), ("simplecil", 0.5))]


def call(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments)


def test_names_of_data_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    data = record()["data"] | {"name": "caf\udce9"}
    files = write_report([record(data=data)], tmp_path, "Report")
    assert {path.suffix for path in files} == {".html", ".md", ".tex", ".csv", ".png"}
    assert "caf\\udce9" in (tmp_path / "table.md").read_text("utf-8")


def test_real_runs_become_files(tiny_run: Record, tmp_path: Path) -> None:
    for seed in (1, 2):
        for method in ("one-a", "simplecil"):
            options = tiny_run["options"] if method == "one-a" else {}
            values = tiny_run | {"method": method, "seed": seed, "options": options}
            run(make_config(values), tmp_path / "deep" / f"{method}-{seed}")
    done = call(str(tmp_path), "--out", str(tmp_path / "out"), "--title", "My runs")
    assert done.exit_code == 0, done.output
    names = ["report.html", "table.md", "table.tex", "table.csv", "curves.png"]
    assert [Path(line).name for line in done.output.splitlines()] == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    page = Reader((tmp_path / "out/report.html").read_text("utf-8"))
    assert "My runs" in page.text
    for expected in (
        "One-A",
        "SimpleCIL",
        "4 runs with 2 seeds (1, 2) in 1 setting",
        "Spectra and gates",
        "Accuracy and",
    ):
        assert expected in page.text
    lines = list(csv.DictReader((tmp_path / "out/table.csv").open()))
    means = {line["row"]: float(line["mean"]) for line in lines if line["column"] == "A_T %"}
    found = [
        json.loads(path.read_text())["metrics"]["A_T"] for path in sorted(tmp_path.glob("deep/one-a-*/record.json"))
    ]
    assert means["One-A"] == pytest.approx(np.mean(found))
    assert (tmp_path / "out/curves.png").read_bytes().startswith(b"\x89PNG")


def test_every_stream_has_a_table_and_curves(tmp_path: Path) -> None:
    records = [*two_methods(), record(sizes=(3, 2), names=()), record("third", sizes=(3, 2), names=())]
    written = write_report(records, tmp_path, "Two streams")
    assert [path.name for path in written[-2:]] == ["curves-1.png", "curves-2.png"]
    assert (tmp_path / "table.md").read_text("utf-8").count("| --- |") == 2
    assert (tmp_path / "table.tex").read_text("utf-8").count("\\toprule") == 2
    lines = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert len({line["group"] for line in lines}) == 2
    assert len(lines) == 4 * 5
    assert (tmp_path / "report.html").read_text("utf-8").count('<h2 class="part">') == 2


def test_titles_come_from_installed_methods() -> None:
    records = [record(), record("somebody-elses"), record(title="Mine")]
    assert [made["title"] for made in with_titles(records)] == ["One-A", "somebody-elses", "Mine"]


def test_folder_without_records_is_an_error(tmp_path: Path) -> None:
    failed = call(str(tmp_path))
    assert isinstance(failed.exception, OneaError)
    assert "no record.json" in str(failed.exception)
    assert list(tmp_path.iterdir()) == []


# ---- the page -------------------------------------------------------------------------------------------------------


def test_bands_are_a_deviation_to_each_side() -> None:
    (setting,) = settings(two_methods((1, 2, 3)))
    axes = banded_curves(setting).axes[0]
    lines = np.array([record(seed=seed)["metrics"]["A"] for seed in (1, 2, 3)])
    assert method_lines(axes)[0].get_ydata() == pytest.approx(lines.mean(0))
    (band,) = [made for made in axes.collections if made.get_gid() == "band-0"]
    corners = band.get_paths()[0].vertices
    for step, (mean, half) in enumerate(zip(lines.mean(0), lines.std(0, ddof=1), strict=True), 1):
        heights = corners[corners[:, 0] == step][:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((mean - half, mean + half))


def test_one_seed_has_no_band_and_bars_are_mean_sizes() -> None:
    assert not banded_curves(settings(two_methods((1,)))[0]).axes[0].collections
    turned = record(seed=2, sizes=NINE[::-1], names=())
    made = record(seed=1, names=())
    (setting,) = settings([made, turned])
    bars = banded_curves(setting).axes[1].patches
    assert [bar.get_height() for bar in bars] == [(a + b) / 2 for a, b in zip(NINE, NINE[::-1], strict=True)]


def test_every_method_has_its_matrix() -> None:
    records = [made | {"title": made["config"]["method"]} for made in two_methods((1,))]
    figure = matrix_panels(records)
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title(loc="left") for axes in panels] == ["one-a", "simplecil"]
    for axes, made in zip(panels, records, strict=True):
        assert axes.images[0].get_array()[0, -1] == pytest.approx(made["metrics"]["matrix"][0][-1])


def test_page_is_self_contained_and_accessible() -> None:
    records = [*two_methods(), analysed()]
    read = Reader(experiment_page("A page", records))
    assert not read.having("script")
    assert not read.having("link")
    assert all(str(image["src"]).startswith("data:image/") for image in read.having("img"))
    assert all(len(str(image["alt"])) > 40 for image in read.having("img"))
    assert len(read.having("table")) == len(read.having("caption"))
    assert {head.get("scope") for head in read.having("th")} == {"col", "row", "rowgroup"}
    for heading in ("Spectra and gates per layer", "Update strength per direction", "Basis before and after"):
        assert heading in read.text


def test_notes_come_first_and_given_tables_replace_the_default() -> None:
    table = Table.from_values(
        "Reported", ("x",), (TableColumn("A_T", "g"),), {("x", 0): Value(wanted=5, reported="88.2")}
    )
    picture = Picture("A picture", lambda **width: banded_curves(settings(two_methods())[0], **width), "alt", "caption")
    text = experiment_page("A page", two_methods(), [table], ["Another backbone."], [picture])
    read = Reader(text)
    assert read.text.index("Another backbone.") < read.text.index("4 runs") < read.text.index("paper 88.2")
    assert "A picture" in read.text
    assert "Results over" not in read.text
    assert "not run" in read.text
    nothing = Reader(experiment_page("Empty", [], [table]))
    assert "Nothing has been run yet" in nothing.text
    with pytest.raises(OneaError, match="at least one"):
        experiment_page("Empty", [])


def test_names_are_escaped_and_runs_that_are_not_finished_are_shown() -> None:
    evil = "<script>alert(1)</script>"
    made = [record(evil, sizes=(2, 3), names=(evil, "$x_{")), record("b", sizes=(2, 3), names=(evil, "$x_{"), done=1)]
    text = experiment_page(evil, made, notes=[evil])
    assert "<script" not in text
    assert Reader(text).text.count("not run") == 5


def test_the_same_records_give_the_same_page() -> None:
    made = two_methods((1,))
    assert experiment_page("A page", made) == experiment_page("A page", made)


def test_importing_the_commands_loads_nothing_heavy() -> None:
    code = (
        "import sys, onea.research.cli.report, onea.research.report.experiment_page, onea.research.report.compare; "
        "print([m for m in ('numpy', 'matplotlib', 'torch', 'rich.table') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_name_of_a_setting_does_not_repeat_the_data_of_its_group() -> None:
    made = [record(sizes=(2, 3), names=()) | {"group": group} for group in ("", "Some-Data (T=2)", "SOMEDATA", "γ=0.1")]
    for one in made:
        one["data"] |= {"name": "some-data"}
    starts = [name.split(":")[0] for name in setting_names(made)]
    assert starts == ["some-data", "Some-Data (T=2)", "SOMEDATA", "γ=0.1, some-data"]
