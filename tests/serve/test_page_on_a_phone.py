# SPDX-License-Identifier: Apache-2.0
"""Navigation on the page: links to its sections, names of files, long lists."""

from __future__ import annotations

import httpx
import pytest
from support.serving import TEACHER, TOKEN, photos, saved, wait_for

from onea.data.decode import upload_formats

pytestmark = pytest.mark.browser

IN_VIEW = """(element) => {
    const box = element.getBoundingClientRect();
    const seen = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    return box.top >= 0 && box.bottom <= innerHeight && element.contains(seen);
}"""


def in_view(page, selector):
    """Whether an element lies inside the window and under nothing else."""
    return page.locator(selector).evaluate(IN_VIEW)


def ask(page, folder, contents):
    page.locator("#predict-files").set_input_files(saved(folder, contents))
    page.locator("#answers > li").nth(len(contents) - 1).wait_for()


def test_each_answer_has_the_name_of_its_file(open_page, tiny_images, tmp_path):
    page = open_page(390)
    good = photos(tiny_images, 0, "test")
    ask(page, tmp_path / "ask", [good[0], b"broken", good[1]])
    assert page.locator("#answers figcaption").all_inner_texts() == ["0.png", "1.png", "2.png"]
    assert page.locator("#answers > li.bad figcaption").inner_text() == "1.png"
    assert page.locator("#predict-status").inner_text().count(".png: ") == 3
    page.locator("#predict-files").set_input_files(
        {"name": 250 * "w" + ".png", "mimeType": "image/png", "buffer": good[0]},
    )
    page.locator("#answers figcaption", has_text="www").wait_for()
    assert page.locator("#answers figcaption").bounding_box()["height"] < 80
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_navigation_on_a_phone(open_page, tiny_images, tmp_path):
    page = open_page(390)
    ask(page, tmp_path / "ask", 2 * photos(tiny_images, 0, "test"))
    parts = page.get_by_role("navigation", name="Parts of this page")
    assert parts.get_by_role("link").all_inner_texts() == ["Predict", "Classes", "Teach", "History"]
    for far in (False, True):
        page.evaluate(f"scrollTo(0, {'document.body.scrollHeight' if far else 0})")
        assert in_view(page, ".jump a[href='#teach']")
        parts.get_by_role("link", name="Teach").click()
        wait_for(lambda: in_view(page, "#teach-title"))
        assert page.locator("#teach").bounding_box()["y"] < 100
        assert in_view(page, "#teach-class")
        page.locator(".jump a[href='#teach'][aria-current]").wait_for()
        assert page.locator(".jump [aria-current]").count() == 1
    page.evaluate("scrollTo(0, 0)")
    page.locator(".jump a[href='#teach']").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "teach-class"
    assert in_view(page, "#teach-class")


def test_a_long_list_of_classes_is_cut_visibly(open_page, tiny_images):
    page = open_page(390)
    assert page.locator("#classes-all").is_hidden()
    for n in range(4):
        place = f"{page.url}rename?old=class0{n}&new={n}{199 * 'w'}"
        assert httpx.post(place, headers=TEACHER).status_code == 200
    page.reload()
    page.get_by_role("button", name="Show all 4", exact=True).wait_for()
    listed = page.locator("#classes")
    fades = "getComputedStyle(document.getElementById('classes')).maskImage !== 'none'"
    assert page.evaluate(fades)
    listed.evaluate("(list) => list.scrollTo(0, list.scrollHeight)")
    wait_for(lambda: not page.evaluate(fades))

    page.get_by_role("button", name="Show all 4", exact=True).click()
    assert listed.evaluate("(list) => list.scrollHeight <= list.clientHeight")
    page.get_by_role("button", name="Show fewer").click()
    assert listed.evaluate("(list) => list.scrollHeight > list.clientHeight")
    page.get_by_label("Search classes").fill("2w")
    assert page.locator("#classes-count").inner_text() == "1 of 4"
    assert page.locator("#classes-all").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("width", [1280, 390])
def test_after_a_correction_the_button_to_teach_it_is_in_view(open_page, tiny_images, tmp_path, width):
    page = open_page(width)
    ask(page, tmp_path / "ask", 3 * photos(tiny_images, 1, "test"))
    page.get_by_role("button", name="his is …").last.click()
    page.get_by_label("Class of 8.png").fill("class01")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_text("Added to “class01”").wait_for()
    assert in_view(page, "#teach-submit")
    page.get_by_text("1 photo to teach").wait_for()
    assert in_view(page, "#answers > li:last-child .verdict"), "nothing else moved"
    assert page.evaluate("document.activeElement.textContent").startswith("Added to"), "the keyboard goes on from there"
    page.get_by_role("button", name="Teach", exact=True).click()
    assert page.evaluate("document.activeElement.id") == "token", "it is missing"
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “class01” from 1 photo").wait_for()
    assert page.locator("#teach-sum").text_content() == ""
    assert page.locator(".afloat").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_hint_names_the_formats_that_are_read(open_page):
    page = open_page(1280)
    *others, last = upload_formats()
    assert page.locator("#predict-hint").inner_text() == f"{', '.join(others)} or {last}. You can also paste one."
    assert httpx.get(f"{page.url}healthz").json()["formats"] == [*others, last]
    types = page.locator("#predict-files").get_attribute("accept").split(",")
    assert {"image/jpeg", "image/webp"} <= set(types)
    assert (".heic" in types) == ("HEIC" in upload_formats())
    assert page.locator("#teach-files").get_attribute("accept").split(",") == [*types, ".zip"]
