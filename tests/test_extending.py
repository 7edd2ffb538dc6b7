# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/extending.md, taken from the page itself, installed like a third-party package and run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"


@pytest.fixture
def third_party(tmp_path) -> Path:
    """A folder with the page's modules and entry points, as pip would lay them out."""
    page = PAGE.read_text("utf-8")
    for name, code in re.findall(r'```python title="(\S+)"\n(.*?)```', page, re.S):
        assert len(code.splitlines()) < 40
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, "utf-8")
    points = re.findall(r'```toml\n\[project.entry-points."(\S+)"\]\n(.*?)```', page, re.S)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    text = "".join(f"[{group}]\n{lines.replace(chr(34), '')}\n" for group, lines in points)
    (info / "entry_points.txt").write_text(text)
    return tmp_path


# Commands one after the other in one process, which takes seconds to start; prints what each left, as JSON.
COMMANDS = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
from onea.cli import main
said = []
for words in json.loads(sys.argv[2]):
    sys.argv, out, err = ["onea", *words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main() or 0
        except SystemExit as stop:
            code = stop.code or 0
    said.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""


def onea(third_party: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and error of each command."""
    words = [sys.executable, "-c", COMMANDS, str(third_party), json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_documented_method_runs_and_takes_its_option(third_party, tiny_run):
    inputs = [f"--{name}={tiny_run[name]}" for name in ("data", "backbone", "sizes")]
    run = ["run", "centred", *inputs, "--centring", "0.5", "--out", str(third_party / "out")]
    (code, _, err), (_, listed, _) = onea(third_party, run, ["methods"])
    assert code == 0, err
    record = json.loads((third_party / "out/record.json").read_text())
    assert record["options"] == {"centring": 0.5}
    assert record["cost"][-1]["passes_per_image"] == 1
    assert record["metrics"]["A_T"] > 100 / 6
    assert "Centred" in listed


def test_the_documented_operator_merges_adapters(third_party, tiny_run):
    inputs = [f"--{name}={tiny_run[name]}" for name in ("data", "backbone", "sizes")]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in tiny_run["options"].items()]
    out = str(third_party / "out")
    ((code, _, err),) = onea(third_party, ["run", "adapter", *inputs, *options, "--merge", "larger-wins", "--out", out])
    assert code == 0, err


def test_the_documented_classifier_answers_and_is_compared(third_party, tiny_run):
    inputs = [f"--{name}={tiny_run[name]}" for name in ("data", "backbone", "sizes")]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in tiny_run["options"].items()]
    asked = ["--classifier", "diagonal", "--classifier-options", "floor=0.1", "--compare-classifiers", "slda"]
    (code, _, err), (_, listed, _), (reported, _, _) = onea(
        third_party,
        ["run", "one-a", *inputs, *options, *asked, "--out", str(third_party / "out")],
        ["methods", "--classifiers"],
        ["report", str(third_party / "out"), "--out", str(third_party / "report")],
    )
    assert (code, reported) == (0, 0), err
    record = json.loads((third_party / "out/record.json").read_text())
    assert record["options"]["classifier"] == "diagonal"
    assert record["metrics"]["A_T"] > 100 / 6
    assert list(record["classifiers"]) == ["slda"]
    assert "Diagonal LDA" in listed
    table = (third_party / "report/table.md").read_text("utf-8")
    assert "One-A, diagonal" in table
    assert "One-A, slda" in table


def test_the_documented_metric_and_dataset_are_found_everywhere(third_party, tiny_vit):
    """In the lists, the terminal, a tracker, reports, a comparison and the page of an experiment of the paper."""
    runs = third_party / "runs"
    common = ["--data=dots", f"--backbone={tiny_vit}", "--sizes=3,1,2", "--threads=1", "--precision=fp32"]
    (code, out, err), (_, listed, _), (reported, _, _), (_, compared, _) = onea(
        third_party,
        ["run", "centred", *common, "--out", str(runs / "a"), "--track=tensorboard"],
        ["methods", "--metrics", "--datasets"],
        ["report", str(runs), "--out", str(third_party / "report")],
        ["compare", str(runs / "a"), str(runs / "a")],
    )
    assert (code, reported) == (0, 0), err
    assert "worst task" in out
    record = json.loads((runs / "a/record.json").read_text())
    assert (record["data"]["name"], record["options"]) == ("dots", {"centring": 0.9})  # of its preset
    worst = f"{min(row[-1] for row in record['metrics']['matrix']):.2f}"
    assert f"worst task {worst}" in out
    assert any(b"test/worst_task" in file.read_bytes() for file in (runs / "a/tracking").rglob("*tfevents*"))
    assert {"worst_task", "noise"} <= set(listed.split())
    for file in (third_party / "report").rglob("*"):
        if file.suffix in (".html", ".md", ".csv", ".tex"):
            assert re.search(r"worst\s+task", file.read_text("utf-8")), file
    assert "worst task" in compared


def test_the_page_of_an_experiment_shows_the_documented_metric(third_party, tiny_vit):
    inputs = ["--data=dots", f"--backbone={tiny_vit}", "--tasks=3", "--seeds=1", "--scale=0.2", "--device=cpu"]
    ((code, _, err),) = onea(third_party, ["paper", "proxies", *inputs, "--out", str(third_party / "paper")])
    assert code == 0, err
    pages = list((third_party / "paper").rglob("*.html"))
    assert pages
    assert any(re.search(r"worst\s+task", page.read_text("utf-8")) for page in pages)


def test_broken_packages_of_others_do_not_break_ours(third_party, tiny_run):
    """One cannot be imported, one registers something else, and one reads what this record does not have."""
    package = third_party / "my_package"
    (package / "broken.py").write_text("import nothing_of_this_name\n")
    (package / "odd.py").write_text(
        "from onea.record_metrics import Metric\n"
        "NO_METRIC = 3\n"
        "ABSENT = Metric('absent', 'of another version', lambda record: record['no such part'], headline=True)\n"
    )
    points = third_party / "my_package-1.0.dist-info/entry_points.txt"
    lines = "broken = my_package.broken:X\nodd = my_package.odd:NO_METRIC\nabsent = my_package.odd:ABSENT\n"
    points.write_text(points.read_text().replace("[onea.metrics]\n", f"[onea.metrics]\n{lines}"))
    inputs = [f"--{name}={tiny_run[name]}" for name in ("data", "backbone", "sizes")]
    ((code, out, err),) = onea(third_party, ["run", "simplecil", *inputs, "--out", str(third_party / "out")])
    assert code == 0, err
    assert "absent –" in out
    assert "repair or uninstall its package" in err
    assert "Traceback" not in err
