# SPDX-License-Identifier: Apache-2.0
"""Refused requests: a problem document with one sentence and no path; the model is unchanged."""

from __future__ import annotations

import errno
import io
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from contextlib import contextmanager

import httpx
import pytest
from support.serving import (
    TEACHER,
    TOKEN,
    ZIP,
    class_zip,
    client_of,
    connect,
    folder_hash,
    form,
    head,
    job_end,
    live,
    photos,
    png,
    service_of,
    zipped,
)
from support.tiny import needs_unicode

from onea.cli import main
from onea.model.storage.layout import locked
from onea.serve.access import allowed_hosts
from onea.serve.settings import Limits

IMAGE = {"Content-Type": "image/png"}


def claimed_png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size; the pixels are not there."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def special_zip(name: str, data: bytes = b"x", mode: int = 0o644, flags: int = 0) -> bytes:
    """A zip with one entry whose name and attributes a well-behaved tool would not write."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        entry = zipfile.ZipInfo("n" * len(name.encode()))
        entry.external_attr = mode << 16
        archive.writestr(entry, data)
    raw = content.getvalue().replace(b"n" * len(name.encode()), name.encode())
    if flags:
        place = raw.rindex(b"PK\x01\x02") + 8
        raw = raw[:place] + struct.pack("<H", flags) + raw[place + 2 :]
    return raw


@pytest.fixture
def client(shop):
    limits = Limits(predict_bytes=300_000, learn_bytes=400_000, predict_images=3, learn_files=5, zip_entries=20)
    with client_of(shop, limits=limits) as client:
        yield client


@pytest.fixture
def refused(client, shop):
    """Check that a response refuses with a status and a sentence, and that nothing was changed."""
    before = folder_hash(shop)

    def check(response, status, words):
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/problem+json"
        problem = response.json()
        assert set(problem) == {"type", "title", "status", "detail"}
        assert problem["status"] == status
        assert words in problem["detail"]
        assert problem["detail"].endswith((".", "?"))
        assert str(shop.parent) not in response.text
        assert folder_hash(shop) == before
        assert client.get("/classes").json()["version"] == 1

    return check


# ambiguous requests


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        ("1.1", ("Content-Length: 4", "Transfer-Encoding: chunked")),
        ("1.1", ("Transfer-Encoding: chunked", "Content-Length: 0")),
        ("1.0", ("Transfer-Encoding: chunked",)),
    ],
)
def test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_is_read(shop, version, lines):
    """A proxy that uses the other length would send the second response to another client."""
    sent = "\r\n".join([f"POST /predict HTTP/{version}", "Host: localhost", "Content-Type: image/png", *lines, "", ""])
    smuggled = "0\r\n\r\nGET /classes HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with live(service_of(shop)) as address, connect(address) as opened:
        opened.sendall((sent + smuggled).encode())
        answer = b"".join(iter(lambda: opened.recv(65_536), b""))  # until the other side closes
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"The length of the request is ambiguous" in answer
    assert answer.count(b"\r\n\r\n") == 1, "one answer"


# images


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"not an image at all", "not an image in a supported format"),
        (png(64, 64)[:-40], "Cannot read image"),
        (claimed_png(50_000, 50_000), "more than 50 megapixels"),
        (claimed_png(8_000, 8_000), "more than 50 megapixels"),
    ],
)
def test_bad_images(client, refused, content, words):
    refused(client.post("/predict", content=content, headers=IMAGE), 422, words)
    refused(client.post("/predict", files=form([png(), content])), 422, words)
    data = {"class": "plum"}
    refused(client.post("/learn", data=data, files=form([png(), content]), headers=TEACHER), 422, "1 of 2 images")


def test_a_bad_image_is_named_as_the_client_named_it_without_folders(client, refused):
    files = [("images", ("../../etc/secret.png", b"x", "image/png"))]
    response = client.post("/predict", files=files)
    refused(response, 422, "Cannot read image secret.png")
    assert "etc" not in response.text


@pytest.mark.parametrize(
    ("kind", "content", "status", "words"),
    [
        ("text/plain", b"hello", 415, "Send an image"),
        ("application/json", b"{}", 415, "Send an image"),
        ("multipart/form-data", b"no boundary", 400, "The form cannot be read"),
        ("multipart/form-data; boundary=x", b"garbage", 400, "The form cannot be read"),
        ("multipart/form-data; boundary=x", b"--x--\r\n", 422, "The form has no image"),
    ],
)
def test_other_bodies(client, refused, kind, content, status, words):
    refused(client.post("/predict", content=content, headers={"Content-Type": kind}), status, words)


def test_forms_with_other_fields(client, refused):
    refused(client.post("/predict", files={"photo": png()}), 422, "unknown field 'photo'")
    refused(client.post("/predict", data={"images": "text"}, files={"x": b""}), 422, "unknown field 'x'")
    named = [("name", ("x", png())), *form([png(), png()])]
    refused(client.post("/learn", data={"class": "plum"}, files=named, headers=TEACHER), 422, "'name' must be")
    refused(client.post("/learn", files=form([png()]), headers=TEACHER), 422, "needs a class name")
    both = {"zip": ("a.zip", b"x")}
    refused(client.post("/learn", data={"class": "plum"}, files=both, headers=TEACHER), 422, "one of the two")


@pytest.mark.parametrize("top", ["0", "-1", "101", "many", ""])
def test_top_out_of_range(client, refused, top):
    refused(client.post(f"/predict?top={top}", content=png(), headers=IMAGE), 422, "top: input should be")


def test_too_much_of_everything(client, refused):
    refused(client.post("/predict", content=b"x" * 300_001, headers=IMAGE), 413, "larger than 0.3 MB")
    refused(client.post("/predict", files=form([png()] * 4)), 413, "more than 3 files")
    data = {"class": "plum"}
    refused(client.post("/learn", data=data, files=form([png()] * 6), headers=TEACHER), 413, "more than 5 files")
    refused(client.post("/learn", content=b"x" * 400_001, headers=ZIP), 413, "larger than 0.4 MB")
    long = {"class": "p" * 20_000}
    refused(client.post("/learn", data=long, files=form([png()]), headers=TEACHER), 413, "fields that are too long")


def test_a_body_without_a_length_is_cut_off_when_it_is_too_long(client, refused):
    sent = []

    def endless():
        while True:
            sent.append(1)
            yield b"x" * 10_000

    refused(
        client.post("/predict", content=(b"x" * 10_000 for _ in range(40)), headers=IMAGE), 413, "larger than 0.3 MB"
    )
    service = service_of(client.service.path, limits=Limits(predict_bytes=300_000))
    with live(service) as address:  # over a real connection: it must not be read to the end, for it has none
        with pytest.raises(httpx.HTTPError):  # the connection is closed while the client still sends
            httpx.post(f"{address}/predict", content=endless(), headers=IMAGE).raise_for_status()
        assert httpx.get(f"{address}/healthz").status_code == 200
    assert len(sent) < 20_000


def test_a_client_that_sends_too_much_gets_a_response(shop):
    with live(service_of(shop, limits=Limits(predict_bytes=300_000))) as address:
        for content in (b"x" * 8_000_000, (b"x" * 100_000 for _ in range(80))):  # with a length, and without
            response = httpx.post(f"{address}/predict", content=content, headers=IMAGE)
            assert response.status_code == 413
            assert "larger than 0.3 MB" in response.json()["detail"]


@contextmanager
def half_sent(address):
    """A connection with a half-sent request, and no other request in progress."""
    with connect(address) as connection:
        connection.sendall(head(99) + b"x")
        yield connection


def test_a_head_that_is_too_long(client, refused):
    words = "The URL and the headers exceed 16 KB"
    refused(client.get("/classes", headers={"X-Long": "a" * 20_000}), 431, words)
    refused(client.get("/classes", params={"q": "a" * 20_000}), 431, words)


def test_a_body_that_stops_half_way(shop):
    with live(service_of(shop, limits=Limits(pause_seconds=0.3))) as address, half_sent(address) as connection:
        assert connection.recv(4_000).startswith(b"HTTP/1.1 408")


# names

OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "localhost:x", ""]


@pytest.mark.parametrize("host", [*OTHERS, "192.0.2.7", "[2001:db8::7]:8000"])
def test_other_host_names_are_refused(client, refused, host):
    """DNS rebinding: a browser resolves that name to this machine and lets a page read the responses."""
    for path in ("/", "/history", "/classes", "/healthz", "/metrics", "/static/app.js", "/nothing"):
        refused(client.get(path, headers={"Host": host}), 421, "This host name is not allowed")
    refused(
        client.post("/predict", content=png(), headers=IMAGE | {"Host": host}), 421, "This host name is not allowed"
    )
    refused(client.post("/undo", headers=TEACHER | {"Host": host}), 421, "This host name is not allowed")


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:65535"])
def test_a_local_service_accepts_loopback_names(client, host):
    assert client.get("/history", headers={"Host": host}).status_code == 200


def test_a_public_service_accepts_ip_addresses_and_allowed_names(shop):
    hosts, any_ip = allowed_hosts("0.0.0.0", ["shop.example", "Other.example"])
    with client_of(shop, hosts=hosts, any_ip=any_ip) as client:
        for host in ("shop.example", "other.EXAMPLE:8000", "192.0.2.7:8000", "[2001:db8::7]", "localhost:8000"):
            assert client.get("/history", headers={"Host": host}).status_code == 200, host
        for host in (*OTHERS, "my.shop.example"):
            assert client.get("/history", headers={"Host": host}).status_code == 421, host
    with client_of(shop, hosts=allowed_hosts("127.0.0.1", ["*"])[0]) as client:
        assert client.get("/history", headers={"Host": "any.example"}).status_code == 200


@pytest.mark.parametrize("listening", ["127.0.0.1", "127.0.0.9", "localhost"])
def test_loopback_addresses_are_recognised(listening):
    assert allowed_hosts(listening, []) == (("localhost", "127.0.0.1", "[::1]"), False)


# who may teach


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer"},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer \xe9\xff"},
    ],
)
def test_a_missing_or_wrong_token(client, refused, headers, tiny_images):
    headers = {name: value.encode("latin-1") for name, value in headers.items()}
    zip_type = {"Content-Type": "application/zip"}
    response = client.post("/learn", content=class_zip(tiny_images, 4), headers=zip_type | headers)
    refused(response, 401, "The token is missing or wrong")
    assert response.headers["www-authenticate"].startswith("Bearer")
    refused(client.post("/undo", headers=headers), 401, "The token is missing or wrong")


def test_without_a_configured_token_teaching_is_disabled(shop, tiny_images):
    with client_of(shop, token=None) as client:
        for headers in (ZIP, ZIP | {"Authorization": "Bearer "}, ZIP | {"Authorization": "Bearer None"}):
            response = client.post("/learn", content=class_zip(tiny_images, 4), headers=headers)
            assert response.status_code == 403
            assert "Teaching is disabled" in response.json()["detail"]
            assert client.post("/undo", headers=headers).status_code == 403
        assert client.get("/healthz").json()["teaching"] is False


@pytest.mark.parametrize(
    "token", ["short", "with a space in the middle", pytest.param("naïve-but-long-enough-token", marks=needs_unicode)]
)
def test_weak_tokens_are_refused(shop, monkeypatch, capsys, token):
    monkeypatch.setenv("ONEA_TOKEN", token)
    monkeypatch.setattr(sys, "argv", ["onea", "serve", str(shop), "--port", "0"])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert "16 to 1,000 printable ASCII characters" in error
    assert token not in error


# zips


def bomb() -> bytes:
    return zipped({"plum/0.png": b"\0" * 30_000_000})


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 422, "not a zip"),
        (b"PK\x03\x04 not really", 422, "not a zip"),
        (b"PK\x05\x06" + b"\xff" * 18, 413, "more than 20 files"),
        (zipped({}), 422, "no images in the zip"),
        (zipped({"readme.txt": b"x"}), 422, "no images in the zip"),
        (zipped({"0.png": png(), "1.png": png()}), 422, "is not an image in a class folder"),
        (zipped({"a/b/c/d.png": png()}), 422, "is not an image in a class folder"),
        (zipped({"a/x/1.png": png(), "b/x/1.png": png()}), 422, "is not an image in a class folder"),
        (
            zipped({"a/1.png": png(), "a/x/2.png": png()}),
            422,
            "'a/1.png' in the zip is next to folders; the zip must contain",
        ),
        (zipped({"plum/0.png": png(), "plum/1.png": b"x"}), 422, "1 of 2 images cannot be read (plum/1.png: it is not"),
        (zipped({"plum/0.png": png()}), 422, "Class 'plum' has only one image"),
        (zipped({"unknown/0.png": png(), "unknown/1.png": png()}), 422, "cannot be called 'unknown'"),
        (zipped({f"{p}/{n}.png": png() for p in ("Plum", "plum") for n in (1, 2)}), 422, "only in case"),
        (zipped({"CLASS00/0.png": png(), "CLASS00/1.png": png()}), 422, "only in case"),
        (zipped({f"plum/{n}.png": png() for n in range(21)}), 413, "more than 20 files"),
        (bomb(), 413, "compression ratio above 200"),
        (zipped({"plum/0.png": b"x" * 99}, zipfile.ZIP_LZMA), 422, "unsupported compression method"),
        (special_zip("../../etc/cron.d/x"), 422, "unsafe path"),
        (special_zip("/etc/cron.d/evil"), 422, "unsafe path"),
        (special_zip("\0.png"), 422, "unsafe path"),
        (special_zip("..\\..\\evil\\0.png"), 422, "unsafe path"),
        (special_zip("C:/evil/0.png"), 422, "unsafe path"),
        (special_zip("plum/0.png", b"/etc/passwd", mode=0o120777), 422, "is a link"),
        (special_zip("plum/0.png", flags=1), 422, "encrypted"),
    ],
)
def test_bad_zips(client, refused, content, status, words):
    refused(client.post("/learn", content=content, headers=ZIP), status, words)
    files = {"zip": ("x.zip", content, "application/zip")}
    refused(client.post("/learn", files=files, headers=TEACHER), status, words)


def test_a_zip_that_unpacks_to_more_than_allowed(shop, tiny_images):
    with client_of(shop, limits=Limits(zip_bytes=10_000)) as client:
        response = client.post("/learn", content=class_zip(tiny_images, 4), headers=ZIP)
    assert response.status_code == 413
    assert "MB uncompressed" in response.json()["detail"]


def test_a_zip_with_a_wrong_size(client, refused):
    raw = bytearray(zipped({"plum/0.png": png(64, 64), "plum/1.png": png()}))
    place = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"PK\x01\x02"))
    raw[place + 24 : place + 28] = struct.pack("<I", 10)  # the directory claims 10 bytes unpacked
    refused(client.post("/learn", content=bytes(raw), headers=ZIP), 422, "")


@pytest.mark.parametrize("name", ["1" * 5_000, "p" * 5_000])
def test_a_class_name_of_thousands_of_characters(client, refused, name):
    both = form([png(), png()])
    refused(client.post("/learn", data={"class": name}, files=both, headers=TEACHER), 422, "cannot be a class name")


# a folder that cannot be written


def test_one_training_job_at_a_time(slow_shop, tiny_images):
    with client_of(slow_shop, grace=0) as client:
        first = client.post("/learn", content=class_zip(tiny_images, 4, 5, times=20), headers=ZIP)
        assert first.status_code == 202
        for second in (
            client.post("/learn", content=class_zip(tiny_images, 4), headers=ZIP),
            client.post("/undo", headers=TEACHER),
        ):
            assert second.status_code == 409
            assert "A training job is running" in second.json()["detail"]
        assert client.get("/healthz").json()["learning"] is True


def test_a_folder_that_another_process_writes(client, refused, shop, tiny_images):
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; from pathlib import Path; from onea.model.storage.layout import locked\n"
         "with locked(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()", str(shop)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "mine\n"
        words = f"shop.onea is being written by process {holder.pid}"
        refused(client.post("/learn", content=class_zip(tiny_images, 4), headers=ZIP), 409, words)
        refused(client.post("/undo", headers=TEACHER), 409, words)
    finally:
        holder.communicate()
    assert client.post("/learn", content=class_zip(tiny_images, 4), headers=ZIP).status_code == 202


def test_a_full_disk(client, refused, tiny_images, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        response = client.post("/learn", content=class_zip(tiny_images, 4), headers=ZIP)
        report = response.json()
        if response.status_code == 202:  # the training job began before the disk was full
            report = job_end(client, response)
        assert report["status"] in ("failed", 507)
    assert "No space left in shop.onea" in report["detail"]
    refused(client.get("/nothing"), 404, "There is nothing at this address")
    assert client.post("/learn", content=class_zip(tiny_images, 4), headers=ZIP).status_code == 202


def test_the_lock_of_the_folder_excludes_writers_in_one_process(shop):
    """What the service relies on: two writers exclude each other even within one process."""
    with locked(shop), client_of(shop) as client:
        assert client.post("/undo", headers=TEACHER).status_code == 409


def test_photos_of_a_known_class_add_evidence(client, tiny_images):
    response = client.post("/learn", data={"class": "class00"}, files=form(photos(tiny_images, 0)[:1]), headers=TEACHER)
    assert response.status_code == 202
