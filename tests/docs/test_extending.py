# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/extending.md, extracted from the page, installed like a third-party package and run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.commands import in_one_process

PAGE = ROOT / "docs" / "extending.md"


def installed(folder: Path) -> Path:
    """The modules and entry points of the page, laid out as pip would install them."""
    page = PAGE.read_text("utf-8")
    for name, code in re.findall(r'```python title="(\S+)"\n(.*?)```', page, re.S):
        assert len(code.splitlines()) < 40
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, "utf-8")
    points = re.findall(r'```toml\n\[project.entry-points."(\S+)"\]\n(.*?)```', page, re.S)
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    text = "".join(f"[{group}]\n{lines.replace(chr(34), '')}\n" for group, lines in points)
    (info / "entry_points.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("third-party"))


@pytest.fixture(scope="module")
def outputs(third_party: Path, shared_tiny_run: dict[str, Any], tiny_vit: str) -> dict[str, str]:
    """The outputs of commands that use the package, by topic; all of them succeed."""
    inputs = [f"--{name}={shared_tiny_run[name]}" for name in ("data", "backbone", "sizes")]
    training = [f"--{name.replace('_', '-')}={value}" for name, value in shared_tiny_run["options"].items()]
    dots = ["--data=dots", f"--backbone={tiny_vit}"]
    alone = [*dots, "--sizes=3,1,2", "--threads=1", "--precision=fp32", "--track=tensorboard"]
    classifiers = ["--classifier", "diagonal", "--classifier-options", "floor=0.1", "--compare-classifiers", "slda"]
    few = ["--tasks=3", "--seeds=1", "--scale=0.2", "--device=cpu"]
    commands = {
        "method": ["run", "centred", *inputs, "--centring", "0.5", "--out", "method"],
        "methods": ["methods"],
        "operator": ["run", "adapter", *inputs, *training, "--merge", "larger-wins", "--out", "operator"],
        "classifier": ["run", "one-a", *inputs, *training, *classifiers, "--out", "classifier"],
        "classifiers": ["methods", "--classifiers"],
        "compared classifiers": ["report", "classifier", "--out", "classifier-report"],
        "metric": ["run", "centred", *alone, "--out", "metric/a"],
        "metrics and datasets": ["methods", "--metrics", "--datasets"],
        "report": ["report", "metric", "--out", "metric-report"],
        "comparison": ["compare", "metric/a", "metric/a"],
        "experiment": ["paper", "proxies", *dots, *few, "--out", "paper"],
    }
    done = in_one_process(list(commands.values()), third_party, cwd=third_party)
    for name, (code, _, err) in zip(commands, done, strict=True):
        assert code == 0, f"{name}: {err}"
    return {name: out for name, (_, out, _) in zip(commands, done, strict=True)}


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())


def test_the_documented_method_runs_and_takes_its_option(third_party, outputs):
    record = record_of(third_party / "method")
    assert record["options"] == {"centring": 0.5}
    assert record["cost"][-1]["passes_per_image"] == 1
    assert record["metrics"]["A_T"] > 100 / 6
    assert "Centred" in outputs["methods"]


def test_the_documented_operator_merges_adapters(third_party, outputs):
    assert outputs["operator"]
    assert record_of(third_party / "operator")["options"]["merge"] == "larger-wins"


def test_the_documented_classifier_predicts_and_is_compared(third_party, outputs):
    record = record_of(third_party / "classifier")
    assert record["options"]["classifier"] == "diagonal"
    assert record["metrics"]["A_T"] > 100 / 6
    assert list(record["classifiers"]) == ["slda"]
    assert "Diagonal LDA" in outputs["classifiers"]
    table = (third_party / "classifier-report/table.md").read_text("utf-8")
    assert "One-A, diagonal" in table
    assert "One-A, slda" in table


def test_the_documented_metric_and_dataset_appear_everywhere(third_party, outputs):
    """They appear in lists, the terminal, a tracker, reports, a comparison and the page of an experiment."""
    record = record_of(third_party / "metric/a")
    assert (record["data"]["name"], record["options"]) == ("dots", {"centring": 0.9})  # of its preset
    worst = f"{min(row[-1] for row in record['metrics']['matrix']):.2f}"
    assert f"worst task {worst}" in outputs["metric"]
    assert any(b"test/worst_task" in file.read_bytes() for file in (third_party / "metric").rglob("*tfevents*"))
    assert {"worst_task", "noise"} <= set(outputs["metrics and datasets"].split())
    for file in (third_party / "metric-report").rglob("*"):
        if file.suffix in (".html", ".md", ".csv", ".tex"):
            assert re.search(r"worst\s+task", file.read_text("utf-8")), file
    assert "worst task" in outputs["comparison"]
    pages = list((third_party / "paper").rglob("*.html"))
    assert any(re.search(r"worst\s+task", page.read_text("utf-8")) for page in pages)


def test_broken_third_party_packages_do_not_break_onea(tmp_path, tiny_run):
    """An import fails, an object is not a metric, a metric reads a missing field, and two return no number."""
    package = installed(tmp_path) / "my_package"
    (package / "broken.py").write_text("import nothing_of_this_name\n")
    (package / "odd.py").write_text(
        "from onea.research.record_metrics import Metric\n"
        "NO_METRIC = 3\n"
        "ABSENT = Metric('absent', 'of another version', lambda record: record['no such part'], headline=True)\n"
        "NAN = Metric('mean of none', 'of no images', lambda record: float('nan'), headline=True)\n"
        "WORD = Metric('word', 'no number', lambda record: 'good', headline=True)\n"
    )
    points = tmp_path / "my_package-1.0.dist-info/entry_points.txt"
    lines = "broken = my_package.broken:X\nodd = my_package.odd:NO_METRIC\nabsent = my_package.odd:ABSENT\n"
    lines += "nan = my_package.odd:NAN\nword = my_package.odd:WORD\n"
    points.write_text(points.read_text().replace("[onea.metrics]\n", f"[onea.metrics]\n{lines}"))
    inputs = [f"--{name}={tiny_run[name]}" for name in ("data", "backbone", "sizes")]
    commands = [["run", "simplecil", *inputs, "--out", "out"], ["report", "out"], ["compare", "out", "out"]]
    done = in_one_process(commands, tmp_path, cwd=tmp_path)
    assert [code for code, _, _ in done] == [0, 0, 0], done
    ((_, out, err), *_) = done
    for title in ("absent", "mean of none", "word"):
        assert f"{title} –" in " ".join(out.split())
    assert "fix or uninstall that package" in err
    assert "Traceback" not in err
