# SPDX-License-Identifier: Apache-2.0
"""The model folder: models are restored bit for bit, and nothing that happens during a save can damage them."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import ROOT
from support.models import class_folders, resealed, tiny_model

import onea
from onea.errors import OneaError
from onea.model.evaluation.evaluation import evaluate
from onea.model.storage import folder as folders
from onea.model.storage.layout import locked

GOLDEN = ROOT / "tests/golden/format-7.onea"
RECORDED = ("expected.json", "evaluation.json")


@pytest.fixture(scope="module")
def photos(tiny_images):
    return tiny_images / "test"


@pytest.fixture(scope="module")
def original(tiny_vit, tiny_images):
    return teach_three_updates(tiny_model(tiny_vit), tiny_images)


def teach_three_updates(model: onea.OneA, tiny_images: Path) -> onea.OneA:
    """Three classes, then one, then this one again with two more."""
    files = class_folders(tiny_images / "train")
    for names in (("class00", "class01", "class02"), ("class03",), ("class03", "class04", "class05")):
        model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])
    return model


@pytest.fixture
def saved(original, tmp_path):
    return original.save(tmp_path / "shop.onea")


@pytest.fixture(name="onea_command")
def _onea_command(request):
    return request.getfixturevalue("onea")


_HEARD: list[Callable[[str], object]] = []


@pytest.fixture(scope="session")
def reads():
    """A function that returns the names and sizes of the files of a folder that a call opens."""

    def hear(event: str, values: tuple[Any, ...]) -> None:
        if _HEARD and event == "open" and isinstance(values[0], str) and not values[2] & (os.O_WRONLY | os.O_RDWR):
            _HEARD[-1](values[0])

    sys.addaudithook(hear)

    def during(folder: Path, what: Callable[[], object]) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []

        def note(name: str) -> None:
            if (place := Path(name).absolute()).is_relative_to(folder.absolute()) and place.is_file():
                size = 0 if place.name == "model.json" else place.stat().st_size  # which lists the numbers of versions
                found.append((str(place.relative_to(folder.absolute())), size))

        _HEARD.append(note)
        try:
            what()
        finally:
            _HEARD.clear()
        assert found
        return sorted(found)

    return during


def listing(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_loaded_model_is_bit_identical(original, saved, photos):
    model = onea.load(saved, threads=1)
    assert np.array_equal(model.predict_proba(photos), original.predict_proba(photos))
    assert model.predict(photos).tolist() == original.predict(photos).tolist()
    assert model.history == original.history
    assert model.version == 3


def test_it_loads_in_another_process(original, saved, photos, tmp_path):
    out = tmp_path / "answers.npy"
    load = f"onea.load({str(saved)!r}, threads=1)"
    code = f"import numpy, onea; numpy.save({str(out)!r}, {load}.predict_proba({str(photos)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert np.array_equal(np.load(out), original.predict_proba(photos))


def test_learning_continues_identically_after_loading(tiny_vit, tiny_images, photos, tmp_path):
    files = class_folders(tiny_images / "train")
    first, second = ("class00", "class01"), ("class02", "class04")

    def teach(model, names):
        return model.learn(
            [file for name in names for file in files[name]], [name for name in names for _ in files[name]]
        )

    whole = teach(teach(tiny_model(tiny_vit), first), second)
    halfway = teach(tiny_model(tiny_vit), first).save(tmp_path / "half.onea")
    resumed = teach(onea.load(halfway, threads=1, precision="fp32"), second)
    assert np.array_equal(whole.predict_proba(photos), resumed.predict_proba(photos))


def test_undo_in_a_folder_never_reuses_a_version(original, saved, photos):
    before = onea.load(saved).predict_proba(photos)
    folders.change(saved, lambda state, version, date: state.forget(["class01"], version, date))
    assert len(onea.load(saved).classes_) == 5
    undone, now = folders.undo(saved)
    assert (undone.version, now.version) == (4, 3)
    assert np.array_equal(onea.load(saved).predict_proba(photos), before)
    folders.change(saved, lambda state, version, date: state.rename("class01", "one", version, date))
    assert folders.read_manifest(saved).versions.kept == (1, 2, 3, 5)
    for _ in range(3):
        folders.undo(saved)
    with pytest.raises(OneaError, match="nothing to undo"):
        folders.undo(saved)
    assert sorted(entry.name for entry in (saved / "states").iterdir()) == ["000001"]


def test_only_the_last_versions_are_kept(tiny_vit, tiny_images, tmp_path):
    path = tiny_model(tiny_vit, keep=2).learn(tiny_images / "train").save(tmp_path / "m.onea")
    for number in range(4):
        folders.change(path, lambda s, version, date, n=number: s.rename(s.classes[0], f"new {n}", version, date))
    assert folders.read_manifest(path).versions.kept == (3, 4, 5)
    assert len(list((path / "states").iterdir())) == 3


def test_the_model_card_shows_the_history(saved):
    text = (saved / "README.md").read_text("utf-8")
    assert "6 classes, taught with" in text
    assert text.count("\n| ") == 1 + 3
    assert "+2, 1 again" in text
    assert (saved / "history.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_card_counts_classes_images_and_updates(saved, monkeypatch):
    """Also for one class or none, and if the working folder is the model folder."""
    monkeypatch.chdir(saved)
    for names, told in (
        ([f"class0{number}" for number in (0, 2, 3, 4, 5)], "1 class, taught with 6 images in 4 updates"),
        (["class01"], "\n0 classes, taught with 0 images in 5 updates"),
    ):
        state = folders.change(Path(), lambda before, version, date, gone=names: before.forget(gone, version, date))
        text = (saved / "README.md").read_text("utf-8")
        assert told in text, (sum(state.images), text)
        assert f'onea.load("{saved.name}")' in text
    assert text.endswith("## Classes\n\nNone.\n")


def test_a_full_disk_changes_nothing(saved, monkeypatch):
    before = listing(saved)
    model = onea.load(saved).forget("class01")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("onea.files.os.fsync", full)
    with pytest.raises(OneaError, match="No space left"):
        model.save(saved)
    monkeypatch.undo()
    after = listing(saved)
    after["lock"] = before["lock"]
    assert after == before


def test_only_one_process_writes_and_a_killed_one_does_not_block(saved):
    code = f"""
        import time
        from pathlib import Path
        from onea.model.storage.layout import locked
        with locked(Path({str(saved)!r})):
            print("held", flush=True)
            time.sleep(60)
    """
    holder = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        model = onea.load(saved).forget("class01")  # reading is always possible
        with pytest.raises(OneaError, match=rf"process {holder.pid}, for \d+ s"):
            model.save(saved)
        assert onea.load(saved).version == 3
    finally:
        holder.kill()
        holder.wait()
    model.save(saved)
    assert onea.load(saved).version == 4


def test_a_lock_without_a_save_leaves_no_folder(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path / "new.onea"):
        raise RuntimeError
    assert not (tmp_path / "new.onea").exists()


def test_an_update_by_another_process_is_not_overwritten(saved):
    mine, theirs = onea.load(saved), onea.load(saved)
    theirs.forget("class00").save(saved)
    with pytest.raises(OneaError, match="does not descend from"):
        mine.forget("class01").save(saved)
    assert "class00" not in onea.load(saved).classes_


def test_folders_of_other_models_and_other_files_are_not_overwritten(tiny_vit, tiny_images, saved, tmp_path):
    other = tiny_model(tiny_vit).learn(tiny_images / "train")
    with pytest.raises(OneaError, match="does not descend from"):
        other.save(saved)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/mum.txt").write_text("dear mum")
    with pytest.raises(OneaError, match="contains no model"):
        other.save(tmp_path / "letters")
    assert [entry.name for entry in (tmp_path / "letters").iterdir()] == ["mum.txt"], "no lock file is left there"


def test_a_newer_format_is_refused(saved):
    manifest = json.loads((saved / "model.json").read_text())
    (saved / "model.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(OneaError, match=r"has format 99.* onea"):
        onea.load(saved)


def test_damage_is_named(saved):
    tensors = saved / "states/000003/state.safetensors"
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(OneaError, match="damaged"):
        onea.load(saved)
    (saved / "model.json").write_text("{")
    with pytest.raises(OneaError, match="damaged"):
        onea.load(saved)


@pytest.mark.parametrize("lost", ["README.md", "history.png", "states/000002/README.md"])
def test_undo_does_not_need_the_card(original, saved, photos, lost):
    (saved / lost).unlink(missing_ok=True)
    undone, now = folders.undo(saved)
    assert (undone.version, undone.update, now.version) == (3, "update 3", 2)
    assert "(version 2)" in (saved / "README.md").read_text("utf-8")
    assert onea.load(saved).version == 2


def test_unprintable_names_of_updates_are_escaped(tiny_vit, tiny_images, tmp_path):
    """For example, the name of a folder in another encoding."""
    path = tiny_model(tiny_vit).learn(tiny_images / "train", name="Mon\udcffday\n").save(tmp_path / "m.onea")
    assert onea.load(path).history[0]["name"] == "Mon\\udcffday\\n"


def test_undo_recovers_from_a_damaged_version(original, saved, photos):
    before = onea.load(saved, threads=1).undo().predict_proba(photos)
    (saved / "states/000003/state.safetensors").write_bytes(b"")
    with pytest.raises(OneaError, match="if it is the newest version, run `onea undo`"):
        onea.load(saved)
    undone, now = folders.undo(saved)
    assert (undone.version, undone.update, now.version) == (3, "which could not be read", 2)
    assert np.array_equal(onea.load(saved, threads=1).predict_proba(photos), before)


@pytest.mark.parametrize("lost", ["state.json", "state.safetensors", "."])
def test_undo_recovers_from_a_missing_file(saved, lost):
    place = saved / "states/000003" / lost
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    with pytest.raises(OneaError, match=r"000003 is damaged .state.* is missing.; .* run `onea undo`"):
        onea.load(saved)
    assert folders.undo(saved)[1].version == onea.load(saved).version == 2


def test_a_damaged_earlier_version_is_named_when_it_is_needed(saved, photos, onea_command, tmp_path):
    """The current version loads; once the damaged one is removed, as advised, undo restores earlier ones."""
    before = onea.load(saved, threads=1).predict_proba(photos)
    (saved / "states/000002/state.json").write_text("{}")
    model = onea.load(saved, threads=1)
    assert np.array_equal(model.predict_proba(photos), before)
    named = r"000002 is damaged .* an earlier one may be removed\.$"
    for needs_it in (model.undo, lambda: folders.undo(saved), lambda: model.save(tmp_path / "copy.onea")):
        with pytest.raises(OneaError, match=named):
            needs_it()
    assert onea_command("info", str(saved))[0] == 0
    code, _, err = onea_command("info", str(saved), "--verify")
    assert (code, len(err.splitlines())) == (2, 1)
    assert re.search(named, err.strip())
    model.forget("class05").save(saved)  # which does not need it
    shutil.rmtree(saved / "states/000002")
    assert model.versions.kept == (1, 3, 4)
    assert "verified versions: 1, 3, 4" in onea_command("info", str(saved), "--verify")[1]
    assert folders.undo(saved)[1].version == 3
    model = onea.load(saved)
    assert (model.version, model.versions.kept) == (3, (1, 3))
    model.forget("class00").save(saved)
    assert folders.undo(saved)[1].version == 3
    assert folders.undo(saved)[1].version == 1


def test_undo_refuses_an_earlier_version_of_another_model(tiny_vit, tiny_images, saved, tmp_path):
    """For example, a version from another folder with the same name."""
    model = onea.load(saved)
    other = tiny_model(tiny_vit).learn(tiny_images / "train", name="other")
    place = other.forget("class01").save(tmp_path / "other.onea") / "states/000002"
    shutil.rmtree(saved / "states/000002")
    shutil.copytree(place, saved / "states/000002")
    for needs_it in (model.undo, lambda: folders.undo(saved), lambda: folders.verify(saved)):
        with pytest.raises(OneaError, match=r"000002 is damaged .version 3 is not based on it"):
            needs_it()


def test_the_files_read_do_not_depend_on_the_number_of_versions(saved, photos, onea_command, reads, tmp_path):
    """Of two folders that differ only in earlier versions, the same files are read."""
    alone = Path(shutil.copytree(saved, tmp_path / "alone.onea"))
    for version in ("000001", "000002"):
        shutil.rmtree(alone / "states" / version)
    for name, *rest in (("predict", str(photos), "--threads=1"), ("forget", "class00"), ("rename", "class01", "one")):
        ask = functools.partial(onea_command, name)
        of_three, of_one = (reads(path, functools.partial(ask, str(path), *rest)) for path in (saved, alone))
        assert of_three == of_one, name
    models = [onea.load(path, threads=1).forget("class02") for path in (saved, alone)]
    of_three, of_one = (
        reads(path, functools.partial(model.save, path)) for model, path in zip(models, (saved, alone), strict=True)
    )
    assert of_three == of_one
    assert not any("state.safetensors" in name for name, _ in of_one), "what was loaded is not read again"
    assert folders.verify(saved) == (1, 2, 3, 4, 5, 6)


def test_a_model_is_read_while_another_process_writes(saved, monkeypatch):
    """The version in the manifest may be gone when it is read."""
    read, undone = folders.read_state, []

    def undone_meanwhile(path, version):
        if version == 3 and not undone:
            undone.append(version)
            folders.undo(path)
        return read(path, version)

    monkeypatch.setattr(folders, "read_state", undone_meanwhile)
    assert onea.load(saved).version == 2


def test_a_flipped_bit_does_not_rename_a_class(saved):
    """Each file has its own checksum."""
    for name, old, new in (
        ("states/000003/state.json", b'"class01"', b'"class11"'),
        ("model.json", b'"unknown":0.05', b'"unknown":0.75'),
        ("model.json", b'"counter":3', b'"counter":7'),
    ):
        whole = (saved / name).read_bytes()
        assert old in whole
        (saved / name).write_bytes(whole.replace(old, new, 1))
        with pytest.raises(OneaError, match=r"damaged .its content does not match its checksum"):
            onea.load(saved)
        (saved / name).write_bytes(whole)
    assert onea.load(saved).version == 3


def test_every_file_needs_its_checksum(saved, tmp_path):
    content = json.loads((saved / "states/000003/state.json").read_text())
    for change in ({"content_sha256": None}, {"content_sha256": "0" * 64}):
        (saved / "states/000003/state.json").write_text(json.dumps(content | change))
        with pytest.raises(OneaError, match="checksum"):
            onea.load(saved)


def test_a_state_that_could_not_be_read_again_is_not_written(original, tmp_path, monkeypatch):
    import dataclasses

    import torch

    path = original.save(tmp_path / "shop.onea")
    before = listing(path)

    def spoiled(state, version, date):
        after = state.rename("class00", "null", version, date)
        return dataclasses.replace(after, held_out_signals=torch.full_like(after.held_out_signals, torch.nan))

    with pytest.raises(OneaError, match=r"cannot be saved .held_out_signals contains NaN or infinity"):
        folders.change(path, spoiled)
    assert {name: data for name, data in listing(path).items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }


def test_another_backbone_is_refused(saved, tmp_path, tiny_vit):
    from support.tiny import write_tiny_vit

    from onea.vit.backbones import load_backbone

    write_tiny_vit(tmp_path / "other.safetensors", depth=3)
    ours, theirs = (load_backbone(str(place)).digest[:12] for place in (tmp_path / "other.safetensors", tiny_vit))
    with pytest.raises(OneaError, match=f"was taught with .*sha256 {theirs}.* has other weights .{ours}"):
        onea.load(saved, backbone=str(tmp_path / "other.safetensors"))


@pytest.mark.parametrize(
    ("number", "words"), [(6, "before the first release of onea .format 6.; teach a new model"), (8, "update onea")]
)
def test_a_folder_of_another_format_is_refused_and_unchanged(saved, number, words):
    content = json.loads((saved / "model.json").read_text("utf-8")) | {"format": number}
    (saved / "model.json").write_bytes(resealed(content))
    with pytest.raises(OneaError, match=words):
        onea.load(saved)
    assert json.loads((saved / "model.json").read_text("utf-8"))["format"] == number


@pytest.fixture(scope="module")
def golden(request, tiny_vit, tiny_images):
    """The model of a folder that an earlier version of onea wrote; `pytest --write-golden` writes it anew."""
    if request.config.getoption("--write-golden"):
        kept = {name: (GOLDEN / name).read_bytes() for name in RECORDED if (GOLDEN / name).is_file()}
        shutil.rmtree(GOLDEN, ignore_errors=True)
        teach_three_updates(tiny_model(tiny_vit, keep=1, memory=2), tiny_images).save(GOLDEN)
        (GOLDEN / "lock").unlink()
        for name, content in kept.items():
            (GOLDEN / name).write_bytes(content)
    return onea.load(GOLDEN, backbone=tiny_vit, threads=1)


@pytest.fixture
def recorded(request):
    """A function that returns a recorded value; `pytest --write-golden` records that of this run."""

    def read(name: str, found: Any) -> Any:
        if request.config.getoption("--write-golden"):
            (GOLDEN / name).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return json.loads((GOLDEN / name).read_text("utf-8"))

    return read


def test_predictions_of_the_golden_folder(golden, photos, recorded):
    probabilities, answers = golden.predict_proba(photos)[::6], golden.predict(photos)[::6].tolist()
    classes = golden.classes_.tolist()
    found = {"classes": classes, "answers": answers, "probabilities": probabilities.round(6).tolist()}
    expected = recorded("expected.json", found)
    assert (classes, answers) == (expected["classes"], expected["answers"])
    np.testing.assert_allclose(probabilities, expected["probabilities"], atol=1e-4)
    assert golden.version == 3


def test_evaluation_of_the_golden_folder(golden, photos, recorded, tmp_path):
    """All results, as `onea evaluate --json` prints them."""
    generator = np.random.default_rng(3)
    for number in range(6):
        pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8) // (1 + number % 3)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    files = class_folders(photos)
    labels = [name for name in files for _ in files[name]]
    labels[0], labels[-1] = labels[-1], "class99"  # a mistake, and a class that was never taught
    found = evaluate(golden.snapshot(), [file for name in files for file in files[name]], labels, tmp_path).as_json()
    for mistake in found["mistakes"]:
        mistake["image"] = "/".join(Path(mistake["image"]).parts[-2:])
    found = json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 4))
    assert found == recorded("evaluation.json", found)


def test_to_the_hub_and_back(original, photos, tmp_path, monkeypatch, tiny_vit):
    """Only the network access is replaced: what would be uploaded is what is downloaded."""
    import shutil

    from huggingface_hub.utils import filter_repo_objects

    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.create_repo", lambda *args, **kwargs: None)

    def upload(*, repo_id, folder_path, **rest):
        shutil.copytree(folder_path, hub / repo_id, dirs_exist_ok=True)
        return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    asked: list[dict[str, object]] = []

    def download(name, **options):
        """Like the Hub: only the requested files, as links into a cache."""
        asked.append(options)
        cache = tmp_path / f"cache-{len(asked)}"
        for file in filter_repo_objects(listing(hub / name), allow_patterns=options["allow_patterns"]):
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            (cache / file).symlink_to(hub / name / file)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert original.push_to_hub("me/shop") == "https://huggingface.co/me/shop"
    everything = b"".join(listing(hub).values())
    (hub / "me/shop/setup.py").write_text("import os")
    (hub / "me/shop/states/000003/state.pkl").write_text("no")
    model = onea.OneA.from_pretrained("me/shop", revision="0123abcd", backbone=tiny_vit, threads=1)
    assert np.array_equal(model.predict_proba(photos), original.predict_proba(photos))
    assert asked[0]["revision"] == "0123abcd"
    fetched = sorted(str(file.relative_to(tmp_path / "cache-1")) for file in (tmp_path / "cache-1").rglob("*.*"))
    assert fetched == ["model.json", "states/000003/state.json", "states/000003/state.safetensors"]
    assert str(Path(tiny_vit).parent).encode() not in everything  # no path of this machine leaves it

    def unreachable(*args, **kwargs):
        raise OSError("no network\nmany lines of trace")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(OneaError, match=r"could not be downloaded \(no network\)"):
        onea.OneA.from_pretrained("me/other")
