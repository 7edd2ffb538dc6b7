# SPDX-License-Identifier: Apache-2.0
"""`GET /check` is computed once for each version and does not block other requests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.serving import TEACHER, client_of, live, png, service_of, wait_for

from onea.serve.schemas import CheckResponse

IMAGE = {"Content-Type": "image/png"}


class Computations:
    """Counts the computations of checks, and blocks each until ``go_on`` is set."""

    def __init__(self, monkeypatch):
        self.begun, self.go_on = 0, threading.Event()
        made = CheckResponse.of.__func__

        def of(cls, check):
            self.begun += 1
            assert self.go_on.wait(60)
            return made(cls, check)

        monkeypatch.setattr(CheckResponse, "of", classmethod(of))


@pytest.fixture
def computations(monkeypatch):
    computations = Computations(monkeypatch)
    yield computations
    computations.go_on.set()


def test_predictions_are_answered_while_a_check_is_computed(shop, computations):
    with live(service_of(shop)) as address, ThreadPoolExecutor(1) as pool:
        checking = pool.submit(httpx.get, f"{address}/check", timeout=60)
        wait_for(lambda: computations.begun)
        assert httpx.post(f"{address}/predict", content=png(), headers=IMAGE, timeout=20).status_code == 200
        assert not checking.done()
        computations.go_on.set()
        assert checking.result().status_code == 200


def test_a_version_is_checked_once(shop, computations):
    with live(service_of(shop)) as address, ThreadPoolExecutor(12) as pool:
        requests = [pool.submit(httpx.get, f"{address}/check", timeout=60) for _ in range(12)]
        wait_for(lambda: computations.begun)
        computations.go_on.set()
        answers = [item.result().json() for item in requests]
        assert computations.begun == 1
        assert answers == 12 * [httpx.get(f"{address}/check").json()]
        assert computations.begun == 1
        assert httpx.post(f"{address}/forget?class=class03", headers=TEACHER).status_code == 200
        check = httpx.get(f"{address}/check").json()
        assert (check["version"], len(check["classes"]), computations.begun) == (2, 3, 2)


def test_a_client_that_leaves_does_not_end_the_check_of_others(shop, computations):
    with live(service_of(shop)) as address, ThreadPoolExecutor(1) as pool:
        with pytest.raises(httpx.TimeoutException):
            httpx.get(f"{address}/check", timeout=httpx.Timeout(60, read=0.3))
        staying = pool.submit(httpx.get, f"{address}/check", timeout=60)
        computations.go_on.set()
        assert staying.result().status_code == 200
        assert computations.begun == 1


def test_a_check_that_failed_is_computed_again(shop, monkeypatch):
    with client_of(shop) as client:
        with monkeypatch.context() as patch:
            patch.setattr("onea.serve.workers.check_model", lambda state: 1 / 0)
            assert client.get("/check").status_code == 500
        assert client.get("/check").status_code == 200
