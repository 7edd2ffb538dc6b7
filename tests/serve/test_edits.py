# SPDX-License-Identifier: Apache-2.0
"""Forget and rename over HTTP, several classes in one form, and unreadable images."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.models import tiny_model
from support.serving import TEACHER, checkerboard, class_zip, client_of, folder_hash, form, job_end, photos, png, zipped

import onea
from onea.serve.training_jobs import TrainingJob


@pytest.fixture
def client(shop):
    with client_of(shop) as client:
        yield client


def names(client):
    return [known["name"] for known in client.get("/classes").json()["classes"]]


def test_rename_forget_and_undo(client, shop):
    renamed = client.post("/rename", params={"old": "class01", "new": "pear"}, headers=TEACHER)
    assert renamed.json() == {"version": 2, "classes": 4, "remarks": []}
    forgotten = client.post("/forget", params={"class": ["class00", "pear"]}, headers=TEACHER)
    (remark,) = forgotten.json()["remarks"]
    assert forgotten.json() == {"version": 3, "classes": 2, "remarks": [remark]}
    assert "everywhere=true" in remark
    assert names(client) == ["class02", "class03"]
    assert onea.load(shop).classes_.tolist() == ["class02", "class03"]
    assert client.post("/undo", headers=TEACHER).json() == {"undone": 3, "version": 2, "classes": 4}
    assert names(client) == ["class00", "pear", "class02", "class03"]


def test_forget_everywhere(client, shop):
    assert client.post("/rename", params={"old": "class01", "new": "Quince"}, headers=TEACHER).status_code == 200
    forgotten = client.post("/forget", params={"class": "Quince", "everywhere": True}, headers=TEACHER)
    assert (forgotten.status_code, forgotten.json()["classes"]) == (200, 3)
    files = [file.read_bytes() for file in shop.rglob("*") if file.is_file()]
    assert not any(name in content for name in (b"Quince", b"class01") for content in files)
    history = client.get("/history").json()
    assert (history["kept"], history["updates"][-1]["everywhere"]) == ([3], 1)
    assert "Quince" not in str(history)
    refused = client.post("/undo", headers=TEACHER)
    assert refused.status_code >= 400
    assert names(client) == ["class00", "class02", "class03"]


def test_a_class_name_that_is_no_folder_name_is_reported(client):
    renamed = client.post("/rename", params={"old": "class01", "new": "T-shirt/top"}, headers=TEACHER)
    (remark,) = renamed.json()["remarks"]
    assert remark.startswith("'T-shirt/top' is not a portable folder name")


def test_two_classes_become_one(client, shop):
    merged = client.post("/rename", params={"old": "class01", "new": "class02", "merge": True}, headers=TEACHER)
    assert merged.json() == {"version": 2, "classes": 3, "remarks": []}
    assert client.get("/classes").json()["classes"][1] == {"name": "class02", "images": 12}
    wanted = onea.load(shop).undo().rename("class01", "class02", merge=True).snapshot().state.statistics
    assert onea.load(shop).snapshot().state.statistics.means.equal(wanted.means)


@pytest.mark.parametrize(
    ("path", "params", "status", "words"),
    [
        ("/rename", {"old": "class01", "new": "class02"}, 422, "already has a class 'class02'"),
        ("/rename", {"old": "class01", "new": "class01"}, 422, "is already called"),
        ("/rename", {"old": "class01", "new": "pear", "merge": True}, 422, "has no class 'pear'"),
        ("/rename", {"old": "class9", "new": "pear"}, 422, "has no class 'class9'"),
        ("/rename", {"old": "class01", "new": " "}, 422, "cannot be a class name"),
        ("/rename", b"old=class01&new=%E9", 422, "send it in UTF-8"),
        ("/rename", {"old": "class01"}, 422, "new: field required"),
        ("/forget", {"class": "class9"}, 422, "has no class 'class9'"),
        ("/forget", {}, 422, "class: field required"),
    ],
)
def test_refusals_change_nothing(client, shop, path, params, status, words):
    before = folder_hash(shop)
    refused = client.post(path, params=params, headers=TEACHER)
    assert refused.status_code == status
    assert words in refused.json()["detail"]
    assert client.post(path, params=params).status_code in (401, 422)
    assert folder_hash(shop) == before


def test_without_the_token_nothing_changes(client, shop):
    before = folder_hash(shop)
    assert client.post("/forget", params={"class": "class00"}).status_code == 401
    assert client.post("/rename", params={"old": "class00", "new": "x"}).status_code == 401
    assert folder_hash(shop) == before


def test_unreadable_images_can_be_skipped(client, tiny_images):
    good = photos(tiny_images, 0, "test")
    sent = form([good[0], b"broken", good[1]])
    refused = client.post("/predict", files=sent)
    assert refused.status_code == 422
    response = client.post("/predict?on_bad=skip", files=sent).json()
    alone = client.post("/predict", files=form(good[:2])).json()
    assert [answer["image"] for answer in response["answers"]] == ["0.png", "2.png"]
    assert [answer["top"] for answer in response["answers"]] == [answer["top"] for answer in alone["answers"]]
    assert [(item["index"], item["image"]) for item in response["skipped"]] == [(1, "1.png")]
    assert "not an image" in response["skipped"][0]["detail"]
    assert alone["skipped"] == []
    nothing = client.post("/predict?on_bad=skip", files=form([b"broken"]))
    assert nothing.status_code == 422
    assert "1 of 1 images cannot be read (0.png" in nothing.json()["detail"]
    assert client.post("/predict?on_bad=maybe", files=sent).status_code == 422


def test_several_classes_in_one_form(client, tiny_images):
    contents = [*photos(tiny_images, 4), *photos(tiny_images, 5), b"broken"]
    labels = ["plum"] * 6 + ["pear"] * 7
    refused = client.post("/learn", files=form(contents), data={"class": labels}, headers=TEACHER)
    assert refused.status_code == 422
    begun = client.post("/learn?on_bad=skip", files=form(contents), data={"class": labels}, headers=TEACHER)
    report = job_end(client, begun)
    assert (report["classes"], report["images"]) == (["pear", "plum"], 12)
    assert report["skipped"][0].startswith("12.png: it is not an image")
    assert "few photos: 'pear' (6) and 'plum' (6); 10 or more per class are advisable" in report["remarks"]
    assert client.get("/history").json()["updates"][-1]["skipped"] == 1
    wrong = client.post("/learn", files=form(contents[:4]), data={"class": ["a", "b"]}, headers=TEACHER)
    assert wrong.status_code == 422
    assert "one for each of them" in wrong.json()["detail"]


def test_repeated_images_are_reported(client, tiny_images):
    report = job_end(
        client, client.post("/learn", files={"zip": ("a.zip", class_zip(tiny_images, 0))}, headers=TEACHER)
    )
    assert "all photos are repeated: nothing new was learned" in report["remarks"]


def test_a_model_taught_class_by_class_comes_with_advice(tiny_vit, tiny_images, tmp_path):
    """On the page, users often teach one class at a time."""
    files = sorted((tiny_images / "train/class00").iterdir())
    path = tiny_model(tiny_vit).learn(files, ["plum"] * 6).save(tmp_path / "shop.onea")
    with client_of(path) as client:
        for label, of in (("pear", 4), ("plum", 5)):
            begun = client.post("/learn", files=form(photos(tiny_images, of)), data={"class": label}, headers=TEACHER)
            remarks = job_end(client, begun)["remarks"]
            assert remarks[-1].startswith("Its adapter has never been trained, since that takes several classes")


def test_other_files_in_a_zip_are_ignored_and_reported(client, tiny_images):
    files = {f"day/plum/{n}.png": content for n, content in enumerate(photos(tiny_images, 4))}
    files |= {"day/plum/notes.txt": b"x", "loose.png": photos(tiny_images, 5)[0]}
    report = job_end(client, client.post("/learn", files={"zip": ("a.zip", zipped(files))}, headers=TEACHER))
    assert (report["classes"], report["images"]) == (["plum"], 6)
    assert "files ignored (not images, or outside the class folders): 2 (notes.txt, loose.png)" in report["remarks"]


def test_background_images_are_learned_as_in_python(client, shop, tmp_path):
    other = onea.load(shop, threads=1, precision="fp32")
    contents = [checkerboard(), png(colour=(0, 90, 20)), b"broken"]
    begun = client.post("/background?on_bad=skip", files=form(contents), data={"name": "shelf"}, headers=TEACHER)
    report = job_end(client, begun)
    assert (report["status"], report["classes"], report["images"], report["version"]) == ("done", [], 2, 2)
    assert report["skipped"][0].startswith("2.png: it is not an image")
    [update] = client.get("/history").json()["updates"][1:]
    assert (update["kind"], update["name"], update["images"], update["skipped"]) == ("background", "shelf", 2, 1)
    assert names(client) == [f"class0{n}" for n in range(4)]
    files = [tmp_path / f"{n}.png" for n in range(2)]
    for file, content in zip(files, contents, strict=False):
        file.write_bytes(content)
    wanted = other.learn_background(files).snapshot().state
    state = onea.load(shop).snapshot().state
    assert state.background.equal(wanted.background)
    assert state.held_out_signals.equal(wanted.held_out_signals)
    assert client.post("/undo", headers=TEACHER).json()["version"] == 1


def test_a_job_that_fails_at_once_has_a_report(client, tiny_images, monkeypatch):
    class Unwatched(TrainingJob):
        def __init__(self, *args):
            super().__init__(*args)
            self.settled = SimpleNamespace(set=lambda: None, wait=self.ended.wait)

    monkeypatch.setattr("onea.serve.service.TrainingJob", Unwatched)
    taught = client.post("/background", files=form(photos(tiny_images, 0)), headers=TEACHER)
    assert job_end(client, taught)["status"] == "failed"


def test_background_images_of_a_class_are_refused(client, shop, tiny_images):
    before = folder_hash(shop)
    taught = client.post("/background", files=form(photos(tiny_images, 0)), headers=TEACHER)
    report = job_end(client, taught)
    assert report["status"] == "failed"
    assert "6 of 6 background images were taught as a class (0.png as 'class00'" in report["detail"]
    sent = form([checkerboard()])
    for data, headers, status, words in (
        ({}, {}, 401, "token"),
        ({"class": "plum"}, TEACHER, 422, "unknown field 'class'; the fields are: images, name."),
        ({"name": " "}, TEACHER, 422, "1 to 200 printable characters"),
    ):
        refused = client.post("/background", files=sent, data=data, headers=headers)
        assert (refused.status_code, words in refused.json()["detail"]) == (status, True), refused.text
    assert client.post("/background", content=b"PK", headers=TEACHER).status_code == 415
    assert "no image" in client.post("/background", files={"name": (None, "x")}, headers=TEACHER).json()["detail"]
    assert folder_hash(shop) == before
