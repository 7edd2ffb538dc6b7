# SPDX-License-Identifier: Apache-2.0
"""The web page in a browser: teaching, predictions, edits and history, wide and narrow."""

from __future__ import annotations

import re

import httpx
import pytest
from support.serving import TOKEN, checkerboard, class_zip, folder_hash, live, photos, png, saved, service_of

from onea import load as onea_load

pytestmark = pytest.mark.browser

OUTLINED = """() => [document.activeElement, document.activeElement.parentElement]
    .some((element) => getComputedStyle(element).outlineStyle !== "none")"""
UNNAMED = """[...document.querySelectorAll("input, button")]
    .filter((element) => !element.labels?.length && !element.textContent).map((element) => element.id)"""


@pytest.mark.parametrize("width", [1280, 390])
def test_teach_a_class_and_recognise_it(open_page, tiny_images, tmp_path, width):
    page = open_page(width, has_touch=width < 500)
    known, fresh = (saved(tmp_path / side, photos(tiny_images, 4, side)) for side in ("train", "test"))

    page.get_by_label("Class name").fill("plum jam")
    page.get_by_label("Photos of the class").set_input_files(known)
    page.get_by_text("6 photos", exact=True).wait_for()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “plum jam” from 6 photos").wait_for()
    page.get_by_text("5 classes · version 2").wait_for()
    assert page.locator("#classes .fresh").inner_text().startswith("plum jam")

    page.locator("#predict-files").set_input_files(fresh)
    page.locator("#answers > li").nth(2).wait_for()
    verdicts = page.locator("#answers .verdict").all_inner_texts()
    assert sum(verdict.startswith("plum jam") for verdict in verdicts) >= 2, verdicts
    assert "sure" in page.locator("#predict-status").inner_text()

    assert page.locator("#chart .new").count() == 2
    assert page.locator("#chart polyline, #chart path").count() == 0, "dots, and no line through few photos"
    assert page.locator("#chart circle.dot").count() == 1, "six photos are too few for a share"
    assert page.get_by_text("Not measured").count() == 0
    share = r"\d+ % of \d+ \(\d+ to \d+ %\)"
    assert re.fullmatch(
        rf"Accuracy on the photos of “first”, among all 4 classes of version 1: {share}, cross-validated\.",
        page.locator("#accuracy").inner_text(),
    )
    assert page.get_by_text("Classes are learned better together than one by one").is_visible()
    page.get_by_text("As a table").click()
    assert page.locator("#history-rows tr").all_inner_texts()[0].startswith("2\t")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"

    page.get_by_role("button", name="Undo the last update").click()
    page.get_by_role("button", name="Really undo “plum jam”?").click()
    page.get_by_text("Undid version 2").wait_for()
    page.get_by_text("4 classes · version 1").wait_for()


def test_refusals_are_shown_as_they_are_and_nothing_changes(open_page, shop, tiny_images, tmp_path):
    before = folder_hash(shop)
    page = open_page(390, color_scheme="dark")
    page.get_by_label("Class name").fill("plum")
    page.get_by_label("Photos of the class").set_input_files(saved(tmp_path / "a", [png(), png()]))
    page.get_by_label("Token").fill("a-wrong-token-of-some-length")
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_role("alert").get_by_text("The token is wrong; ask the operator of this service for it").wait_for()
    assert page.evaluate("document.activeElement.id") == "token"
    page.get_by_label("Class name").fill("CLASS00")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_role("alert").get_by_text("differs from 'class00' only in case").wait_for()
    broken = saved(tmp_path / "b", [b"not an image"])
    page.locator("#predict-files").set_input_files(broken)
    page.get_by_role("alert").get_by_text("1 of 1 images cannot be read (0.png").wait_for()
    page.locator("#predict-files").set_input_files(saved(tmp_path / "c", [checkerboard()]))
    page.locator("#answers .unknown .verdict").get_by_text("Unknown").wait_for()
    assert folder_hash(shop) == before


def test_an_unreadable_photo_does_not_block_the_others(open_page, tiny_images, tmp_path):
    page = open_page(390)
    good = photos(tiny_images, 0, "test")
    page.locator("#predict-files").set_input_files(saved(tmp_path / "ask", [good[0], b"broken", good[1]]))
    page.locator("#answers > li").nth(2).wait_for()
    assert page.locator("#answers .verdict").all_inner_texts()[1] == "Cannot be read"
    assert page.locator("#answers .bad figcaption").inner_text() == "1.png"
    assert page.locator("#answers .bad .why").inner_text().startswith("It is not an image")
    assert page.locator("#answers .likely").count() == 2

    page.get_by_label("Class name").fill("plum")
    page.get_by_label("Photos of the class").set_input_files(
        saved(tmp_path / "teach", [*photos(tiny_images, 4), b"broken"])
    )
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “plum” from 6 photos").wait_for()
    remarks = page.locator("#teach-remarks li").all_inner_texts()
    assert remarks[0].startswith("Left out, unreadable: 6.png: it is not an image")
    assert remarks[1] == "few photos: 'plum' (6); 10 or more per class are advisable"
    page.get_by_text("These predictions are from version 1; the model is now at version 2.").wait_for()
    assert page.locator("#answers > li.old").count() == 2
    page.get_by_role("button", name="Predict again").click()
    page.wait_for_selector("#predict-outdated", state="hidden")
    assert page.locator("#answers > li.old").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_single_photos_are_removed_and_several_classes_taught_at_once(open_page, shop, tiny_images, tmp_path):
    page = open_page(1280)
    page.get_by_label("Class name").fill("plum")
    page.get_by_label("Photos of the class").set_input_files(saved(tmp_path / "plum", photos(tiny_images, 4)))
    page.get_by_role("button", name="Remove 2.png").click()
    page.get_by_text("5 photos", exact=True).wait_for()
    assert page.locator("#teach-thumbs li").count() == 5
    page.get_by_role("button", name="Add another class").click()
    folder = tmp_path / "day"
    for label, of in (("pear", 5), ("class00", 0)):
        folder.mkdir(exist_ok=True)
        saved(folder / label, photos(tiny_images, of, "test"))
    (folder / "pear/notes.txt").write_text("from Monday")
    (folder / "pear/Thumbs.db").write_text("left by a file manager")
    (folder / "pear/._0.png").write_text("and by another")
    saved(folder / "@eaDir", photos(tiny_images, 5, "test"))
    page.locator("#teach-folder").set_input_files(folder)
    page.locator("#queue > li").nth(2).wait_for()
    lined = [line.split("\n")[0] for line in page.locator("#queue > li").all_inner_texts()]
    assert lined == ["plum · 5 photos Remove", "class00 · 3 photos Remove", "pear · 3 photos Remove"]
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “plum, class00 and pear” from 11 photos").wait_for()
    page.get_by_text("6 classes · version 2").wait_for()
    assert page.locator("#queue > li").count() == 0
    assert onea_load(shop).snapshot().state.images == [9, 6, 6, 6, 3, 5]


def test_a_zip_is_taught(open_page, tiny_images, tmp_path):
    page = open_page(390)
    (tmp_path / "day.zip").write_bytes(class_zip(tiny_images, 4, 5))
    page.get_by_label("Photos of the class").set_input_files(tmp_path / "day.zip")
    page.get_by_text("day.zip (zip of class folders)").wait_for()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “day.zip” from 12 photos").wait_for()
    page.get_by_text("6 classes · version 2").wait_for()


def drop(page, selector, *files):
    """Drop files and folders from outside the browser on an element, as a user does."""
    zone = page.locator(selector)
    zone.scroll_into_view_if_needed()
    box = zone.bounding_box()
    where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    devtools = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        devtools.send("Input.dispatchDragEvent", {"type": kind, "data": data, **where})


def test_a_folder_is_dragged_onto_the_page(open_page, shop, tiny_images, tmp_path):
    page = open_page(1280)
    day = tmp_path / "day"
    day.mkdir()
    saved(day / "pear", photos(tiny_images, 5))
    saved(day / "plum", 20 * photos(tiny_images, 4))  # the browser lists a hundred files of a folder at a time
    (day / "plum/notes.txt").write_text("from Monday")
    drop(page, "#teach-drop", day)
    page.locator("#queue > li").nth(1).wait_for()
    lined = [line.split("\n")[0] for line in page.locator("#queue > li").all_inner_texts()]
    assert lined == ["pear · 6 photos Remove", "plum · 120 photos Remove"]
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “pear and plum” from 126 photos").wait_for()
    assert onea_load(shop).snapshot().state.images == [6, 6, 6, 6, 6, 6]  # each photo of plum came twenty times

    drop(page, "#predict-drop", day / "pear", day / "plum/0.png")
    page.locator("#answers > li").nth(6).wait_for()
    drop(page, "#teach-drop", day / "pear/0.png", day / "pear/1.png")
    page.get_by_text("2 photos", exact=True).wait_for()


def test_photos_of_none_of_the_classes(open_page, shop, tmp_path):
    page = open_page(390)
    page.get_by_label("Photos of none of the classes").check()
    assert page.get_by_label("Class name").is_disabled()
    saved(tmp_path / "other", [checkerboard()])
    drop(page, "#teach-drop", tmp_path / "other")
    page.get_by_text("1 photo", exact=True).wait_for()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “none of the classes” from 1 photo").wait_for()
    page.get_by_text("4 classes · version 2").wait_for()
    assert page.get_by_label("Class name").is_enabled()
    assert page.locator("#history-rows td").nth(2).text_content() == "Background: none of the classes"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert onea_load(shop).snapshot().state.background_images == 1


def test_correct_a_prediction(open_page, shop, tiny_images, tmp_path):
    page = open_page(390)
    page.locator("#predict-files").set_input_files(saved(tmp_path / "ask", photos(tiny_images, 1, "test")))
    page.locator("#answers > li").nth(2).wait_for()
    page.get_by_role("button", name=re.compile("his is …")).first.click()
    page.get_by_label("Class of 0.png").fill("class01")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_text("Added to “class01”").wait_for()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Teach", exact=True).click()
    page.get_by_text("Learned “class01” from 1 photo").wait_for()
    assert onea_load(shop).snapshot().state.images == [6, 7, 6, 6]


def test_accuracies_name_the_version_that_was_measured(open_page, shop):
    page = open_page(1280)
    of_all = {"overall_accuracy": 0.75, "overall_interval": [0.6, 0.86], "overall_images": 40, "overall_classes": 4}
    figures = of_all | {"held_out": 9, "cross_validated_accuracy": None}

    def with_figures(route):
        history = route.fetch().json()
        (learned,) = history["updates"]
        gone = {"version": 2, "kind": "forget", "classes": ["class00"], "known": 3, "date": learned["date"]}
        route.fulfill(json=history | {"updates": [learned | figures, gone]})

    page.route("**/history", with_figures)
    page.reload()
    page.locator("#chart circle.dot.all").first.wait_for()
    assert page.locator("#chart circle.dot:not(.all)").count() == 1, "the legend; nine photos are no figure"
    assert page.locator("#accuracy").inner_text() == (
        "Accuracy on held-out photos of all 4 classes of version 1: 75 % of 40 (60 to 86 %)."
    )


def test_rename_and_forget(open_page, shop):
    page = open_page(1280)
    assert page.get_by_text("Choose a class to rename, merge or remove it.").is_visible()
    page.locator("#classes").get_by_role("button", name="class01").click()
    page.get_by_role("button", name="Rename", exact=True).click()
    page.get_by_label("New name for “class01”").fill("pear")
    page.get_by_role("button", name="Rename", exact=True).click()
    page.get_by_role("alert").get_by_text("This needs the token").wait_for()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Rename", exact=True).click()
    page.get_by_text("Renamed “class01” to “pear”. The model is now at version 2").wait_for()
    page.locator("#classes").get_by_role("button", name="class02").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("button", name="Really remove “class02”?").click()
    page.get_by_text("Removed “class02”. The model is now at version 3").wait_for()
    page.get_by_text("3 classes · version 3").wait_for()
    assert onea_load(shop).classes_.tolist() == ["class00", "class03", "pear"]
    assert page.locator("#history-rows td").nth(2).text_content() == "Removed class02"
    assert "among all 4 classes of version 1:" in page.locator("#accuracy").inner_text(), "not of those known now"
    page.locator("#classes").get_by_role("button", name="class03").click()
    page.get_by_label("New name for “class03”").fill("pear")
    page.get_by_role("button", name="Rename", exact=True).click()
    page.get_by_role("button", name="Really merge “class03” into “pear”?").click()
    page.get_by_text("Merged “class03” into “pear”. The model is now at version 4").wait_for()
    assert onea_load(shop).classes_.tolist() == ["class00", "pear"]


def test_the_longest_name_does_not_widen_the_page(open_page):
    page = open_page(390)
    page.get_by_label("Token").fill(TOKEN)
    page.locator("#classes").get_by_role("button", name="class01").click()
    page.get_by_label("New name for “class01”").fill(200 * "w")
    page.get_by_role("button", name="Rename", exact=True).click()
    page.get_by_text("The model is now at version 2").wait_for()
    page.locator("#check-summary").click()
    page.get_by_role("button", name="Undo the last update").click()
    page.get_by_role("button", name="Really undo").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_page_works_by_keyboard(open_page):
    page = open_page(1280)
    reached = []
    for _ in range(18):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert page.evaluate(OUTLINED), reached
    assert reached[:3] == ["Skip to content", "API", "predict-files"]
    assert {
        "search",
        "teach-class",
        "teach-background",
        "teach-files",
        "teach-folder",
        "teach-more",
        "token",
        "teach-submit",
    } <= set(reached)
    page.get_by_label("Search classes").fill("03")
    assert page.locator("#classes li").all_inner_texts() == ["class036"]
    assert page.locator("#search-status").inner_text() == "1 class found"
    assert page.evaluate(UNNAMED) == []


def test_a_list_of_very_many_classes_has_few_elements(open_page):
    """Each key pressed in the search draws the list again."""
    page = open_page(390)
    classes = [{"name": f"product {number:05}", "images": 20} for number in range(10_000)]
    answer = {"version": 1, "count": len(classes), "classes": classes}
    page.route("**/classes", lambda route: route.fulfill(json=answer))
    page.reload()
    page.get_by_text("And 9,700 more; search by name.").wait_for()
    assert page.locator("#classes li").count() == 301
    page.get_by_label("Search classes").fill("product 0001")
    assert page.locator("#classes li").count() == 10
    assert page.locator("#search-status").inner_text() == "10 classes found"
    page.get_by_label("Search classes").fill("")
    page.locator("#classes-all").click()
    assert page.locator("#classes-all").inner_text() == "Show fewer"


def test_the_api_page_lists_every_endpoint(open_page):
    page = open_page(390)
    page.get_by_role("link", name="API").click()
    page.locator(".op").first.wait_for()
    paths = page.evaluate("fetch('/openapi.json').then(response => response.json()).then(document => document.paths)")
    assert page.locator(".op h3").count() == sum(map(len, paths.values()))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_without_a_token_teaching_is_disabled(browser, shop):
    with live(service_of(shop, token=None)) as address:
        page = browser.new_page()
        page.goto(address)
        page.get_by_text("Teaching is disabled").wait_for()
        assert page.get_by_label("Class name").is_hidden()
        assert page.get_by_text("Choose a class to rename").is_hidden()
        assert page.get_by_role("button", name="Undo").count() == 0
        page.close()


DRAWN = """async (updates) => {
    const { drawHistory } = await import("/static/chart.js");
    drawHistory(document.getElementById("chart"), updates);
}"""


def test_the_history_shows_held_out_and_cross_validated_shares(open_page):
    page = open_page(390)
    first = httpx.get(f"{page.url}history").json()["updates"][0]
    share = {"held_out": 40, "held_out_accuracy": 0.9, "held_out_interval": [0.77, 0.96]}
    of_all = {"overall_accuracy": 0.8, "overall_interval": [0.65, 0.9], "overall_images": 40, "overall_classes": 4}
    page.evaluate(DRAWN, [first, first | share | of_all | {"version": 2}])
    dots = page.locator("#chart circle[class=dot] title")
    assert "cross-validated" in dots.nth(0).text_content()
    assert dots.nth(1).text_content().endswith("accuracy: 90 % of 40 (77 to 96 %)")
    assert page.locator("#chart g, #chart text", has_text="all classes").count() == 1, "a legend"
    assert page.locator("#chart circle.all title").count() == 1


@pytest.fixture
def shop_with_memory(shop):
    """Its updates store three copies of each class."""
    onea_load(shop, threads=1).set_params(memory=3).rename("class00", "apple").save(shop)
    return shop


@pytest.mark.parametrize("width", [1280, 390])
def test_training_on_stored_copies(shop_with_memory, open_page, tiny_images, tmp_path, width):
    """The page says what is stored; a button trains on it, and the remarks say what it brought."""
    page = open_page(width)
    train = page.get_by_role("button", name="Train on the stored copies")
    assert page.locator("#stored").inner_text() == "Photos are not stored, neither for predictions nor for teaching."
    assert train.is_hidden()
    page.get_by_label("Token").fill(TOKEN)
    for label in (4, 5):
        page.get_by_label("Class name").fill(f"fruit {label}")
        page.get_by_label("Photos of the class").set_input_files(
            saved(tmp_path / f"{label}", photos(tiny_images, label))
        )
        page.get_by_role("button", name="Teach", exact=True).click()
        page.get_by_text(f"Learned “fruit {label}” from 6 photos").wait_for()
    assert "small copies of photos of 2 classes" in page.locator("#memory").inner_text()
    assert "the model stores small copies" in page.locator("#stored").inner_text()
    train.click()
    page.get_by_text("trained on 6 stored copies").wait_for()
    assert page.locator("#teach-done").inner_text().startswith("The model is at version")
    assert train.is_enabled()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
