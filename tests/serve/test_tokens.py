# SPDX-License-Identifier: Apache-2.0
"""Clients with many wrong tokens are slowed down; the correct token is always accepted; memory is limited."""

from __future__ import annotations

import pytest
from support.serving import TEACHER, client_of

from onea.serve import access
from onea.serve.access import FREE_ATTEMPTS, WINDOW, TokenFailures


class Clock:
    now = 1_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_correct_token_is_accepted_after_any_number_of_wrong_ones(shop, monkeypatch):
    monkeypatch.setattr(access, "_MAX_DELAY", 0.01)
    with client_of(shop) as client:
        wrong = [client.post("/undo", headers={"Authorization": f"Bearer guess-{n}"}) for n in range(FREE_ATTEMPTS + 3)]
        assert [answer.status_code for answer in wrong] == [401] * FREE_ATTEMPTS + [429] * 3
        assert 0 < int(wrong[-1].headers["retry-after"]) <= WINDOW
        assert wrong[-1].headers["connection"] == "close"
        assert wrong[-1].json()["detail"].startswith("Too many wrong tokens")
        assert client.post("/undo").status_code == 401, "no token is no guess"
        assert client.post("/rename?old=class00&new=zero", headers=TEACHER).json()["version"] == 2
        assert client.post("/undo", headers=TEACHER).status_code == 200
        assert client.get("/classes").status_code == 200, "questions need no token"


def test_delays_grow_up_to_a_limit(clock):
    failed = TokenFailures(clock)
    assert [failed.add("a") for _ in range(FREE_ATTEMPTS)] == [(0, 0.0)] * FREE_ATTEMPTS
    delays = [failed.add("a")[1] for _ in range(8)]
    assert delays == sorted(delays)
    assert (delays[0], delays[1], delays[-1]) == (0.25, 0.5, 4.0)
    assert failed.add("b") == (0, 0.0), "others are not concerned"
    clock.now += WINDOW
    assert failed.add("a") == (0, 0.0), "a minute later it starts anew"


def test_delayed_responses_are_limited(clock):
    failed = TokenFailures(clock)
    failed.delayed = 16
    seconds, delay = [failed.add("a") for _ in range(FREE_ATTEMPTS + 1)][-1]
    assert (seconds, delay) == (60, 0.0)


def test_the_number_of_remembered_addresses_is_limited(clock):
    failed = TokenFailures(clock)
    for n in range(5_000):
        failed.add(f"10.{n >> 8}.{n & 255}.1")
    assert len(failed) == 1_000


def test_an_ipv6_network_counts_as_one_client(clock):
    failed = TokenFailures(clock)
    for n in range(FREE_ATTEMPTS):
        failed.add(f"2001:db8::{n:x}")
    assert failed.add("2001:db8::ffff")[0] > 0
    assert failed.add("2001:db8:0:1::1") == (0, 0.0)
