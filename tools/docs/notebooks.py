# SPDX-License-Identifier: Apache-2.0
"""Notebooks: stored without outputs, run in a new kernel, and converted to pages with their outputs.

``make docs NOTEBOOKS="quick-start"`` runs only some of them, ``NOTEBOOKS=none`` none; the others are shown without
outputs. Outputs are cached until the notebook or the program changes.
"""

from __future__ import annotations

import hashlib
import os
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/notebooks"
TIMEOUT = 300  # seconds per cell
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and cursor movements


def paths() -> list[Path]:
    """The paths of all notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def run(path: Path) -> Any:
    """The notebook with the outputs of a new kernel; an error in a cell is raised.

    Kernels and settings of the user have no effect: the kernel uses this Python and an empty configuration folder.
    """
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        # The kernel talks through a socket in this folder instead of the network.
        manager = AsyncKernelManager(connection_file=f"{folder}/kernel.json", kernel_name="python3", transport="ipc")
        manager.kernel_spec_manager = KernelSpecManager(kernel_dirs=[])
        client = NotebookClient(notebook, km=manager, timeout=TIMEOUT, resources={"metadata": {"path": folder}})
        settings = {
            "IPYTHONDIR": folder,
            "PYTHONWARNINGS": "ignore:IProgress not found",
        }  # progress bars need no widgets
        client.execute(cleanup_kc=True, env=os.environ | settings)
    return notebook


def render(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures by name."""
    pictures: dict[str, bytes] = {}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(_link_pages(cell.source))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in _join_streams(cell.outputs):
            parts += _markdown(output, name, pictures)
    title, *rest = parts
    note = f"[Download this notebook]({name}.ipynb){{ .notebook }}"
    return "\n\n".join([title, note, *rest]) + "\n", pictures


def _markdown(output: Any, name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """An output of a cell in Markdown."""
    if output.output_type == "stream":
        yield f"```text\n{_TERMINAL.sub('', output.text).rstrip()}\n```"
        return
    data: Mapping[str, str] = output.get("data", {})
    if "text/markdown" in data:
        yield data["text/markdown"]
    elif "image/png" in data:
        file = f"{name}-{len(pictures) + 1}.png"
        pictures[file] = b64decode(data["image/png"])
        yield f"![Output of the cell above]({file})"
    elif "text/plain" in data:
        yield f"```text\n{data['text/plain']}\n```"


def _join_streams(outputs: list[Any]) -> Iterator[Any]:
    """Outputs, with consecutive printed texts joined."""
    last = None
    for output in outputs:
        if last and output.output_type == last.output_type == "stream":
            last.text += output.text
            continue
        if last:
            yield last
        last = output
    if last:
        yield last


def _link_pages(text: str) -> str:
    """The text with links to the pages of other notebooks instead of their files."""
    return re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", text)


def pages(cache: Path) -> dict[str, bytes]:
    """The pages of all notebooks and their pictures by file name; two notebooks run at a time."""
    import nbformat

    only = os.environ.get("NOTEBOOKS", "").split()

    def files_of(path: Path) -> dict[str, bytes]:
        if only and path.stem not in only:
            text, pictures = render(nbformat.read(path, as_version=4), path.stem)
            return {f"{path.stem}.md": text.encode(), **pictures}
        cached = cache / f"{path.stem}-{_digest(path)}.ipynb"
        if not cached.exists():
            executed = run(path)
            cache.mkdir(parents=True, exist_ok=True)
            for old in cache.glob(f"{path.stem}-{'?' * 16}.ipynb"):
                old.unlink()
            nbformat.write(executed, cached)
        text, pictures = render(nbformat.read(cached, as_version=4), path.stem)
        return {f"{path.stem}.md": text.encode(), **pictures}

    with ThreadPoolExecutor(2) as pool:
        return {name: content for files in pool.map(files_of, paths()) for name, content in files.items()}


def _digest(path: Path) -> str:
    """A digest of the notebook and the source."""
    digest = hashlib.sha256(path.read_bytes())
    for source in sorted((ROOT / "src/onea").rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
