# SPDX-License-Identifier: Apache-2.0
"""The service on Ray: replicas predict, and load updates of the folder."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from support.serving import TEACHER, ZIP, class_zip, form, photos, wait_for

import onea

# Found, not imported: Ray reads its settings once in a process, and other tests set them first.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs onea[ray]")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ask(address, files):
    try:
        return httpx.post(f"{address}/predict", files=files, timeout=30)
    except httpx.TransportError:
        return None


@pytest.mark.slow
def test_replicas_answer_follow_the_folder_and_do_not_teach(shop, tiny_images):
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "onea", "serve", str(shop), "--on", "ray", "--replicas", "2", "--port", str(port)]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    files = form(photos(tiny_images, 1, "test"))
    try:
        wait_for(lambda: (r := _ask(address, files)) is not None and r.status_code == 200, 240)
        expected = onea.load(shop).predict([content for _, (_, content, _) in files]).tolist()
        answers = [_ask(address, files).json() for _ in range(20)]
        assert all([row["class"] for row in answer["answers"]] == expected for answer in answers)
        assert {answer["version"] for answer in answers} == {1}
        for refused in (
            httpx.post(f"{address}/learn", content=class_zip(tiny_images, 4), headers=ZIP),
            httpx.post(f"{address}/undo", headers=TEACHER),
        ):
            assert refused.status_code == 403
            assert "only predicts" in refused.json()["detail"]
        bad = httpx.post(f"{address}/predict", content=b"x", headers={"Content-Type": "image/png"})
        assert bad.status_code == 422
        assert bad.headers["content-type"] == "application/problem+json"
        onea.load(shop).learn(photos(tiny_images, 4), ["plum"] * 6).save(shop)
        wait_for(lambda: {_ask(address, files).json()["version"] for _ in range(10)} == {2}, 60)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            server.kill()
        print(server.communicate()[0])
