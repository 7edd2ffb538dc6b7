"""Hundreds of malformed uploads: never a 500, never a change of the model."""

from __future__ import annotations

import io
import json
import random

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from PIL import Image
from serving import TEACHER, TOKEN, ZIP, client_of, connect, folder_hash, live, png, service_of, wait_for, zipped

from onea.serve.settings import Limits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "ICO", "TGA")
BOUNDARY = "limit"


def encoded(kind: str) -> bytes:
    content = io.BytesIO()
    Image.radial_gradient("L").resize((48, 40)).convert("RGB").save(content, kind)
    return content.getvalue()


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Bytes changed, removed, repeated or cut off, at random places."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[place : place + draw.randint(1, 30)]
            case 2:
                data[place:place] = data[: draw.randint(1, 30)]
            case 3:
                data[place : place + 4] = draw.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
            case 4:
                del data[max(place, 8) :]
    return bytes(data)


def multipart(*parts: tuple[str, bytes]) -> bytes:
    """A form as bytes, to be damaged: header line and content of each part."""
    pieces = [f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts]
    return b"".join(pieces) + f"--{BOUNDARY}--\r\n".encode()


def image_cases(draw):
    for number in range(100):
        content = damaged(encoded(FORMATS[number % len(FORMATS)]), draw)
        yield "/predict", content, {"Content-Type": draw.choice(["image/png", "application/octet-stream", "image/x"])}


def form_cases(draw):
    image = ('Content-Disposition: form-data; name="images"; filename="a.png"', png())
    label = ('Content-Disposition: form-data; name="class"', b"plum")
    for number in range(80):
        body = multipart(image, label) if number % 2 else multipart(image)
        kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        # One image of a new class is never enough: whatever the damage, there is nothing to learn from.
        yield ("/learn" if number % 2 else "/predict"), damaged(body, draw), kind | TEACHER


def zip_cases(draw):
    for number in range(100):
        content = zipped({"plum/0.png": png(), "pear/0.png": png(), "fig/0.png": png()}, method=0 if number % 2 else 8)
        yield "/learn", damaged(content, draw), ZIP


def json_cases(draw):
    values = [None, 0, -1, 1e308, "", "class00", [], {}, {"class": None}, {"images": ["../../etc/passwd"]}, "\ud800"]
    for number in range(40):
        body = json.dumps([draw.choice(values) for _ in range(draw.randrange(4))]).encode()
        yield draw.choice(["/predict", "/learn", "/undo"])[: 9 - number % 2], body, {"Content-Type": "application/json"}


def header_cases(draw):
    kinds = [
        "",
        ";",
        "/",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\xe9",
        "image/",
        "a" * 5_000,
    ]
    tokens = ["", "Bearer", f"bearer{TOKEN}", "Bearer " + "x" * 5_000, "Bearer \x7f", "Basic Og==", "Digest a=b"]
    for _ in range(40):
        headers = {"Content-Type": draw.choice(kinds), "Authorization": draw.choice(tokens)}
        headers |= {"Accept": draw.choice(["*/*", "nonsense", ""]), "X-Forwarded-For": "a" * draw.randrange(2_000)}
        encoded_headers = {name: value.encode("latin-1") for name, value in headers.items()}
        yield draw.choice(["/predict?top=x", "/learn", "/undo", "/predict?top=%ff&top=1"]), b"x", encoded_headers


def test_malformed_uploads_never_fail_the_service_and_never_change_the_model(shop):
    before, told = folder_hash(shop), []
    makers = (image_cases, form_cases, zip_cases, json_cases, header_cases)
    cases = [case for seed, make in enumerate(makers) for case in make(random.Random(seed))]
    assert len(cases) >= 300
    with client_of(shop, limits=Limits(pixels=1_000_000)) as client:
        for address, content, headers in cases:
            response = client.post(address, content=content, headers=headers)
            told.append(response.status_code)
            assert response.status_code == 200 or 400 <= response.status_code < 500, (address, headers, response.text)
            if response.status_code != 200:
                assert response.headers["content-type"] == "application/problem+json"
                assert str(shop.parent) not in response.text
            else:
                assert address.startswith("/predict"), (address, content)
        assert client.get("/classes").json()["version"] == 1
        assert client.service.learning is False
    assert folder_hash(shop) == before
    assert sum(status >= 400 for status in told) >= 250


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
    with live(service_of(shop, limits=Limits(patience=0.3))) as address:
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


def test_the_openapi_document_is_true(shop):
    """Schemathesis makes requests from the document, valid and not, and holds every answer against it."""
    schemathesis = pytest.importorskip("schemathesis")
    # A schema can say "bytes" but not "an image", so bytes that it allows may be refused.
    from schemathesis.specs.openapi.checks import positive_data_acceptance as beyond_a_schema

    before, calls = folder_hash(shop), []
    with live(service_of(shop)) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()

            @given(case=operation.as_strategy())
            @settings(
                max_examples=20, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def check(case):
                response = case.call(headers=TEACHER)  # beyond the token, where it gets interesting
                calls.append(response.status_code)
                case.validate_response(response, excluded_checks=[beyond_a_schema])

            check()
    assert len(calls) >= 60
    assert max(calls) < 500
    assert folder_hash(shop) == before
