# SPDX-License-Identifier: Apache-2.0
"""Names of photos are reported to the user who teaches them; model folders and the service do not reveal them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.models import tiny_model
from support.serving import TEACHER, client_of, form, job_end, photos, png, zipped

import onea

PRIVATE = ("broken-scan", "second-copy", "diary", "loose-portrait", "holiday-at-home")


@pytest.fixture
def folder(tiny_images: Path, tmp_path: Path) -> Path:
    """Two classes below another folder, an unreadable photo, one under two names, and files that are no photos."""
    root = tmp_path / "photos"
    for name in ("class00", "class01"):
        shutil.copytree(tiny_images / "train" / name, root / "holiday-at-home" / name)
    inside = root / "holiday-at-home"
    (inside / "class00/broken-scan.png").write_bytes(b"not an image")
    shutil.copy(inside / "class00/0.png", inside / "class01/second-copy.png")
    (inside / "class01/diary.txt").write_text("private")
    (root / "loose-portrait.png").write_bytes(png())
    return root


def names_in(path: Path) -> set[str]:
    """The private names that occur in a file of a folder, or in its path."""
    files = [file for file in path.rglob("*") if file.is_file()]
    return {name for name in PRIVATE for file in files if name.encode() in file.read_bytes() or name in str(file)}


def test_a_saved_model_contains_no_photo_names(tiny_vit, folder, tmp_path):
    model = tiny_model(tiny_vit, epochs=1).learn(folder, on_bad="skip")
    report = model.last_report
    assert [Path(one.image).name for one in report.conflicts] == ["second-copy.png"]
    assert ["broken-scan" in line for line in report.skipped] == [True]
    assert {Path(file).name for file in report.ignored_files} == {"diary.txt", "loose-portrait.png"}
    assert [Path(group).name for group in report.group_folders] == ["holiday-at-home"]
    update = model.history[-1]
    assert [update[what] for what in ("skipped", "conflicts", "ignored_files", "group_folders")] == [1, 1, 2, 1]
    saved = model.save(tmp_path / "shop.onea")
    model.learn_background([png(colour=(0, 90, 20)), folder / "holiday-at-home/class00/broken-scan.png"], on_bad="skip")
    assert "broken-scan" in model.last_report.skipped[0]
    model.save(saved)
    assert names_in(saved) == set()
    assert onea.load(saved, threads=1).last_report.counts == dict.fromkeys(report.counts, 0)


def test_teach_prints_photo_names(onea, tiny_vit, folder, tmp_path):
    given = ("--backbone", tiny_vit, "--epochs", "1", "--threads", "1", "--device", "cpu", "--on-bad", "skip")
    code, out, _ = onea("teach", str(tmp_path / "shop.onea"), str(folder), *given)
    assert code == 0
    for name in PRIVATE:
        assert name in out
    assert names_in(tmp_path / "shop.onea") == set()


def test_a_service_reveals_no_photo_names(shop, tiny_images):
    files = {f"plum/{n}.png": content for n, content in enumerate(photos(tiny_images, 4))}
    files |= {"plum/second-copy.png": photos(tiny_images, 0)[0], "plum/broken-scan.png": b"x", "plum/diary.txt": b"x"}
    with client_of(shop) as client:
        begun = client.post("/learn?on_bad=skip", files={"zip": ("a.zip", zipped(files))}, headers=TEACHER)
        report = job_end(client, begun)
        assert report["skipped"][0].startswith("plum/broken-scan.png: ")
        assert any("(second-copy.png: 'class00' and 'plum')" in remark for remark in report["remarks"])
        assert any(remark.endswith("(diary.txt)") for remark in report["remarks"])
        job_end(client, client.post("/background", files=form([png()]), headers=TEACHER))
        for address in ("/history", "/classes", "/check", "/metrics", "/healthz"):
            told = client.get(address).text
            assert not [name for name in PRIVATE if name in told], address
        assert client.get("/history").json()["updates"][1]["conflicts"] == 1
    assert names_in(shop) == set()
