# SPDX-License-Identifier: Apache-2.0
"""A small real service for tests: a model with four classes, requests, and a live port."""

from __future__ import annotations

import hashlib
import io
import os
import re
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from fastapi.testclient import TestClient
from PIL import Image

from onea.model.estimator import OneA
from onea.serve.app import create_app
from onea.serve.server import create_server
from onea.serve.service import Service
from onea.serve.settings import Settings
from support.models import ALL_BLOCKS, wait_for

TOKEN = "a-token-only-for-tests"
TEACHER = {"Authorization": f"Bearer {TOKEN}"}
ZIP = TEACHER | {"Content-Type": "application/zip"}


def teach_first(path: Path, images: Path, backbone: str, epochs: int = 2) -> None:
    """A model with class00 to class03; more epochs make its training jobs longer."""
    trains = ALL_BLOCKS | {"min_share": 0.25}  # so that two more classes also train
    small = {"rank": 4, "batch_size": 8, "precision": "fp32", "threads": 1}
    model = OneA(backbone=backbone, epochs=epochs, options=trains, **small)
    files = [(file, f"class{k:02d}") for k in range(4) for file in sorted((images / f"train/class{k:02d}").iterdir())]
    model.learn([file for file, _ in files], [label for _, label in files], name="first").save(path)


def service_of(path: Path, **settings: object) -> Service:
    settings = {"token": TOKEN, "poll_seconds": 0} | settings
    return Service(path, Settings(**settings), {"threads": 1, "precision": "fp32"})


@contextmanager
def client_of(path: Path, **settings: object) -> Iterator[TestClient]:
    """A client of the app without a network."""
    service = service_of(path, **settings)
    with TestClient(create_app(service), "http://localhost", raise_server_exceptions=False) as client:
        client.service = service  # type: ignore[attr-defined]
        yield client


@contextmanager
def live(service: Service) -> Iterator[str]:
    """The address of a real server in a thread of this process."""
    opened = socket.socket()
    opened.bind(("127.0.0.1", 0))
    server = create_server(service, graceful=2)
    thread = threading.Thread(target=server.run, args=([opened],), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{opened.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@contextmanager
def process(path: Path, *options: str, first: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``onea serve`` in a process: the process and the printed address; ``first`` is code to run before."""
    code = f"{first}\nfrom onea.cli import main\nmain()"
    command = [sys.executable, "-c", code, "serve", str(path), "--port", "0", "--threads", "1", *options]
    environment = os.environ | {"ONEA_TOKEN": TOKEN}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = started.stdout.readline()
        address = re.search(r"http://\S+", line)
        assert address, line + started.stderr.read()
        wait_for(lambda: _answers(address[0]))
        yield started, address[0]
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/healthz", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def connect(address: str) -> socket.socket:
    """A bare connection to a live service."""
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def head(length: int, path: str = "/predict", host: str = "localhost") -> bytes:
    """The header of a request with an image."""
    lines = f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: image/png", f"Content-Length: {length}"
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def job_end(client, response) -> dict:
    """The final report of a training job that was started."""
    assert response.status_code == 202, response.text
    place = response.headers["location"]

    def ended():
        report = client.get(place).json()
        return report if report["status"] in ("done", "failed") else None

    return wait_for(ended)


def png(width: int = 32, height: int = 32, colour: object = (200, 30, 30)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(content, "PNG")
    return content.getvalue()


def checkerboard() -> bytes:
    """An image unlike those of all classes."""
    content = io.BytesIO()
    squares = np.indices((32, 32)).sum(0) // 4 % 2 * 255
    Image.fromarray(np.repeat(squares[:, :, None], 3, 2).astype(np.uint8)).save(content, "PNG")
    return content.getvalue()


def photos(images: Path, label: int, side: str = "train") -> list[bytes]:
    return [file.read_bytes() for file in sorted((images / side / f"class{label:02d}").iterdir())]


def saved(folder: Path, contents: list[bytes]) -> list[Path]:
    """Images as the files 0.png, 1.png and so on."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"{n}.png" for n in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return files


def form(contents: list[bytes]) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("images", (f"{n}.png", content, "image/png")) for n, content in enumerate(contents)]


def zipped(files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def class_zip(images: Path, *labels: int, times: int = 1) -> bytes:
    """A zip of class folders; repeated images make a long training job."""
    every = ((label, n, data) for label in labels for n, data in enumerate(times * photos(images, label)))
    return zipped({f"class{label:02d}/{n}.png": data for label, n, data in every})


def folder_hash(path: Path) -> str:
    """A digest of a model folder, without the lock, that changes if anything in it changes."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != "lock":
            digest.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return digest.hexdigest()
