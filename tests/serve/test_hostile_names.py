# SPDX-License-Identifier: Apache-2.0
"""Names with markup, scripts or changes of text direction are shown as text on the page."""

from __future__ import annotations

import httpx
import pytest
from support.serving import TEACHER, TOKEN, class_zip, job_end, photos

pytestmark = pytest.mark.browser

# Whatever of these ran would set it.
MARKUP = "<img src=x onerror=window.executed=1>"
SCRIPT = '"><script>window.executed=1</script>'
ADDRESS = "javascript:window.executed=1"
EMOJI = "🍋 lemon ✅"
ALLOWED = [MARKUP, SCRIPT, ADDRESS, EMOJI]
TURNED, LINES, LONGEST = "photo\u202egnp.exe", "two\nlines", 255 * "w"
REFUSED = [TURNED, LINES, LONGEST]
INJECTED = (
    "document.querySelectorAll('main script, main img[src=\"x\"], main a[href^=javascript], img[onerror]').length"
)


def executed(page):
    """Whether any name became more than text."""
    page.wait_for_timeout(100)  # an image that does not load says so a moment later
    return page.evaluate("window.executed") == 1 or page.evaluate(INJECTED) > 0


def sent(names, contents):
    return [
        {"name": name, "mimeType": "image/png", "buffer": content}
        for name, content in zip(names, contents, strict=True)
    ]


def test_hostile_class_names_entered_on_the_page(open_page, tiny_images):
    page = open_page(1280)
    page.get_by_label("Token").fill(TOKEN)
    for n, name in enumerate(ALLOWED):
        page.locator("#classes").get_by_role("button", name=f"class0{n}").click()
        page.get_by_label(f"New name for “class0{n}”").fill(name)
        page.get_by_role("button", name="Rename", exact=True).click()
        page.get_by_text(f"to “{name}”. The model").wait_for()
    page.get_by_label("Class name").fill(MARKUP)
    page.get_by_text("This class has 6 photos").wait_for()
    page.get_by_label("Photos of the class").set_input_files(
        sent(["a.png", "b.png"], photos(tiny_images, 0, "test")[:2])
    )
    page.get_by_role("button", name="Add another class").click()
    assert page.locator("#queue b").inner_text() == MARKUP
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text(f"Learned “{MARKUP}” from 2 photos").wait_for()
    page.locator("#predict-files").set_input_files(sent("123", photos(tiny_images, 0, "test")))
    page.locator("#answers > li").nth(2).wait_for()
    page.get_by_text("As a table").click()
    page.get_by_role("button", name="Undo the last update").click()
    page.get_by_role("button", name=f"Really undo “{MARKUP}”?").wait_for()
    assert not executed(page)


def test_hostile_class_names_from_the_api(open_page, tiny_images):
    page = open_page(390)
    for n, name in enumerate(ALLOWED):
        renamed = httpx.post(f"{page.url}rename", params={"old": f"class0{n}", "new": name}, headers=TEACHER)
        assert renamed.status_code == 200, renamed.text
    for name in REFUSED:
        renamed = httpx.post(f"{page.url}rename", params={"old": MARKUP, "new": name}, headers=TEACHER)
        assert renamed.status_code == 422
        assert "cannot be a class name" in renamed.json()["detail"]
    page.reload()
    page.locator("#classes li").nth(3).wait_for()
    listed = [text.removesuffix("6") for text in page.locator("#classes li").all_inner_texts()]
    assert sorted(listed) == sorted(ALLOWED)
    page.locator("#predict-files").set_input_files(sent("123", photos(tiny_images, 1, "test")))
    page.locator("#answers > li").nth(2).wait_for()
    assert set(page.locator("#answers .likely span").all_inner_texts()) & set(ALLOWED)
    page.get_by_text("As a table").click()
    assert page.get_by_role("cell", name=f"Renamed class00 to {MARKUP}").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not executed(page)


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_file_names(open_page, tiny_images, width):
    page = open_page(width)
    script = SCRIPT.replace("/", ":")  # which no file name has
    names = [f"{name}.png" for name in (MARKUP, script, ADDRESS, EMOJI, TURNED, LINES, LONGEST)]
    shown = [name.replace("\u202e", r"\u202e").replace("\n", r"\u000a") for name in names]
    contents = [*photos(tiny_images, 0, "test"), *photos(tiny_images, 1, "test"), b"broken"]
    page.locator("#predict-files").set_input_files(sent(names, contents))
    page.locator("#answers > li").nth(6).wait_for()
    assert page.locator("#answers figcaption").all_inner_texts() == shown
    assert page.locator("#predict-status").inner_text().startswith(f"{MARKUP}.png: ")

    page.get_by_label("Class name").fill("plum")
    page.get_by_label("Photos of the class").set_input_files(sent(names, contents))
    assert page.get_by_role("button", name=f"Remove {shown[4]}", exact=True).count() == 1
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “plum” from 6 photos").wait_for()
    page.get_by_text("Left out, unreadable").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not executed(page)


def test_a_zip_with_a_hostile_name_is_taught(open_page, tiny_images):
    page = open_page(390)
    name = f"{TURNED} {MARKUP}.zip"
    page.get_by_label("Photos of the class").set_input_files(
        {"name": name, "mimeType": "application/zip", "buffer": class_zip(tiny_images, 4)}
    )
    assert page.locator("#queue b").inner_text() == name.replace("\u202e", r"\u202e")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("from 6 photos in").wait_for()
    page.get_by_text("As a table").click()
    assert page.locator("#history-rows td").nth(2).inner_text() == name.replace("\u202e", " ")
    assert not executed(page)


def test_hostile_file_names_from_the_api(open_page, tiny_images):
    page = open_page(1280)
    named = [("images", (f"{MARKUP}.png", content, "image/png")) for content in photos(tiny_images, 4)]
    broken = ("images", (f"{SCRIPT}.png", b"broken", "image/png"))
    fields = {"class": MARKUP, "name": SCRIPT}
    begun = httpx.post(f"{page.url}learn?on_bad=skip", data=fields, files=[*named, broken], headers=TEACHER)
    with httpx.Client(base_url=page.url) as client:
        report = job_end(client, begun)
    assert report["status"] == "done", report
    page.reload()
    page.get_by_text("5 classes · version").wait_for()
    page.get_by_text("As a table").click()
    assert page.get_by_role("cell", name=SCRIPT, exact=True).count() == 1
    assert page.locator("#classes li", has_text=MARKUP).count() == 1
    assert not executed(page)


def test_injected_markup_does_not_run(browser, open_page):
    address = open_page(1280).url
    page = browser.new_page()
    policy = page.goto(address).headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    page.evaluate("""() => {
        const script = document.createElement("script");
        try { script.textContent = "window.executed = 1"; } catch { script.append("window.executed = 1"); }
        document.body.append(script);
    }""")
    assert page.evaluate("window.executed") is None
    for code in (
        "document.body.innerHTML = '<img src=x onerror=window.executed=1>'",
        "document.write('<b>')",
        "setTimeout('window.executed = 1')",
    ):
        refused = page.evaluate(f"() => {{ try {{ {code}; return ''; }} catch (error) {{ return error.name; }} }}")
        assert refused in ("TypeError", "EvalError"), code
    assert page.evaluate("document.querySelectorAll('main section').length") == 4
    assert page.evaluate("window.executed") is None
    page.close()
