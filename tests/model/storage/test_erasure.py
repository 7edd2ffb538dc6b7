# SPDX-License-Identifier: Apache-2.0
"""A class that is forgotten everywhere leaves neither its name nor its statistics in any file of the model folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.models import all_blocks_model, class_folders

import onea
from onea.errors import OneaError
from onea.model.storage import folder as folders
from onea.model.storage import layout
from onea.model.storage.erasure import UNNAMED, erase

GONE, EARLIER, KEPT = "Quincefruit", "Quinzefruit", "class01"


@pytest.fixture(scope="module")
def files(tiny_images):
    return class_folders(tiny_images / "train")


@pytest.fixture(scope="module")
def original(tiny_vit, files):
    """Four classes, taught in two updates that are named after a class; one class is renamed. Must not be changed."""
    model = all_blocks_model(tiny_vit, options={"min_share": 0.25})
    for name, folder in ((EARLIER, "class00"), (KEPT, "class01")):
        more = files["class02" if name == EARLIER else "class03"]
        labels = [name] * 6 + [more[0].parent.name] * 6
        model.learn([*files[folder], *more], labels, name=f"{name} of a day")
    model.rename(EARLIER, GONE)
    assert model.history[1]["trained"]
    return model


@pytest.fixture
def shop(original, tmp_path):
    return original.save(tmp_path / "shop.onea")


def content(path: Path) -> bytes:
    return b"\0".join(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file())


def found_names(path: Path) -> list[str]:
    return [name for name in (GONE, EARLIER, KEPT) if name.encode() in content(path)]


def rows_of(state, name: str) -> list[bytes]:
    """The bytes of each tensor's rows for a class, as they are stored."""
    own = state.classes.index(name)
    factor = state.statistics.factors[own]
    rows = [state.statistics.means[own], factor[factor.any(1)].bfloat16()]
    rows += [
        *state.held_out_features[state.held_out_rows == own].bfloat16(),
        *state.held_out_fingerprints[state.held_out_rows == own],
    ]
    for kind, of in (
        ("held_out_signals", "held_out_signal_rows"),
        ("left_out_signals", "left_out_signal_rows"),
        ("fingerprints", "fingerprint_rows"),
    ):
        rows += [*getattr(state, kind)[getattr(state, of) == own]]
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows]


def states(path: Path):
    return [folders.read_state(path, version) for version in folders.read_manifest(path).versions.kept]


def test_no_file_contains_the_name_or_the_statistics(shop, onea):
    rows = [*rows_of(states(shop)[-1], GONE), *rows_of(states(shop)[0], EARLIER)]
    assert len(rows) > 20
    assert "--everywhere (everywhere=true) removes it" in onea("forget", str(shop), GONE)[1]
    assert found_names(shop) == [GONE, EARLIER, KEPT]
    assert all(row in content(shop) for row in rows), "plain forget leaves them in earlier versions"
    status, told, _ = onea("forget", str(shop), GONE, "--everywhere")
    assert status == 0
    assert "undo cannot go back beyond this update" in told
    assert found_names(shop) == [KEPT]
    assert not any(row in content(shop) for row in rows)
    assert onea("undo", str(shop))[0] != 0
    history = onea("history", str(shop))[1]
    assert "forgot 1 class everywhere" in history
    assert "update 1" in history


def test_other_classes_are_predicted_as_after_a_plain_forget(original, shop, tiny_images, tmp_path):
    plain = onea.load(original.save(tmp_path / "plain.onea"), threads=1).forget(GONE)
    model = onea.load(shop, threads=1).forget(GONE, everywhere=True)
    assert model.predict_proba(tiny_images / "test").tolist() == plain.predict_proba(tiny_images / "test").tolist()
    assert model.versions.kept == (model.version,) == (plain.version,)
    with pytest.raises(OneaError, match="no earlier version"):
        model.undo()
    assert onea.load(model.save(shop), threads=1).predict_proba(tiny_images / "test").tolist() == (
        plain.predict_proba(tiny_images / "test").tolist()
    )
    assert found_names(shop) == [KEPT]


def test_an_erased_class_can_be_taught_again(original, files, shop):
    model = onea.load(shop, threads=1)
    sizes = sorted(model.snapshot().state.adapter_images.values())
    model.forget(GONE, everywhere=True).learn(files["class00"], [GONE] * 6)
    state = model.snapshot().state
    assert model.history[-1]["repeated"] == 0
    assert GONE in state.classes
    assert sorted(state.adapter_images.values()) == sizes, (
        "the class that was merged counts, and one more is not trained"
    )
    assert sorted(model.history[0]["classes"]) == [UNNAMED, "class02"]
    assert onea.load(model.save(shop), threads=1).history == model.history
    model.forget(GONE, everywhere=True).save(shop)
    assert found_names(shop) == [KEPT]


def test_unknown_names_are_refused(original):
    state = original.snapshot().state
    with pytest.raises(OneaError, match="has no class 'fig'"):
        erase(state, ["fig"], 9, "")
    with pytest.raises(OneaError, match="name at least one"):
        erase(state, [], 9, "")
    with pytest.raises(OneaError, match=f"Images of '{EARLIER}' now belong to '{GONE}'"):
        erase(state, [EARLIER], 9, "")
    once = erase(state, [GONE, GONE], 9, "")
    assert once.updates[-1]["everywhere"] == 1
    with pytest.raises(OneaError, match=f"has no class '{GONE}'"):
        erase(once, [GONE], 10, "")
    with pytest.raises(OneaError, match="has no class"):
        erase(once, [UNNAMED], 10, "")


def test_a_name_that_another_class_has_now_stays(original):
    state = original.snapshot().state.rename(KEPT, EARLIER, 8, "")
    gone = erase(state, [GONE], 9, "")
    assert gone.classes == ("class02", EARLIER, "class03")
    assert GONE not in str(gone.updates)


def test_a_file_that_cannot_be_removed_is_named_and_removed_later(shop, monkeypatch, onea):
    kept = folders.read_manifest(shop).versions.kept
    unlink = Path.unlink

    def refused(path, missing_ok=False):
        if f"{kept[0]:06d}" in str(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        status, _, told = onea("forget", str(shop), GONE, "--everywhere")
        assert status != 0
        assert str(layout.state_folder(shop, kept[0])) in told
    assert found_names(shop) == [EARLIER, KEPT]
    assert "has no class" in onea("forget", str(shop), GONE, "--everywhere")[2]
    assert found_names(shop) == [KEPT]
