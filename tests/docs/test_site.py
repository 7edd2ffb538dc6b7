# SPDX-License-Identifier: Apache-2.0
"""The site that `make docs` builds: results from the committed records, first questions, search, no network."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tools/docs"))
import fill
import results

# results are rendered from the committed records


def assert_same_tables(made: Path, name: str) -> None:
    """Check that rendered files equal the committed ones byte for byte."""
    committed = [path for path in (ROOT / "docs/results" / name).iterdir() if path.suffix in (".csv", ".md")]
    assert len(committed) == 2
    for path in committed:
        assert (made / name / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_every_committed_table_is_that_of_the_records(tmp_path: Path) -> None:
    made = fill.render(tmp_path, results.groups())
    for name in results.groups():
        assert_same_tables(made, name)


# the site


def assert_links_lead_to_files(site: Path) -> None:
    """Check links without a server, which would map folders to their index.html."""
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text("utf-8")):
            outside = re.match(r"\w+:", link) or page.name == "404.html"
            assert outside or (page.parent / unquote(link)).is_file(), f"{page.relative_to(site)}: {link}"


def assert_results_are_complete(site: Path) -> None:
    """Check that tables have all methods with records and all experiments, and that charts fit desktop and phone."""
    from onea.research.paper.experiments import experiments

    page = (site / "results.html").read_text("utf-8")
    tables = [table for table in re.findall(r"<table>.*?</table>", page, re.S) if "MB kept" in table]
    assert len(tables) == 2
    for table, data in zip(tables, results.DATA, strict=True):
        assert not [found.title for found in results.runs(data).values() if found.title not in table]
    assert page.count('class="drawn wide"') == page.count('class="drawn narrow"') == 4
    state = re.search(r"<table>.*?</table>", (site / "paper.html").read_text("utf-8"), re.S)
    assert state
    assert all(f"onea paper {each.alias}" in state[0] for each in experiments().values())
    assert len(experiments()) == 22


def assert_answers_the_first_questions(site: Path) -> None:
    """Check the text of the home page before its first heading, and its links."""
    first = (site / "index.html").read_text("utf-8").partition("<h2")[0]
    for anchor in ("what-accuracy-will-i-get", "does-it-reproduce-the-paper", "may-i-depend-on-it"):
        found = re.search(rf'<a id="{anchor}"></a><a href="([\w-]+\.html)#([\w-]+)"', first)
        assert found, f"the home page does not answer {anchor} at once"
        assert f'id="{found[2]}"' in (site / found[1]).read_text("utf-8")


def assert_a_phone_has_room_for_the_tables(site: Path) -> None:
    """Check that intervals in cells can wrap below their values, and long names can break at their dots."""
    cells = {name: _cells(site / f"{name}.html") for name in ("results", "glossary")}
    assert not [cell for cell in cells["results"] if re.search(r"\xa0\([^()]*\xa0to\xa0", cell)], "one cannot break"
    assert sum("<small>(" in cell for cell in cells["results"]) > 10


# Tables of the site that are wider than their place on a phone, each with its head.
_TOO_WIDE = """() => [...document.querySelectorAll(".md-typeset__scrollwrap")]
    .filter((place) => place.scrollWidth > place.clientWidth)
    .map((place) => [place.scrollWidth - place.clientWidth, place.querySelector("tr").innerText])"""


def same_fonts() -> str:
    """A style sheet with Matplotlib's fonts, which every machine has, about as wide as those of a phone."""
    import matplotlib

    def face(family: str, file: str, weight: str, size: int) -> str:
        data = base64.b64encode((Path(matplotlib.get_data_path()) / "fonts/ttf" / file).read_bytes()).decode()
        return (
            f"@font-face {{ font-family: {family}; font-weight: {weight}; size-adjust: {size}%; "
            f"src: url(data:font/ttf;base64,{data}) }}"
        )

    faces = ("Same", "DejaVuSans.ttf", "normal", 88), ("Same", "DejaVuSans-Bold.ttf", "bold", 88)
    used = ".md-typeset { font-family: Same !important } .md-typeset code { font-family: Code !important }"
    return "\n".join([*(face(*each) for each in faces), face("Code", "DejaVuSansMono.ttf", "normal", 100), used])


def assert_tables_fit_a_phone(site: Path) -> None:
    """Check the widths of tables in a browser, if there is one, with the same fonts on every machine."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if chromium is None or importlib.util.find_spec("playwright") is None:
        return
    from playwright.sync_api import sync_playwright

    surroundings = os.environ | {"TMPDIR": "/tmp", "LC_ALL": "C.UTF-8"}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], env=surroundings)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        for name in ("research", "paper", "methods", "results", "expect", "one-a-plus"):
            page.goto((site / f"{name}.html").as_uri())
            page.locator(".md-typeset__scrollwrap").first.wait_for()
            page.add_style_tag(content=same_fonts())
            page.wait_for_function("document.fonts.status == 'loaded'")
            assert page.evaluate(_TOO_WIDE) == [], name
        browser.close()


def _cells(page: Path) -> list[str]:
    return re.findall(r"<td\b[^>]*>(.*?)</td>", page.read_text("utf-8"), re.S)


SEARCHED = {
    "using it": "license cite windows partial_fit roadmap changelog macos seeds forget troubleshooting",
    "research": "arxiv bibtex continual lifelong catastrophic replay rehearsal exemplar ood lesson backbone gamma",
    "trust": "privacy gdpr security",
    "limits": "detection segmentation video",
    "installing": "conda colab uninstall",
}


def assert_search_finds_what_people_type(site: Path) -> None:
    """Check the search, also without a server, where the index is a script; labels in charts are not indexed."""
    text = (site / "search/search_index.js").read_text("utf-8")
    index = json.loads(text.partition("=")[2])
    told = re.sub(r"<[^>]*>", " ", " ".join(f"{page['title']} {page['text']}" for page in index["docs"])).lower()
    found = set(re.split(index["config"]["separator"], told))  # the words that a search knows
    for words in SEARCHED.values():
        assert not [word for word in words.split() if not any(each.startswith(word) for each in found)]
    assert "GFLOP per image" not in text


def assert_options_are_those_of_the_terminal(site: Path, onea: Callable[..., tuple[int, str, str]]) -> None:
    """Of every method: no cell lost to stray ticks, and the values that `onea methods NAME` prints."""
    page = (site / "methods.html").read_text("utf-8")
    section = re.search(r'<h3 id="their-options">.*?<h2', page, re.S)
    assert section
    assert "``" not in section[0]
    tables = re.findall(r"<summary><code>([\w-]+)</code>.*?<table>(.*?)</table>", section[0], re.S)
    shown = {
        method: {
            option: re.sub("<.*?>", "", value)
            for option, value in re.findall(r"<td><code>(--[\w-]+)</code></td>\s*<td>(.*?)</td>\s*<td>.+?</td>", rows)
        }
        for method, rows in tables
    }
    assert len(shown) > 20
    assert all(rows.count("<tr>") == len(shown[method]) + 1 for method, rows in tables)
    code, printed, _ = onea("methods", "one-a", "--data", "cifar100")
    assert code == 0
    terminal = dict(re.findall(r"^(--[\w-]+) +(\S+)  +\S", printed, re.M))
    assert terminal.keys() >= {"--learning-rate", "--head", "--batch-size", "--epochs"}
    assert terminal.items() <= shown["one-a"].items()


def test_the_site_is_built_strictly_and_offline(tmp_path: Path, onea: Callable[..., tuple[int, str, str]]) -> None:
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    fewer = {"RESULTS": "one-a-plus", "NOTEBOOKS": "none"}  # all take minutes
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"} | fewer
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(site.glob("*.html"))
    assert len(pages) > 15
    for page in pages:
        fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//[^"]+"', page.read_text("utf-8"))
        assert not fetched, page
    (cache,) = (tmp_path / "build/results").iterdir()
    assert_same_tables(cache / "docs/results", "one-a-plus")
    assert 'href="one-a-plus/report.html"' in (site / "results/index.html").read_text("utf-8")
    report = (site / "results/one-a-plus/report.html").read_text("utf-8")
    assert "<figure>" in report
    assert (site / "results/one-a-plus/curves-1.png").is_file()
    methods = (site / "methods.html").read_text("utf-8")
    from onea.merging import OPERATORS
    from onea.research.methods import METHODS

    assert all(f"<code>{name}</code>" in methods for name in (*METHODS.builtin, *OPERATORS.builtin))
    assert "<h1" in (site / "notebooks/quick-start.html").read_text("utf-8")
    assert (site / "notebooks/quick-start.ipynb").is_file()
    assert_links_lead_to_files(site)
    assert_results_are_complete(site)
    assert_a_phone_has_room_for_the_tables(site)
    assert_tables_fit_a_phone(site)
    assert_answers_the_first_questions(site)
    assert_search_finds_what_people_type(site)
    assert_options_are_those_of_the_terminal(site, onea)
    commands = (site / "commands.html").read_text("utf-8")
    assert all(word in commands for word in ("onea-teach", "onea-paper", "--share-training", "--on-bad"))
