# SPDX-License-Identifier: Apache-2.0
"""With too little memory, the message says so, no photo is reported as unreadable, and nothing is changed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.serving import TEACHER, client_of, folder_hash, form, job_end, png

from onea.data import decode
from onea.data.decode import BadImage, read_image
from onea.errors import OutOfMemory
from onea.vit.frozen import FrozenViT

# With this much more address space than a first command takes, small photos can be decoded, but a large one cannot.
SPARE = 250_000_000
RUN = """
    import contextlib, io, json, resource, sys
    from onea.cli import main

    def run(*words):
        sys.argv, err = ["onea", *words], io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            try:
                main()
                return 0, err.getvalue()
            except SystemExit as stop:
                return stop.code or 0, err.getvalue()

    shop, day, photos = sys.argv[1:]
    found = [run("predict", shop, photos + "/small.png", "--threads", "1")]
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found.append(run("predict", shop, photos + "/small.png", "--threads", "1", "--on-bad", "skip"))
    found.append(run("predict", shop, photos, "--threads", "1", "--on-bad", "skip"))
    found.append(run("teach", shop, day, "--threads", "1", "--on-bad", "skip"))
    print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs a limit of address space")
def test_commands_distinguish_a_lack_of_memory_from_an_unreadable_photo(shop, tmp_path):
    photos = tmp_path / "day" / "plum"
    photos.mkdir(parents=True)
    for number in range(3):
        (photos / f"{number}.png").write_bytes(png())
    (photos / "small.png").write_bytes(png())
    Image.new("L", (9_000, 8_000)).save(photos / "large.png")  # 70 kB, and 288 MB as RGB
    before = folder_hash(shop)
    code = textwrap.dedent(RUN).replace("SPARE", str(SPARE))
    words = [sys.executable, "-c", code, str(shop), str(photos.parent), str(photos)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    whole, limited, predicted, taught = json.loads(done.stdout)
    assert [whole[0], limited[0]] == [0, 0], "small photos fit into the limited memory"
    for code, message in (predicted, taught):
        assert code == 3, message
        assert "left out" not in message
        (line,) = message.splitlines()
        large = photos / "large.png"
        assert line.startswith(f"onea: There is not enough memory to decode {large}; close other programs")
    assert folder_hash(shop) == before


def exhaust_numpy(*_: object, **__: object) -> object:
    """Request more memory than any machine has from NumPy."""
    return np.empty(2**55)


def exhaust_torch(*_: object, **__: object) -> object:
    """Request more memory than any machine has from torch."""
    return torch.empty(2**55)


def test_a_decoder_without_memory_is_not_a_broken_file(tmp_path, monkeypatch):
    """Some decoders report a broken file if there is no memory for its pixels."""
    content = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").save(content, "JPEG")
    (tmp_path / "x.jpg").write_bytes(content.getvalue()[:-2_000])
    with pytest.raises(BadImage, match="cut short"):
        read_image(tmp_path / "x.jpg")
    monkeypatch.setattr(decode, "_BYTES_PER_PIXEL", 2**40)
    with pytest.raises(OutOfMemory, match="not enough memory to decode"):
        read_image(tmp_path / "x.jpg")


@pytest.mark.parametrize(
    ("place", "name", "fail"), [(decode, "_to_rgb", exhaust_numpy), (FrozenViT, "embed", exhaust_torch)]
)
def test_a_service_answers_507_and_continues(shop, tiny_images, monkeypatch, place, name, fail):
    before = folder_hash(shop)
    photos = [file.read_bytes() for file in sorted((tiny_images / "train/class05").iterdir())]
    with client_of(shop) as client:
        with monkeypatch.context() as short:
            short.setattr(place, name, fail)
            answer = client.post("/predict?on_bad=skip", files=form([png()]))
            assert answer.status_code == 507, answer.text
            assert answer.json()["detail"].startswith("The service does not have enough memory for this; send fewer")
            taught = client.post("/learn?on_bad=skip", data={"class": "plum"}, files=form(photos), headers=TEACHER)
            if taught.status_code == 202:
                assert "not have enough memory" in job_end(client, taught)["detail"]
            else:
                assert taught.status_code == 507, taught.text
        assert folder_hash(shop) == before
        assert client.post("/predict", files=form([png()])).status_code == 200
