# SPDX-License-Identifier: Apache-2.0
"""Changed files of a run and of its packed images lead to the same record or one error message."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.damage import accidents, check_sentence, content
from support.malformed import ODD, leaves, replaced
from support.records import comparable_fields

from onea.errors import OneaError
from onea.files import dump_with_checksum
from onea.research.report.records import load_records
from onea.research.runs.config import make_config
from onea.research.runs.runner import read_run, run
from onea.runtime import Progress

SEED = 20_261_117
KINDS = ("finished", "interrupted", "cache")


class Stop(Progress):
    """Ends a run after its first task, as Ctrl-C would."""

    def end_task(self, task: int, accuracy: float) -> None:
        raise KeyboardInterrupt


def values(vit: str, images: Path, **more: Any) -> dict[str, Any]:
    options = {"rank": 4, "learning_rate": 0.05, "batch_size": 8, "epochs": 1, "min_epochs": 1, "max_epochs": 1}
    common = {"data": f"folder:{images}", "backbone": vit, "sizes": "3,1,2", "device": "cpu", "precision": "fp32"}
    return {"method": "one-a", **common, "threads": 1, "options": options, **more}


@pytest.fixture(scope="module")
def original_runs(tiny_vit, tiny_images, tmp_path_factory) -> Path:
    """A finished and an interrupted run and the images packed for them, and the same of another run on other images."""
    folder = tmp_path_factory.mktemp("mutations")
    for name in ("mine", "other"):
        for file in sorted(tiny_images.rglob("*.png")):
            target = folder / name / "images" / file.relative_to(tiny_images)
            target.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.asarray(Image.open(file))
            Image.fromarray(pixels if name == "mine" else 255 - pixels).save(target)
        config = make_config(values(tiny_vit, folder / name / "images"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ONEA_CACHE", str(folder / name / "cache"))
            run(config, folder / name / "finished")
            with pytest.raises(KeyboardInterrupt):
                run(config, folder / name / "interrupted", Stop())
    assert [read_run(folder / "mine" / kind)["status"] for kind in KINDS[:2]] == ["finished", "running"]
    return folder


class Mutations:
    """Changes the folder of one kind in many ways and counts the outcomes of the command that uses it."""

    def __init__(self, kind: str, original_runs: Path, folder: Path, vit: str) -> None:
        self.kind, self.path, self.out = kind, folder / kind, folder / "out"
        self.original, self.other = (original_runs / name / kind for name in ("mine", "other"))
        self.config = make_config(values(vit, original_runs / "mine/images"))
        self.expected = comparable_fields(read_run(original_runs / "mine/finished"))
        self.refused = self.same = 0

    def fresh(self) -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        return Path(shutil.copytree(self.original, self.path))

    def command(self) -> dict[str, Any]:
        if self.kind != "cache":
            return run(self.config, self.path)
        shutil.rmtree(self.out, ignore_errors=True)
        return run(self.config, self.out)

    def check(self, what: str) -> None:
        """Report on the changed folder, then repeat the command."""
        before = content(self.path)
        if self.kind != "cache":
            self.check_report(what)
        try:
            record = self.command()
        except OneaError as error:
            check_sentence(what, error)
            self.refused += 1
            if self.kind != "cache":  # unusable files of the cache are rebuilt
                after = content(self.path)
                assert {name: after.get(name) for name in before if name != "lock"} == {
                    name: value for name, value in before.items() if name != "lock"
                }, f"{what}: a refused command changed the folder"
        else:
            assert comparable_fields(record) == self.expected, f"{what}: another record"
            folder = self.out if self.kind == "cache" else self.path
            assert read_run(folder) == record, f"{what}: the record in the file differs"
            self.same += 1

    def check_report(self, what: str) -> None:
        try:
            [record] = load_records(self.path)
        except OneaError as error:
            check_sentence(what, error)
        else:
            valid_records = (read_run(self.original), read_run(self.other))  # the other one is a valid record, too
            assert record in valid_records, f"{what}: another record is shown"


@pytest.fixture
def mutations_of(original_runs, tmp_path, tiny_vit, monkeypatch) -> Callable[[str], Mutations]:
    def make(kind: str) -> Mutations:
        used = tmp_path / "cache" if kind == "cache" else original_runs / "mine/cache"
        monkeypatch.setenv("ONEA_CACHE", str(used))
        return Mutations(kind, original_runs, tmp_path, tiny_vit)

    return make


def exchange_files(mutations: Mutations) -> Iterator[str]:
    """Replace some or all files by those of another run."""
    own_names, other_names = (
        sorted(file.name for file in folder.iterdir()) for folder in (mutations.original, mutations.other)
    )
    pairs = list(zip(own_names, other_names, strict=True))
    for count in range(1, len(pairs) + 1):
        for chosen in itertools.combinations(pairs, count):
            for name, other in chosen:
                shutil.copy(mutations.other / other, mutations.path / name)
            yield f"{', '.join(name for name, _ in chosen)} of another run"


def rewrite_json(mutations: Mutations, rng: random.Random, share: float) -> Iterator[str]:
    """Replace or duplicate values in JSON files without updating the checksum."""
    for file in sorted(mutations.path.glob("*.json")):
        name, intact = file.name, json.loads(file.read_bytes())
        for path in leaves(intact):
            for value in (*ODD, float("nan"), float("inf")):
                if path and rng.random() < share:
                    (mutations.path / name).write_text(json.dumps(replaced(intact, path, value)))
                    yield f"{name}: {path} is {value!r:.60}"
        for key in intact:
            for duplicate in ("null", json.dumps(intact[key]), "[]"):
                if rng.random() < 100 * share:
                    text = json.dumps(intact)
                    again = rng.choice([f'{{"{key}": {duplicate}, {text[1:]}', f'{text[:-1]}, "{key}": {duplicate}}}'])
                    (mutations.path / name).write_text(again)
                    yield f"{name}: {key} twice, as {duplicate:.60}"
        (mutations.path / name).write_text("[" * 100_000)
        yield f"{name}: brackets"
        (mutations.path / name).write_text(f'{{"format": 2, "x": {"[" * 900}{"]" * 900}}}')
        yield f"{name}: a nest"
        with (mutations.path / name).open("r+b") as opened:
            opened.truncate(10 * 2**30)  # a sparse file, which occupies no space
        yield f"{name}: gigabytes"


def try_all(mutations: Mutations, per_file: int, share: float, json_share: float) -> int:
    rng, sampler, count = random.Random(SEED), random.Random(SEED), 0
    path = mutations.fresh()
    changes = (accidents(path, rng, per_file), exchange_files(mutations), rewrite_json(mutations, rng, json_share))
    for what in itertools.chain(*changes):
        if sampler.random() < share:
            mutations.check(what)
            count += 1
        mutations.fresh()
    return count


@pytest.mark.parametrize(("kind", "share"), [("finished", 0.35), ("interrupted", 0.35), ("cache", 0.15)])
def test_a_changed_file_never_changes_the_final_record(kind, share, mutations_of):
    """A sample; --slow tries many more."""
    mutations = mutations_of(kind)
    assert try_all(mutations, per_file=2, share=share, json_share=0.0005) > 8
    assert mutations.same > 0
    assert mutations.refused > 0 or kind == "cache", "damaged files of the cache are rebuilt"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_files_never_change_the_final_record(kind, mutations_of, tried):
    mutations = mutations_of(kind)
    count = try_all(mutations, per_file=60, share=1.0, json_share=0.01)
    tried("changed run folders", kind, {"refused with one sentence": mutations.refused, "harmless": mutations.same})
    assert count > 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_flipped_bit_in_any_byte_of_a_record(kind, mutations_of, tried):
    """A record is read correctly or refused after one bit of any byte is flipped."""
    mutations = mutations_of(kind)
    file = mutations.fresh() / "record.json"
    intact, expected = file.read_bytes(), read_run(mutations.path)
    refused = 0
    for position in range(len(intact)):
        data = bytearray(intact)
        data[position] ^= 1 << (position % 8)
        file.write_bytes(data)
        try:
            assert read_run(mutations.path) == expected, f"bit at {position}"
        except OneaError as error:
            check_sentence(f"bit at {position}", error)
            refused += 1
    outcomes = {"refused with one sentence": refused, "harmless": len(intact) - refused}
    tried("changed run folders", f"flipped bits of record.json, {kind}", outcomes)
    assert refused > len(intact) / 2


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_changed_number_in_a_record_is_detected(kind, mutations_of):
    """The error messages of runs and reports contain the remedy."""
    mutations = mutations_of(kind)
    file = mutations.fresh() / "record.json"
    record = json.loads(file.read_bytes())
    record["metrics"]["A"][0] += 1
    file.write_text(json.dumps(record))
    for command in (mutations.command, lambda: load_records(mutations.path)):
        with pytest.raises(OneaError, match=r"record\.json is damaged \(its content does not match"):
            command()
        with pytest.raises(OneaError, match="restore it from a backup, or delete that folder to run it again"):
            command()


def test_a_newer_record_is_not_called_damaged(mutations_of):
    mutations = mutations_of("finished")
    record = json.loads((mutations.fresh() / "record.json").read_bytes())
    (mutations.path / "record.json").write_bytes(dump_with_checksum(record | {"format": 3}))
    with pytest.raises(OneaError, match=r"is not a record that onea .* reads; move it elsewhere"):
        mutations.command()
