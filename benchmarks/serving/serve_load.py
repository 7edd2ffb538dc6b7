# SPDX-License-Identifier: Apache-2.0
"""Load test of ``onea serve``: many clients send photos without a pause, while one training job runs.

    python benchmarks/serving/serve_load.py [--clients 20] [--seconds 60] [--batch 32] [--no-training]

Prints requests per second, p50 and p99 of the latency, errors, and the model versions of the answers. Each answer is
compared with that of its version without load. ``--batch-size 1`` turns batching off.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from serve_screenshot import TAUGHT_LIVE, TOKEN, UPDATES, drawn, teach

import onea

PHOTOS = 24  # different photos in the requests
TEACHER = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/zip"}
JPEG = {"Content-Type": "image/jpeg"}
Rows = list[dict[str, Any]]


def request_photos() -> list[bytes]:
    """The photos that clients send."""
    names = [name for _, classes in UPDATES for name in classes]
    return [drawn(names[n % len(names)], 500 + n) for n in range(PHOTOS)]


async def client(address: str, photos: list[bytes], end: float, seed: int, seen: Rows) -> None:
    """Send one request after the other, without a pause."""
    order = np.random.default_rng(seed)
    async with httpx.AsyncClient(base_url=address, timeout=60) as http:
        while (now := time.perf_counter()) < end:
            number = int(order.integers(len(photos)))
            try:
                response = await http.post("/predict?top=1", content=photos[number], headers=JPEG)
                row = {"status": response.status_code, "body": response.json()}
            except httpx.HTTPError as error:
                row = {"status": type(error).__name__, "body": None}
            seen.append({"photo": number, "at": now, "seconds": time.perf_counter() - now, **row})


async def job(address: str, after: float) -> dict[str, Any]:
    """Teach one new and one known class, so that the adapter is trained."""
    await asyncio.sleep(after)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in (TAUGHT_LIVE, "lemon"):
            for n in range(16):
                archive.writestr(f"{name}/{n}.jpg", drawn(name, 700 + n))
    async with httpx.AsyncClient(base_url=address, timeout=60) as http:
        begun = time.perf_counter()
        response = await http.post("/learn", content=content.getvalue(), headers=TEACHER)
        assert response.status_code == 202, response.text
        while (report := (await http.get(response.headers["location"])).json())["status"] in ("waiting", "learning"):
            await asyncio.sleep(0.2)
        return {**report, "begun": begun, "ended": time.perf_counter()}


async def load(address: str, clients: int, seconds: float, teaching: bool) -> tuple[Rows, dict[str, Any] | None]:
    """Run all clients and the training job."""
    photos, seen = request_photos(), Rows()
    end = time.perf_counter() + seconds
    requests = [client(address, photos, end, seed, seen) for seed in range(clients)]
    taught = asyncio.create_task(job(address, seconds / 4)) if teaching else None
    await asyncio.gather(*requests)
    return seen, await taught if taught else None


def inconsistent(path: Path, seen: Rows) -> int:
    """The number of answers that differ from those of their model version without load."""
    from onea.model.answers import Snapshot
    from onea.model.storage.folder import read_state

    model = onea.load(path)
    photos = request_photos()
    expected_answers = {}
    for version in {row["body"]["version"] for row in seen if row["status"] == 200}:
        snapshot = Snapshot(model.snapshot().engine, read_state(path, version), model.unknown)
        expected_answers[version] = snapshot.answers(photos, 1)
    wrong = 0
    for row in seen:
        if row["status"] == 200:
            answer, expected = row["body"]["answers"][0], expected_answers[row["body"]["version"]][row["photo"]]
            same_confidence = abs(answer["top"][0]["confidence"] - expected.top[0][1]) < 1e-3
            wrong += not (answer["class"] == expected.label and same_confidence)
    return wrong


def main() -> None:
    """Serve, run the clients, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--model", type=Path, help="a model that serve_screenshot.py --model wrote; it is copied")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "shop.onea"
        if options.model:
            subprocess.run(["cp", "-r", options.model, path], check=True)
        else:
            teach(path)
        serve = ["serve", str(path), "--port", "0", "--batch-size", str(options.batch_size)]
        command = [sys.executable, "-m", "onea", *serve]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"ONEA_TOKEN": TOKEN})
        try:
            assert server.stdout
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address
            time.sleep(1)
            seen, taught = asyncio.run(load(address[0], options.clients, options.seconds, not options.no_training))
            batches = httpx.get(f"{address[0]}/metrics").text
        finally:
            server.terminate()
            code = server.wait()
        report(options, seen, taught, batches, inconsistent(path, seen), code)


def report(
    options: argparse.Namespace,
    seen: Rows,
    taught: dict[str, Any] | None,
    batches: str,
    wrong: int,
    code: int,
) -> None:
    """Print all results as one JSON object."""

    def spread(rows: Rows) -> dict[str, float]:
        p50, p99 = np.percentile([1000 * row["seconds"] for row in rows], [50, 99]).round(1).tolist()
        return {"requests": len(rows), "p50_ms": p50, "p99_ms": p99}

    during = [row for row in seen if taught and taught["begun"] <= row["at"] <= taught["ended"]]
    images, passes = (float(re.search(rf"onea_batch_images_{k} (\S+)", batches)[1]) for k in ("sum", "count"))  # type: ignore[index]
    figures = {
        "clients": options.clients,
        "seconds": options.seconds,
        "batch": options.batch_size,
        "requests_per_second": round(len(seen) / options.seconds, 1),
        "images_per_pass": round(images / passes, 2),
        "all": spread(seen),
        "during_lesson": spread(during) if during else None,
        "lesson": taught and {"status": taught["status"], "seconds": taught["seconds"], "version": taught["version"]},
        "errors": sum(row["status"] != 200 for row in seen),
        "statuses": dict(Counter(str(row["status"]) for row in seen)),
        "versions": dict(Counter(row["body"]["version"] for row in seen if row["status"] == 200)),
        "answers_not_of_their_version": wrong,
        "exit_code_of_server": code,
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
