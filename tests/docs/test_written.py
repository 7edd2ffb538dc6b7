# SPDX-License-Identifier: Apache-2.0
"""What README and pages keep in writing is what the committed records say; `make results` renews it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "tools/docs"))
import written

WITH = [page for page in written.PAGES if written.MARK.search(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", WITH, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_written_is_what_the_records_say(page: Path) -> None:
    text = page.read_text("utf-8")
    assert written.renewed(text) == text, "run `make results`"


def test_whatever_number_is_edited_comes_back() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    places = [
        mark.start(3) + number.end() - 1
        for mark in written.MARK.finditer(text)
        for number in re.finditer(r"\d+\.\d+", mark[3])
    ]
    assert len(places) > 50
    edited = "".join(
        str((int(letter) + 1) % 10) if place in set(places) else letter for place, letter in enumerate(text)
    )
    assert edited != text
    assert written.renewed(edited) == text


def test_every_mark_is_closed_and_known() -> None:
    used = set()
    for page in written.PAGES:
        text = page.read_text("utf-8")
        names = re.findall(r"<!-- written: (\S+) -->", text)
        assert len(names) == len(written.MARK.findall(text)) == text.count("<!-- end -->"), page
        used |= {*names}
    assert used == written.WRITTEN.keys()
