# SPDX-License-Identifier: Apache-2.0
"""What MkDocs calls: it fills in what is generated, and brings files from outside docs/ that pages link to.

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

MAP = re.compile(r"^!\[[^\]]*\]\((\S+\.svg)\)$", re.M)
CELL, CODE = re.compile(r"<td\b.*?</td>", re.S), re.compile(r"<code>[^<]+</code>")
MEASURED = ("benchmarks", "research")  # folders beside docs/ whose files come along, each with its README
BESIDE = ("CHANGELOG", "NOTICE", "SECURITY")  # files beside docs/ that become pages


def result_pages(files: Any) -> str:
    """Links to the pages of the committed records."""
    pages = [Path(file.src_uri).relative_to("results") for file in files if file.src_uri.endswith(".html")]
    links = (f"[{page.parent}]({page.as_posix()})" for page in sorted(pages))
    return f"Pages: {', '.join(links)}." if pages else ""


def _outside(name: str) -> str:
    """A file from beside docs/ as a page; its links lead from there."""
    found = ROOT / (name if name == "NOTICE" else f"{name}.md")
    text = found.read_text("utf-8")
    if name == "NOTICE":
        return f"---\nsearch: {{exclude: true}}\n---\n# Notice\n\n```text\n{text}\n```\n"
    return re.sub(r"\]\((?:docs/|\./)", "](", text)


def _drawn(path: Path) -> str:
    """A drawing as part of its page, where the page's colours reach it."""
    return f'<figure class="drawing">{path.read_text("utf-8")}</figure>'


# mkdocs calls these by name


def on_files(files: Any, config: Any) -> Any:
    """Measured files, which are beside docs/, become part of the site; so do pages made from records."""
    from mkdocs.structure.files import File

    for folder in MEASURED:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.name == "README.md":
                text = path.read_text("utf-8").replace("](../docs/", "](../")
                files.append(File.generated(config, name, content=text))
            elif path.suffix in (".csv", ".json", ".jsonl"):
                files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "drawn.css", content=charts.stylesheet()))
    for name in BESIDE:
        files.append(File.generated(config, f"{name.lower()}.md", content=_outside(name)))
    built = Path(config.site_dir).parent / "build"
    for name, content in notebooks.pages(built / "notebooks").items():
        files.append(File.generated(config, f"notebooks/{name}", content=content))
    for path in fill.rendered(os.environ.get("RESULTS", ""), built / "results"):
        name = f"results/{path.parent.name}/{path.name}"
        if made_before := files.get_file_from_path(name):  # by the same commands, run by hand
            files.remove(made_before)
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Fill in what is generated, and turn links out of docs/ to where those files are on the site."""
    if "/" not in page.file.src_uri:
        markdown = re.sub(rf"\]\(\.\./({'|'.join(MEASURED)})/", r"](\1/", markdown)
    markdown = re.sub(rf"\]\(\.\./({'|'.join(BESIDE)})(\.md)?\)", lambda found: f"]({found[1].lower()}.md)", markdown)
    markdown = MAP.sub(lambda found: _drawn(Path(page.file.abs_src_path).parent / found[1]), markdown)
    markdown = re.sub(r"\]\((notebooks/[\w-]+)\.ipynb\)", r"](\1.md)", markdown)
    functions = fill.CONTENT | reference.TABLES | {"result-pages": lambda: result_pages(files)}
    return fill.GENERATED.sub(lambda found: fill.content(found[1], functions), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let names in tables break at their dots, where a phone has no room for all of a name."""

    def breakable(cell: re.Match[str]) -> str:
        return CODE.sub(lambda code: re.sub(r"(?<=\w\.)(?=[^\W\d])", "<wbr>", code[0]), cell[0])

    return CELL.sub(breakable, html)
