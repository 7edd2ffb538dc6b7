# SPDX-License-Identifier: Apache-2.0
"""A stopped service ends soon after its grace period, even if a job hangs; the model folder stays complete."""

from __future__ import annotations

import functools
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.serving import TEACHER, ZIP, class_zip, client_of, folder_hash, form, photos, process, wait_for

PATIENCE = 100  # seconds, for a loaded machine; documented are 5 after the grace period
ENDLESS_JOB = """
import onea.serve.service as service
def learn(*given, **options):
    while True:
        pass
service.learn = learn
"""
ENDLESS_CHECK = """
import threading
import onea.serve.workers as workers
def check_model(state):
    print("checking", flush=True)
    threading.Event().wait()
workers.check_model = check_model
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_training_job_that_never_stops_does_not_keep_the_process_alive(shop, tiny_images, times):
    before = folder_hash(shop)
    grace = "0.5" if times == 1 else "600"  # a second signal does not wait for it
    with process(shop, "--grace", grace, first=ENDLESS_JOB) as (server, address):
        begun = httpx.post(f"{address}/learn", content=class_zip(tiny_images, 4), headers=ZIP)
        assert begun.status_code == 202
        for _ in range(times):
            server.send_signal(signal.SIGTERM)
            wait_for(lambda: server.poll() is not None or _refuses(address))
        ended = server.wait(PATIENCE)
        assert times > 1 or ended == 0, "exits with 0"
        assert server.stderr.read() == ""
    assert folder_hash(shop) == before


def test_a_thread_that_never_ends_does_not_keep_the_process_alive(shop):
    """Python waits for threads of pools before it exits."""
    with process(shop, "--grace", "0.5", first=ENDLESS_CHECK) as (server, address), ThreadPoolExecutor(1) as pool:
        response = pool.submit(httpx.get, f"{address}/check", timeout=PATIENCE)
        assert "checking\n" in server.stdout
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
        assert response.exception() or response.result().status_code >= 500


def _refuses(address: str) -> bool:
    try:
        return httpx.get(f"{address}/classes").status_code == 503
    except httpx.TransportError:
        return True


def test_an_abandoned_job_writes_nothing_even_if_it_finishes_later(shop, tiny_images, monkeypatch):
    import onea.serve.service as module

    go_on, learn, before = threading.Event(), module.learn, folder_hash(shop)

    @functools.wraps(learn)
    def late(*args, progress, **options):
        assert go_on.wait(60)
        return learn(*args, **options)

    monkeypatch.setattr(module, "learn", late)
    with client_of(shop) as client:
        service = client.service
        begun = client.post("/learn", data={"class": "plum"}, files=form(photos(tiny_images, 4)), headers=TEACHER)
        assert begun.status_code == 202
        service.close(0)
        assert service.wait_for_job() is False
        report = service.job(begun.json()["id"]).report()
        assert report.status == "failed"
        assert "the model is unchanged" in report.detail, "clients that wait for the job get a report at once"
        go_on.set()
        wait_for(service.wait_for_job)
        assert service.job(report.id).report() == report
    assert folder_hash(shop) == before
