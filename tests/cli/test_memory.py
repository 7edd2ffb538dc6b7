# SPDX-License-Identifier: Apache-2.0
"""``onea teach --memory``, ``--later`` and ``--remember-sources``, and ``onea refresh``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import onea as product

FAST = ("--epochs", "2", "--threads", "1", "--precision", "fp32")
MACHINE = ("--threads", "1", "--precision", "fp32")


@pytest.fixture
def day(tiny_images):
    """Copy photos of some classes to a folder with a name."""

    def copied(name: str, *labels: int) -> str:
        for label in labels:
            shutil.copytree(tiny_images / f"train/class{label:02d}", f"{name}/class{label:02d}")
        return name

    return copied


@pytest.fixture
def teach(onea, day, tiny_vit):
    """Teach a day in shop.onea, and return what is printed."""

    def taught(name: str, *labels: int, options: tuple[str, ...] = ()) -> str:
        first = () if Path("shop.onea").exists() else ("--backbone", tiny_vit, *FAST)
        code, out, err = onea("teach", "shop.onea", day(name, *labels), *(first or MACHINE), *options)
        assert code == 0, err
        return " ".join(out.split())

    return taught


def info(onea) -> dict:
    return json.loads(onea("info", "shop.onea", "--json")[1])


def test_the_first_update_says_what_is_stored_and_what_memory_would_bring(onea, teach):
    assert "No photo is stored. With --memory 10, ten small copies" in teach("monday", 0, 1, 2)
    assert "--memory" not in teach("tuesday", 3)
    assert "No photo is stored." in onea("info", "shop.onea")[1]
    assert info(onea)["memory"] == {"setting": 0, "copies": 0, "classes": 0, "bytes": 0}


def test_memory_is_printed_and_stays_with_the_model(onea, teach):
    out = teach("monday", 0, 1, 2, options=("--memory", "2"))
    assert "The model stores 6 small copies of photos of 3 classes (" in out
    out = teach("tuesday", 3, 4, options=("--later",))
    assert "Classes that wait for training: 2 of 5 classes; it is due now" in out
    facts = info(onea)
    assert facts["memory"] == {"setting": 2, "copies": 10, "classes": 5, "bytes": facts["memory"]["bytes"]}
    assert "10 small copies" in Path("shop.onea/README.md").read_text("utf-8")


def test_refresh_without_folders_uses_the_copies(onea, teach):
    teach("monday", 0, 1, 2, options=("--memory", "2", "--later"))
    code, out, _ = onea("refresh", "shop.onea", *MACHINE)
    assert code == 0
    assert out.startswith("trained on 6 stored copies in ")
    assert f"shop.onea is at version {product.load('shop.onea').version}" in out


def test_refresh_finds_the_photos_wherever_they_are(onea, teach, tiny_images):
    teach("monday", 0, 1, 2)
    teach("tuesday", 3)
    shutil.move("monday", "elsewhere/deep/below")
    shutil.copytree(tiny_images / "test", "elsewhere/others")
    code, out, _ = onea("refresh", "shop.onea", "elsewhere", *MACHINE)
    assert code == 0
    assert "trained on 18 photos in " in out
    assert "18 photos were never taught and not used" in out


def test_remembered_folders_are_found_and_missing_ones_named(onea, teach):
    teach("monday", 0, 1, 2, options=("--remember-sources",))
    teach("tuesday", 3, options=("--remember-sources",))
    shutil.rmtree("tuesday")
    code, out, _ = onea("refresh", "shop.onea", *MACHINE)
    assert code == 0
    assert f"{Path('tuesday').resolve()} no longer exists and was left out" in out.replace("\n", "")
    assert "trained on 18 photos" in out


def test_sources_are_read_by_refresh_alone(onea, teach, tiny_images, monkeypatch):
    """Nothing else reads the file: it is damaged, and all other commands work."""
    teach("monday", 0, 1, 2, options=("--remember-sources",))
    file = Path("shop.onea/sources.json")
    assert json.loads(file.read_bytes())["folders"] == [str(Path("monday").resolve())]
    file.write_text("damaged")
    for words in (("predict", str(tiny_images / "test")), ("info",), ("history",), ("check",)):
        assert onea(words[0], "shop.onea", *words[1:])[0] == 0
    code, _, err = onea("refresh", "shop.onea", *MACHINE)
    assert code == 2
    assert "sources.json is damaged (not JSON); delete it, and name the folders in the command" in err.replace(
        "\n", " "
    )
    uploaded = []
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "create_repo", lambda *_, **__: None)
    monkeypatch.setattr(
        hub, "upload_folder", lambda folder_path, **_: uploaded.extend(Path(folder_path).rglob("*")) or "address"
    )
    product.load("shop.onea", threads=1).push_to_hub("owner/shop")
    assert uploaded
    assert not any(path.name == "sources.json" for path in uploaded)


def test_sources_may_be_deleted(onea, teach):
    teach("monday", 0, 1, 2, options=("--remember-sources",))
    Path("shop.onea/sources.json").unlink()
    code, _, err = onea("refresh", "shop.onea", *MACHINE)
    assert code == 2
    assert "photos of 0 classes to train on" in " ".join(err.split())
    assert onea("refresh", "shop.onea", "monday", *MACHINE)[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--memory", "many"),
            "memory is many; give the number of images of each class to keep, 0 for none, or pending",
        ),
        (("--memory", "-3"), "memory is -3; give the number"),
        (("--memory", "5", "--preset", "fast"), "preset fast trains nothing; leave it out"),
        (("--memory", "5", "--memory-mb", "0"), "memory_mb is 0; give the largest number of megabytes"),
    ],
)
def test_invalid_memory_is_refused_and_nothing_is_written(onea, day, tiny_vit, options, message):
    code, _, err = onea("teach", "shop.onea", day("monday", 0, 1), "--backbone", tiny_vit, *options)
    assert code == 2
    assert message in " ".join(err.split())
    assert not Path("shop.onea").exists()


def test_background_has_no_later(onea, teach, day):
    teach("monday", 0, 1)
    code, _, err = onea("teach", "shop.onea", "--background", day("none", 2), "--later")
    assert code == 2
    assert "--later and --remember-sources are for classes" in " ".join(err.split())


def test_refresh_refuses_a_folder_that_does_not_exist(onea, teach):
    teach("monday", 0, 1)
    code, _, err = onea("refresh", "shop.onea", "nowhere")
    assert code == 2
    assert "nowhere does not exist; give a folder with photos that were taught" in " ".join(err.split())
