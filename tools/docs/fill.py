# SPDX-License-Identifier: Apache-2.0
"""Fill numbers and tables into the README and the pages.

    python tools/docs/fill.py [--made FOLDER]

``make results`` runs this command before it builds the site. The text between ``<!-- written: NAME WORDS -->`` and
``<!-- end -->`` is the result of a function of ``CONTENT`` with those words as arguments: a number or a table. It is
committed, and this command updates it together with the tables in docs/results and the pictures. A line
``<!-- generated: NAME WORDS -->`` is replaced when the site is built. With ``--made``, finished records of
tools/results_grid.py are copied to docs/results first.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent))
import charts
import frontier_chart
import measured
import results
from results import ONE_A, PLUS, RESULTS, ROOT

from onea.research.record import write_record

LOG = ROOT / "research/README.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), RESULTS / "README.md", LOG)
WRITTEN = re.compile(r"<!-- written: ([^>]+) -->(\n?)(.*?)\n?<!-- end -->", re.S)
GENERATED = re.compile(r"^<!-- generated: ([^>]+) -->$", re.M)
CACHE = ROOT / "build/results"
COMMITTED = (".csv", ".gz", ".md")  # suffixes of committed files in docs/results


def comparison() -> str:
    """The output of `onea compare` for One-A and One-A+ on CIFAR-100."""
    from onea.research.cli.report import compare

    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as output:
            for side, key in (("first", ONE_A), ("second", PLUS)):
                for seed, record in results.runs("cifar100")[key].seeds.items():
                    write_record(Path(folder) / side / str(seed), record)
            compare(f"{folder}/first", f"{folder}/second")
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {"COLUMNS": columns} if columns else {}
    return "```text\n" + "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines()) + "```"


CONTENT: dict[str, Callable[..., str]] = {
    **results.NUMBERS,
    **results.TABLES,
    **measured.NUMBERS,
    **measured.TABLES,
    **frontier_chart.TABLES,
    **charts.CHARTS,
    "comparison": comparison,
}


def content(words: str, functions: Mapping[str, Callable[..., str]] = CONTENT) -> str:
    """The content of a placeholder: the name of a function, and its arguments."""
    name, *arguments = words.split()
    return functions[name](*arguments)


def updated(text: str) -> str:
    """A page with the current content of its placeholders."""
    return WRITTEN.sub(
        lambda match: f"<!-- written: {match[1]} -->{match[2]}{content(match[1])}{match[2]}<!-- end -->", text
    )


# reports of the committed records


def render(folder: Path, groups: Sequence[str]) -> Path:
    """Run ``onea report`` on a copy of the records in an empty folder; returns the folder of its files."""
    for record in RESULTS.rglob("record.json.gz"):
        copy = folder / record.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        shutil.copy(record, copy)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def report(group: str) -> None:
        out = f"docs/results/{group}"
        command = [sys.executable, "-m", "onea", "report", f"{out}/runs", "--out", out]
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed.\n{process.stdout}{process.stderr}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(report, groups))
    return folder / "docs/results"


def cached_results(groups: Sequence[str], cache: Path = CACHE) -> Path:
    """The folder of rendered results, from ``cache`` unless records or source have changed."""
    from importlib.metadata import version

    digest = hashlib.sha256(f"{sys.version} {version('matplotlib')} {version('numpy')} {groups}".encode())
    source = ROOT / "src/onea"
    for top, pattern in ((RESULTS, "record.json.gz"), (source, "*.py"), (source, "*.yaml"), (source, "*.css")):
        for path in sorted(top.rglob(pattern)):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    folder = cache / digest.hexdigest()[:16]
    if not folder.exists():
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)
        with TemporaryDirectory(dir=cache) as temporary:
            render(Path(temporary) / "complete", groups)
            (Path(temporary) / "complete").rename(folder)
    return folder / "docs/results"


def uncommitted_files(only: str = "", cache: Path = CACHE) -> list[Path]:
    """Rendered pages and figures, which are not committed; of some groups, or of all."""
    groups = [group for group in results.groups() if not only or group in only.split()]
    files = sorted(cached_results(groups, cache).rglob("*.*")) if groups else []
    return [path for path in files if path.suffix not in COMMITTED]


def main() -> None:
    """Update tables, pictures and pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--made", type=Path, help="folder of finished runs to copy to docs/results first")
    arguments = parser.parse_args()
    if arguments.made:
        grid = ROOT / "tools/results_grid.py"
        subprocess.run([sys.executable, str(grid), "collect", str(arguments.made)], check=True)
    rendered = cached_results(results.groups())
    for path in sorted(rendered.rglob("*")):
        if path.suffix in (".csv", ".md"):
            shutil.copy(path, RESULTS / path.relative_to(rendered))
    subprocess.run([sys.executable, str(ROOT / "tools/docs/pictures.py")], check=True, stdout=subprocess.DEVNULL)
    for page in PAGES:
        text = page.read_text("utf-8")
        if (new := updated(text)) != text:
            page.write_text(new, "utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
