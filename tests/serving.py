"""A small real service for tests: a model that knows four classes, things to send to it, and a live port."""

from __future__ import annotations

import hashlib
import io
import socket
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi.testclient import TestClient
from model_tools import wait_for
from PIL import Image

from onea.model.estimator import OneA
from onea.serve.app import create_app
from onea.serve.server import Server
from onea.serve.service import Service
from onea.serve.settings import Settings

TOKEN = "a-token-only-for-tests"
TEACHER = {"Authorization": f"Bearer {TOKEN}"}
ZIP = TEACHER | {"Content-Type": "application/zip"}


def teach_first(path: Path, images: Path, backbone: str, epochs: int = 2) -> None:
    """A model that knows class00 to class03; more epochs make its lessons longer."""
    model = OneA(backbone=backbone, epochs=epochs, rank=4, batch_size=8, precision="fp32", threads=1)
    files = [(file, f"class{k:02d}") for k in range(4) for file in sorted((images / f"train/class{k:02d}").iterdir())]
    model.learn([file for file, _ in files], [label for _, label in files], name="first").save(path)


def service_of(path: Path, **settings: object) -> Service:
    return Service(path, Settings(**{"token": TOKEN, "follow": 0} | settings), {"threads": 1, "precision": "fp32"})


@contextmanager
def client_of(path: Path, **settings: object) -> Iterator[TestClient]:
    """A client of the app itself."""
    service = service_of(path, **settings)
    with TestClient(create_app(service), raise_server_exceptions=False) as client:
        client.service = service  # type: ignore[attr-defined]
        yield client


@contextmanager
def live(service: Service) -> Iterator[str]:
    """The address of a real server in a thread of this process."""
    opened = socket.socket()
    opened.bind(("127.0.0.1", 0))
    app = create_app(service)
    server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2), app, service)
    thread = threading.Thread(target=server.run, args=([opened],), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{opened.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def lesson_end(client, response) -> dict:
    """The last report of a lesson that was begun."""
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


def photos(images: Path, label: int, side: str = "train") -> list[bytes]:
    return [file.read_bytes() for file in sorted((images / side / f"class{label:02d}").iterdir())]


def form(contents: list[bytes]) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("images", (f"{n}.png", content, "image/png")) for n, content in enumerate(contents)]


def zipped(files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def class_zip(images: Path, *labels: int, times: int = 1) -> bytes:
    """A zip of class folders; each image several times makes a long lesson."""
    every = ((label, n, data) for label in labels for n, data in enumerate(times * photos(images, label)))
    return zipped({f"class{label:02d}/{n}.png": data for label, n, data in every})


def folder_hash(path: Path) -> str:
    """Changes when anything in a model folder does; who held the lock last does not count."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != "lock":
            digest.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return digest.hexdigest()
