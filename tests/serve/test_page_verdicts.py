# SPDX-License-Identifier: Apache-2.0
"""Predictions on the page: verdicts, probabilities that add up to 100 %, and corrections."""

from __future__ import annotations

import httpx
import pytest
from support.serving import TOKEN, checkerboard, form, photos, saved

from onea import load as onea_load
from onea.model.answers import Answer, candidates

pytestmark = pytest.mark.browser

SHOWN = """async ([answer, name]) => {
    const { renderPrediction } = await import("/static/answers.js");
    document.getElementById("answers").append(renderPrediction(answer, new File([], name, { type: "image/png" })));
}"""


def show(page, name, ranked, none):
    """Show an answer of any distribution; its verdict follows from that."""
    answer = Answer(name, ranked[:3], none, version=1, candidates=candidates(ranked, none))
    page.evaluate(SHOWN, [answer.as_json(), name])
    return page.locator("#answers > li", has=page.locator("figcaption", has_text=name))


def percents(answer):
    """The probabilities that an answer shows, in tenths of a percent; ``< 0.1 %`` counts as 0."""
    texts = answer.locator(".likely b").all_inner_texts()
    return [0 if text.startswith("<") else round(10 * float(text.removesuffix(" %"))) for text in texts]


def test_verdicts_and_probabilities_are_consistent(open_page, tiny_images, tmp_path):
    page = open_page(390)
    contents = [*photos(tiny_images, 0, "test"), *photos(tiny_images, 5, "test"), checkerboard()]
    page.locator("#predict-files").set_input_files(saved(tmp_path / "ask", contents))
    page.locator("#answers > li").nth(6).wait_for()
    answers = httpx.post(f"{page.url}predict?top=3", files=form(contents)).json()["answers"]
    for shown, answer in zip(page.locator("#answers > li").all(), answers, strict=True):
        assert sum(percents(shown)) == 1000
        verdict = shown.locator(".verdict").inner_text()
        best = shown.locator(".likely > li").first.inner_text()
        if answer["verdict"] == "unknown":
            assert verdict.startswith("Unknown")
            assert best.startswith("none of the classes")
        elif answer["verdict"] == "answer":
            assert verdict.startswith(answer["class"])
            assert best.startswith(answer["class"])
        first = shown.locator(".likely b").first.inner_text()
        assert answer["verdict"] == "unsure" or first in verdict, "one number, not two"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_each_verdict_comes_first_and_its_bars_add_up(open_page):
    page = open_page(390, color_scheme="dark")
    ranked = (("lemon", 0.7004), ("plum", 0.1), ("kiwi", 0.05), ("pear", 0.0495))
    sure = show(page, "answer.png", ranked, 0.1)
    assert sure.locator(".verdict").inner_text().split() == ["lemon", "70.0", "%", "sure"]
    rows = ["lemon", "none of the classes", "plum", "kiwi", "all other classes"]
    assert [row.split("\n")[0] for row in sure.locator(".likely > li").all_inner_texts()][:1] == rows[:1]
    assert {row.split("\n")[0] for row in sure.locator(".likely > li").all_inner_texts()} == set(rows)
    unknown = show(page, "unknown.png", (("lemon", 1e-5), ("plum", 0.0)), 1 - 1e-5)
    assert unknown.locator(".verdict").inner_text().split("\n")[0].startswith("Unknown")
    assert unknown.locator(".likely b").all_inner_texts() == ["100 %", "< 0.1 %", "0 %"]
    unsure = show(page, "unsure.png", (("lemon", 0.35), ("plum", 1 / 3), ("kiwi", 0.01)), 0.3)
    assert unsure.locator(".verdict").inner_text() == "Unsure: lemon or plum"
    either = show(page, "either.png", (("lemon", 0.48), ("plum", 0.06)), 0.46)
    assert either.locator(".verdict").inner_text() == "Unsure: lemon or none of the classes or plum"
    for answer in (sure, unknown, unsure, either):
        assert sum(percents(answer)) == 1000
        widths = answer.locator(".fill").evaluate_all("(fills) => fills.map((fill) => parseFloat(fill.style.width))")
        assert sum(widths) == pytest.approx(100)
        above, below = answer.locator(".verdict").bounding_box(), answer.locator(".likely").bounding_box()
        assert above["y"] + above["height"] <= below["y"]


def test_one_click_on_a_candidate_corrects_to_it(open_page, shop, tiny_images):
    page = open_page(390)
    ranked = (("class02", 0.3), ("class01", 0.15), ("class00", 0.15), ("class03", 0.1))
    name = "unsure.png"
    content = list(photos(tiny_images, 1, "test")[0])
    page.evaluate(SHOWN.replace("[]", "[new Uint8Array(answer.content)]"), [
        Answer(name, ranked[:3], 0.3, 1, candidates(ranked, 0.3)).as_json() | {"content": content}, name,
    ])  # fmt: skip
    answer = page.locator("#answers > li")
    assert answer.get_by_role("button").all_inner_texts() == [
        "It is class02",
        "It is class01",
        "It is class00",
        "This is something else …",
    ]
    page.keyboard.press("Tab")
    answer.get_by_role("button", name="It is class01").focus()
    page.keyboard.press("Enter")
    assert answer.locator(".correct").inner_text() == "Added to “class01”; press Teach to train on all added photos."
    page.get_by_text("1 photo to teach").wait_for()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “class01” from 1 photo").wait_for()
    assert onea_load(shop).snapshot().state.images == [6, 7, 6, 6]
