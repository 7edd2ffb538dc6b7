# SPDX-License-Identifier: Apache-2.0
"""A model folder that was changed by accident or on purpose gives the same predictions or an error; no file is lost."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from support.damage import accidents, check_sentence, content
from support.malformed import ODD, leaves, replaced
from support.models import class_folders, resealed, tiny_model

import onea
from onea.errors import OneaError
from onea.model import engine
from onea.model.storage import folder as folders

SEED = 20_261_116


@pytest.fixture(scope="module")
def shop(tiny_vit, tiny_images, tmp_path_factory) -> Path:
    """A folder with three versions, the last one of five classes; more are kept, so that none needs to be removed."""
    files = class_folders(tiny_images / "train")
    model = tiny_model(tiny_vit, keep=50, memory=2)
    for names in (("class00", "class01", "class02"), ("class03", "class04")):
        model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])
    path = model.save(tmp_path_factory.mktemp("mutations") / "shop.onea")
    folders.change(path, lambda state, version, date: state.rename("class01", "one", version, date))
    return path


@pytest.fixture(scope="module")
def asked(tiny_images) -> list[Path]:
    return [next((tiny_images / "test" / name).iterdir()) for name in ("class00", "class01", "class04")]


@pytest.fixture(autouse=True)
def _one_network(monkeypatch):
    """The network is read from disk once; it is no part of the folder."""
    monkeypatch.setattr(engine, "load_backbone", functools.cache(engine.load_backbone))


def answers(path: Path, asked: list[Path]) -> tuple[list[str], np.ndarray]:
    model = onea.load(path, threads=1, device="cpu").snapshot()
    return list(model.classes), model.predict_proba(asked)


class Trial:
    """One folder, changed in many ways; counts the outcomes."""

    def __init__(self, shop: Path, asked: list[Path], place: Path) -> None:
        self.shop, self.asked, self.path = shop, asked, place / "shop.onea"
        self.names, self.chances = answers(shop, asked)
        self.refused = self.same = 0

    def fresh(self) -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        return Path(shutil.copytree(self.shop, self.path))

    def check(self, what: str, hostile: bool = False) -> None:
        """Predict with the changed folder, then update it; if it is hostile, other finite predictions are allowed."""
        before = content(self.path)
        self._ask(what, hostile)
        assert content(self.path) == before, f"{what}: asking changed the folder"
        try:
            folders.change(self.path, lambda state, version, date: state.rename("class00", "null", version, date))
        except OneaError as error:
            check_sentence(what, error)
            after = content(self.path)
            assert {name: after.get(name) for name in before if name != "lock"} == {
                name: value for name, value in before.items() if name != "lock"
            }, f"{what}: a refused command changed the folder"
            assert after.keys() - before.keys() <= {"lock"}, f"{what}: a refused command left something behind"
        else:
            if "'keep'" not in what:  # which says how many versions to keep
                assert before.keys() <= content(self.path).keys(), f"{what}: something was removed"
            if not hostile:
                names, chances = answers(self.path, self.asked)
                assert names == ["null", *self.names[1:]], what
                assert np.array_equal(chances, self.chances), what

    def _ask(self, what: str, hostile: bool) -> None:
        try:
            names, chances = answers(self.path, self.asked)
        except OneaError as error:
            check_sentence(what, error)
            self.refused += 1
        else:
            assert np.isfinite(chances).all(), f"{what}: answers are no numbers"
            if not hostile:
                assert names == self.names, f"{what}: other classes"
                assert np.array_equal(chances, self.chances), f"{what}: other answers"
            self._verify(what)

    def report(self, tried: Callable[..., None], what: str) -> None:
        """Report the outcomes; any other outcome fails the test."""
        tried("changed model folders", what, {"refused with one sentence": self.refused, "harmless": self.same})

    def _verify(self, what: str) -> None:
        """Also read the earlier versions, after the current one was found to be intact."""
        try:
            folders.verify(self.path)
        except OneaError as error:
            check_sentence(what, error)
            self.refused += 1
        else:
            self.same += 1


@pytest.fixture
def trial(shop, asked, tmp_path) -> Trial:
    return Trial(shop, asked, tmp_path)


# By accident: damaged bytes and files


def swapped_versions(path: Path) -> Iterator[str]:
    versions = sorted((path / "states").iterdir())
    for one, two in itertools.combinations(versions, 2):
        one.rename(path / "aside")
        two.rename(one)
        (path / "aside").rename(two)
        yield f"versions {one.name} and {two.name} swapped"


def try_accidents(trial: Trial, each: int, share: float = 1.0) -> int:
    rng, chance = random.Random(SEED), random.Random(SEED)
    count = 0
    path = trial.fresh()
    for what in itertools.chain(accidents(path, rng, each), swapped_versions(path)):
        if chance.random() < share:
            trial.check(what)
            count += 1
        trial.fresh()
    return count


def test_accidental_changes_are_detected_or_harmless(trial):
    """A sample; --slow tries all."""
    assert try_accidents(trial, each=2, share=0.3) > 30
    assert trial.refused > trial.same > 0


@pytest.mark.slow
def test_many_accidental_changes_are_detected_or_harmless(trial, tried):
    count = try_accidents(trial, each=100)
    trial.report(tried, "accidents")
    assert count > 1_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.json", "states/000003/state.json"])
def test_every_single_bit_of_the_json_files(trial, name, tried):
    path = trial.fresh()
    whole = (path / name).read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << (place % 8)
        (path / name).write_bytes(data)
        trial._ask(f"{name}: bit at {place}", hostile=False)
    trial.report(tried, f"flipped bits of {name}")
    assert trial.refused > len(whole) / 2


# On purpose: impossible contents with correct checksums


def try_hostile_json(trial: Trial, name: str, share: float) -> int:
    rng, count = random.Random(SEED), 0
    whole = json.loads((trial.shop / name).read_bytes())
    for path in leaves(whole):
        for odd in ODD:
            if rng.random() < share and path:
                file = trial.fresh() / name
                file.write_bytes(resealed(replaced(whole, path, odd)))
                trial.check(f"{name}: {path} is {odd!r:.60}", hostile=True)
                count += 1
    return count


@pytest.mark.parametrize(("name", "share"), [("model.json", 0.04), ("states/000003/state.json", 0.005)])
def test_hostile_values_are_refused_and_nothing_is_removed(trial, name, share):
    """A sample; --slow tries all."""
    assert try_hostile_json(trial, name, share) > 10
    assert trial.refused > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("model.json", 1.0), ("states/000003/state.json", 0.3)])
def test_many_hostile_values_are_refused_and_nothing_is_removed(trial, name, share, tried):
    count = try_hostile_json(trial, name, share)
    trial.report(tried, f"hostile values in {name}")
    assert count > 500


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"params": {"keep": -100}}, "keep is -100"),
        ({"params": {"kept": 5}}, "has a parameter 'kept'"),
        ({"params": {"device": "cuda"}}, "has a parameter 'device'"),
        ({"params": {"unknown": "0.05"}}, "'unknown' is '0.05'"),
        ({"params": {"readout": "raw"}}, "readout is 'raw'"),
        ({"versions": []}, "versions do not increase"),
        ({"versions": [1, 3, 2]}, "versions do not increase"),
        ({"versions": [3, 3]}, "versions do not increase"),
        ({"versions": [0, 3]}, "versions do not increase"),
        ({"versions": ["3"]}, "'versions' is"),
        ({"counter": 2}, "counter is not between"),
        ({"counter": 10**7}, "counter is not between"),
        ({"format": 0}, "no format"),
    ],
)
def test_an_impossible_manifest_is_refused(trial, change, reason):
    file = trial.fresh() / "model.json"
    whole = json.loads(file.read_bytes())
    if "params" in change:
        change = {"params": whole["params"] | change["params"]}
    file.write_bytes(resealed(whole | change))
    with pytest.raises(OneaError, match=reason):
        onea.load(trial.path)
    trial.check(str(change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"temperature": 0.0}, "temperature is invalid"),
        ({"version": 2}, "has the version number 2"),
        ({"adapter_images": {"class00": -1}}, "image counts of the adapter"),
        ({"classes": ["a", "a", "b", "c", "d"]}, "are not unique"),
        ({"classes": ["a", "b", "c", "d", "\ud800"]}, "not valid Unicode"),
        ({"classes": ["a", "b"], "exemplars": {}}, "'counts' does not have the expected type and shape"),
        ({"exemplars": {"other": []}}, "of classes that do not exist"),
        ({"exemplars": {"class00": []}}, "of classes that do not exist"),
        ({"exemplars": {"class00": [{"sha256": "../a", "images": 2, "size": 9}]}}, "stored copies are invalid"),
        ({"exemplars": {"class00": [{"sha256": "a" * 64, "images": 2, "size": 2**40}]}}, "stored copies are invalid"),
        ({"exemplars": {"class00": [{"sha256": "a" * 64, "images": 2, "size": 9, "x": 1}]}}, "unknown fields"),
        ({"exemplars": {"class00": [{"sha256": "a" * 64, "images": 0, "size": 9}]}}, "'class00' is"),
        ({"options": {"rank": 10**9}}, "'adapter.blocks.1.down.bias' does not have the expected type and shape"),
        ({"options": {"colour": 1}}, "Unknown option 'colour'"),
        ({"preprocess": {"side": 10**9}}, "of images is invalid"),
        ({"preprocess": {"std": [0.2, 0.2, 0.0]}}, "of images is invalid"),
        ({"preprocess": {"speed": 1}}, "'speed' is not a parameter"),
        ({"updates": [{"kind": "sing"}]}, "'version' is missing"),
    ],
)
def test_an_impossible_state_is_refused(trial, change, reason):
    file = trial.fresh() / "states/000003/state.json"
    whole = json.loads(file.read_bytes())
    for name, new in change.items():
        whole[name] = whole[name] | new if name in ("options", "preprocess") else new
    file.write_bytes(resealed(whole))
    with pytest.raises(OneaError, match=reason):
        onea.load(trial.path)
    trial.check(str(change))


@pytest.mark.parametrize("name", ["held_out_accuracy", "overall_accuracy"])
def test_an_impossible_history_is_refused(trial, name):
    file = trial.fresh() / "states/000003/state.json"
    whole = json.loads(file.read_bytes())
    learned = next(update for update in whole["updates"] if update["kind"] == "learn")
    assert name in learned
    learned[name] = 1.5
    file.write_bytes(resealed(whole))
    with pytest.raises(OneaError, match=r"is 1\.5"):
        onea.load(trial.path)
    trial.check(name)


def test_equal_parameters_of_another_type_are_converted(trial):
    file = trial.fresh() / "model.json"
    whole = json.loads(file.read_bytes())
    file.write_bytes(resealed(whole | {"params": whole["params"] | {"keep": 2.0, "mirror": 1}}))
    params = folders.read_manifest(trial.path).params
    assert (params["keep"], params["mirror"]) == (2, True)
    assert type(params["keep"]) is int


def test_hostile_json_is_refused(trial):
    """NaN, infinite and huge numbers, deep nesting, and huge sparse files."""
    for name in ("model.json", "states/000003/state.json"):
        whole = (trial.shop / name).read_text()
        number = '"unknown":0.05' if name == "model.json" else '"calibration_images":'
        assert number in whole
        for new in ("NaN", "-Infinity", "1e999", "9" * 5_000):
            (trial.fresh() / name).write_text(whole.replace(number, number.split(":")[0] + f':{new},"x":', 1))
            trial.check(f"{name}: {new}")
        (trial.fresh() / name).write_text("[" * 100_000)
        trial.check(f"{name}: brackets")
        with (trial.fresh() / name).open("r+b") as file:
            file.truncate(10 * 2**30)  # of nothing, so that it takes no room on the disk
        with pytest.raises(OneaError, match="has 10,737,418,240 bytes"):
            onea.load(trial.path)


def with_tensors(path: Path, content: bytes) -> None:
    """Write tensors, and correct all checksums."""
    (path / "state.safetensors").write_bytes(content)
    described = json.loads((path / "state.json").read_bytes())
    (path / "state.json").write_bytes(resealed(described | {"sha256": hashlib.sha256(content).hexdigest()}))


def hostile_tensors(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, bytes]]:
    """Files of tensors that no update could have written."""
    for name, value in tensors.items():
        rest = {other: each for other, each in tensors.items() if other != name}
        yield f"{name} is missing", save(rest)
        yield f"{name} has another name", save(rest | {f"{name}s": value})
        yield f"{name} is there twice", save(tensors | {f"{name}s": value.clone()})
        yield f"{name} is half", save(tensors | {name: value.half()})
        yield f"{name} has another dimension", save(tensors | {name: value[None].clone()})
        if not value.numel():
            continue
        yield f"{name} is empty", save(tensors | {name: value[:0].clone()})
        yield f"{name} is a number", save(tensors | {name: value.flatten()[0].clone()})
        yield f"{name} has one row more", save(tensors | {name: torch.cat([value, value[:1]])})
        if value.is_floating_point():
            for odd in (math.nan, math.inf, -math.inf):
                spoiled = value.clone()
                spoiled.flatten()[-1] = odd
                yield f"{name} has {odd}", save(tensors | {name: spoiled})
            yield f"{name} is huge", save(tensors | {name: torch.full_like(value, 1e38)})
            yield f"{name} is nothing", save(tensors | {name: torch.zeros_like(value)})
        else:
            for odd in (-1, 2**62):
                yield f"{name} has {odd}", save(tensors | {name: torch.full_like(value, odd)})
    whole = save(tensors)
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def with_header(text: str) -> bytes:
        return len(text.encode()).to_bytes(8, "little") + text.encode() + whole[8 + length :]

    yield "a header beyond the file", (2**40).to_bytes(8, "little") + whole[8:]
    yield "a header beyond all files", b"\xff" * 8 + whole[8:]
    yield "no header", b""
    yield "brackets", with_header("[" * 50_000)
    yield "a list", with_header("[]")
    yield "metadata alone", with_header('{"__metadata__": {}}')
    first = next(iter(tensors))
    for shape in ([2**40, 2**40], [-1], ["3"], [True], "3", None, [2**70]):
        yield f"shape {shape}", with_header(json.dumps(header | {first: header[first] | {"shape": shape}}))
    for offsets in ([0, 2**60], [5, 0], [0, 0], None):
        yield f"offsets {offsets}", with_header(json.dumps(header | {first: header[first] | {"data_offsets": offsets}}))
    twice = json.dumps(header)[:-1] + f', "{first}": {json.dumps(header[first] | {"shape": [1]})}' + "}"
    yield "declared twice", with_header(twice)
    wide = {name: dict(each) for name, each in header.items()}
    wide["prototypes"]["shape"], wide["scatter"]["shape"] = [5, 100_000], [100_000, 100_000]
    yield "a network of 100,000 features", with_header(json.dumps(wide))


def test_hostile_tensors_are_refused(trial):
    """Their checksums are correct, so only their contents show that they are impossible."""
    cases = list(hostile_tensors(load_file(trial.shop / "states/000003/state.safetensors")))
    chosen = [case for number, case in enumerate(cases) if number % 5 == 0 or number >= len(cases) - 20]
    for what, tensors in chosen:
        with_tensors(trial.fresh() / "states/000003", tensors)
        trial._ask(what, hostile=True)
    assert trial.refused > 0.8 * len(chosen)


@pytest.mark.slow
def test_all_hostile_tensors_are_refused(trial, tried):
    cases = list(hostile_tensors(load_file(trial.shop / "states/000003/state.safetensors")))
    for what, tensors in cases:
        with_tensors(trial.fresh() / "states/000003", tensors)
        trial.check(what, hostile=True)
    trial.report(tried, "hostile tensors")


def test_a_huge_sparse_tensor_file_is_not_read(trial):
    file = trial.fresh() / "states/000003/state.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(100 * 2**30)
    with pytest.raises(OneaError, match="the wrong size"):
        onea.load(trial.path)
