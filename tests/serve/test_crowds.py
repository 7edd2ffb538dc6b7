# SPDX-License-Identifier: Apache-2.0
"""Large images, slow uploads and many requests of a client do not block other clients."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image
from support.serving import client_of, connect, form, head, live, png, process, service_of, wait_for

from onea.data.decode import upload_formats
from onea.serve import uploads
from onea.serve.app import create_app
from onea.serve.middleware import _Upload
from onea.serve.problems import Problem
from onea.serve.settings import Limits
from onea.serve.workers import DecoderPool, DecodingJob

IMAGE = {"Content-Type": "image/png"}
LARGE = png(100, 100)
LIMITS = Limits(pixels=10_000)  # LARGE is of the maximum size, png() is small


class Gate:
    """Blocks the decoding of large images until it is opened."""

    def __init__(self, monkeypatch):
        self.opened, self.held = threading.Event(), []
        decode = uploads.read_image

        def read_image(content, **options):
            if content == LARGE:
                self.held.append(options["name"])
                assert self.opened.wait(60)
            return decode(content, **options)

        monkeypatch.setattr(uploads, "read_image", read_image)


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # the number of threads that decode
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def ask(address, content=None, **options):
    return httpx.post(f"{address}/predict", content=content or png(), headers=IMAGE, timeout=20, **options)


def test_the_default_timeout_of_clients(patience):
    """A loaded machine may take longer than the default timeout of httpx, which has no global setting."""
    made = inspect.signature(httpx.post).parameters["timeout"].default
    assert httpx.Client().timeout == made == httpx.Timeout(patience)
    assert httpx.Client(timeout=20).timeout == httpx.Timeout(20)


# large images


def test_large_images_keep_nobody_waiting(shop, gate):
    with live(service_of(shop, limits=LIMITS)) as address, ThreadPoolExecutor(1) as pool:
        large = pool.submit(httpx.post, f"{address}/predict", files=form([LARGE] * 5), timeout=60)
        wait_for(lambda: gate.held)
        assert ask(address).status_code == 200
        assert httpx.get(f"{address}/healthz").status_code == 200
        assert not large.done()
        gate.opened.set()
        assert large.result().status_code == 200


def test_decoding_stops_when_the_client_disconnects(shop, gate):
    with live(service_of(shop, limits=LIMITS)) as address:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{address}/predict", files=form([LARGE] * 16), timeout=httpx.Timeout(60, read=0.5))
        wait_for(lambda: 'route="/predict",status="400"' in httpx.get(f"{address}/metrics").text)
        begun = len(gate.held)
        assert begun < 16
        gate.opened.set()
        assert ask(address).status_code == 200, "after which the threads have finished what they had begun, or go on"
        assert ask(address, LARGE).status_code == 200
        assert len(gate.held) == begun + 1


def test_the_pixels_of_a_request_are_limited(shop, gate):
    gate.opened.set()
    with client_of(shop, limits=LIMITS) as client:
        assert client.post("/predict", files=form([LARGE] * 16)).status_code == 200
        gate.held.clear()
        refused = client.post("/predict", files=form([LARGE] * 16 + [png(1, 1)]))
        assert refused.status_code == 413
        assert refused.json()["detail"].startswith("The images have more than 0 megapixels together")
        assert gate.held == [], "it is known before anything is decoded"


def run_jobs(limits, requests, threads=2):
    """Run concurrent requests (client, pixels of each image); record the running jobs whenever one starts."""
    seen, lock, in_work = [], threading.Lock(), []

    def work(client, pixels):
        with lock:
            in_work.append(pixels)
            seen.append((client, pixels, list(in_work)))
        time.sleep(0.001)
        with lock:
            in_work.remove(pixels)
        return pixels

    async def all_of_them():
        made = DecoderPool(limits, threads)
        tasks = [
            made.run(client, [DecodingJob(lambda c=client, p=p: work(c, p), p) for p in images], limits.waiting_pixels)
            for client, images in requests
        ]
        try:
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            made.close()

    return asyncio.run(all_of_them()), seen


images = st.lists(st.integers(0, 100), min_size=1, max_size=5)


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), images), max_size=8), st.integers(2, 5))
def test_every_request_gets_its_results_within_the_limits(requests, threads):
    limits = Limits(pixels=100)
    results, seen = run_jobs(limits, requests, threads)
    for (_, pixels), result in zip(requests, results, strict=True):
        assert result == pixels or (isinstance(result, Problem) and result.status == 503)
    for _, _, in_work in seen:
        assert len(in_work) <= threads
        assert len(in_work) == 1 or sum(in_work) <= limits.decoded_pixels
        assert sum(pixels > limits.large_pixels for pixels in in_work) < threads
    if sum(sum(pixels) for _, pixels in requests) <= limits.waiting_pixels:
        assert not any(isinstance(result, Problem) for result in results)


def test_the_smallest_request_of_a_client_comes_first_and_clients_take_turns():
    requests = [("a", [90] * 3), ("a", [80] * 2), ("a", [70]), ("b", [95] * 2)]
    _, seen = run_jobs(Limits(pixels=100), requests, threads=2)  # one thread for large images, and all are large
    assert [(client, pixels) for client, pixels, _ in seen] == [
        ("a", 90), ("b", 95), ("a", 70), ("b", 95), ("a", 80), ("a", 80), ("a", 90), ("a", 90),
    ]  # fmt: skip


def test_the_largest_waiting_request_of_a_client_is_refused():
    limits = Limits(pixels=100)
    most = limits.waiting_pixels // 100
    requests = [("a", [100] * (most - 5)), ("a", [100] * 4), ("b", [100] * 4), ("a", [100] * 2)]
    results, seen = run_jobs(limits, requests)
    assert [isinstance(got, Problem) for got in results] == [True, False, False, False]
    assert "more megapixels than one client may" in results[0].detail
    assert len([client for client, _, _ in seen if client == "a"]) <= 1 + 4 + 2, "at most one of the largest had begun"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_common_formats_are_taken(shop, kind):
    with client_of(shop) as client:
        assert client.post("/predict", content=encoded(kind), headers=IMAGE).status_code == 200


@pytest.mark.parametrize("kind", ["JPEG2000", "ICO", "QOI", "PPM", "TIFF", "TGA", "PCX", "AVIF"])
def test_others_are_not(shop, kind):
    with client_of(shop) as client:
        refused = client.post("/predict", content=encoded(kind), headers=IMAGE)
    assert refused.status_code == 422
    assert f"not an image in a supported format ({', '.join(upload_formats())})" in refused.json()["detail"]


def encoded(kind: str, side: int = 48, **options: object) -> bytes:
    content = io.BytesIO()
    Image.radial_gradient("L").resize((side, side)).convert("RGB").save(content, kind, **options)
    return content.getvalue()


def scanned_again(times: int) -> bytes:
    """A progressive JPEG with many copies of its last scan; each makes the decoder process all pixels."""
    content = encoded("JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * times + content[-2:]


def padded(kind: str, count: int) -> bytes:
    """An image with many empty chunks before its pixels."""
    content = encoded(kind)
    if kind == "JPEG":
        return content[:2] + b"\xff" * count + content[2:]
    chunk = b"abCd"
    return content[:33] + (bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4)) * count + content[33:]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (scanned_again(500), "more than 32 scans"),
        (padded("JPEG", 100_000), "too many chunks"),
        (padded("PNG", 20_000), "too many chunks"),
    ],
)
def test_images_that_take_long_to_decode_are_refused(shop, content, words):
    with client_of(shop) as client:
        refused = client.post("/predict", content=content, headers=IMAGE)
        assert refused.status_code == 422, refused.text
        assert words in refused.json()["detail"]
        for fine in (scanned_again(2), padded("JPEG", 50), padded("PNG", 50)):
            assert client.post("/predict", content=fine, headers=IMAGE).status_code == 200


# slow clients


def test_slow_uploads_do_not_block_other_clients(shop):
    with live(service_of(shop, limits=Limits(requests=4))) as address, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connect(address)).sendall(head(99) + b"x")
        for _ in range(3):
            assert ask(address).status_code == 200
            for path in ("/classes", "/healthz", "/metrics", "/"):
                assert httpx.get(address + path).status_code == 200, path


def test_an_upload_below_the_minimum_rate_is_ended(shop):
    """Each byte arrives well within the allowed pause, but 5 bytes per second are too slow."""
    with live(service_of(shop, limits=Limits(pause_seconds=2))) as address, connect(address) as connection:
        connection.sendall(head(1_000))
        connection.settimeout(0.2)
        for _ in range(300):
            connection.sendall(b"x")
            try:
                answer = connection.recv(4_000)
                break
            except TimeoutError:
                answer = b""
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"was too slow" in answer


def test_every_byte_extends_the_deadline():
    async def receive():
        return {"type": "http.request", "body": b"x" * 500, "more_body": True}

    async def deadlines():
        upload = _Upload(receive, 10_000, Limits(pause_seconds=30, min_rate=50), on_complete=pytest.fail)
        yield upload.deadline
        for _ in range(2):
            await upload()
            yield upload.deadline

    async def listed():
        return [deadline async for deadline in deadlines()]

    first, second, third = asyncio.run(listed())
    assert (second - first, third - first) == (pytest.approx(10), pytest.approx(20))


def test_the_slowest_upload_is_ended_for_a_new_one(shop):
    content = png()
    service = service_of(shop, limits=Limits(uploads=2, min_rate=100))
    with live(service) as address, connect(address) as slow, connect(address) as slower:
        slow.sendall(head(len(content) + 10_000) + b"x" * 10_000)
        slower.sendall(head(99) + b"x")
        httpx.get(f"{address}/classes")
        assert ask(address).status_code == 200
        assert slower.recv(4_000).startswith(b"HTTP/1.1 503")
        slow.sendall(content)
        assert slow.recv(4_000).startswith(b"HTTP/1.1 422"), "it has come whole, and is no image"


@pytest.mark.parametrize(
    "sent", [b"", b"GET /classes HTTP/1.1\r\nHost: localh", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /"]
)
def test_a_connection_without_a_request_is_closed(shop, sent):
    with live(service_of(shop, limits=Limits(head_seconds=0.5))) as address, connect(address) as connection:
        connection.sendall(sent)
        received = b""
        while piece := connection.recv(4_000):
            received += piece
        assert received.startswith(b"HTTP/1.1 200") == sent.startswith(b"GET /healthz")


def test_an_endless_head(shop):
    with live(service_of(shop)) as address, connect(address) as connection:
        connection.sendall(b"GET /classes HTTP/1.1\r\nHost: localhost\r\n")
        lines = (b"X-A: " + b"a" * 20_000 + b"\r\n") * 1_000
        with pytest.raises(ConnectionError):
            connection.sendall(lines)
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_what_is_not_http_gets_a_problem_document(shop):
    with live(service_of(shop)) as address, connect(address) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = connection.recv(4_000)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"application/problem+json" in answer
    assert json.loads(answer.split(b"\r\n\r\n")[1])["detail"].startswith("This is not HTTP/1.1")


def test_too_many_connections_close_the_oldest_idle_one(shop):
    with live(service_of(shop, limits=Limits(connections=4))) as address, ExitStack() as stack:
        busy = stack.enter_context(connect(address))
        busy.sendall(head(99) + b"x")
        idle = [stack.enter_context(connect(address)) for _ in range(8)]
        for _ in range(3):
            assert httpx.get(f"{address}/healthz").status_code == 200
        for connection in idle[:4]:
            assert connection.recv(10) == b""
        busy.settimeout(0.2)
        with pytest.raises(TimeoutError):  # the connection is still open
            busy.recv(10)


def test_requests_that_are_too_large_do_not_fill_the_connections(shop):
    """A refused client may continue to send for a moment, to read the response; but not all clients at once."""
    limits = Limits(connections=6, requests=2)
    with live(service_of(shop, limits=limits)) as address, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connect(address)).sendall(head(10**12) + b"x")
        assert httpx.get(f"{address}/healthz").status_code == 200


# many requests


def test_too_many_requests_get_503(shop, gate):
    limits = Limits(pixels=10_000, requests=1)
    with live(service_of(shop, limits=limits)) as address, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, address, LARGE)
        wait_for(lambda: gate.held)
        for busy in (httpx.get(f"{address}/classes"), ask(address)):
            assert busy.status_code == 503
            assert busy.headers["retry-after"] == "1"
            assert "busy" in busy.json()["detail"]
        for path in ("/healthz", "/metrics"):
            assert httpx.get(address + path).status_code == 200
        gate.opened.set()
        assert first.result().status_code == 200
        assert httpx.get(f"{address}/classes").status_code == 200


def test_one_client_cannot_take_all_places(shop, gate):
    service = service_of(shop, limits=Limits(pixels=10_000, requests=4, client_requests=2))
    app = create_app(service)
    with TestClient(app, "http://localhost", client=("10.0.0.1", 1)) as client, ThreadPoolExecutor(2) as pool:
        first = [pool.submit(client.post, "/predict", content=LARGE, headers=IMAGE) for _ in range(2)]
        wait_for(lambda: app.state.metrics.active == 2 and gate.held)
        wait_for(lambda: client.get("/classes").status_code == 503)
        other = TestClient(app, "http://localhost", client=("10.0.0.2", 1))
        assert other.get("/classes").status_code == 200
        gate.opened.set()
        assert [answer.result().status_code for answer in first] == [200, 200]
        assert client.get("/classes").status_code == 200


# everything at once


def hostile() -> list[bytes]:
    """Small files with nearly as many pixels as an image may have."""
    jpeg_2000 = io.BytesIO()
    Image.new("RGB", (7_000, 7_000), "green").save(jpeg_2000, "JPEG2000", quality_layers=[10_000], irreversible=True)
    transparent = io.BytesIO()
    Image.new("RGBA", (7_000, 7_000), (0, 200, 0, 100)).save(transparent, "PNG")
    return [jpeg_2000.getvalue(), transparent.getvalue()]


def others(address: str, times: int) -> list[float]:
    """Seconds until another client has a prediction and a health check."""
    seconds = []
    for _ in range(times):
        for request in (ask, lambda place: httpx.get(f"{place}/healthz", timeout=20)):
            begun = time.monotonic()
            assert request(address).status_code == 200
            seconds.append(time.monotonic() - begun)
        time.sleep(0.2)
    return seconds


def drip(connections: list[socket.socket], stop: threading.Event) -> None:
    while not stop.wait(9):
        for connection in connections:
            try:
                connection.sendall(b"x")
            except OSError:
                continue  # it was ended


@pytest.mark.slow
def test_under_64_hostile_images_and_128_slow_uploads_another_client_is_answered_within_two_seconds(shop):
    """The time limit grows with the time that a busy machine needs without an attack."""
    refused, heavy = hostile()
    stop = threading.Event()
    with ThreadPoolExecutor(20) as pool, process(shop) as (server, address), ExitStack() as stack:
        stack.callback(stop.set)
        quiet = others(address, 10)
        slow = [stack.enter_context(connect(address)) for _ in range(128)]
        for connection in slow:
            connection.sendall(head(1_000_000) + b"x")
        pool.submit(drip, slow, stop)

        def attack(images):
            answers = []
            while not stop.is_set():
                try:
                    answers.append(httpx.post(f"{address}/predict", files=form(images), timeout=300).status_code)
                except httpx.HTTPError:
                    answers.append(0)
            return answers

        attacks = [pool.submit(attack, [refused] * 64)]
        attacks += [pool.submit(attack, [heavy] * 16) for _ in range(4)]
        attacks += [pool.submit(attack, [heavy]) for _ in range(8)]
        seconds = others(address, 40)
        stop.set()
        server.kill()
        statuses = [status for attack in attacks for status in attack.result()]
    print(f"quiet: at most {max(quiet):.2f} s; attacked: at most {max(seconds):.2f} s; the attack got {set(statuses)}")
    assert {422} <= set(statuses)
    assert max(seconds) < max(2.0, 20 * max(quiet))
