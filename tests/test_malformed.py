# SPDX-License-Identifier: Apache-2.0
"""Ten thousand malformed inputs at the real entry points: each is refused in one sentence or harmless.

Images, zips, JSON, safetensors, YAML and arguments. The default suite tests a sample; --slow tests all and prints the
outcomes. A failure contains kind, seed and number, from which ``trial_rng`` generates the same input again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import shutil
import socket
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file, save
from support import malformed
from support.adapters import BARE_OPERATORS, CONFIG, write_lora, write_matrices
from support.commands import COMMANDS
from support.malformed import trial_rng
from support.models import class_folders, resealed
from support.serving import TEACHER, ZIP, client_of, folder_hash, png, zipped
from support.tiny import Stopped, save_plain

from onea.data.dataset import Split
from onea.data.decode import fit, image_size, read_image
from onea.data.pixel_limit import DEFAULT_MAX_PIXELS
from onea.errors import OneaError
from onea.model import engine
from onea.research.data.pack import pack, stored_shape
from onea.research.runs import runner as runs
from onea.research.runs import setup
from onea.research.runs.config import make_config
from onea.research.runs.grid import RecordStore
from onea.serve.settings import Limits
from onea.vit import backbones

SEED = 12
# Maximum CPU seconds of one input, and bytes by which a kind may raise the peak memory. A local file may declare
# DEFAULT_MAX_PIXELS pixels, for each of which Pillow allocates four bytes.
MAX_SECONDS, MAX_BYTES = 5.0, 4 * DEFAULT_MAX_PIXELS


class Trials:
    """Counts the outcomes of the inputs of one kind, and collects the failures."""

    def __init__(self, kind: str) -> None:
        self.kind, self.outcomes = kind, Counter[str]()
        self.failures: list[str] = []

    def numbers(self, count: int) -> Iterator[int]:
        """The number of each trial; after the last one, none may have failed."""
        yield from range(count)
        assert not self.failures, f"{len(self.failures)} of {count} failed:\n" + "\n".join(self.failures[:20])

    @contextmanager
    def trial(self, number: int) -> Iterator[random.Random]:
        """The random generator of one input; any exception except ``OneaError`` is a failure, and so is a long time."""
        started = time.process_time()
        try:
            try:
                yield trial_rng(self.kind, SEED, number)
                self.outcomes["harmless"] += 1
            except OneaError as error:
                check_sentence(str(error))
                self.outcomes["refused"] += 1
        except Exception as error:  # the other inputs are still tested, and all failures are reported at the end
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._fail(number, f"{type(error).__name__} in {place.filename}:{place.lineno}: {error!s:.500}")
        if (taken := time.process_time() - started) > MAX_SECONDS:
            self._fail(number, f"took {taken:.1f} s")

    def _fail(self, number: int, reason: str) -> None:
        self.failures.append(f"{self.kind}, seed {SEED}, number {number}: {reason}")

    def count(self, refused: bool) -> None:
        """Correct the outcome of an input that was refused without an exception."""
        self.outcomes["refused"] += refused
        self.outcomes["harmless"] -= refused


@pytest.fixture
def trials(request, tried) -> Iterator[Trials]:
    """The trials of a test; its name is their kind."""
    resource = pytest.importorskip("resource")
    made = Trials(request.function.__name__.removeprefix("test_"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield made
    outcomes = {"tried": made.outcomes.total() + len(made.failures)}
    outcomes |= {"refused with one sentence": made.outcomes["refused"], "harmless": made.outcomes["harmless"]}
    tried("malformed inputs", f"{made.kind} (seed {SEED})", outcomes | {"tracebacks or too slow": len(made.failures)})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MAX_BYTES


def counts(sample: int, many: int) -> Any:
    """The number of inputs, by default and with --slow."""
    return pytest.mark.parametrize("count", [sample, pytest.param(many, marks=pytest.mark.slow)])


def check_sentence(text: str) -> None:
    assert text.strip(), "the message is empty"
    assert "Traceback" not in text, text
    assert len(text.strip().splitlines()) == 1, text
    assert len(text) < 3_000, f"{len(text)} characters"


@pytest.fixture(autouse=True)
def _cached(monkeypatch):
    """Load the network and build the table of commands only once, as no trial changes them."""
    once = functools.cache(backbones.load_backbone)
    monkeypatch.setattr(engine, "load_backbone", once)
    monkeypatch.setattr(setup, "load_backbone", once)
    monkeypatch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))


@pytest.fixture
def command(onea):
    """Run a command, which must succeed or be refused in one sentence; returns whether it was refused."""

    def call(*words: str) -> bool:
        code, _, err = onea(*words)
        assert code in (0, 2), (code, words, err)
        if code == 2 and not err.startswith(("Usage:", "╭─ Error")):
            assert err.startswith("onea: "), err
            check_sentence(err)
        assert "Traceback" not in err, err
        return code == 2

    return call


@pytest.fixture(scope="session")
def original_shop(_taught) -> Path:
    """The model folder of which ``shop`` is a copy."""
    return Path(_taught)


@pytest.fixture(scope="module")
def finished(tiny_vit, tiny_images, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """Values and folder of a finished run."""
    values = {"method": "simplecil", "data": f"folder:{tiny_images}", "backbone": tiny_vit, "sizes": "3,1,2"}
    values |= {"device": "cpu", "precision": "fp32", "threads": 1}
    folder = tmp_path_factory.mktemp("run") / "run"
    runs.run(make_config(values), folder)
    return values, folder


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished[1], tmp_path / "runs" / make_config(finished[0]).folder().name))


@pytest.fixture
def as_options(finished) -> list[str]:
    """The values of the finished run as options."""
    options = [word for name, value in finished[0].items() if name != "method" for word in (f"--{name}", str(value))]
    return [finished[0]["method"], *options]


# Images


@counts(90, 3_000)
def test_images(count, trials, shop, tmp_path, command):
    before, file = folder_hash(shop), tmp_path / "image.png"
    with client_of(shop, limits=Limits(pixels=1_000_000)) as client:
        for number in trials.numbers(count):
            with trials.trial(number) as rng:
                content = malformed.image(rng)
                file.write_bytes(content)
                match number % 10:
                    case 0:
                        trials.count(command("predict", str(shop), str(file), "--threads", "1"))
                    case 1 | 2 | 3:
                        height, width = image_size(file)
                        assert min(height, width) >= 0
                        assert fit(read_image(file, min_side=28), 28, 28).shape == (3, 28, 28)
                    case 4 | 5:
                        read_image(content, min_side=28, limit=1_000_000, untrusted=True)
                    case 6 | 7:
                        trials.count(refused(client.post("/predict", content=content)))
                    case 8:
                        body, headers = malformed.form(content)
                        trials.count(refused(client.post("/predict", content=body, headers=headers)))
                    case 9:
                        body, headers = malformed.form(content, b"plum")
                        answer = client.post("/learn", content=body, headers=headers | TEACHER)
                        assert refused(answer), "one image of a new class is not enough"
                        trials.count(True)
    assert folder_hash(shop) == before


def refused(response: Any) -> bool:
    """Whether the service refused a request, which must be in one sentence with a client error status."""
    assert response.status_code < 500, (response.status_code, response.text)
    if response.status_code < 400:
        return False
    assert response.headers["content-type"] == "application/problem+json"
    check_sentence(response.json()["detail"])
    return True


# Zips and requests


@counts(40, 1_500)
def test_zips(count, trials, shop):
    before = folder_hash(shop)
    with client_of(shop, limits=Limits(pixels=1_000_000, zip_bytes=10_000_000)) as client:
        for number in trials.numbers(count):
            with trials.trial(number) as rng:
                answer = client.post("/learn", content=malformed.archive(rng), headers=ZIP)
                assert refused(answer), "there is nothing to learn from"
                assert str(shop.parent) not in answer.text
                trials.count(True)
        assert client.service.learning is False
    assert folder_hash(shop) == before


@counts(40, 700)
def test_requests(count, trials, shop):
    before = folder_hash(shop)
    with client_of(shop, limits=Limits(pixels=1_000_000)) as client:
        for number in trials.numbers(count):
            with trials.trial(number) as rng:
                method, address, body, headers = malformed.request(rng)
                if address == "/learn" and "Authorization" not in headers:
                    headers |= TEACHER
                encoded = {name: value.encode("latin-1") for name, value in headers.items()}
                answer = client.request(method, address, content=body, headers=encoded)
                assert refused(answer) or method == "OPTIONS" or address.startswith("/predict"), answer.text
                assert str(shop.parent) not in answer.text
                trials.count(answer.status_code >= 400)
        assert client.get("/classes").json()["version"] == 1
    assert folder_hash(shop) == before


# JSON


def restore(folder: Path, whole: Path) -> Path:
    """Replace a folder by a copy of the original."""
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(whole, folder))


def run_unchanged(folder: Path, trials: Trials, command: Any, *words: str) -> None:
    """Run a command, which must not change the folder if it is refused."""
    before = folder_hash(folder)
    was_refused = command(*words)
    assert not was_refused or folder_hash(folder) == before, "a refused command changed the folder"
    trials.count(was_refused)


@counts(15, 500)
def test_json_of_a_model(count, trials, shop, original_shop, tiny_images, command):
    """Mostly with a matching checksum."""
    image = str(next((tiny_images / "test/class00").iterdir()))
    asks = (["history", "--json"], ["predict", image, "--threads", "1"], ["rename", "class00", "null"])
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            file = restore(shop, original_shop) / rng.choice(["model.json", "states/000001/state.json"])
            value = json.loads(file.read_bytes())
            sealed = rng.random() < 0.7
            file.write_bytes(resealed(malformed.odd_value(value, rng)) if sealed else malformed.odd_json(value, rng))
            asked, *more = rng.choice(asks)
            run_unchanged(shop, trials, command, asked, str(shop), *more)


@counts(15, 700)
def test_json_of_a_run(count, trials, run_folder, finished, as_options, command, tmp_path):
    file, whole = run_folder / "record.json", json.loads((run_folder / "record.json").read_bytes())
    asks = [["run", *as_options, "--out", str(run_folder)], ["compare", str(run_folder), str(finished[1])]] * 6
    asks += [["report", str(run_folder), "--out", str(tmp_path / "report")]]
    asks += [["paper", "proxies", "--out", str(tmp_path), "--render-only", *as_options[1:5], "--tasks", "3"]]
    store, config = RecordStore(run_folder.parent), make_config(finished[0])
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            sealed = rng.random() < 0.7
            file.write_bytes(resealed(malformed.odd_value(whole, rng)) if sealed else malformed.odd_json(whole, rng))
            noted = {"error": "x", "details": "", "attempts": 1, "date": ""}
            (run_folder / "failure.json").write_bytes(malformed.odd_json(noted, rng))
            run_unchanged(run_folder, trials, command, *rng.choice(asks))
            assert store.find(config) is None or store.failure(config) is None
            assert len(f"{store.failure(config)}") < 10_000
            assert len(list(store.records())) < 2


@counts(20, 400)
def test_json_of_packed_images(count, trials, tiny_images, tmp_path):
    """A damaged index is rebuilt, and the pixels are always correct."""
    files = class_folders(tiny_images / "test")["class00"]
    split, cache = Split(labels=np.zeros(len(files), dtype=np.int64), files=tuple(files)), tmp_path / "cache"
    shape = stored_shape([split], 28, cache)
    right = np.array(pack(split, shape, cache=cache, on_bad="fail").pixels)
    whole = shutil.copytree(cache, tmp_path / "whole")
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            file = rng.choice(sorted(restore(cache, whole).glob("*.json")))
            value = json.loads(file.read_bytes())
            if rng.random() < 0.3:  # deliberately forged; a forger could change the pixels as well
                file.write_bytes(resealed(malformed.odd_value(value, rng)))
                pack(split, shape, cache=cache, on_bad="fail")
                restore(cache, whole)
                continue
            file.write_bytes(malformed.odd_json(value, rng))
            assert np.array_equal(pack(split, shape, cache=cache, on_bad="fail").pixels, right)
            assert stored_shape([split], 28, cache) == shape or file.name.startswith("shape")
            assert max(stored_shape([split], 28, cache)) <= 56, "images are packed in that shape"


@counts(15, 500)
def test_json_of_adapters(count, trials, command, tmp_path):
    one, two = (write_lora(tmp_path / name, seed) for seed, name in enumerate(("one", "two")))
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            (one / "adapter_config.json").write_bytes(malformed.odd_json(CONFIG | {"rank_pattern": {"value": 3}}, rng))
            merge_either_way(rng, trials, command, one, two)


def merge_either_way(rng: random.Random, trials: Trials, command: Any, one: Path, two: Path) -> None:
    """Merge two inputs in either order with any operator; a refused merge must leave no file."""
    inputs = [str(one), str(two)] if rng.random() < 0.5 else [str(two), str(one)]
    out = one.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    words = ["--classes", "3,2", "--with", rng.choice(BARE_OPERATORS), "--out", str(out / f"merged{one.suffix}")]
    was_refused = command("merge", *inputs, *words)
    assert not (was_refused and list(out.iterdir())), "a refused merge left a file"
    trials.count(was_refused)


# Tensors


@counts(20, 600)
def test_tensors_of_backbones(count, trials, tiny_vit, tmp_path):
    file, whole = tmp_path / "own.safetensors", Path(tiny_vit).read_bytes()
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            file.write_bytes(malformed.tensors(whole, rng))
            backbones.load_backbone(f"plain:{file}")


@counts(20, 900)
def test_tensors_of_adapters(count, trials, command, tmp_path):
    loras = [write_lora(tmp_path / f"lora{seed}", seed) for seed in (1, 2)]
    plain = [write_matrices(tmp_path / f"plain{seed}.safetensors", seed) for seed in (1, 2)]
    files = [(loras[0] / "adapter_model.safetensors", loras), (plain[0], plain)]
    whole = [file.read_bytes() for file, _ in files]
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            file, inputs = files[number % 2]
            file.write_bytes(malformed.tensors(whole[number % 2], rng))
            merge_either_way(rng, trials, command, *inputs)


@counts(10, 400)
def test_tensors_of_a_model(count, trials, shop, original_shop, tiny_images, command):
    """With a matching checksum, so that the tensors themselves must be checked."""
    image = str(next((tiny_images / "test/class00").iterdir()))
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            version = restore(shop, original_shop) / "states/000001"
            content = malformed.tensors((version / "state.safetensors").read_bytes(), rng)
            (version / "state.safetensors").write_bytes(content)
            described = json.loads((version / "state.json").read_bytes())
            (version / "state.json").write_bytes(resealed(described | {"sha256": hashlib.sha256(content).hexdigest()}))
            run_unchanged(shop, trials, command, "predict", str(shop), image, "--threads", "1")


@counts(4, 200)
def test_tensors_of_a_run(count, trials, finished, tmp_path, command):
    """The state of a run that was stopped before its last task, with a matching checksum."""
    own = {"one-a": {"rank": 4, "batch_size": 8, "epochs": 1, "min_epochs": 1, "max_epochs": 1}, "simplecil": {}}
    asks = []
    for method, options in own.items():
        values = finished[0] | {"method": method, "options": options}
        with pytest.raises(KeyboardInterrupt):
            runs.run(make_config(values), tmp_path / "whole" / method, Stopped())
        given = {name: value for name, value in (finished[0] | options).items() if name != "method"}
        asks.append([method, *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())])
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            ask = asks[number % 2]
            folder = restore(tmp_path / "run", tmp_path / "whole" / ask[0])
            record = json.loads((folder / "record.json").read_bytes())
            state = folder / record["checkpoint"]["file"]
            state.write_bytes(malformed.tensors(state.read_bytes(), rng))
            record["checkpoint"]["sha256"] = hashlib.sha256(state.read_bytes()).hexdigest()
            (folder / "record.json").write_bytes(resealed(record))
            run_unchanged(folder, trials, command, "run", *ask, "--out", str(folder))


# YAML


@counts(30, 1_200)
def test_yaml(count, trials, finished, run_folder, command, tmp_path):
    """The configuration of a finished run, which is shown if it still matches."""
    file = tmp_path / "run.yaml"
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            file.write_bytes(malformed.yaml(finished[0], rng))
            run_unchanged(run_folder, trials, command, "run", "--config", str(file), "--out", str(run_folder))
            assert not (tmp_path / "runs" / "runs").exists()


# Arguments

# Final arguments that stop a command which would take minutes; given twice, because an option without a value takes
# the first of them.
LAST = {
    "run": ["--data=folder:nowhere/nothing"],
    "paper": ["--dry-run"],
    "stream": ["--seed=1"],
    "demo": ["--seed=-1"],
    "bench": ["--threads=-1"],
}


@counts(90, 2_000)
def test_arguments(
    count, trials, shop, original_shop, run_folder, as_options, tiny_images, command, tmp_path, monkeypatch
):
    monkeypatch.setattr(socket, "getaddrinfo", functools.partial(socket.getaddrinfo, flags=socket.AI_NUMERICHOST))
    work = shop.parent / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    image, nowhere = str(next((tiny_images / "test/class00").iterdir())), str(shop.parent / "nowhere")
    base = {name: [nowhere, nowhere] for name in COMMANDS} | {
        "run": as_options,
        "compare": [str(run_folder), str(run_folder)],
        "teach": [str(shop), nowhere],
        "predict": [str(shop), image, "--threads", "1"],
        "evaluate": [str(shop), nowhere],
        "history": [str(shop)],
        "undo": [str(shop)],
        "forget": [str(shop), "class01"],
        "rename": [str(shop), "class00", "other"],
        "merge": [f"{nowhere}.safetensors", f"{nowhere}.safetensors", "--out", "merged.safetensors"],
        "paper": ["proxies", *as_options[1:5], "--tasks", "3"],
    }
    for name in ("stream", "bench", "demo", "methods"):
        base[name] = []
    before = folder_hash(run_folder)
    names = sorted(COMMANDS)
    for number in trials.numbers(count):
        with trials.trial(number) as rng:
            name = names[number % len(names)]
            restore(shop, original_shop)
            for made in work.iterdir():
                shutil.rmtree(made) if made.is_dir() else made.unlink()
            options = [
                option for parameter in COMMANDS[name].params for option in parameter.opts if option.startswith("-")
            ]
            words = malformed.arguments(name, base[name], options or ["--help"], rng) + 2 * LAST.get(name, [])
            run_unchanged(shop, trials, command, *words)
    assert folder_hash(run_folder) == before


# Cases found by the trials above


def test_invalid_host_names_are_refused(shop, command):
    for host in (".x", "a" * 64, "\0", "\ud800"):
        assert command("serve", str(shop), "--host", host, "--port", "0")


def test_a_backbone_with_inconsistent_sizes_is_refused(tmp_path, tiny_vit):
    """Blocks of the declared width would take 200 GB."""
    tensors = load_file(tiny_vit)
    wide = tensors | {"patch_embed.proj.weight": torch.zeros(65_536, 3, 1, 1), "pos_embed": torch.zeros(1, 5, 1)}
    for name, spoilt in {"wide": wide, "flat": tensors | {"pos_embed": torch.zeros(())}}.items():
        save_plain(spoilt, tmp_path / f"{name}.safetensors")
        with pytest.raises(OneaError, match="does not contain a plain timm ViT"):
            backbones.load_backbone(str(tmp_path / f"{name}.safetensors"))


def test_dtypes_that_torch_lacks_are_refused(tmp_path, command):
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    assert command("merge", "one.safetensors", "two.safetensors", "--classes=1,1", "--out=out.safetensors")
    with pytest.raises(OneaError, match="damaged or not safetensors"):
        backbones.load_backbone("one.safetensors")


@pytest.mark.parametrize(
    ("part", "odd"),
    [
        ("metrics", {"A": [1.0]}),
        ("environment", []),
        ("stream", {"sizes": []}),
        ("config", {"method": "one-a"}),
        ("total", [10**400]),
    ],
)
def test_a_damaged_record_is_not_reported(part, odd, run_folder, command):
    record = json.loads((run_folder / "record.json").read_bytes())
    (run_folder / "record.json").write_bytes(resealed(record | {part: odd}))
    assert command("report", str(run_folder), "--out", "report")
    assert command("compare", str(run_folder), str(run_folder))
    assert not Path("report").exists()


@pytest.mark.parametrize("prototypes", [None, torch.ones(3, 64), torch.full((4, 64), math.nan)])
def test_the_state_of_another_run_is_refused(prototypes, finished, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        runs.run(make_config(finished[0]), tmp_path / "run", Stopped())
    record = json.loads((tmp_path / "run/record.json").read_bytes())
    file = tmp_path / "run" / record["checkpoint"]["file"]
    file.write_bytes(save({} if prototypes is None else {"prototypes": prototypes}))
    record["checkpoint"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "run/record.json").write_bytes(resealed(record))
    with pytest.raises(OneaError, match=r"does not fit this run .*; delete that folder"):
        runs.run(make_config(finished[0]), tmp_path / "run")


@pytest.mark.parametrize("odd", ["0", "[" * 100_000])
def test_an_index_that_is_not_a_list_is_rebuilt(odd, tiny_images, tmp_path):
    split = Split(labels=np.zeros(1, dtype=np.int64), files=(next((tiny_images / "test/class00").iterdir()),))
    pack(split, stored_shape([split], 28, tmp_path), cache=tmp_path, on_bad="fail")
    for file in tmp_path.glob("*.json"):
        file.write_text(f'{{"rows": {odd}, "skipped": [], "shape": [], "sha256": ""}}')
    assert stored_shape([split], 28, tmp_path) == (32, 32)
    assert pack(split, (32, 32), cache=tmp_path, on_bad="fail").rows.tolist() == [0]


def test_a_line_break_in_a_zip_entry_name_is_refused(shop):
    with client_of(shop) as client:
        assert refused(client.post("/learn", content=zipped({"plum/0\n.png": b"", "plum/1.png": png()}), headers=ZIP))
