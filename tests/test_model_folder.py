"""The model folder: what is saved comes back bit for bit, and nothing that happens while writing can spoil it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from model_tools import class_folders, tiny_model

import onea
from onea.errors import OneaError
from onea.model import folder as folders
from onea.model.lock import locked

GOLDEN = Path(__file__).parent / "golden" / "format-1.onea"


@pytest.fixture(scope="module")
def photos(tiny_images):
    return tiny_images / "test"


@pytest.fixture(scope="module")
def original(tiny_vit, tiny_images):
    """Taught three classes, then one, then three more with one of them again."""
    files = class_folders(tiny_images / "train")
    model = tiny_model(tiny_vit)
    for names in (("class00", "class01", "class02"), ("class03",), ("class03", "class04", "class05")):
        model.learn([file for name in names for file in files[name]], [name for name in names for _ in files[name]])
    return model


@pytest.fixture
def saved(original, tmp_path):
    return original.save(tmp_path / "shop.onea")


def listing(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_loaded_model_answers_bit_for_bit_alike(original, saved, photos):
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


def test_learning_goes_on_after_loading_as_if_it_had_never_stopped(tiny_vit, tiny_images, photos, tmp_path):
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


def test_undo_on_disk_restores_the_answers_and_never_reuses_a_version(original, saved, photos):
    before = onea.load(saved).predict_proba(photos)
    folders.change(saved, lambda state, version, date: state.without(["class01"], version, date))
    assert len(onea.load(saved).classes_) == 5
    undone, now = folders.undo(saved)
    assert (undone.version, now.version) == (4, 3)
    assert np.array_equal(onea.load(saved).predict_proba(photos), before)
    folders.change(saved, lambda state, version, date: state.renamed("class01", "one", version, date))
    assert folders.read_manifest(saved).versions == (1, 2, 3, 5)
    for _ in range(3):
        folders.undo(saved)
    with pytest.raises(OneaError, match="nothing to go back to"):
        folders.undo(saved)
    assert sorted(entry.name for entry in (saved / "states").iterdir()) == ["000001"]


def test_only_the_last_versions_are_kept(tiny_vit, tiny_images, tmp_path):
    path = tiny_model(tiny_vit, keep=2).learn(tiny_images / "train").save(tmp_path / "m.onea")
    for number in range(4):
        folders.change(path, lambda s, version, date, n=number: s.renamed(s.classes[0], f"new {n}", version, date))
    assert folders.read_manifest(path).versions == (3, 4, 5)
    assert len(list((path / "states").iterdir())) == 3


def test_the_card_tells_the_history(saved):
    text = (saved / "README.md").read_text("utf-8")
    assert "Knows 6 classes" in text
    assert text.count("\n| ") == 1 + 3
    assert "+2, 1 again" in text
    assert (saved / "history.png").read_bytes().startswith(b"\x89PNG")


CRASHES = {
    "while the tensors are written": ("onea.model.folder", "write_atomically", 0),
    "before the new version is whole": ("onea.model.folder", "write_atomically", 3),
    "before the switch": ("onea.model.folder", "write_json", 0),
    "after the switch": ("onea.model.folder", "write_atomically", 4),
}


@pytest.mark.parametrize("moment", CRASHES)
def test_a_crash_at_any_moment_leaves_a_whole_model(original, saved, photos, moment):
    module, name, after = CRASHES[moment]
    code = f"""
        import os, signal, {module} as module, onea
        calls, real = 0, module.{name}
        def deadly(*args, **kwargs):
            global calls
            calls += 1
            if calls > {after}:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        model = onea.load({str(saved)!r}, threads=1)
        model.forget("class01")
        module.{name} = deadly
        model.save({str(saved)!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    model = onea.load(saved, threads=1)
    assert model.version == (4 if moment == "after the switch" else 3)
    if model.version == 3:
        assert np.array_equal(model.predict_proba(photos), original.predict_proba(photos))
    model.forget("class02").save(saved)  # nothing is in the way of the next update, and leftovers go
    assert not list((saved / "states").glob(".partial*"))
    assert "class02" not in onea.load(saved).classes_


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


def test_only_one_process_writes_and_a_dead_one_does_not_block(saved):
    code = f"""
        import time
        from pathlib import Path
        from onea.model.lock import locked
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


def test_a_lock_leaves_nothing_behind_where_nothing_was_written(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path / "new.onea"):
        raise RuntimeError
    assert not (tmp_path / "new.onea").exists()


def test_somebody_elses_update_is_not_overwritten(saved):
    mine, theirs = onea.load(saved), onea.load(saved)
    theirs.forget("class00").save(saved)
    with pytest.raises(OneaError, match="did not grow from"):
        mine.forget("class01").save(saved)
    assert "class00" not in onea.load(saved).classes_


def test_another_models_folder_and_other_folders_are_left_alone(tiny_vit, tiny_images, saved, tmp_path):
    other = tiny_model(tiny_vit).learn(tiny_images / "train")
    with pytest.raises(OneaError, match="did not grow from"):
        other.save(saved)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/mum.txt").write_text("dear mum")
    with pytest.raises(OneaError, match="holds no model"):
        other.save(tmp_path / "letters")
    assert [entry.name for entry in (tmp_path / "letters").iterdir() if entry.name != "lock"] == ["mum.txt"]


def test_a_newer_format_is_refused(saved):
    manifest = json.loads((saved / "model.json").read_text())
    (saved / "model.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(OneaError, match=r"has format 99.* onea"):
        onea.load(saved)


def test_damage_is_named(saved):
    tensors = saved / "states/000003/state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\0")
    with pytest.raises(OneaError, match="damaged"):
        onea.load(saved)
    (saved / "model.json").write_text("{")
    with pytest.raises(OneaError, match="damaged"):
        onea.load(saved)


def test_a_description_of_images_that_lacks_something_is_named(saved):
    path = saved / "states/000003/state.json"
    state = json.loads(path.read_text())
    del state["preprocess"]["side"]
    path.write_text(json.dumps(state))
    with pytest.raises(OneaError, match="What the model says of its images is damaged \\('side'\\)"):
        onea.load(saved).predict([np.zeros((8, 8, 3), np.uint8)])


def test_another_backbone_is_refused(saved, tmp_path):
    from tiny import write_tiny_vit

    write_tiny_vit(tmp_path / "other.safetensors", depth=3)
    with pytest.raises(OneaError, match="other weights"):
        onea.load(saved, backbone=str(tmp_path / "other.safetensors"))


def test_a_folder_of_format_1_loads_for_ever(tiny_vit, photos):
    model = onea.load(GOLDEN, backbone=tiny_vit, threads=1)
    expected = json.loads((GOLDEN / "expected.json").read_text())
    assert model.classes_.tolist() == expected["classes"]
    np.testing.assert_allclose(model.predict_proba(photos)[::6], expected["probabilities"], atol=1e-4)
    assert model.predict(photos)[::6].tolist() == expected["answers"]
    assert model.version == 3


def test_to_the_hub_and_back(original, photos, tmp_path, monkeypatch, tiny_vit):
    """The network's edge alone is replaced: what would be uploaded is what is downloaded."""
    import shutil

    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.create_repo", lambda *args, **kwargs: None)

    def upload(*, repo_id, folder_path, **rest):
        shutil.copytree(folder_path, hub / repo_id, dirs_exist_ok=True)
        return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **rest: str(hub / name))
    assert original.push_to_hub("me/shop") == "https://huggingface.co/me/shop"
    model = onea.OneA.from_pretrained("me/shop", backbone=tiny_vit, threads=1)
    assert np.array_equal(model.predict_proba(photos), original.predict_proba(photos))
    everything = b"".join(listing(hub).values())
    assert str(Path(tiny_vit).parent).encode() not in everything  # no path of this machine leaves it

    def unreachable(*args, **kwargs):
        raise OSError("no network\nmany lines of trace")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(OneaError, match=r"could not be downloaded \(no network\)"):
        onea.OneA.from_pretrained("me/other")
