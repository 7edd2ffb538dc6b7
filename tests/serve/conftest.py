# SPDX-License-Identifier: Apache-2.0
"""A long default timeout of HTTP clients, and a browser."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 120.0  # seconds, as `wait_for` has; httpx gives up after 5


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[float]:
    """The default of httpx, which all its functions and clients share; an explicit timeout takes precedence."""
    httpx = pytest.importorskip("httpx")
    default = inspect.signature(httpx.get).parameters["timeout"].default
    with pytest.MonkeyPatch.context() as patch:
        for phase in ("connect", "read", "write", "pool"):
            patch.setattr(default, phase, PATIENCE)
        yield PATIENCE


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; tests are skipped where there is none."""
    playwright_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu"],
            # Its socket must have a short path, and the names of photos need not be ASCII.
            env=os.environ | {"TMPDIR": "/tmp", "LC_ALL": "C.UTF-8"},
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, shop: Path) -> Iterator[Callable[..., Any]]:
    """Open the page of a live service at a given width; the browser must not report any error."""
    from support.serving import live, service_of

    complaints: list[str] = []
    hosts: set[str] = set()
    pages = []
    with live(service_of(shop)) as address:

        def opened(width: int, **options: Any) -> Any:
            page = browser.new_page(viewport={"width": width, "height": 900}, **options)
            page.set_default_timeout(60_000)
            page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: hosts.add(request.url.split("/", 3)[2]))
            page.goto(address)
            page.get_by_text("4 classes · version").wait_for()
            pages.append(page)
            return page

        yield opened
        for page in pages:
            page.close()
    assert hosts == {address.removeprefix("http://")}, "nothing is loaded from other hosts"
    refusals = [text for text in complaints if "the server responded with a status of 4" in text]
    assert complaints == refusals
