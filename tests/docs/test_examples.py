# SPDX-License-Identifier: Apache-2.0
"""The examples in README and docs: offline ones are run on tiny data, all other commands are parsed or dry-run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import save_file
from support import ROOT
from support.commands import check_command
from support.pages import PAGES, SHELL, Block, blocks, script
from support.tiny import write_tiny_images

from onea.errors import OneaError

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [
    (block, words) for block in BLOCKS if block.language in SHELL and block.how != "exact" for words in block.commands()
]
RUN = sorted({block.page for block in BLOCKS if block.how in ("run", "exact")})
ELSEWHERE = ("serve", "bench", "demo", "tour")  # other tests run them: they take minutes, or never end
USAGE_ERROR = typer.BadParameter.__mro__[1]  # of click, or of the parser that newer typers bring along
SMALL = ["--threads", "1", "--precision", "fp32"]
TRAINING = ["--rank", "4", "--batch-size", "8", "--epochs", "1", "--min-epochs", "1", "--max-epochs", "1"]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


# every command is parsed


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=[f"{b.where} {' '.join(w)[:50]}" for b, w in COMMANDS])
def test_every_command_is_accepted(block: Block, words: list[str]) -> None:
    if block.how.endswith(".py"):  # about things that only that test installs
        assert (ROOT / block.how).is_file()
    else:
        check_command(words)


@pytest.mark.parametrize(
    "wrong",
    [
        "onea tech a b",
        "onea teach a",
        "onea teach a b --background c",
        "onea predict a b --jsn",
        "onea run one-a --kapa 3",
        "onea run one-b",
        "onea merge a b -o c --with tis",
        "onea paper tabel3",
        "oena demo",
        "make dmeo",
        "pip install onea[serve]",
        "pip install .[srve]",
        "python missing.py",
    ],
)
def test_an_invalid_command_is_detected(wrong: str) -> None:
    with pytest.raises((AssertionError, OneaError, USAGE_ERROR)):
        check_command(wrong.split())


# what can run offline is run


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tiny_vit: str) -> Path:
    """Tiny versions of everything in the pages: photos and updates, adapters, LoRAs, runs, folders with mistakes."""
    root = tmp_path_factory.mktemp("shop")
    images = root / "images"
    write_tiny_images(images, classes=6, train=6, test=3)
    first = ["Banana", "Kiwi", "Lemon", "Mango", "Papaya", "Leek"]
    for old, new in zip(sorted((images / "train").iterdir()), first, strict=True):
        day = "tuesday" if new == "Papaya" else "monday"
        shutil.copytree(old, root / "photos" / day / new)
        shutil.copytree(images / "test" / old.name, root / "photos" / "test" / new)
    for day in ("monday", "tuesday"):
        shutil.copytree(root / "photos" / day, root / "arrivals" / day)
    some = Image.open(root / "photos/test/Papaya/0.png")
    (root / "photos/background").mkdir()
    Image.new("RGB", some.size, "gray").save(root / "photos/background/shelf.png")
    (root / "new").mkdir()
    for name in ("photo.webp", "photo.jpg", "other.webp", "new/1.jpg", "new/papaya.webp"):
        some.save(root / name)
    _mistakes(root, some)
    _grocery(root, images)
    _adapters(root)
    return root


def _mistakes(root: Path, some: Image.Image) -> None:
    (root / "photos/empty").mkdir()
    for folder, names in {
        "single": ["Plum"],
        "twice": ["Plum", "plum"],
        "reserved": ["unknown"],
        "broken": ["Fig"],
    }.items():
        for name in names:
            place = root / "photos" / folder / name
            place.mkdir(parents=True)
            for number in range(1 if folder == "single" else 2):
                some.save(place / f"{number}.png")
    cut = root / "photos/broken/Fig/1.png"
    cut.write_bytes(cut.read_bytes()[:200])


def _grocery(root: Path, images: Path) -> None:
    """The classes that grocery.md copies, as links to a few images, and the list of them."""
    (root / "benchmarks/models").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/models/grocery-arrivals.json", root / "benchmarks/models")
    names = [
        name
        for one in json.loads((root / "benchmarks/models/grocery-arrivals.json").read_text())[:5]
        for name in one["classes"]
    ]
    for number, name in enumerate(names):
        for side in ("train", "test"):
            shutil.copytree(images / side / f"class{number % 6:02d}", root / "grocery" / side / name)


def _adapters(root: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in "AB":
        weights = {"down": torch.randn(4, 16, generator=generator), "up": torch.randn(16, 4, generator=generator)}
        save_file(weights, root / f"{name}.safetensors")
        lora = root / f"lora-{name.lower()}"
        lora.mkdir()
        prefix = "base_model.model.layer"
        factors = {
            f"{prefix}.lora_A.weight": torch.randn(3, 12, generator=generator),
            f"{prefix}.lora_B.weight": torch.randn(8, 3, generator=generator),
        }
        save_file(factors, lora / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["layer"], "bias": "none"}
        (lora / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture
def place(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shop as the working folder."""
    shutil.copytree(shop, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("ONEA_DATA", raising=False)
    return tmp_path / "here"


def tiny_words(words: list[str], vit: str) -> list[str]:
    """The same command with tiny images, a tiny network and short training; grids are only dry-run."""
    words = [match for word in words for match in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    swaps = {"--backbone": vit, "--tasks": "3"}
    words = [swaps.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    words = [
        "folder:images" if word.startswith(("glyphs", "cifar100", "folder:photos", "folder:cifar100")) else word
        for word in words
    ]
    match words:
        case ["onea", "teach", model, *_] if not Path(model).exists():
            return [*words, "--backbone", vit, "--epochs", "1", *SMALL]
        case ["onea", "teach", *_]:
            return [*words, *SMALL]
        case ["onea", "run", method, *rest]:
            stream = (
                [] if {"--tasks", "--sizes", "--stream"} & {*rest} or "folder:arrivals" in rest else ["--tasks", "3"]
            )
            network = [] if "--backbone" in rest else ["--backbone", vit]
            return [*words, *stream, *network, *SMALL, *(TRAINING if method != "simplecil" else [])]
        case ["onea", "report", "runs", *rest]:
            return ["onea", "report", "runs/A", *rest]  # drawing the figures of all would take as long as all the rest
        case ["onea", "paper", _, *rest]:
            return [*words, *({"--dry-run"} - {*rest}), *([] if "--tasks" in rest else ["--tasks", "3"])]
    return words


def run_python(code: str, name: str, vit: str) -> None:
    """Run an example with a tiny network in all its models."""
    from onea.model.estimator import OneA

    defaults = {"backbone": vit, "precision": "fp32", "threads": 1}
    with pytest.MonkeyPatch.context() as patch:
        for parameter, value in defaults.items():
            patch.setitem(OneA.__init__.__kwdefaults__, parameter, value)
        exec(compile(code, name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", RUN, ids=named)
def test_offline_examples_run(page: Path, place: Path, tiny_vit: str, onea: Callable[..., Any]) -> None:
    os.chdir(place)  # the onea fixture goes to an empty folder
    if page.name in ("README.md", "paper.md", "merging.md"):
        for name in "AB":
            words = ["onea", "run", "one-a", "--data", "glyphs", "--out", f"runs/{name}"]
            words += ["--no-gating"] if name == "B" else []
            assert onea(*tiny_words(words, tiny_vit)[1:])[0] == 0
    for block in blocks(page):
        if block.how == "exact":
            for words, printed in block.exchanges():
                code, out, err = onea(*words[1:])
                assert " ".join((out + err).split()) == " ".join(printed.split()), block.where
                assert code == (2 if printed.startswith("onea: ") else 0)
        elif block.how == "run" and block.language == "python":
            with contextlib.redirect_stdout(None):
                run_python(block.text, block.where, tiny_vit)
        elif block.how == "run":
            for words in block.commands():
                if words[0] != "onea" or words[1] in ELSEWHERE:
                    continue
                code, out, err = onea(*tiny_words(words, tiny_vit)[1:])
                assert code == 0, f"{block.where}: {' '.join(words)}\n{out}\n{err}"


def test_the_pictures_of_the_concepts_can_be_drawn(tmp_path: Path) -> None:
    pictures = script("pictures")
    pictures.OUT = tmp_path
    pictures.main()
    others = {"architecture-calls.svg", "architecture-data.svg"}
    others.add("teach-predict-undo.svg")
    kept = {path.name for path in (ROOT / "docs/pictures").iterdir() if path.is_file()} - others
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn <= kept <= {*drawn, "gates.svg"}, "gates are drawn of a record that holds the analysis of its merges"


def test_outputs_are_written_below_their_commands(tmp_path: Path) -> None:
    outputs = script("outputs")
    run, table = "<!-- test: run -->\n", "\n".join(["a", "───", *["b"] * 30, "is", "c", "───", "d"])
    page = f"{run}```python\nprint(6 * 7)\n```\n\n```text\n41\n```\n\n{run}```sh\necho unseen\n```\nafter\n"
    assert outputs.updated(page, tmp_path, example=False) == page.replace("41", "42")
    short = outputs.shorten(table).splitlines()
    assert len(short) < 20
    assert (short[:2], short[-4:]) == (["a", "───"], ["is", "c", "───", "d"])
    assert any("..." in line for line in short)


# what the pages point at


def test_every_link_leads_to_a_file() -> None:
    """This includes code hosts, which show the pages without generated content."""
    pages = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "docs/results").rglob("*.md")]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text("utf-8"))
        if not re.match(r"\w+:", target)
    ]
    assert len(links) > 50
    assert not [f"{named(page)}: {target}" for page, target in links if not (page.parent / target).exists()]


def test_placeholders_in_sentences_do_not_begin_a_line() -> None:
    """At the beginning of a line, a comment ends the paragraph or list around it."""
    lines = [(page, line) for page in PAGES for line in page.read_text("utf-8").splitlines()]
    assert not [f"{named(page)}: {line}" for page, line in lines if re.match(r"\s*<!-- written: \S+ -->.", line)]


def anchors(page: Path) -> set[str]:
    """The targets of links into a page on a code host: headings and named anchors."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    heads = (re.sub(r"<[^>]*>|\]\([^)]*\)", "", head).lower() for head in re.findall(r"^#+ (.+)$", text, re.M))
    named_places = re.findall(r'<a id="([\w-]+)">', text)
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in heads}.union(named_places)


def test_every_link_into_a_page_leads_to_a_heading_or_an_anchor() -> None:
    """This includes code hosts, which lack the headings that are generated with the site."""
    generated = ("commands.md", "api.md")
    links = [
        (page, page.parent / target if target else page, anchor)
        for page in PAGES
        for target, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text("utf-8"))
    ]
    assert len(links) > 50
    missing = [
        f"{named(page)}: {target.name}#{anchor}"
        for page, target, anchor in links
        if target.suffix == ".md" and target.name not in generated and anchor not in anchors(target)
    ]
    assert not missing


def test_the_readme_begins_with_photos_and_installation() -> None:
    """The commands for photos and the requirements of an installation come before research."""
    photos, _, research = (ROOT / "README.md").read_text("utf-8").partition("\n## Research\n")
    assert research
    assert not re.findall(r"\bA_T\b|\badapters?\b|subspace|prototype", photos)
    assert photos.index("onea teach") < photos.index("make demo") < photos.index(". .venv/bin/activate")
    size = re.search(r"takes (\d+\.\d) GB of disk", photos)
    assert size
    assert "install PyTorch and\ntorchvision for the CPU first" in photos[size.end() :]
