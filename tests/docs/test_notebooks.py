# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs in a clean kernel, is stored without outputs, and becomes a page with them."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tools/docs"))
import notebooks

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def named(path: Path) -> str:
    return path.stem


def test_there_are_five_notebooks_and_the_site_lists_them() -> None:
    listed = re.findall(r"notebooks/([\w-]+)\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert sorted(listed) == [path.stem for path in notebooks.paths()]
    assert len(listed) == 5


@pytest.mark.parametrize("path", notebooks.paths(), ids=named)
def test_notebook_runs_in_a_clean_kernel(path: Path) -> None:
    done = notebooks.run(path)
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    text, pictures = notebooks.render(done, path.stem)
    assert text.startswith("# ")
    assert "Warning" not in text
    assert tempfile.gettempdir() + os.sep not in text  # a path of this machine says nothing to a reader
    assert all(picture.startswith(b"\x89PNG") and f"]({name})" in text for name, picture in pictures.items())
    printed = [output.text for cell in code for output in cell.outputs if output.output_type == "stream"]
    assert printed
    assert all(line.rstrip() in text for told in printed for line in told.splitlines())


@pytest.mark.parametrize("path", notebooks.paths(), ids=named)
def test_notebook_is_stored_without_outputs_and_its_links_are_valid(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    links = re.findall(r"\]\(((?!https?:)[^)#]+)", "".join("".join(cell["source"]) for cell in cells))
    assert links
    assert all((path.parent / link).is_file() for link in links)


def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    book = json.loads(notebooks.paths()[0].read_text("utf-8"))
    book["cells"] = [next(cell for cell in book["cells"] if cell["cell_type"] == "code") | {"source": "1 / 0"}]
    (tmp_path / "wrong.ipynb").write_text(json.dumps(book), "utf-8")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.run(tmp_path / "wrong.ipynb")


def test_unselected_notebooks_are_shown_without_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOKS", "none")
    made = notebooks.pages(tmp_path)
    assert sorted(made) == [f"{path.stem}.md" for path in notebooks.paths()]
    assert "](photos-to-service.md)" in made["quick-start.md"].decode()
