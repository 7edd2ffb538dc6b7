# SPDX-License-Identifier: Apache-2.0
"""Figures of streams and their command: complete files, labels that do not overlap, error messages."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from onea.errors import OneaError
from onea.presentation import style
from onea.research.cli.stream import stream as stream_command
from onea.research.report.stream_figures import (
    comparison_figure,
    descending_figure,
    draw_stream_figures,
    generation_figure,
)
from onea.research.streams import Stream, make_stream

NAMES = ["generation.png", "descending.png", "si-cil-vs-long-tailed.png"]

app = typer.Typer()
app.command()(stream_command)


def command(*options: str):
    return CliRunner().invoke(app, list(options))


def heights(axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches if hasattr(bar, "get_height")]


def test_characters_missing_in_the_font_cause_no_warning(tmp_path: Path, recwarn) -> None:
    figure = style.new_figure(2, 2)
    figure.text(0.5, 0.5, "三角")
    style.save(figure, tmp_path / "names.png")
    assert not [str(warning.message) for warning in recwarn]


@pytest.mark.parametrize(("classes", "tasks"), [(1, 1), (5, 1), (100, 10), (200, 40)])
def test_files_are_written(tmp_path: Path, classes: int, tasks: int) -> None:
    paths = draw_stream_figures(make_stream(classes=classes, tasks=tasks), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == NAMES
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(NAMES), "no drafts stay behind"
    for path in paths:
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert 700 < image.width < 2400
            assert 450 < image.height < 1000
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 3


def test_a_task_keeps_its_colour_and_every_bar_its_count() -> None:
    made = make_stream(classes=100, tasks=10)
    left, right = generation_figure(made).axes
    assert heights(left) == sorted(made.sizes, reverse=True)
    assert heights(right) == list(made.sizes)
    size_and_colour = [{(b.get_height(), b.get_facecolor()) for b in axes.patches} for axes in (left, right)]
    assert size_and_colour[0] == size_and_colour[1]
    assert len(size_and_colour[0]) == 10, "ten tasks, ten colours"
    assert [text.get_text() for text in right.texts] == [str(n) for n in made.sizes]


def test_the_comparison_shows_both_kinds_of_imbalance() -> None:
    even, tail, uneven, flat = comparison_figure(_stream(10)).axes
    assert heights(even) == [10] * 10
    assert heights(uneven) == list(_stream(10).sizes)
    assert [text.get_text() for text in tail.texts] == ["500", "50"]
    assert [text.get_text() for text in flat.texts] == ["500", "500"]


def test_titles_name_the_kind_of_imbalance() -> None:
    tail = comparison_figure(make_stream(classes=20, tasks=4, long_tail=0.1, n_max=100), n_max=100)
    assert [text.get_text() for text in tail.axes[3].texts] == ["100", "10"]
    assert tail.axes[3].get_title("left") == "Step-imbalanced: uneven classes"
    even = comparison_figure(make_stream(classes=20, tasks=4, kind="balanced"))
    assert even.axes[2].get_title("left") == "This stream: equal tasks"


def _stream(tasks: int) -> Stream:
    return make_stream(classes=100 if tasks <= 10 else 200, tasks=tasks)


def _visible(texts) -> list:
    return [text for text in texts if text.get_text() and text.get_visible()]


@pytest.mark.parametrize("tasks", [1, 2, 10, 20, 21, 40])
@pytest.mark.parametrize("draw", [generation_figure, descending_figure, comparison_figure])
def test_no_two_numbers_overlap(draw, tasks: int) -> None:
    figure = draw(_stream(tasks))
    figure.draw_without_rendering()
    for axes in figure.axes:
        for texts in (_visible(axes.texts), _visible(axes.get_xticklabels())):
            boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.x0)
            for left, right in pairwise(boxes):
                assert not left.overlaps(right), f"{tasks} tasks: {left} {right}"


def test_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    class Broken:
        def savefig(self, *_: object, **__: object) -> None:
            raise RuntimeError("no ink")

    with pytest.raises(RuntimeError, match="no ink"):
        style.save(Broken(), path)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_settings_of_the_caller_are_restored() -> None:
    import matplotlib

    before = matplotlib.rcParams["axes.titlesize"]
    descending_figure(_stream(10))
    assert matplotlib.rcParams["axes.titlesize"] == before


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_first_line_is_the_sizes(tmp_path: Path) -> None:
    result = command("--classes", "100", "--tasks", "10", "--out", str(tmp_path / "figures"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "14,1,3,6,36,9,23,2,2,4"
    assert lines[-4:] == [str(tmp_path / "figures" / name) for name in (*NAMES, "stream.json")]
    assert all(Path(line).stat().st_size > 0 for line in lines[-3:])


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (["--tasks", "10", "--order", "descending"], "36,23,14,9,6,4,3,2,2,1"),
        (["--classes", "10", "--tasks", "3", "--balanced"], "4,3,3"),
        (["--sizes", "36,1,14"], "36,1,14"),
        (["--sizes", "36,1,14", "--order", "descending", "--long-tail", "0.1"], "36,14,1"),
        (["--classes", "7", "--tasks", "1"], "7"),
    ],
)
def test_options(options: list[str], first: str) -> None:
    result = command(*options)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == first
    assert ".png" not in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--balanced", "--sizes", "1,2"], "give one of them"),
        (["--sizes", "1,2", "--classes", "4"], "add 1"),
        (["--tasks", "200"], "cannot fill 200 tasks"),
        (["--order", "random"], "no order 'random'"),
    ],
)
def test_invalid_options_are_errors(options: list[str], message: str) -> None:
    result = command(*options)
    assert isinstance(result.exception, OneaError)
    assert message in str(result.exception)


def test_file_at_the_path_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = command("--out", str(tmp_path / "taken"))
    assert isinstance(result.exception, OneaError)
    assert "choose another folder" in str(result.exception)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, onea.research.cli.stream, onea.research.report.stream_figures; "
        "print([m for m in ('numpy', 'matplotlib', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_panels_are_stacked_on_a_phone() -> None:
    for draw, panels in ((generation_figure, 2), (comparison_figure, 4)):
        figure = draw(_stream(10), width=4.2)
        figure.draw_without_rendering()
        assert figure.get_size_inches()[0] == pytest.approx(4.2)
        tops = [axes.get_position().y1 for axes in figure.axes]
        assert len(tops) == panels
        assert tops == sorted(tops, reverse=True)
        assert len({round(axes.get_position().x0, 2) for axes in figure.axes}) == 1
    upper, lower = (draw.axes for draw in (comparison_figure(_stream(10)), comparison_figure(_stream(10), width=4.2)))
    assert [axes.get_ylim() for axes in upper] == [axes.get_ylim() for axes in lower]
