# SPDX-License-Identifier: Apache-2.0
"""Teach a small shop of drawn products, serve it, and take docs/screenshots/serve-1280.png in a browser.

    python benchmarks/serving/serve_screenshot.py [--out docs/screenshots/serve-1280.png]

Needs ``onea[serve]``, playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import io
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import uvicorn
from PIL import Image, ImageDraw, ImageFilter

from onea.model.estimator import OneA
from onea.serve.app import create_app
from onea.serve.server import Server
from onea.serve.service import Service
from onea.serve.settings import Settings

TOKEN = "only-for-these-pictures"
ROUND, LONG, JAR, BOX, BOTTLE = "round", "long", "jar", "box", "bottle"
PRODUCTS = {
    "red apple": (ROUND, (196, 42, 46)),
    "green apple": (ROUND, (132, 178, 62)),
    "orange": (ROUND, (238, 140, 36)),
    "plum": (ROUND, (92, 44, 110)),
    "lemon": (LONG, (244, 214, 62)),
    "cucumber": (LONG, (62, 122, 58)),
    "carrot": (LONG, (232, 118, 40)),
    "aubergine": (LONG, (70, 36, 86)),
    "strawberry jam": (JAR, (176, 30, 52)),
    "apricot jam": (JAR, (236, 150, 58)),
    "blueberry jam": (JAR, (52, 48, 112)),
    "oat flakes": (BOX, (206, 168, 112)),
    "cocoa": (BOX, (96, 58, 40)),
    "olive oil": (BOTTLE, (150, 150, 44)),
    "apple juice": (BOTTLE, (222, 176, 84)),
}
UPDATES = (
    ("season", ["red apple", "green apple", "orange", "lemon", "cucumber", "carrot", "oat flakes", "olive oil"]),
    ("plum", ["plum"]),
    ("jams", ["strawberry jam", "apricot jam"]),
    ("cocoa", ["cocoa"]),
    ("Tuesday", ["aubergine", "apple juice", "carrot"]),
)
TAUGHT_LIVE = "blueberry jam"


def drawn(name: str, seed: int, side: int = 320) -> bytes:
    """A picture of a product, as JPEG: place, size, light and background differ by seed."""
    shape, colour = PRODUCTS[name]
    rng = np.random.default_rng([seed, len(name), *colour])
    shelf = np.linspace(rng.integers(205, 245, 3), rng.integers(165, 215, 3), side)[:, None] * np.ones((1, side, 1))
    page = Image.fromarray(shelf.astype(np.uint8)).convert("RGBA")
    item = Image.new("RGBA", (side, side))
    pen = ImageDraw.Draw(item)
    shade = tuple(int(np.clip(c + rng.integers(-16, 17), 0, 255)) for c in colour)
    dark, light = (tuple(int(c * f + (255 - 255 * f if f > 1 else 0)) for c in shade) for f in (0.72, 0.9))
    r = side * rng.uniform(0.24, 0.32)
    cx = cy = side / 2
    if shape == ROUND:
        pen.ellipse((cx - r, cy - r * 0.95, cx + r, cy + r), shade)
        pen.line((cx, cy - r * 0.8, cx + r * 0.15, cy - r * 1.25), (86, 60, 36), 6)
        pen.ellipse((cx + r * 0.1, cy - r * 1.25, cx + r * 0.6, cy - r * 1.0), (80, 130, 60))
    elif shape == LONG:
        pen.rounded_rectangle((cx - r * 1.35, cy - r * 0.42, cx + r * 1.35, cy + r * 0.42), r * 0.4, shade)
        pen.ellipse((cx + r * 1.2, cy - r * 0.16, cx + r * 1.5, cy + r * 0.16), (86, 120, 56))
    elif shape == JAR:
        pen.rounded_rectangle((cx - r * 0.8, cy - r * 0.75, cx + r * 0.8, cy + r), 18, shade)
        pen.rectangle((cx - r * 0.7, cy - r * 1.02, cx + r * 0.7, cy - r * 0.72), (226, 226, 220))
        pen.rectangle((cx - r * 0.8, cy - r * 0.1, cx + r * 0.8, cy + r * 0.55), (248, 244, 232))
        pen.ellipse((cx - r * 0.25, cy, cx + r * 0.25, cy + r * 0.45), dark)
    elif shape == BOX:
        pen.rectangle((cx - r * 0.8, cy - r * 1.15, cx + r * 0.8, cy + r * 1.1), shade)
        pen.rectangle((cx - r * 0.8, cy - r * 0.6, cx + r * 0.8, cy - r * 0.1), (246, 240, 226))
        pen.rectangle((cx - r * 0.5, cy + r * 0.2, cx + r * 0.5, cy + r * 0.7), dark)
    else:
        pen.rounded_rectangle((cx - r * 0.5, cy - r * 0.6, cx + r * 0.5, cy + r * 1.2), 14, shade)
        pen.rectangle((cx - r * 0.18, cy - r * 1.25, cx + r * 0.18, cy - r * 0.5), light)
        pen.rectangle((cx - r * 0.5, cy, cx + r * 0.5, cy + r * 0.6), (246, 240, 226))
    pen.ellipse((cx - r * 0.45, cy - r * 0.6, cx - r * 0.2, cy - r * 0.3), (255, 255, 255, 110))
    item = item.rotate(rng.uniform(-18, 18), translate=(int(rng.integers(-20, 21)), int(rng.integers(-16, 17))))
    shadow = Image.new("RGBA", item.size, (40, 40, 50, 0))
    shadow.putalpha(item.getchannel("A").filter(ImageFilter.GaussianBlur(9)).point(lambda a: a // 3))
    page.alpha_composite(shadow.transform(shadow.size, Image.Transform.AFFINE, (1, 0, -8, 0, 1, -12)))
    page.alpha_composite(item)
    noisy = np.asarray(page.convert("RGB")) + rng.normal(0, 4, (side, side, 3))
    content = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(content, "JPEG", quality=88)
    return content.getvalue()


def blend(first: str, second: str, seed: int, share: float) -> bytes:
    """A blend of two products, as JPEG; ``share`` is the weight of the second one."""
    under, over = (Image.open(io.BytesIO(drawn(name, seed))) for name in (first, second))
    content = io.BytesIO()
    Image.blend(under, over, share).save(content, "JPEG", quality=88)
    return content.getvalue()


def tiles(side: int = 320) -> bytes:
    """A picture without any product."""
    pattern = np.indices((side, side)).sum(0) // 20 % 2 * 255
    content = io.BytesIO()
    Image.fromarray(np.stack([pattern, 255 - pattern, np.full_like(pattern, 200)], 2).astype(np.uint8)).save(
        content, "JPEG"
    )
    return content.getvalue()


def teach(path: Path, photos: int = 16) -> None:
    """Teach the drawn products in updates of different sizes."""
    model = OneA(seed=1)
    for number, (name, classes) in enumerate(UPDATES):
        pairs = [(drawn(label, 100 * number + n), label) for label in classes for n in range(photos)]
        model.learn([image for image, _ in pairs], [label for _, label in pairs], name=name)
        print(name, model.history[-1]["held_out_accuracy"], flush=True)
    model.save(path)


def take_screenshot(address: str, out: Path, files: Path) -> None:
    """Take a screenshot of the page with answers for three photos and a class to be taught."""
    from playwright.sync_api import sync_playwright

    predicted = []
    pictures = drawn("strawberry jam", 900), blend("olive oil", "apple juice", 901, 0.8), tiles()
    for name, content in zip(("IMG_2041.jpg", "IMG_2042.jpg", "tiles.jpg"), pictures, strict=True):
        (files / name).write_bytes(content)
        predicted.append(str(files / name))
    taught = []
    for n in range(14):
        (files / f"jam-{n}.jpg").write_bytes(drawn(TAUGHT_LIVE, 800 + n))
        taught.append(str(files / f"jam-{n}.jpg"))
    more = []
    for n in range(3):
        (files / f"plum-{n}.jpg").write_bytes(drawn("plum", 850 + n))
        more.append(str(files / f"plum-{n}.jpg"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(address)
        page.set_input_files("#predict-files", predicted)
        page.wait_for_selector("#answers li")
        page.fill("#teach-class", "plum")
        page.set_input_files("#teach-files", more)
        page.click("#teach-more")
        page.fill("#teach-class", TAUGHT_LIVE)
        page.set_input_files("#teach-files", taught)
        page.fill("#token", TOKEN)
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.wait_for_timeout(300)
        page.evaluate("document.getElementById('teach-dock').classList.remove('afloat')")  # the whole form is visible
        page.screenshot(path=out, full_page=True)
        browser.close()
    picture = Image.open(out).convert("RGB")  # without refining the 256 colours, flat greys become white
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE).save(out, optimize=True)


def main() -> None:
    """Teach, serve and take the screenshot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/screenshots/serve-1280.png"))
    parser.add_argument("--model", type=Path, help="folder in which the model is kept and reused")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        path = options.model or Path(place) / "corner shop.onea"
        if not path.exists():
            teach(path)
        service = Service(path, Settings(token=TOKEN))
        app = create_app(service)
        opened = socket.socket()
        opened.bind(("127.0.0.1", 0))
        server = Server(uvicorn.Config(app, log_level="warning"), app, service)
        thread = threading.Thread(target=server.run, args=([opened],))
        thread.start()
        while not server.started:
            time.sleep(0.05)
        try:
            take_screenshot(f"http://127.0.0.1:{opened.getsockname()[1]}", options.out, Path(place))
        finally:
            server.should_exit = True
            thread.join()


if __name__ == "__main__":
    main()
