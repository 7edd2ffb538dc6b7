# SPDX-License-Identifier: Apache-2.0
"""Stored copies of photos in the service: training later, on request and in idle time."""

from __future__ import annotations

import httpx
import pytest
from support.serving import TEACHER, ZIP, class_zip, client_of, form, job_end, live, photos, service_of, wait_for

import onea
from onea.serve.training_jobs import TrainingJob


@pytest.fixture
def memory_shop(shop):
    """The shop with three copies of each class to come."""
    onea.load(shop, threads=1).set_params(memory=3).forget("class03").save(shop)
    return shop


def test_a_training_can_be_left_to_a_refresh(memory_shop, tiny_images):
    with client_of(memory_shop) as client:
        report = job_end(client, client.post("/learn?later=true", content=class_zip(tiny_images, 4, 5), headers=ZIP))
        assert report["total"] == 0
        assert any(line.startswith("The model stores 6 small copies") for line in report["remarks"])
        assert any("it is due now" in line for line in report["remarks"])
        report = job_end(client, client.post("/refresh", headers=TEACHER))
        assert report["status"] == "done"
        assert report["total"] > 0
        assert report["remarks"][0].startswith("trained on 6 stored copies")
        kinds = [update["kind"] for update in client.get("/history").json()["updates"]]
        assert (kinds[-1] == "refresh") == (report["version"] == 4)


def test_a_version_that_is_not_better_is_not_kept(memory_shop, tiny_images, monkeypatch):
    monkeypatch.setattr("onea.model.learning.refresh._accuracies", lambda update: (0.9, 0.5))
    with client_of(memory_shop) as client:
        job_end(client, client.post("/learn?later=true", content=class_zip(tiny_images, 4, 5), headers=ZIP))
        before = client.get("/healthz").json()["version"]
        report = job_end(client, client.post("/refresh", headers=TEACHER))
        assert (report["status"], report["version"]) == ("done", before)
        assert report["remarks"][-1] == "the earlier version is better and stays"
        assert client.get("/healthz").json()["version"] == onea.load(memory_shop).version == before


def test_without_copies_there_is_nothing_to_train_on(shop):
    with client_of(shop) as client:
        response = client.post("/refresh", headers=TEACHER)
        assert response.status_code == 422
        assert "nothing to train on" in response.json()["detail"]
        assert client.post("/refresh").status_code == 401


def test_a_due_training_begins_when_nothing_changed_for_a_while(memory_shop, tiny_images):
    """The present version answers meanwhile, and the updates themselves train nothing."""
    service = service_of(memory_shop, idle_training=0.2)
    contents = photos(tiny_images, 0, "test")
    with live(service) as address, httpx.Client(base_url=address) as client:
        report = job_end(client, client.post("/learn", content=class_zip(tiny_images, 4, 5), headers=ZIP))
        assert report["total"] == 0
        wait_for(lambda: service._tried and not service.learning)
        assert client.post("/predict", files=form(contents)).status_code == 200
        assert len(service._jobs) == 2
        started = len(service._jobs)
        assert not service.learning
        service.train_if_idle()
        if service.current.state.id == service._tried:  # it was not better
            assert len(service._jobs) == started


def test_no_training_in_idle_time_if_it_is_off_or_not_due(memory_shop):
    for seconds in (0.0, 0.001):
        service = service_of(memory_shop, idle_training=seconds)
        service._last_change -= 10
        service.train_if_idle()
        assert not service._jobs


def test_the_report_of_a_job_on_copies_has_no_classes():
    report = TrainingJob([], 6).report()
    assert (report.classes, report.images) == ([], 6)
