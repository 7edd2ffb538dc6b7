# SPDX-License-Identifier: Apache-2.0
"""Every endpoint of the service."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.serving import (
    TEACHER,
    TOKEN,
    ZIP,
    checkerboard,
    class_zip,
    client_of,
    folder_hash,
    form,
    job_end,
    photos,
    zipped,
)

import onea
from onea.cli import main
from onea.model.evaluation.check import Check, ClassCheck, Pair
from onea.serve.access import read_token
from onea.serve.schemas import MAX_CHECKED, CheckResponse

GOLDEN = Path(__file__).parents[1] / "golden" / "openapi.json"


@pytest.fixture
def client(shop):
    with client_of(shop) as client:
        yield client


def events(text):
    """The server-sent events of a stream: (event, data)."""
    pieces = [dict(line.split(": ", 1) for line in piece.split("\n")) for piece in text.strip().split("\n\n")]
    return [(piece["event"], json.loads(piece["data"])) for piece in pieces]


# asking


def test_one_image_as_the_body(client, shop, tiny_images):
    content = photos(tiny_images, 1, "test")[0]
    response = client.post("/predict", content=content, headers={"Content-Type": "image/png"})
    assert response.status_code == 200
    expected = onea.load(shop).snapshot().answers([content], 3)[0]
    (answer,) = response.json()["answers"]
    assert answer["class"] == expected.label
    assert answer["version"] == response.json()["version"] == 1
    assert [(row["class"], row["probability"]) for row in answer["top"]] == [
        (name, pytest.approx(chance, abs=1e-5)) for name, chance in expected.top
    ]
    assert answer["verdict"] == expected.verdict
    assert answer["probability"] == pytest.approx(expected.probability, abs=1e-5)


def test_many_images_in_a_form_keep_their_order_and_names(client, shop, tiny_images):
    contents = [photos(tiny_images, label, "test")[0] for label in (0, 1, 2, 3)]
    response = client.post("/predict?top=1", files=form(contents))
    answers = response.json()["answers"]
    assert [answer["image"] for answer in answers] == ["0.png", "1.png", "2.png", "3.png"]
    assert all(len(answer["top"]) == 1 for answer in answers)
    assert [answer["class"] for answer in answers] == onea.load(shop).predict(contents).tolist()


def test_an_unknown_image_has_the_most_probable_classes(client):
    sent = {"content": checkerboard(), "headers": {"Content-Type": "image/png"}}
    (answer,) = client.post("/predict", **sent).json()["answers"]
    assert answer["verdict"] == answer["class"] == "unknown"
    assert answer["probability"] == answer["none_of_these"] > 0.5
    assert all(row["probability"] < 0.5 for row in answer["top"])
    assert len(answer["top"]) == 3


def test_top_is_at_most_the_known_classes(client, tiny_images):
    (answer,) = client.post("/predict?top=100", files=form(photos(tiny_images, 0)[:1])).json()["answers"]
    assert sorted(row["class"] for row in answer["top"]) == [f"class{k:02d}" for k in range(4)]
    assert sum(row["probability"] for row in answer["top"]) + answer["none_of_these"] == pytest.approx(1)


def test_check_equals_the_check_of_the_model(client):
    check = client.get("/check").json()
    assert check["version"] == 1
    assert {(item["name"], item["images"], item["advice"]) for item in check["classes"]} == {
        (f"class{k:02d}", 6, "few photos") for k in range(4)
    }
    assert check["advice"] == {"few photos": 4}
    assert all(0 < pair["overlap"] <= 0.5 for pair in check["pairs"])


def test_the_check_of_very_many_classes_is_bounded():
    classes = tuple(ClassCheck(f"class {row}", 6, 0, None, "class 0", "few photos") for row in range(MAX_CHECKED + 7))
    pairs = tuple(Pair("class 0", f"class {row}", 0.3) for row in range(1, MAX_CHECKED + 7))
    response = CheckResponse.of(Check(1, classes, pairs))
    assert response.advice == {"few photos": MAX_CHECKED + 7}
    assert (len(response.classes), len(response.pairs)) == (MAX_CHECKED, MAX_CHECKED)
    assert response.classes[0].name == "class 0"


def test_classes_history_and_health(client):
    classes = client.get("/classes").json()
    assert classes == {
        "version": 1,
        "count": 4,
        "classes": [{"name": f"class{k:02d}", "images": 6} for k in range(4)],
    }
    history = client.get("/history").json()
    assert (history["version"], history["kept"], len(history["updates"])) == (1, [1], 1)
    assert history["updates"][0]["name"] == "first"
    health = client.get("/healthz").json()
    assert health | {"status": "ok", "name": "shop", "version": 1, "classes": 4, "teaching": True} == health


@pytest.mark.parametrize("address", ["/", "/docs", "/healthz", "/metrics", "/classes"])
def test_head_requests(client, address):
    answer = client.head(address)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == client.get(address).headers["content-type"]
    assert client.head("/predict").status_code == 405


def test_metrics_count_what_happened(client, tiny_images):
    client.post("/predict", files=form(photos(tiny_images, 0)[:2]))
    client.get("/no/such/address")
    text = client.get("/metrics").text
    assert 'onea_requests_total{route="/predict",status="200"} 1' in text
    assert 'onea_requests_total{route="other",status="404"} 1' in text
    assert "onea_images_total 2" in text
    assert 'onea_batch_images_bucket{le="2.0"} 1' in text
    assert "onea_model_version 1" in text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rsplit(" ", 1)[1]) >= 0


# learning


def test_a_zip_of_class_folders_is_learned_in_the_background(client, shop, tiny_images):
    response = client.post("/learn", content=class_zip(tiny_images, 4, 5), headers=ZIP)
    report = job_end(client, response)
    assert (report["status"], report["version"], report["classes"]) == ("done", 2, ["class04", "class05"])
    assert report["done"] == report["total"] > 0
    assert client.get("/classes").json()["count"] == 6
    answers = client.post("/predict", files=form(photos(tiny_images, 4))).json()["answers"]
    assert {answer["version"] for answer in answers} == {2}
    assert sum(answer["class"] == "class04" for answer in answers) >= 4
    assert onea.load(shop).version == 2, "it is on disk"


def test_a_training_job_equals_the_estimators(client, shop, tiny_images, tmp_path):
    model = onea.load(shop, threads=1, precision="fp32")
    for label in (4, 5):
        (tmp_path / "new" / f"class{label:02d}").mkdir(parents=True)
        for n, data in enumerate(photos(tiny_images, label)):
            (tmp_path / "new" / f"class{label:02d}" / f"{n}.png").write_bytes(data)
    job_end(client, client.post("/learn", content=class_zip(tiny_images, 4, 5), headers=ZIP))
    model.learn(tmp_path / "new")
    contents = photos(tiny_images, 5, "test")
    assert onea.load(shop).predict_proba(contents) == pytest.approx(model.predict_proba(contents), abs=1e-5)


def test_one_class_from_files_of_a_form(client, tiny_images):
    data = {"class": "plum jam", "name": "Tuesday"}
    response = client.post("/learn", data=data, files=form(photos(tiny_images, 4)), headers=TEACHER)
    assert job_end(client, response)["classes"] == ["plum jam"]
    assert client.get("/history").json()["updates"][-1]["name"] == "Tuesday"
    assert {"name": "plum jam", "images": 6} in client.get("/classes").json()["classes"]


def test_a_zip_in_a_form_and_one_folder_around_everything(client, tiny_images):
    inner = {f"new products/plum/{n}.png": data for n, data in enumerate(photos(tiny_images, 4))}
    inner |= {"__MACOSX/new products/plum/._0.png": b"x", "new products/.DS_Store": b"x"}
    response = client.post("/learn", files={"zip": ("new.zip", zipped(inner), "application/zip")}, headers=TEACHER)
    assert job_end(client, response)["classes"] == ["plum"]


def test_events_report_a_training_job(client, tiny_images):
    response = client.post("/learn", content=class_zip(tiny_images, 4, 5), headers=ZIP)
    stream = client.get(f"{response.headers['location']}/events")
    assert stream.headers["content-type"].startswith("text/event-stream")
    *progress, (last, report) = events(stream.text)
    assert all(name == "progress" for name, _ in progress)
    assert (last, report["status"], report["version"]) == ("end", "done", 2)
    assert client.get(f"/learn/{report['id']}").json() == report
    assert client.get("/learn/nonsense").status_code == client.get("/learn/nonsense/events").status_code == 404


def test_undo(client, shop, tiny_images):
    job_end(client, client.post("/learn", content=class_zip(tiny_images, 4), headers=ZIP))
    assert client.post("/undo", headers=TEACHER).json() == {"undone": 2, "version": 1, "classes": 4}
    assert client.get("/classes").json()["version"] == 1
    before = folder_hash(shop)
    refused = client.post("/undo", headers=TEACHER)
    assert refused.status_code == 409
    assert refused.json()["detail"].startswith("shop.onea has no version before 1")
    assert folder_hash(shop) == before
    report = job_end(client, client.post("/learn", content=class_zip(tiny_images, 4), headers=ZIP))
    assert report["version"] == 3, "a version is never used twice"


def test_undo_works_without_the_model_card(client, shop, tiny_images):
    job_end(client, client.post("/learn", content=class_zip(tiny_images, 4), headers=ZIP))
    for file in shop.rglob("README.md"):
        file.unlink()
    assert client.post("/undo", headers=TEACHER).json() == {"undone": 2, "version": 1, "classes": 4}
    assert client.get("/classes").json()["version"] == 1


def test_a_class_of_five_thousand_digits_is_refused(client, tiny_images):
    response = client.post("/learn", data={"class": "9" * 5_000}, files=form(photos(tiny_images, 4)), headers=TEACHER)
    assert response.status_code == 422
    assert "cannot be a class name" in response.json()["detail"]


def test_updates_of_another_process_are_loaded(shop, tiny_images, tmp_path):
    with client_of(shop) as client:
        onea.load(shop).learn(photos(tiny_images, 4), ["plum"] * 6).save(shop)
        assert client.get("/classes").json()["count"] == 4
        client.service.reload()
        assert client.get("/classes").json()["count"] == 5
        report = job_end(client, client.post("/learn", content=class_zip(tiny_images, 5), headers=ZIP))
        assert report["version"] == 3


@pytest.fixture
def replaced(shop, tiny_images, tiny_vit, tmp_path):
    """Replace the served model by another with the same version, parameters and number of versions."""

    def replace():
        other = onea.OneA(backbone=tiny_vit, epochs=2, rank=4, batch_size=8, precision="fp32", threads=1)
        images = [*photos(tiny_images, 0), *photos(tiny_images, 4)]
        other.learn(images, ["fig"] * 6 + ["plum"] * 6, name="other").save(tmp_path / "other.onea")
        shutil.rmtree(shop)
        shutil.copytree(tmp_path / "other.onea", shop)

    return replace


def known(client):
    return [row["name"] for row in client.get("/classes").json()["classes"]]


def test_another_model_of_the_same_version_is_noticed(client, replaced):
    replaced()
    client.service.reload()
    assert known(client) == ["fig", "plum"]
    assert client.get("/classes").json()["version"] == 1


@pytest.mark.parametrize("change", ["learn", "undo"])
def test_an_unseen_version_is_not_changed(client, shop, tiny_images, replaced, change):
    replaced()
    before = folder_hash(shop)
    if change == "learn":
        refused = client.post("/learn", content=class_zip(tiny_images, 5), headers=ZIP)
    else:
        refused = client.post("/undo", headers=TEACHER)
    assert refused.status_code == 409
    assert refused.json()["detail"].startswith("shop.onea was changed by another process and is now at version 1")
    assert folder_hash(shop) == before
    assert known(client) == ["fig", "plum"], "now everybody can see it"
    report = job_end(client, client.post("/learn", content=class_zip(tiny_images, 5), headers=ZIP))
    assert (report["status"], report["version"]) == ("done", 2)
    assert known(client) == ["fig", "plum", "class05"]


# the page and the documents


def test_pages_load_nothing_from_elsewhere(client):
    for address in ("/", "/docs"):
        page = client.get(address)
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "http://" not in page.text
        assert "https://" not in page.text
        assert "<script>" not in page.text
        assert "style=" not in page.text
        for piece in page.text.split('"'):
            if piece.startswith("/static/"):
                assert client.get(piece).status_code == 200, piece
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404


def test_every_answer_has_the_security_headers(client):
    for response in (client.get("/"), client.get("/classes"), client.get("/nothing"), client.post("/undo")):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "server" not in response.headers


def test_the_openapi_document_names_every_address(client):
    document = client.get("/openapi.json").json()
    expected = {"/predict", "/classes", "/history", "/learn", "/learn/{id}", "/learn/{id}/events", "/undo", "/healthz"}
    assert expected | {"/background", "/check", "/metrics", "/forget", "/rename", "/refresh"} == set(document["paths"])
    for path in ("/learn", "/background", "/undo", "/forget", "/rename"):
        assert document["paths"][path]["post"]["security"] == [{"HTTPBearer": []}]
    assert "ValidationError" not in json.dumps(document)


def test_the_openapi_document_equals_the_golden_one(client):
    """After a deliberate change write the new document to the golden file, with sorted keys."""
    document = client.get("/openapi.json").json()
    del document["info"]["version"]
    assert document == json.loads(GOLDEN.read_text("utf-8"))


# the command


def test_tokens_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("ONEA_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("ONEA_TOKEN", TOKEN)
    assert read_token(None) == TOKEN
    (tmp_path / "token").write_text("another-token-for-tests\n")
    assert read_token(tmp_path / "token") == "another-token-for-tests"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing.onea"], "does not exist; give a folder that `onea teach`"),
        (["nothing.onea", "--on", "moon"], "choose local, ray or ray:ADDRESS"),
        (["nothing.onea", "--batch-size", "0"], "--batch-size must be between 1 and 10,000"),
        (["nothing.onea", "--batch-wait", "inf"], "--batch-wait must be between 0 and 60,000 milliseconds"),
        (["nothing.onea", "--batch-wait", "nan"], "--batch-wait must be between"),
        (["nothing.onea", "--grace", "inf"], "--grace must be between 0 and 86,400 seconds"),
        (["nothing.onea", "--max-upload", "9" * 25], "--max-upload must be between"),
        (["nothing.onea", "--max-megapixels", "9" * 25], "--max-megapixels must be between"),
        (["nothing.onea", "--allowed-host", "http://shop.example"], "give a host name without a port"),
        (["nothing.onea", "--allowed-host", "shop.example:8000"], "give a host name without a port"),
        (["nothing.onea", "--allowed-host", ""], "give a host name without a port"),
        (["nothing.onea", "--replicas", "4"], "--replicas needs --on ray"),
        (["nothing.onea", "--on", "local:auto"], "choose local, ray or ray:ADDRESS"),
        (["nothing.onea", "--token-file", "absent"], "Cannot read the token file absent"),
        (["nothing.onea", "--token-file", "endless"], "16 to 1,000 printable ASCII characters"),
        (["nothing.onea", "--host", "203.0.113.1"], "Cannot listen on 203.0.113.1"),
        (["nothing.onea", "--on", "ray", "--replicas", "0"], "it must be at least 1"),
    ],
)
def test_mistakes_on_the_command_line_get_a_sentence(arguments, sentence, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with Path("endless").open("wb") as endless:  # like /dev/zero, but reading all of it needs little memory
        endless.truncate(10_000_000)
    monkeypatch.setattr(sys, "argv", ["onea", "serve", "--port", "0", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_serve_with_another_unknown_rate(shop, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["onea", "serve", str(shop), "--port", "0", "--unknown", "0.7"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "between 0 (never) and 0.5" in capsys.readouterr().err


def test_a_model_of_a_newer_format_is_refused(shop, monkeypatch, capsys):
    manifest = json.loads((shop / "model.json").read_text())
    (shop / "model.json").write_text(json.dumps(manifest | {"format": 999}))
    monkeypatch.setattr(sys, "argv", ["onea", "serve", str(shop), "--port", "0"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "update onea" in capsys.readouterr().err


def test_without_the_extra_the_install_command_is_printed(shop):
    code = "import sys; sys.modules['fastapi'] = None; from onea.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "serve", str(shop)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert "'fastapi>=" in done.stderr
