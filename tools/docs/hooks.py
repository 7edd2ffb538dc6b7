# SPDX-License-Identifier: Apache-2.0
"""What the documentation takes from the program at build time, so that it cannot grow stale.

Pages hold ``<!-- generated: NAME -->`` where a table goes. Files outside docs/ that pages link to become part of the
site, and so does what is rendered from the committed records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import expected
import notebooks
import rendered
import result_tables
import svg
from result_tables import table

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"^<!-- generated: (\S+) -->$", re.M)
MAP = re.compile(r"^!\[[^\]]*\]\((\S+\.svg)\)$", re.M)
CELL, CODE = re.compile(r"<td\b.*?</td>", re.S), re.compile(r"<code>[^<]+</code>")
MEASURED = ("benchmarks", "research")  # folders beside docs/ whose files come along, each with its README
BESIDE = ("CHANGELOG", "NOTICE", "SECURITY")  # files beside docs/ that become pages
OPTIONS_FOR = "cifar100"  # epochs and batch size follow from the data


def methods_table() -> str:
    """Every registered method."""
    from onea.research.methods import METHODS, method_class

    def row(name: str) -> Sequence[str]:
        kind = method_class(name)
        passes = " / ".join(f"{kind.forward_passes(kind.Options(), tasks):g}" for tasks in (1, 10, 40))
        title = f"[{kind.title}]({kind.paper})" if kind.paper else kind.title
        return f"`{name}`", title, kind.trains, kind.stores, passes, "yes" if kind.in_paper else ""

    heads = ("name", "method", "trains", "keeps", "passes after 1 / 10 / 40 tasks", "in the paper")
    return table(heads, (row(name) for name in METHODS.builtin))


def base_rates() -> str:
    """The learning rate of the default preset, for every method that trains."""
    from onea.research.methods import METHODS, method_class

    rates = {name: method_class(name).base_learning_rate for name in METHODS.builtin}
    return table(("method", "base rate"), ((f"`{name}`", f"{rate:g}") for name, rate in rates.items() if rate))


def method_options() -> str:
    """The options of every method, each below its name, with the values that a run has by default."""
    from onea.research.methods import METHODS, method_class
    from onea.research.paper.scale import option_values
    from onea.research.runs.config import RunConfig

    def options(kind: Any, name: str) -> str:
        return _options(kind.Options, option_values(name, RunConfig.preset, OPTIONS_FOR), f"default for {OPTIONS_FOR}")

    kinds = {name: method_class(name) for name in METHODS.builtin}
    return "\n\n".join(_folded(f"`{name}`: {kind.title}", options(kind, name)) for name, kind in kinds.items())


def operators_table() -> str:
    """Every registered merging operator."""
    from onea.merging import OPERATORS, operator_class

    def row(name: str) -> Sequence[str]:
        kind = operator_class(name)
        marks = ["yes" if flag else "" for flag in (kind.uses_sizes, kind.associative)]
        needs = {"": "", "fisher": "Fisher information", "gram": "Gram matrices"}[kind.needs]
        return f"`{name}`", f"[{kind.title}]({kind.paper})" if kind.paper else kind.title, *marks, needs

    heads = ("name", "operator", "sizes matter", "any order gives the same", "needs statistics")
    return table(heads, (row(name) for name in OPERATORS.builtin))


def operator_options() -> str:
    """The options of every operator that has some."""
    import dataclasses

    from onea.merging import OPERATORS, operator_class

    kinds = {name: operator_class(name) for name in OPERATORS.builtin}
    return "\n\n".join(
        _folded(f"`{name}`: {kind.title}", _options(kind)) for name, kind in kinds.items() if dataclasses.fields(kind)
    )


def classifiers_table() -> str:
    """Every registered classifier."""
    from onea.classifiers import CLASSIFIERS, classifier_class

    def row(name: str) -> Sequence[str]:
        kind = classifier_class(name)
        return f"`{name}`", f"[{kind.title}]({kind.paper})", kind.stores, "yes" if kind.follows_drift else ""

    return table(("name", "classifier", "keeps", "follows the adapter"), (row(name) for name in CLASSIFIERS.builtin))


def datasets_table() -> str:
    """Every dataset by its name on the command line."""
    from onea.research.data.sources import DATASETS

    return table(
        ("`--data`", "what it is"), ((f"`{info.usage}`", info.description) for info in DATASETS.load_all().values())
    )


def commands_reference() -> str:
    """Every command with its arguments and options, as the parser itself knows them."""
    import typer

    from onea.cli.app import app
    from onea.cli.examples import EXAMPLES

    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command, EXAMPLES[name]) for name, command in group.commands.items())


def _command(name: str, command: Any, examples: Sequence[str]) -> str:
    usage, rows = ["onea", name], []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            shown = f"`{parameter.name.upper()}`"
            many = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
            usage.append(many if parameter.required else f"[{many}]")
        else:
            shown = ", ".join(f"`{word}`" for word in (*parameter.opts, *parameter.secondary_opts))
        rows.append((shown, parameter.help or "", _default(parameter)))
    help_text = " ".join((command.help or "").split())
    shape = f"```text\n{' '.join(usage)} [OPTIONS]\n```"
    shown = "```sh\n" + "\n".join(examples) + "\n```"
    return "\n\n".join([f"## onea {name}", help_text, shape, shown, table(("", "meaning", "default"), rows)])


def _default(parameter: Any) -> str:
    if isinstance(getattr(parameter, "show_default", None), str):
        return str(parameter.show_default)
    value = parameter.default
    return "" if parameter.required or value is None or value is False or callable(value) else f"`{value}`"


def _options(kind: type, values: Mapping[str, Any] | None = None, head: str = "default") -> str:
    from onea.options import list_options

    rows = []
    for name, default, meaning in list_options(kind):
        value = str(values[name] if values else default)
        words = (meaning[:1].upper() + meaning[1:]).replace("``", "`")
        rows.append((f"`--{name.replace('_', '-')}`", value and f"`{value}`", words))
    return table(("option", head, "meaning"), rows)


def _folded(title: str, content: str) -> str:
    body = "\n".join(f"    {line}" for line in content.splitlines())
    return f'??? note "{title}"\n\n{body}'


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


GENERATED: dict[str, Callable[[], str]] = (
    {
        "methods": methods_table,
        "base-rates": base_rates,
        "method-options": method_options,
        "operators": operators_table,
        "classifiers": classifiers_table,
        "operator-options": operator_options,
        "datasets": datasets_table,
        "commands": commands_reference,
    }
    | expected.GENERATED
    | result_tables.GENERATED
)


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
    files.append(File.generated(config, "drawn.css", content=svg.stylesheet()))
    for name in BESIDE:
        files.append(File.generated(config, f"{name.lower()}.md", content=_outside(name)))
    built = Path(config.site_dir).parent / "build"
    for name, content in notebooks.pages(built / "notebooks").items():
        files.append(File.generated(config, f"notebooks/{name}", content=content))
    for path in rendered.rendered(built / "results"):
        name = f"results/{path.parent.name}/{path.name}"
        if path.suffix == ".html" and files.get_file_from_path(str(Path(name).with_suffix(".md"))):
            name = f"results/{path.parent.name}/report.html"  # its own name is that of the table as a page
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
    generated = GENERATED | {"result-pages": lambda: result_pages(files)}
    return MARK.sub(lambda found: generated[found[1]](), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let names in tables break at their dots, where a phone has no room for all of a name."""

    def breakable(cell: re.Match[str]) -> str:
        return CODE.sub(lambda code: re.sub(r"(?<=\w\.)(?=[^\W\d])", "<wbr>", code[0]), cell[0])

    return CELL.sub(breakable, html)
