# SPDX-License-Identifier: Apache-2.0
"""Updates during predictions, shutdown, and kill -9."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from support.serving import (
    TEACHER,
    ZIP,
    class_zip,
    folder_hash,
    form,
    job_end,
    live,
    photos,
    process,
    service_of,
    wait_for,
)

import onea
from onea.model.answers import Snapshot
from onea.serve.service import Service
from onea.serve.settings import Settings


@pytest.mark.parametrize(("clients", "seconds"), [(4, 0), pytest.param(50, 120, marks=pytest.mark.slow)])
def test_no_answer_comes_from_half_a_version(shop, tiny_images, clients, seconds, tried):
    """Clients predict continuously while versions change; each answer must be that of the version it names."""
    service = service_of(shop)
    contents = [photos(tiny_images, label, "test")[0] for label in range(6)]
    seen, refused, versions, stop = [], [], {1: service.current.snapshot}, threading.Event()

    def ask(address):
        with httpx.Client(base_url=address) as client:
            while not stop.is_set():
                response = client.post("/predict?top=2", files=form(contents))
                if response.status_code == 200:
                    seen.append(response.json())
                else:
                    refused.append(response.status_code)

    def answered(version):
        wait_for(lambda: refused or any(prediction["version"] == version for prediction in seen))

    with live(service) as address, ThreadPoolExecutor(clients) as pool, httpx.Client(base_url=address) as teacher:
        asking, end = [pool.submit(ask, address) for _ in range(clients)], time.monotonic() + seconds
        try:
            answered(1)
            while len(versions) == 1 or time.monotonic() < end:
                for label in (4, 5):
                    content = class_zip(tiny_images, label, 0)
                    report = job_end(teacher, teacher.post("/learn", content=content, headers=ZIP))
                    assert report["status"] == "done"
                    versions[report["version"]] = service.current.snapshot
                    answered(report["version"])
                undone = [teacher.post("/undo", headers=TEACHER).json()["version"] for _ in range(2)]
                assert undone == [report["version"] - 1, 1]
            before = len(seen)
            wait_for(lambda: len(seen) > before + clients)  # that many may have been in progress
        finally:
            stop.set()
        for future in asking:
            future.result()

    expected = {version: snapshot.answers(contents, 2) for version, snapshot in versions.items()}
    chances = {version: [answer.none for answer in answers] for version, answers in expected.items()}
    assert chances[1] != pytest.approx(chances[2], abs=1e-3), "the versions differ, so a mixture would be noticed"
    assert chances[2] != pytest.approx(chances[3], abs=1e-3)
    assert {prediction["version"] for prediction in seen} == set(versions)
    wrong = [prediction for prediction in seen if not is_right(prediction, expected[prediction["version"]])]
    faults = sum(status >= 500 for status in refused)
    outcomes = {"answers": len(seen) * len(contents), "versions": len(versions), "wrong answers": len(wrong)}
    outcomes |= {"5xx": faults, "other refusals": len(refused) - faults}
    tried("crowd", f"{clients} clients for {seconds} s", outcomes)
    assert not wrong, wrong[0]
    assert not refused


@pytest.mark.parametrize(("clients", "seconds"), [(4, 0), pytest.param(50, 120, marks=pytest.mark.slow)])
def test_no_answer_comes_from_half_a_version_while_copies_are_trained_on(shop, tiny_images, clients, seconds, tried):
    """Updates that train on stored copies, and refreshes, while clients predict."""
    onea.load(shop, threads=1).set_params(memory=3).rename("class00", "zero").save(shop)
    service = service_of(shop)
    contents = [photos(tiny_images, label, "test")[0] for label in range(6)]
    seen, refused, stop = [], [], threading.Event()
    versions = {service.current.state.version: service.current.snapshot}

    def ask(address):
        with httpx.Client(base_url=address) as client:
            while not stop.is_set():
                response = client.post("/predict?top=2", files=form(contents))
                seen.append(response.json()) if response.status_code == 200 else refused.append(response.status_code)

    with live(service) as address, ThreadPoolExecutor(clients) as pool, httpx.Client(base_url=address) as teacher:
        asking, end = [pool.submit(ask, address) for _ in range(clients)], time.monotonic() + seconds
        try:
            while len(versions) == 1 or time.monotonic() < end:
                for send in (
                    *(partial(teacher.post, "/learn", content=class_zip(tiny_images, k), headers=ZIP) for k in (4, 5)),
                    partial(teacher.post, "/refresh", headers=TEACHER),
                ):
                    assert job_end(teacher, send())["status"] == "done"
                    versions[service.current.state.version] = service.current.snapshot
                while service.current.state.version != min(versions):
                    teacher.post("/undo", headers=TEACHER)
            before = len(seen)
            wait_for(lambda: refused or len(seen) > before + clients)
        finally:
            stop.set()
        for future in asking:
            future.result()
    expected = {version: snapshot.answers(contents, 2) for version, snapshot in versions.items()}
    wrong = [prediction for prediction in seen if not is_right(prediction, expected[prediction["version"]])]
    tried(
        "crowd",
        f"{clients} clients for {seconds} s, copies",
        {"answers": len(seen) * len(contents), "wrong": len(wrong)},
    )
    assert not wrong, wrong[0]
    assert not refused


def is_right(prediction, expected) -> bool:
    """Whether all answers of a response equal those of the version that it names."""
    return all(
        answer["version"] == prediction["version"]
        and answer["class"] == right.label
        and [row["class"] for row in answer["top"]] == [name for name, _ in right.top]
        and answer["none_of_these"] == pytest.approx(right.none, abs=1e-4)
        and [row["probability"] for row in answer["top"]] == pytest.approx([each for _, each in right.top], abs=1e-4)
        for answer, right in zip(prediction["answers"], expected, strict=True)
    )


def test_the_unknown_rate_of_the_service_applies_to_every_version(shop, tiny_images):
    onea.load(shop).rename("class00", "zero").save(shop)
    plain, strict = (Service(shop, Settings(), {"threads": 1, **machine}) for machine in ({}, {"unknown": 0.5}))
    assert strict.current.snapshot.threshold > plain.current.snapshot.threshold
    strict.undo()
    assert strict.current.state.version == 1
    assert strict.current.snapshot.threshold > plain.current.snapshot.threshold


def test_the_old_version_answers_until_the_new_one_is_on_disk(slow_shop, tiny_images):
    service = service_of(slow_shop)
    with live(service) as address, httpx.Client(base_url=address) as client:
        response = client.post("/learn", content=class_zip(tiny_images, 4, 5), headers=ZIP)
        during = []
        while client.get(response.headers["location"]).json()["status"] == "learning":
            version = client.post("/predict", files=form(photos(tiny_images, 0)[:1])).json()["version"]
            during.append((version, onea.load(slow_shop).version))
        assert job_end(client, response)["version"] == 2
        assert (1, 1) in during
        assert all(answered <= on_disk for answered, on_disk in during)
        assert client.get("/classes").json()["version"] == 2


def test_concurrent_requests_share_a_forward_pass(shop, tiny_images):
    service = service_of(
        shop, batch_wait=600, batch_size=16
    )  # as many as the concurrent requests, so that none waits for the batch
    content = photos(tiny_images, 0)[0]
    with live(service) as address, ThreadPoolExecutor(16) as pool:
        ask = lambda _: httpx.post(f"{address}/predict", content=content, headers={"Content-Type": "image/png"})  # noqa: E731
        answers = list(pool.map(ask, range(48)))
        text = httpx.get(f"{address}/metrics").text
    assert {answer.status_code for answer in answers} == {200}
    assert "onea_images_total 48" in text
    assert "onea_batch_images_count 3" in text


def test_a_batch_is_limited_and_never_splits_a_request(shop, tiny_images, monkeypatch):
    sizes = []
    original = Snapshot.compute_scores

    def noted(self, images):
        sizes.append(len(images))
        return original(self, images)

    monkeypatch.setattr(Snapshot, "compute_scores", noted)
    service = service_of(shop, batch_wait=0.05, batch_size=4)
    with live(service) as address, ThreadPoolExecutor(8) as pool:
        three = form(photos(tiny_images, 0)[:3])
        answers = list(pool.map(lambda _: httpx.post(f"{address}/predict", files=three).json(), range(8)))
        six = httpx.post(f"{address}/predict", files=form(photos(tiny_images, 0)[:6])).json()
    assert all(len(answer["answers"]) == 3 for answer in answers)
    assert len(six["answers"]) == 6
    assert sizes == [3] * 8 + [6]


def test_a_request_during_shutdown_gets_503_and_the_training_job_is_finished(slow_shop, tiny_images):
    with process(slow_shop, "--grace", "600") as (server, address), httpx.Client(base_url=address) as client:
        response = client.post("/learn", content=class_zip(tiny_images, 4, 5, times=2), headers=ZIP)
        assert response.status_code == 202
        server.send_signal(signal.SIGTERM)
        refused = wait_for(lambda: (r := client.get("/classes")).status_code == 503 and r)
        assert refused.headers["content-type"] == "application/problem+json"
        assert "shutting down" in refused.json()["detail"]
        posted = httpx.post(f"{address}/predict", files=form(photos(tiny_images, 0)[:1]))
        assert posted.status_code == 503
        assert server.wait(600) == 0
    assert onea.load(slow_shop).version == 2


def test_a_training_job_that_takes_longer_than_the_grace_is_abandoned(slow_shop, tiny_images):
    before = folder_hash(slow_shop)
    with (
        process(slow_shop, "--grace", "0.2") as (server, address),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        response = client.post("/learn", content=class_zip(tiny_images, 4, 5, times=100), headers=ZIP)
        assert response.status_code == 202
        with client.stream("GET", f"{response.headers['location']}/events") as stream:
            server.send_signal(signal.SIGTERM)
            text = stream.read().decode()
        assert "event: end" in text
        assert "the model is unchanged" in text
        assert server.wait(60) == 0
        assert server.stderr.read() == ""
    assert folder_hash(slow_shop) == before


def test_kill_9_during_a_training_job_leaves_the_last_complete_model(slow_shop, tiny_images):
    before = folder_hash(slow_shop)
    with process(slow_shop) as (server, address):
        response = httpx.post(f"{address}/learn", content=class_zip(tiny_images, 4, 5, times=100), headers=ZIP)
        place = address + response.headers["location"]
        wait_for(lambda: httpx.get(place).json()["done"] > 0)
        server.kill()
        server.wait()
    assert folder_hash(slow_shop) == before
    with process(slow_shop) as (_, address):
        assert httpx.get(f"{address}/healthz").json()["version"] == 1
        answer = httpx.post(f"{address}/predict", files=form(photos(tiny_images, 0)[:1]))
        assert answer.json()["version"] == 1
        again = httpx.post(f"{address}/learn", content=class_zip(tiny_images, 4), headers=ZIP)
        assert again.status_code == 202, "the lock went with the process"
