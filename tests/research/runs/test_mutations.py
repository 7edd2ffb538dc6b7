# SPDX-License-Identifier: Apache-2.0
"""Changed files of a run and of its packed images: the same record or one error message."""

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
def made(tiny_vit, tiny_images, tmp_path_factory) -> Path:
    """A finished and an interrupted run and the images packed for them, and the same of another run on other images."""
    place = tmp_path_factory.mktemp("mutations")
    for name in ("mine", "other"):
        for file in sorted(tiny_images.rglob("*.png")):
            target = place / name / "images" / file.relative_to(tiny_images)
            target.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.asarray(Image.open(file))
            Image.fromarray(pixels if name == "mine" else 255 - pixels).save(target)
        config = make_config(values(tiny_vit, place / name / "images"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ONEA_CACHE", str(place / name / "cache"))
            run(config, place / name / "finished")
            with pytest.raises(KeyboardInterrupt):
                run(config, place / name / "interrupted", Stop())
    assert [read_run(place / "mine" / kind)["status"] for kind in KINDS[:2]] == ["finished", "running"]
    return place


class Trial:
    """The folder of one kind, changed in many ways; counts the outcomes of the command that uses it."""

    def __init__(self, kind: str, made: Path, place: Path, vit: str) -> None:
        self.kind, self.made, self.path, self.out = kind, made / "mine" / kind, place / kind, place / "out"
        self.other = made / "other" / kind
        self.config = make_config(values(vit, made / "mine/images"))
        self.expected = comparable_fields(read_run(made / "mine/finished"))
        self.refused = self.same = 0

    def fresh(self) -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        return Path(shutil.copytree(self.made, self.path))

    def command(self) -> dict[str, Any]:
        if self.kind != "cache":
            return run(self.config, self.path)
        shutil.rmtree(self.out, ignore_errors=True)
        return run(self.config, self.out)

    def check(self, what: str) -> None:
        """Show the changed folder, then give the command again."""
        before = content(self.path)
        if self.kind != "cache":
            self.check_report(what)
        try:
            record = self.command()
        except OneaError as error:
            check_sentence(what, error)
            self.refused += 1
            if self.kind != "cache":  # where what cannot be used is made again
                after = content(self.path)
                assert {name: after.get(name) for name in before if name != "lock"} == {
                    name: value for name, value in before.items() if name != "lock"
                }, f"{what}: a refused command changed the folder"
        else:
            assert comparable_fields(record) == self.expected, f"{what}: another record"
            folder = self.out if self.kind == "cache" else self.path
            assert read_run(folder) == record, f"{what}: the file says something else"
            self.same += 1

    def check_report(self, what: str) -> None:
        try:
            [found] = load_records(self.path)
        except OneaError as error:
            check_sentence(what, error)
        else:
            known = (read_run(self.made), read_run(self.other))  # the other one says itself what it is of
            assert found in known, f"{what}: another record is shown"


@pytest.fixture
def trial_of(made, tmp_path, tiny_vit, monkeypatch) -> Callable[[str], Trial]:
    def make(kind: str) -> Trial:
        used = tmp_path / "cache" if kind == "cache" else made / "mine/cache"
        monkeypatch.setenv("ONEA_CACHE", str(used))
        return Trial(kind, made, tmp_path, tiny_vit)

    return make


def exchanged(trial: Trial) -> Iterator[str]:
    """Some or all files are those of another run, under the names of this one's."""
    mine, theirs = (sorted(file.name for file in place.iterdir()) for place in (trial.made, trial.other))
    pairs = list(zip(mine, theirs, strict=True))
    for count in range(1, len(pairs) + 1):
        for chosen in itertools.combinations(pairs, count):
            for name, other in chosen:
                shutil.copy(trial.other / other, trial.path / name)
            yield f"{', '.join(name for name, _ in chosen)} of another run"


def rewritten(trial: Trial, rng: random.Random, share: float) -> Iterator[str]:
    """JSON in which something else stands, or stands twice; whoever did that left the checksum as it was."""
    for file in sorted(trial.path.glob("*.json")):
        name, whole = file.name, json.loads(file.read_bytes())
        for path in leaves(whole):
            for odd in (*ODD, float("nan"), float("inf")):
                if path and rng.random() < share:
                    (trial.path / name).write_text(json.dumps(replaced(whole, path, odd)))
                    yield f"{name}: {path} is {odd!r:.60}"
        for key in whole:
            for twice in ("null", json.dumps(whole[key]), "[]"):
                if rng.random() < 100 * share:
                    text = json.dumps(whole)
                    again = rng.choice([f'{{"{key}": {twice}, {text[1:]}', f'{text[:-1]}, "{key}": {twice}}}'])
                    (trial.path / name).write_text(again)
                    yield f"{name}: {key} twice, as {twice:.60}"
        (trial.path / name).write_text("[" * 100_000)
        yield f"{name}: brackets"
        (trial.path / name).write_text(f'{{"format": 2, "x": {"[" * 900}{"]" * 900}}}')
        yield f"{name}: a nest"
        with (trial.path / name).open("r+b") as opened:
            opened.truncate(10 * 2**30)  # of nothing, so that it takes no room on the disk
        yield f"{name}: gigabytes"


def try_all(trial: Trial, each: int, share: float, of_json: float) -> int:
    rng, chance, count = random.Random(SEED), random.Random(SEED), 0
    path = trial.fresh()
    ways = (accidents(path, rng, each), exchanged(trial), rewritten(trial, rng, of_json))
    for what in itertools.chain(*ways):
        if chance.random() < share:
            trial.check(what)
            count += 1
        trial.fresh()
    return count


@pytest.mark.parametrize(("kind", "share"), [("finished", 0.35), ("interrupted", 0.35), ("cache", 0.15)])
def test_a_changed_file_never_changes_the_final_record(kind, share, trial_of):
    """A sample; --slow tries many more."""
    trial = trial_of(kind)
    assert try_all(trial, each=2, share=share, of_json=0.0005) > 8
    assert trial.same > 0
    assert trial.refused > 0 or kind == "cache", "what is spoilt there is made again"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_files_never_change_the_final_record(kind, trial_of, tried):
    trial = trial_of(kind)
    count = try_all(trial, each=60, share=1.0, of_json=0.01)
    tried("changed run folders", kind, {"refused with one sentence": trial.refused, "harmless": trial.same})
    assert count > 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_flipped_bit_in_any_byte_of_a_record(kind, trial_of, tried):
    """One bit of each: what is read is what was written."""
    trial = trial_of(kind)
    file = trial.fresh() / "record.json"
    whole, expected = file.read_bytes(), read_run(trial.path)
    refused = 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << (place % 8)
        file.write_bytes(data)
        try:
            assert read_run(trial.path) == expected, f"bit at {place}"
        except OneaError as error:
            check_sentence(f"bit at {place}", error)
            refused += 1
    outcomes = {"refused with one sentence": refused, "harmless": len(whole) - refused}
    tried("changed run folders", f"flipped bits of record.json, {kind}", outcomes)
    assert refused > len(whole) / 2


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_changed_number_in_a_record_is_detected(kind, trial_of):
    """What to do about it is part of the sentence, for the run and for a report."""
    trial = trial_of(kind)
    file = trial.fresh() / "record.json"
    record = json.loads(file.read_bytes())
    record["metrics"]["A"][0] += 1
    file.write_text(json.dumps(record))
    for look in (trial.command, lambda: load_records(trial.path)):
        with pytest.raises(OneaError, match=r"record\.json is damaged \(its content does not match"):
            look()
        with pytest.raises(OneaError, match="restore it from a copy, or delete that folder to run it again"):
            look()


def test_a_newer_record_is_not_called_damaged(trial_of):
    trial = trial_of("finished")
    record = json.loads((trial.fresh() / "record.json").read_bytes())
    (trial.path / "record.json").write_bytes(dump_with_checksum(record | {"format": 3}))
    with pytest.raises(OneaError, match=r"is not a record that onea .* reads; move it elsewhere"):
        trial.command()
