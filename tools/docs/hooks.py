# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: fill in generated content, and add linked files from outside docs/ to the site.

``make docs RESULTS=none`` leaves out the pages of the committed records; ``RESULTS=methods`` renders one group.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import charts
import fill
import notebooks
import reference
from results import ROOT

DRAWING = re.compile(r"^!\[[^\]]*\]\((\S+\.svg)\)$", re.M)
CELL, CODE = re.compile(r"<td\b.*?</td>", re.S), re.compile(r"<code>[^<]+</code>")
RESULT_FOLDERS = ("benchmarks", "research")  # folders outside docs/ whose READMEs and results are added
ROOT_PAGES = ("CHANGELOG", "NOTICE", "SECURITY")  # files outside docs/ that become pages


def result_pages(files: Any) -> str:
    """Links to the pages of the committed records."""
    pages = [Path(file.src_uri).relative_to("results") for file in files if file.src_uri.endswith(".html")]
    links = (f"[{page.parent}]({page.as_posix()})" for page in sorted(pages))
    return f"Pages: {', '.join(links)}." if pages else ""


def _root_page(name: str) -> str:
    """A file from outside docs/ as a page, with its links adapted."""
    text = (ROOT / (name if name == "NOTICE" else f"{name}.md")).read_text("utf-8")
    if name == "NOTICE":
        return f"---\nsearch: {{exclude: true}}\n---\n# Notice\n\n```text\n{text}\n```\n"
    return re.sub(r"\]\((?:docs/|\./)", "](", text)


def _inline_drawing(path: Path) -> str:
    """An SVG as part of its page, so that the page's style sheet applies to it."""
    return f'<figure class="drawing">{path.read_text("utf-8")}</figure>'


# hooks, which MkDocs calls by name


def on_files(files: Any, config: Any) -> Any:
    """Add measurements, notebooks and pages of records to the site."""
    from mkdocs.structure.files import File

    for folder in RESULT_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.name == "README.md":
                text = path.read_text("utf-8").replace("](../docs/", "](../")
                files.append(File.generated(config, name, content=text))
            elif path.suffix in (".csv", ".json", ".jsonl"):
                files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "drawn.css", content=charts.stylesheet()))
    for name in ROOT_PAGES:
        files.append(File.generated(config, f"{name.lower()}.md", content=_root_page(name)))
    built = Path(config.site_dir).parent / "build"
    for name, content in notebooks.pages(built / "notebooks").items():
        files.append(File.generated(config, f"notebooks/{name}", content=content))
    for path in fill.uncommitted_files(os.environ.get("RESULTS", ""), built / "results"):
        name = f"results/{path.parent.name}/{path.name}"
        if existing := files.get_file_from_path(name):  # from a manual `onea report`
            files.remove(existing)
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Fill in generated content, and adapt links to files outside docs/."""
    if "/" not in page.file.src_uri:
        markdown = re.sub(rf"\]\(\.\./({'|'.join(RESULT_FOLDERS)})/", r"](\1/", markdown)
    markdown = re.sub(
        rf"\]\(\.\./({'|'.join(ROOT_PAGES)})(\.md)?\)", lambda match: f"]({match[1].lower()}.md)", markdown
    )
    markdown = DRAWING.sub(lambda match: _inline_drawing(Path(page.file.abs_src_path).parent / match[1]), markdown)
    markdown = re.sub(r"\]\((notebooks/[\w-]+)\.ipynb\)", r"](\1.md)", markdown)
    functions = fill.CONTENT | reference.TABLES | {"result-pages": lambda: result_pages(files)}
    return fill.GENERATED.sub(lambda match: fill.content(match[1], functions), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Allow line breaks at the dots of names in tables, for phones."""

    def breakable(cell: re.Match[str]) -> str:
        return CODE.sub(lambda code: re.sub(r"(?<=\w\.)(?=[^\W\d])", "<wbr>", code[0]), cell[0])

    return CELL.sub(breakable, html)
