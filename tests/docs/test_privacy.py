# SPDX-License-Identifier: Apache-2.0
"""docs/privacy.md: each sentence has a test or a measurement."""

from __future__ import annotations

import ast
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import ROOT
from support.models import all_blocks_model, class_folders, tiny_model

import onea as product
from onea.files import cache_folder
from onea.model.parameters import Parameters

PAGE = ROOT / "docs/privacy.md"
HERE = "tests/docs/test_privacy.py"
OFFLINE = "tests/cli/test_offline.py"
FORGET = f"{HERE}::test_forgetting_removes_this_and_no_more"

# The beginning of each sentence, in the order of the page, and what carries it: tests, or files of measured values.
CLAIMS = (
    ("What a model keeps of your photos", f"{HERE}::test_every_sentence_is_carried"),
    ("Each sentence below has a test", f"{HERE}::test_every_sentence_is_carried"),
    ("A model folder holds these files", f"{HERE}::test_the_files_are_those_of_the_page"),
    ("A version holds these tensors", f"{HERE}::test_the_tensors_are_those_of_the_page"),
    ("By default no photo is kept", f"{HERE}::test_the_files_are_those_of_the_page"),
    ("By default no photo is kept", f"{HERE}::test_the_tensors_are_those_of_the_page"),
    ("With `--memory 10`", f"{HERE}::test_copies_are_small_and_limited"),
    ("With `--memory pending`", "tests/model/learning/test_memory.py::test_pending_copies_are_deleted_by_the_training"),
    ("No name of a photo", "tests/model/test_photo_names.py::test_a_saved_model_contains_no_photo_names"),
    ("No name of a photo", "tests/model/storage/test_shared_folders.py::test_a_model_folder_contains_no_path"),
    (
        "Of each class, the features of 16",
        "tests/model/test_held_out.py::test_a_limited_number_of_the_newest_images_of_each_class_is_kept",
    ),
    (
        "Of each class, the features of 16",
        "tests/model/learning/test_background.py::test_a_seeded_sample_of_limited_size_is_kept",
    ),
    ("An update in the history has", f"{HERE}::test_the_history_has_names_and_numbers"),
    ("Its name is that of the folder", f"{HERE}::test_the_history_has_names_and_numbers"),
    ("A model keeps what it was taught", FORGET),
    ("Each change makes a version", "tests/model/storage/test_folder.py::test_only_the_last_versions_are_kept"),
    ("Each change makes a version", f"{HERE}::test_five_versions_are_kept"),
    ("What is removed from the current", FORGET),
    ("Whoever has a model folder can read", f"{HERE}::test_the_history_has_names_and_numbers"),
    ("A fingerprint reveals the average", "benchmarks/privacy/fingerprints.csv"),
    ("Whoever has a copy of a photo", f"{HERE}::test_a_copy_tells_what_was_taught"),
    ("Pictures cannot be drawn", "benchmarks/privacy/fingerprints.csv"),
    ("Kept features tell more", "benchmarks/privacy/features.csv"),
    ("A photo that was saved again", "benchmarks/privacy/features.csv"),
    ("Pictures that the same decoders draw", "benchmarks/privacy/features.csv"),
    ("Of a class that was taught with two", f"{HERE}::test_statistics_of_two_photos_are_their_features"),
    ("So treat a model", "benchmarks/privacy/features.csv"),
    ("`onea forget shop.onea CLASS` removes", FORGET),
    ("Its name stays in the history", FORGET),
    (
        "`onea forget shop.onea CLASS --everywhere`",
        "tests/model/storage/test_erasure.py::test_no_file_contains_the_name_or_the_statistics",
    ),
    ("What was learned from its photos", FORGET),
    ("A new model, taught without", f"{HERE}::test_a_new_model_has_nothing_of_an_old_one"),
    (
        "`onea teach shop.onea FOLDER --memory 0`",
        "tests/model/learning/test_memory.py::test_memory_can_be_lowered_and_switched_off",
    ),
    (
        "Files below `copies` and `sources.json`",
        "tests/model/storage/test_copies.py::test_removed_copies_are_not_missed",
    ),
    ("Files below `copies` and `sources.json`", "tests/cli/test_memory.py::test_sources_may_be_deleted"),
    ("`onea undo shop.onea` removes", f"{HERE}::test_undo_removes_a_version_from_the_disk"),
    ("Folders of earlier versions", f"{HERE}::test_an_earlier_version_may_be_deleted_by_hand"),
    ("Whoever deletes the model folder", f"{HERE}::test_the_cache_holds_the_place_of_the_network_alone"),
    ("No command of onea looks up", f"{OFFLINE}::test_a_model"),
    ("No command of onea looks up", f"{OFFLINE}::test_research"),
    ("No command of onea looks up", f"{OFFLINE}::test_long_commands"),
    ("No command of onea looks up", f"{OFFLINE}::test_commands_with_workers"),
    ("No command of onea looks up", f"{OFFLINE}::test_the_tour"),
    ("No command of onea looks up", f"{OFFLINE}::test_the_service"),
    ("No command of onea looks up", f"{OFFLINE}::test_every_command_is_here"),
    ("It does so for a network", "tests/research/data/test_sources.py::test_error_message_for_cifar100_offline"),
    ("It does so for a network", "tests/model/storage/test_folder.py::test_to_the_hub_and_back"),
    ("The telemetry of ONNX Runtime", f"{OFFLINE}::test_onnx_runtime_is_imported_in_one_place"),
    ("The telemetry of ONNX Runtime", f"{OFFLINE}::test_a_model"),
    ("Below your home folder", f"{OFFLINE}::test_a_model"),
    ("Teaching and asking leave no copy", f"{HERE}::test_the_cache_holds_the_place_of_the_network_alone"),
    ("The service leaves no photo", f"{HERE}::test_the_service_leaves_no_photo_on_the_disk"),
    (
        "Its history tells nobody",
        "tests/model/test_photo_names.py::test_a_service_reveals_no_photo_names",
    ),
    ("`push_to_hub` uploads the current", "tests/model/storage/test_folder.py::test_to_the_hub_and_back"),
    (
        "`push_to_hub` uploads the current",
        "tests/model/storage/test_copies.py::test_copies_are_uploaded_only_on_request",
    ),
    ("It never uploads", "tests/cli/test_memory.py::test_sources_are_read_by_refresh_alone"),
    (
        "Exported files hold no path",
        "tests/model/storage/test_shared_folders.py::test_an_exported_file_contains_no_path",
    ),
    ("Exported files hold no path", "tests/model/storage/test_copies.py::test_an_exported_file_contains_no_copy"),
    ("Only `onea refresh` reads", "tests/cli/test_memory.py::test_sources_are_read_by_refresh_alone"),
    ("Research runs", "tests/research/data/test_pack.py::test_a_second_call_maps_the_cached_array"),
    ("You may delete it", "tests/research/runs/test_reuse.py"),
)


def sentences(text: str) -> list[str]:
    """The sentences of a page, without headings and tables."""
    lines = [line for line in text.splitlines() if not line.startswith(("#", "|"))]
    flat = re.sub(r"\]\([^)]*\)|<!--.*?-->|\[", "", " ".join(lines))
    return re.split(r"(?<=[.:]) +(?=[A-Z`])", " ".join(flat.split()))


def listed(heading: str) -> set[str]:
    """The names in the first column of the table below a sentence that begins with this text."""
    after = PAGE.read_text("utf-8").split(heading, 1)[1].split("\n\n")[1]
    return {name for line in after.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])}


def test_every_sentence_is_carried():
    found = sentences(PAGE.read_text("utf-8"))
    for sentence in found:
        assert any(sentence.startswith(start) for start, _ in CLAIMS), f"nothing carries: {sentence}"
    for start, _ in CLAIMS:
        assert any(sentence.startswith(start) for sentence in found), f"the page does not say: {start}"


@pytest.mark.parametrize("evidence", sorted({evidence for _, evidence in CLAIMS}))
def test_what_carries_a_sentence_exists(evidence):
    file, _, test = evidence.partition("::")
    assert (ROOT / file).is_file()
    if test:
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_readme_and_the_pages_agree():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.search(r"No photo is kept, nothing leaves\s+your machine \(\[privacy\]\(docs/privacy.md\)\)", readme)


# What can be looked at directly


@pytest.fixture(scope="module")
def taught(tiny_vit, tiny_images) -> product.OneA:
    """A model with several updates, further photos of a known class, and a background."""
    folders = class_folders(tiny_images / "train")
    model = all_blocks_model(tiny_vit, held_out=0.3)
    for names in (["class00", "class01", "class02"], ["class03"], ["class04"]):
        files = [(str(file), name) for name in names for file in folders[name]]
        model.learn([file for file, _ in files], [name for _, name in files])
    return model.learn_background([str(file) for file in folders["class05"]])


@pytest.fixture
def saved(taught, tmp_path) -> Path:
    return Path(taught.save(tmp_path / "shop.onea"))


def state_of(folder: Path, version: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"states/{version:06d}/state.json").read_bytes())
    return found


def tensors_of(folder: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"states/{version:06d}/state.safetensors")


def test_the_files_are_those_of_the_page(saved):
    files = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    names = {re.sub(r"[0-9]{6}", "000001", name) for name in files}
    only_on_request = {"copies/SHA256.safetensors", "sources.json"}
    assert names == listed("A model folder holds these files") - only_on_request
    assert (saved / "lock").read_bytes() == b"", "only while a process writes"


def test_copies_are_small_and_limited(tiny_vit, tiny_images, onea):
    given = ("--backbone", tiny_vit, "--epochs", "1", "--threads", "1", "--memory", "2", "--remember-sources")
    assert onea("teach", "shop.onea", str(tiny_images / "train"), *given)[0] == 0
    files = {str(path.relative_to("shop.onea")) for path in Path("shop.onea").rglob("*") if path.is_file()}
    names = {re.sub(r"[0-9a-f]{64}", "SHA256", re.sub(r"[0-9]{6}", "000001", name)) for name in files}
    assert names == listed("A model folder holds these files")
    state = product.load("shop.onea", threads=1).snapshot().state
    assert [sum(file.images for file in files) for files in state.exemplars.values()] == [2] * 6
    [file] = state.exemplars["class00"]
    side = state.preprocess["side"]
    assert file.decode(side)[0].shape == (2, 3, side, side)


def test_the_tensors_are_those_of_the_page(saved):
    names = {re.sub(r"^adapter\..*", "adapter.*", name) for name in tensors_of(saved, 4)}
    assert names == listed("A version holds these tensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(saved, 4).items()}
    side = state_of(saved, 4)["preprocess"]["side"]
    assert all(shape[-2:] != (side, side) for shape in shapes.values())
    assert shapes["held_out_signals"][1] == shapes["left_out_signals"][1] == 5


def test_the_history_has_names_and_numbers(saved, tiny_vit, tiny_images, onea):
    for update in state_of(saved, 4)["updates"]:
        texts = {name: value for name, value in update.items() if isinstance(value, str)}
        assert texts.keys() <= {"kind", "name", "date"}
        for name in update.keys() - {*texts, "classes", "merge"}:
            parts = update[name]
            if isinstance(parts, dict):
                assert parts.keys() <= set(update["classes"]), name
                parts = list(parts.values())
            for part in parts if isinstance(parts, list) else [parts]:
                assert part is None or isinstance(part, int | float), name
    shutil.copytree(tiny_images / "train", "monday")
    for more in ((), ("--name", "other")):
        assert onea("teach", "own.onea", "monday", "--backbone", tiny_vit, "--epochs", "1", *more)[0] == 0
    assert [update["name"] for update in product.load("own.onea").history] == ["monday", "other"]


def test_five_versions_are_kept():
    assert Parameters.defaults()["keep"] == 5


def test_a_copy_tells_what_was_taught(taught, tiny_images):
    from onea.model.learning.fingerprints import compute_fingerprints
    from onea.model.learning.images import read_unlabelled

    state = taught.snapshot().state
    read = read_unlabelled([tiny_images / "train/class02/3.png"], taught.snapshot().side)
    assert state.find_taught(compute_fingerprints(read.pixels)) == {0: "class02"}


def test_statistics_of_two_photos_are_their_features(tiny_vit, tiny_images, tmp_path):
    """Each photo is the mean of its class plus or minus half the difference along the only direction of spread."""
    photos = [str(tiny_images / f"train/class{k:02d}/{i}.png") for k in range(3) for i in range(2)]
    model = tiny_model(tiny_vit, views=1).learn(photos, [photo.split("/")[-2] for photo in photos])
    kept = tensors_of(Path(model.save(tmp_path / "shop.onea")), 1)
    first, second = torch.from_numpy(model.transform(photos[:2]))
    torch.testing.assert_close(kept["prototypes"][0], (first + second) / 2, rtol=1e-3, atol=1e-3)
    [direction] = [one for one in kept["factors"][0].float() if one.norm() > 0.01]
    assert torch.cosine_similarity(direction, first - second, dim=0).abs() > 0.99


def test_forgetting_removes_this_and_no_more(saved):
    before = tensors_of(saved, 4)
    model = product.load(saved, device="cpu", threads=1)
    row = model.snapshot().state.row("class01")
    model.forget("class01").save(saved)
    after = tensors_of(saved, 5)
    for name in ("prototypes", "counts", "factors", "cut"):
        assert len(after[name]) == len(before[name]) - 1
    for rows, values in (
        ("fingerprint_rows", "fingerprints"),
        ("held_out_rows", "held_out_features"),
        ("held_out_signal_rows", "held_out_signals"),
    ):
        gone = int((before[rows] == row).sum())
        assert gone > 0
        assert len(after[values]) == len(after[rows]) == len(before[values]) - gone
    adapter = [name for name in before if name.startswith("adapter.")]
    assert adapter
    assert all(torch.equal(before[name], after[name]) for name in (*adapter, "scatter"))
    assert "class01" not in state_of(saved, 5)["classes"]
    assert "class01" in json.dumps(state_of(saved, 5)["updates"])
    assert "class01" in state_of(saved, 4)["classes"]


def test_undo_removes_a_version_from_the_disk(saved):
    from onea.model.storage.folder import undo

    assert (saved / "states/000004").is_dir()
    undo(saved)
    assert not (saved / "states/000004").exists()


def test_an_earlier_version_may_be_deleted_by_hand(saved):
    shutil.rmtree(saved / "states/000001")
    shutil.rmtree(saved / "states/000003")
    model = product.load(saved, device="cpu", threads=1)
    assert model.version == 4
    assert model.undo().version == 2


def test_a_new_model_has_nothing_of_an_old_one(tiny_vit, tiny_images, tmp_path):
    shutil.copytree(tiny_images / "train/class00", tmp_path / "photos/class00")
    shutil.copytree(tiny_images / "train/class02", tmp_path / "photos/class02")
    tiny_model(tiny_vit).learn(tiny_images / "train").save(tmp_path / "old.onea")
    again = [tiny_model(tiny_vit).learn(tmp_path / "photos").save(tmp_path / f"{name}.onea") for name in "ab"]
    first, second = (tensors_of(folder, 1) for folder in again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first), "whatever was taught before"
    assert not any(b"class01" in path.read_bytes() for path in again[0].rglob("*") if path.is_file())


def test_the_cache_holds_the_place_of_the_network_alone(tiny_vit, tiny_images, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEA_CACHE", str(tmp_path / "cache"))
    model = tiny_model(tiny_vit).learn(tiny_images / "train")
    model.predict(tiny_images / "test")
    shutil.rmtree(model.save(tmp_path / "shop.onea"))
    [note] = [path for path in cache_folder().rglob("*") if path.is_file()]
    assert json.loads(note.read_bytes()) == {"file": str(Path(tiny_vit).resolve())}


def test_the_service_leaves_no_photo_on_the_disk(shop, tmp_path, monkeypatch):
    """Requests that are too large for memory go through an unnamed file."""
    serving = pytest.importorskip("support.serving", exc_type=ImportError)
    from PIL import Image

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    noise = Image.effect_noise((1500, 1500), 90).convert("RGB")
    noise.save(tmp_path / "large.png")
    large = (tmp_path / "large.png").read_bytes()
    assert len(large) > 2_000_000
    before = {path: path.read_bytes() for path in shop.rglob("*") if path.is_file() and path.name != "lock"}
    with serving.client_of(shop) as client:
        for sent in (
            {"content": large, "headers": {"content-type": "image/png"}},
            {"files": [("images", ("a.png", large))]},
        ):
            assert client.post("/predict", **sent).status_code == 200
    assert list((tmp_path / "temporary").iterdir()) == []
    assert before == {path: path.read_bytes() for path in shop.rglob("*") if path.is_file() and path.name != "lock"}
