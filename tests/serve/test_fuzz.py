# SPDX-License-Identifier: Apache-2.0
"""Malformed HTTP, and all that the OpenAPI document allows: never a 500, never a change of the model.

What is wrong within a request is tried in test_malformed.py.
"""

from __future__ import annotations

import random

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.malformed import damaged
from support.serving import TEACHER, connect, folder_hash, live, service_of, wait_for

from onea import load
from onea.serve.settings import Limits


def test_malformed_http_never_takes_the_service_down(shop):
    draw = random.Random(9)
    heads = [
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
        b"POST /learn HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /learn HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\nx",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /classes HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    ]
    before = folder_hash(shop)
    with live(service_of(shop, limits=Limits(pause_seconds=0.3))) as address:
        for number in range(40):
            content = heads[number % len(heads)]
            with connect(address) as connection:
                connection.sendall(content if number < len(heads) else damaged(content, draw))
                connection.settimeout(0.1 if number >= len(heads) else 1.0)
                try:
                    answer = connection.recv(2_000)
                except (TimeoutError, ConnectionResetError):
                    answer = b""  # it waits for the rest, or has hung up
            assert b" 500 " not in answer.split(b"\r\n")[0], content
        assert wait_for(lambda: httpx.get(f"{address}/healthz").status_code == 200)
    assert folder_hash(shop) == before


def test_responses_conform_to_the_openapi_document(shop):
    """Schemathesis sends valid and invalid requests, and checks every response against the document."""
    schemathesis = pytest.importorskip("schemathesis")
    # A schema can say "bytes" but not "an image", so bytes that it allows may be refused.
    from schemathesis.specs.openapi.checks import positive_data_acceptance as beyond_a_schema

    before, calls, begun = load(shop).snapshot().state, [], set()
    with live(service_of(shop)) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()

            @given(case=operation.as_strategy())
            @settings(
                max_examples=20, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def check(case):
                response = case.call(headers=TEACHER)  # beyond the token, where it gets interesting
                calls.append(response.status_code)
                begun.update([case.path] if response.status_code == 202 else [])
                case.validate_response(response, excluded_checks=[beyond_a_schema])

            check()
    assert len(calls) >= 60
    assert max(calls) < 500
    assert begun <= {"/background"}, "any image will do there; a class needs two, and a name"
    after = load(shop).snapshot().state
    assert (after.classes, after.images) == (before.classes, before.images)
    assert after.adapter.keys() == before.adapter.keys()
    assert all(after.adapter[name].equal(before.adapter[name]) for name in before.adapter)
