# SPDX-License-Identifier: Apache-2.0
"""The commands about models, and one sentence for every error."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest
from PIL import Image
from support.models import resealed
from support.tiny import needs_unicode

FAST = ["--epochs", "2", "--threads", "1", "--precision", "fp32"]


@pytest.fixture(scope="module")
def days(tiny_images, tmp_path_factory) -> Path:
    """Photos of two days: three classes, then one."""
    root = tmp_path_factory.mktemp("days")
    for day, names in (("monday", ("class00", "class01", "class02")), ("tuesday", ("class03",))):
        for name in names:
            (root / day).mkdir(exist_ok=True)
            (root / day / name).symlink_to(tiny_images / "train" / name)
    return root


@pytest.fixture
def shop(onea, tiny_vit, days):
    """A copy of a model with Monday's classes; the original is taught only once."""
    taught = days / "shop.onea"
    if not taught.exists():
        code, _, err = onea("teach", str(taught), str(days / "monday"), "--backbone", tiny_vit, *FAST)
        assert code == 0, err
    return Path(shutil.copytree(taught, "shop.onea"))


def snapshot(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "lock")
    return {str(file): file.read_bytes() for file in files}


def test_teach_prints_the_update(onea, shop, days):
    code, out, _ = onea("teach", "shop.onea", str(days / "tuesday"), "--threads", "1")
    assert code == 0
    assert "learned 1 new class from 6 images" in out
    assert "few photos: 'class03' (6); 10 or more per class are advisable" in out
    assert "held-out" not in out, "one image"
    assert "now has 4 classes (version 2)" in out
    code, out, _ = onea("teach", "shop.onea", str(days / "tuesday"), "--name", "more of it")
    assert "learned 1 known class again" in out
    code, out, _ = onea("history", "shop.onea")
    assert code == 0
    assert [name for name in ("monday", "tuesday", "more of it") if name in out] == ["monday", "tuesday", "more of it"]
    assert "undo can restore: 1, 2" in out
    noted = json.loads(onea("history", "shop.onea", "--json")[1])
    assert [update["known"] for update in noted["updates"]] == [3, 4, 4]


def test_predict_in_three_forms(onea, shop, tiny_images):
    where = [str(tiny_images / "test/class00"), str(tiny_images / "test/class01/0.png")]
    code, out, _ = onea("predict", "shop.onea", *where)
    assert code == 0
    assert out.count(".png") == 4
    lines = [json.loads(line) for line in onea("predict", "shop.onea", *where, "--json", "--top", "2")[1].splitlines()]
    assert [Path(line["image"]).name for line in lines] == ["0.png", "1.png", "2.png", "0.png"]
    assert all(len(line["top"]) == 2 and line["version"] == 1 for line in lines)
    rows = list(csv.DictReader(io.StringIO(onea("predict", "shop.onea", *where, "--csv", "--top", "2")[1])))
    assert [row["class"] for row in rows] == [line["class"] for line in lines]
    assert [float(row["probability_1"]) for row in rows] == [line["top"][0]["probability"] for line in lines]


def test_invalid_tags_of_a_photo_cause_no_warning(onea, shop, recwarn):
    cut_short = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\x0f\x01\x02\0\xff\0"
    Image.new("RGB", (40, 30)).save("photo.jpg", exif=cut_short)
    assert onea("predict", "shop.onea", "photo.jpg")[0] == 0
    assert [str(item.message) for item in recwarn if "PIL" in item.filename] == []


def test_predict_with_another_unknown_rate(onea, shop, tiny_images):
    def unknown(rate: str) -> int:
        return onea("predict", "shop.onea", str(tiny_images / "test"), "--csv", "--unknown", rate)[1].count("unknown")

    assert unknown("0.5") > unknown("0") == 0


def test_evaluate_draws_and_lists_the_worst_first(onea, shop, tiny_images):
    shutil.copytree(tiny_images / "test", "photos")
    shutil.copytree(tiny_images / "test/class01", "photos/class00", dirs_exist_ok=True)  # under another name
    code, out, _ = onea("evaluate", "shop.onea", "photos", "-o", "seen.png")
    assert code == 0
    assert "untaught classes, not counted: class03, class04, class05; " in " ".join(out.split())
    rows = [line.split() for line in out.splitlines() if re.match(r"class\d+ +\d+ ", line)]
    shares = [float(cells[2]) for cells in rows]
    assert len(shares) == 3
    assert shares == sorted(shares)
    assert "most frequent mistakes" in out
    assert re.search(r"[\d.]+ % correct, [\d.]+ % wrong, [\d.]+ % unknown of 9 images", out)
    assert Image.open("seen.png").width > 500


def test_evaluate_lists_the_misclassified_photos(onea, shop, tiny_images):
    shutil.copytree(tiny_images / "test/class01", "photos/class00")  # under another name
    result = json.loads(onea("evaluate", "shop.onea", "photos", "--json")[1])
    wrong = result["mistakes"]
    assert len(wrong) == sum(item["images"] for item in result["confusions"]) > 0
    assert {item["class"] for item in wrong} == {"class00"}
    assert sorted((item["probability"] for item in wrong), reverse=True) == [item["probability"] for item in wrong]
    code, out, _ = onea("evaluate", "shop.onea", "photos", "--wrong")
    assert code == 0
    lines = [line for line in out.splitlines() if ": predicted " in line]
    assert [line.partition(":")[0] for line in lines] == [item["image"] for item in wrong]
    assert all(Path(item["image"]).is_file() for item in wrong)


@pytest.fixture
def unknown_photos(tiny_images) -> str:
    """Photos of classes that the shop never sold, in a folder of the working folder."""
    for name in ("class04", "class05"):
        shutil.copytree(tiny_images / "test" / name, Path("strange") / name)
    return "strange"


def shares(out: str) -> dict[str, str]:
    """The cells of the table about unknown images, by the start of their row."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.partition("measure")[2].splitlines()[2:]]
    return {re.split("[:,]", row[0])[0].strip(): row[1] for row in rows if len(row) == 2}


def test_evaluate_measures_how_well_unknown_photos_are_detected(onea, shop, days, unknown_photos, tiny_images):
    code, out, err = onea("evaluate", "shop.onea", str(days / "monday"), "--unknown", unknown_photos, "-o", "seen.png")
    assert code == 0, err
    measures = shares(out)
    assert "18 known images and 6 unknown" in out
    assert list(measures) == [
        "AUROC",
        "FPR95",
        "OSCR",
        "unknown images predicted unknown",
        "known images predicted unknown",
    ]
    assert all(0 <= float(share) <= 100 for share in measures.values())
    assert f"{measures['known images predicted unknown']} % unknown of 18 images" in out
    answers = onea("predict", "shop.onea", unknown_photos, "--json")[1].splitlines()
    rejected = sum(json.loads(line)["verdict"] == "unknown" for line in answers) / 6
    assert measures["unknown images predicted unknown"] == f"{100 * rejected:.1f}"
    assert out.endswith("seen.png\nseen-unknown.png\n")
    assert Image.open("seen-unknown.png").width > 500


def test_unknown_photos_for_a_model_without_a_threshold(onea, tiny_vit, days, unknown_photos):
    assert onea("teach", "sure.onea", str(days / "monday"), "--backbone", tiny_vit, "--unknown", "0", *FAST)[0] == 0
    code, out, err = onea("evaluate", "sure.onea", str(days / "monday"), "--unknown", unknown_photos)
    assert code == 0, err
    measures = shares(out)
    assert measures["unknown images predicted unknown"] == measures["known images predicted unknown"] == "no threshold"
    assert 0 <= float(measures["AUROC"]) <= 100
    assert Path("confusion-unknown.png").is_file()


def test_invalid_folders_of_unknown_photos_are_refused(onea, shop, days, tiny_images):
    Path("empty").mkdir()
    for where, words in (
        ("nowhere", "nowhere does not exist; give a folder"),
        ("empty", "no images below empty"),
        (str(days / "monday"), "contains images of 'class00', a class of the model"),
    ):
        code, out, err = onea("evaluate", "shop.onea", str(tiny_images / "test"), "--unknown", where)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
    assert not list(Path().glob("*.png"))


def test_rename_forget_and_undo(onea, shop, tiny_images):
    answers = onea("predict", "shop.onea", str(tiny_images / "test"), "--csv")[1]
    assert onea("rename", "shop.onea", "class00", "zero")[0] == 0
    assert (
        "removed class01, class02; shop.onea now has 1 class (version 3)"
        in onea("forget", "shop.onea", "class01", "class02", "class01")[1]
    )
    code, out, _ = onea("undo", "shop.onea")
    assert code == 0
    assert "undid version 3 (forgot class01, class02)" in out
    assert "undid version 2 (renamed class00 to zero)" in onea("undo", "shop.onea")[1]
    assert onea("predict", "shop.onea", str(tiny_images / "test"), "--csv")[1] == answers
    code, _, err = onea("undo", "shop.onea")
    assert code == 2
    assert "nothing to undo" in err


def test_export_prints_the_input_of_the_file(onea, shop):
    code, out, err = onea("export", "shop.onea", "--to", "torch")
    assert code == 0, err
    assert "shop.pt2: 3 classes, version 1" in out
    assert "float32 [N, 3, 32, 32], RGB, pixels in 0..1" in out
    assert json.loads(Path("shop.pt2.json").read_text())["classes"] == ["class00", "class01", "class02"]
    assert onea("forget", "shop.onea", "class01", "class02")[0] == 0
    assert "shop.pt2: 1 class, version 2" in onea("export", "shop.onea", "--to", "torch")[1]
    code, _, err = onea("export", "shop.onea", "--to", "onyx")
    assert code == 2
    assert "did you mean 'onnx'" in err


def test_export_from_inside_the_folder(onea, shop, monkeypatch):
    beside = shop.absolute().with_suffix(".pt2")
    monkeypatch.chdir(shop)
    code, _, err = onea("export", ".", "--to", "torch")
    assert code == 0, err
    assert beside.is_file()


def test_exports_of_models_whose_names_have_dots_do_not_replace_each_other(onea, shop):
    shutil.copytree(shop, "shop.2026")
    code, _, err = onea("export", "shop.2026", "--to", "torch")
    assert code == 0, err
    assert Path("shop.2026.pt2").is_file()


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def write_photos(folder: Path, count: int = 2) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (20, 20), (number * 40, 90, 200)).save(folder / f"{number}.png")


def make_invalid_folder(kind: str, root: Path) -> str:
    """Make a folder that cannot be taught; returns what the message must match."""
    write_photos(root / "fine")
    bad = root / "bad"
    if kind == "not an image":
        write_photos(bad)
        (bad / "x.jpg").write_text("no image")
        return "not an image"
    if kind == "truncated image":
        write_photos(bad)
        content = (bad / "0.png").read_bytes()
        (bad / "1.png").write_bytes(content[: len(content) // 2])
        return "cut short|broken"
    if kind == "huge image":
        write_photos(bad)
        (bad / "x.png").write_bytes(png_header(50_000, 50_000))
        return "more than 300 megapixels"
    if kind == "one image":
        write_photos(bad, 1)
        return "Class 'bad' has only one image"
    if kind == "mixed case":
        write_photos(root / "Fine")
        return "only in case"
    if kind == "known in another case":
        write_photos(root / "CLASS00")
        return "only in case"
    if kind == "empty class":
        bad.mkdir()
        return "is empty"
    if kind == "reserved name":
        write_photos(root / "Unknown")
        return "cannot be called"
    assert kind == "no classes"
    for file in (root / "fine").iterdir():
        file.rename(root / file.name)
    (root / "fine").rmdir()
    return "no class folders"


KINDS = [
    *("not an image", "truncated image", "huge image", "one image", "mixed case", "known in another case"),
    *("empty class", "reserved name", "no classes"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_photos_get_one_sentence_and_change_nothing(onea, shop, kind):
    words = make_invalid_folder(kind, Path("photos"))
    before = snapshot(shop)
    code, out, err = onea("teach", "shop.onea", "photos")
    assert code == 2
    assert re.search(words, err), err
    assert err.count("\n") == 1
    assert not out
    assert snapshot(shop) == before
    if kind != "known in another case":
        assert onea("teach", "new.onea", "photos", "--backbone", "nowhere.safetensors")[0] == 2
        assert not Path("new.onea").exists()


def test_photos_of_many_pixels_are_refused_unless_allowed(onea, shop, tmp_path):
    """A small file can declare a huge image."""
    Image.new("RGB", (1_500, 1_000)).save(tmp_path / "wide.webp", lossless=True)
    code, _, err = onea("predict", "shop.onea", str(tmp_path / "wide.webp"), "--max-megapixels", "1", "--threads", "1")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "wide.webp: it has 1.5 megapixels; the limit is 1, see --max-megapixels" in err
    assert onea("predict", "shop.onea", str(tmp_path / "wide.webp"), "--max-megapixels", "2", "--threads", "1")[0] == 0
    assert "choose a whole number from 1 to 300" in onea("teach", "shop.onea", "x", "--max-megapixels", "0")[2]


def test_unreadable_photos_can_be_left_out(onea, shop):
    make_invalid_folder("not an image", Path("photos"))
    code, out, _ = onea("teach", "shop.onea", "photos", "--on-bad", "skip")
    assert code == 0
    assert "1 unreadable image left out" in out


def test_a_reason_that_photos_share_is_printed_once(onea, shop, tiny_images):
    shutil.copytree(tiny_images / "test", "mixed")
    for number in range(4):
        Path(f"mixed/class00/phone{number}.heic").write_bytes(b"\0\0\0\x1cftypheic")
    for command in (("teach", "shop.onea"), ("predict", "shop.onea")):
        code, _, err = onea(*command, "mixed")
        assert code == 2
        assert err.count(" it is ") + err.count(" the ") == 1, err
        assert "phone0.heic, " in err
        assert "phone3.heic: " in err
    for command in ("predict", "evaluate"):
        code, _, err = onea(command, "shop.onea", "mixed", "--on-bad", "skip")
        assert code == 0
        (line,) = (line for line in err.splitlines() if "left out" in line)
        assert line.count(".heic") == 4


def test_folders_of_class_folders_are_reported(onea, tiny_vit, tiny_images):
    for day, name in (("monday", "class00"), ("tuesday", "class01")):
        shutil.copytree(tiny_images / "train" / name, f"week/{day}/{name}")
    remark = "folders of class folders: 2 (monday, tuesday)"
    code, out, err = onea("teach", "shop.onea", "week", "--backbone", tiny_vit, *FAST)
    assert code == 0, err
    assert remark in out.splitlines()
    assert remark in onea("evaluate", "shop.onea", "week")[1].splitlines()
    assert remark in onea("check", "shop.onea", "week")[2]
    assert json.loads(onea("evaluate", "shop.onea", "week", "--json")[1])["group_folders"] == ["monday", "tuesday"]


@pytest.mark.parametrize("name", ["T-shirt/top", "..", "aux", "苹果" * 50, ".hidden"])
def test_a_class_name_that_is_no_folder_name_is_reported(onea, shop, name):
    code, out, _ = onea("rename", "shop.onea", "class00", name)
    assert code == 0
    assert f"'{name}' is not a portable folder name: to teach photos of it, pass labels to learn() in Python" in out
    assert "folder name" not in onea("rename", "shop.onea", name, "zero")[1]


@pytest.mark.parametrize("name", ["", " ", "kiwi ", "a\0b", "x" * 201])
def test_invalid_class_names_are_refused(onea, shop, name):
    code, _, err = onea("rename", "shop.onea", "class00", name)
    assert code == 2
    assert "cannot be a class name" in err


def test_teach_a_background(onea, shop, days, tiny_images):
    """Background photos may be anywhere below a folder, and do not become a class."""
    strangers = Path("strangers/shelf/left")
    strangers.parent.mkdir(parents=True)
    strangers.symlink_to(tiny_images / "train/class05")
    code, out, err = onea("teach", "shop.onea", "--background", "strangers", "--threads", "1")
    assert code == 0, err
    assert "learned 6 background images in" in out
    assert "now has 3 classes (version 2)" in out
    assert "background: strangers" in onea("history", "shop.onea")[1]
    photo = str(next((tiny_images / "test/class00").iterdir()))
    assert json.loads(onea("predict", "shop.onea", photo, "--json")[1])["version"] == 2
    code, out, _ = onea("undo", "shop.onea")
    assert code == 0
    assert "background: strangers" in out


def clear_photos(model: str, taught: Path, folder: Path) -> None:
    """A folder of photos that were taught and that the model clearly recognises."""
    from onea.model.estimator import load
    from onea.model.learning.background import clearly_known

    current = load(model, threads=1).snapshot()
    batch = current.read(taught)
    folder.mkdir()
    for row in clearly_known(current, current.engine.features(batch.pixels, current.adapters)):
        (folder / f"{row}.png").symlink_to(batch.names[row])


def test_background_photos_of_a_class_are_refused(onea, tiny_vit, tiny_images):
    assert onea("teach", "all.onea", str(tiny_images / "train"), "--backbone", tiny_vit, *FAST)[0] == 0
    before = snapshot(Path("all.onea"))
    clear_photos("all.onea", tiny_images / "train", Path("known"))
    code, out, err = onea("teach", "all.onea", "--background", "known", "--threads", "1")
    assert code == 2
    assert re.search(r"of \d+ background images were taught as a class \(.*\.png as 'class0", err)
    assert err.count("\n") == 1
    assert not out
    assert snapshot(Path("all.onea")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["teach", "shop.onea"], "or --background and a folder"),
        (["teach", "shop.onea", "photos", "--background", "photos"], "or --background and a folder"),
        (
            ["teach", "shop.onea", "--background", "nowhere"],
            "nowhere does not exist; give a folder with images of none",
        ),
        (["teach", "shop.onea", "--background", "shop.onea/states"], "no images below"),
        (["teach", "nowhere.onea", "--background", "photos"], "has no classes yet"),
        (["teach", "shop.onea", "nowhere"], "nowhere does not exist"),
        (["teach", "shop.onea", "photos", "--epochs", "9"], "leave out --epochs"),
        (["teach", "shop.onea", "photos", "--on-bad", "x"], "choose fail or skip"),
        (["teach", "shop.onea", "photos", "--unknown", "2"], "unknown is 2"),
        (["teach", "photos", "photos"], "contains no model"),
        (
            ["teach", "photos/new.onea", "photos"],
            "photos/new.onea is inside photos, where every folder is read as photos",
        ),
        (["teach", "shop.onea", "--background", "."], "shop.onea is inside ., where every folder is read as photos"),
        (["predict", "shop.onea", "nowhere.png"], "there is no such file): check the path.\n"),
        (
            ["predict", "shop.onea", "nowhere.png", "photos"],
            "(nowhere.png: there is no such file): check the path or pass --on-bad skip.\n",
        ),
        (["predict", "shop.onea", "photos", "--json", "--csv"], "cannot be combined"),
        (["predict", "shop.onea", "photos", "--top", "0"], "must be at least 1"),
        (["predict", "shop.onea", "photos", "--unknown", "0.6"], "between 0 (never) and 0.5"),
        (["predict", "shop.onea", "photos", "--unknown", "0.0001"], "are too few to guarantee that"),
        (["predict", "nowhere.onea", "photos"], "does not exist"),
        (["evaluate", "shop.onea", "photos", "--unknown", "0.2", "--unknown", "0.3"], "one number and one folder"),
        (["evaluate", "shop.onea", "photos", "--unknown", "0.7"], "between 0 (never) and 0.5"),
        (["evaluate", "shop.onea", "photos"], "None of the classes"),
        (["evaluate", "shop.onea", "cased"], "Class 'Class00' differs from 'class00' only in case"),
        (
            ["check", "shop.onea", "photos", "-o", "photos/fine/0.png"],
            "Cannot write to photos/fine/0.png: it is not a folder that you may write to",
        ),
        (["evaluate", "shop.onea", "photos", "-o", "photos"], "photos is a folder; name a file in it, such as photos"),
        (
            ["export", "shop.onea", "--precision", "int8", "--check", "cased"],
            "Class 'Class00' differs from 'class00' only in case",
        ),
        (["check", "shop.onea", "cased"], "Class 'Class00' differs from 'class00' only in case"),
        (["evaluate", "shop.onea", "photos/fine"], "so the images have no class: put the images of each class into"),
        (["evaluate", "shop.onea", "photos/fine/0.png"], "0.png is a file; give a folder with one folder of images"),
        (["evaluate", "shop.onea", "nowhere"], "nowhere does not exist; give a folder with one folder of images for"),
        (["history", "photos"], "contains no model"),
        (["undo", "nowhere.onea"], "does not exist"),
        (["forget", "shop.onea", "class0"], "did you mean"),
        (["rename", "shop.onea", "class00", "class01"], "already has a class"),
        (["rename", "shop.onea", "class00", "class00"], "is already called 'class00'; give it another name"),
        (["rename", "shop.onea", "class00", "CLASS01"], "only in case"),
        (["export", "shop.onea", "--to", "torch", "-o", "/proc/nowhere/x.pt2"], "Cannot write"),
        (["export", "shop.onea", "--to", "torch", "--preprocess"], "Only an ONNX file takes photos"),
        (["export", "shop.onea", "--precision", "int8"], "give --check and a folder"),
        (["export", "shop.onea", "--precision", "int4"], "choose fp32 or int8"),
        (["export", "shop.onea", "--check", "photos"], "--check is for --precision int8"),
        (["export", "shop.onea", "--to", "torch", "--precision", "int8"], "Only an ONNX file can be int8"),
    ],
)
def test_a_mistake_gets_one_sentence(onea, shop, arguments, message):
    write_photos(Path("photos/fine"))
    write_photos(Path("cased/Class00"))
    write_photos(Path("cased/class01"))
    before = snapshot(shop)
    code, _, err = onea(*arguments)
    assert code == 2
    assert message in err
    assert "labels" not in err, "which only Python code can pass"
    assert err.count("\n") == 1
    assert snapshot(shop) == before
    assert not Path("nowhere.onea").exists()


def test_a_model_that_is_being_written_is_left_alone(onea, shop, days):
    code = """
        import time
        from pathlib import Path
        from onea.model.storage.layout import locked
        with locked(Path("shop.onea")):
            print("held", flush=True)
            time.sleep(60)
    """
    holder = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        for words in (["teach", "shop.onea", str(days / "tuesday")], ["undo", "shop.onea"]):
            code, _, err = onea(*words)
            assert code == 2
            assert f"being written by process {holder.pid}, for" in err
    finally:
        holder.kill()
        holder.wait()
    assert onea("teach", "shop.onea", str(days / "tuesday"))[0] == 0


def test_a_newer_model_and_a_full_disk(onea, shop, days, monkeypatch):
    import errno

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = snapshot(shop)
    with monkeypatch.context() as patch:
        patch.setattr("onea.files.os.fsync", full)
        code, _, err = onea("teach", "shop.onea", str(days / "tuesday"))
        assert code == 2
        assert "No space left in" in err
    assert snapshot(shop) == before
    manifest = json.loads((shop / "model.json").read_text())
    (shop / "model.json").write_text(json.dumps(manifest | {"format": 99}))
    code, _, err = onea("predict", "shop.onea", str(days))
    assert code == 2
    assert "has format 99" in err


HOSTILE = ("\x1b[2J\x1b]0;owned\x07", "[red]x[/red]", "right\u202eleft", "\x9b31m", "[/]")


@pytest.fixture
def untrusted(shop) -> Path:
    """A model with class names that onea refuses to learn."""
    file = shop / "states/000001/state.json"
    state = json.loads(file.read_text())
    state["classes"] = list(HOSTILE[:3])
    state["adapter_images"] = dict.fromkeys(HOSTILE[:3], 5)
    state["updates"][0]["classes"] = list(HOSTILE[:3])
    state["updates"][0]["name"] = "".join(HOSTILE)
    file.write_bytes(resealed(state))
    return shop


def test_names_of_an_untrusted_model_are_escaped(onea, untrusted, tiny_images):
    """The terminal shows the names without interpreting them."""
    images = str(tiny_images / "test")
    outputs = []
    for words in (
        ["history", "shop.onea"],
        ["predict", "shop.onea", images],
        ["predict", "shop.onea", images, "--json"],
        ["predict", "shop.onea", images, "--csv"],
        ["rename", "shop.onea", "nothing", "like it"],
        ["rename", "shop.onea", HOSTILE[0], "harmless"],
        ["forget", "shop.onea", HOSTILE[1]],
        ["undo", "shop.onea"],
        ["undo", "shop.onea"],
    ):
        _, out, err = onea(*words)
        assert (out + err).replace("\n", "").isprintable(), words
        outputs.append(out + err)
    for text in outputs[:4]:
        assert "\\u001b[2J" in text
    assert all("[red]x[/red]" in text for text in (*outputs[:5], outputs[6], outputs[7]))
    assert json.loads(outputs[2].splitlines()[0])["top"][0]["class"] in HOSTILE
    assert (untrusted / "README.md").read_text("utf-8").replace("\n", "").isprintable()


@needs_unicode
def test_names_of_an_untrusted_model_are_escaped_by_evaluate(onea, untrusted, tiny_images):
    for name, target in zip(("[red]x[/red]", "[/]"), ("class00", "class01"), strict=True):
        (Path("photos") / name.replace("/", "∕")).parent.mkdir(exist_ok=True)
        (Path("photos") / name.replace("/", "∕")).symlink_to(tiny_images / "test" / target)
    (Path("photos") / HOSTILE[2]).symlink_to(tiny_images / "test/class02")
    code, out, err = onea("evaluate", "shop.onea", "photos")
    assert code == 0, err
    assert "right\\u202eleft" in out
    assert "untaught classes, not counted: [red]x[∕red], [∕]; " in out
    assert out.replace("\n", "").isprintable()


def test_a_class_named_with_thousands_of_digits_is_refused(onea, shop, tiny_images):
    from onea.errors import OneaError
    from onea.model.estimator import load

    images = sorted((tiny_images / "train/class00").iterdir())
    with pytest.raises(OneaError, match="cannot be a class name"):
        load(shop).learn(images, ["9" * 5_000] * 3 + ["b"] * 3)


def test_undo_without_a_model_card(onea, shop, days):
    assert onea("teach", "shop.onea", str(days / "tuesday"), "--threads", "1")[0] == 0
    for file in shop.rglob("README.md"):
        file.unlink()
    code, out, err = onea("undo", "shop.onea")
    assert (code, err) == (0, "")
    assert "is at version 1 again" in out


def test_repeated_photos_are_reported(onea, tiny_vit, tiny_images):
    assert onea("teach", "all.onea", str(tiny_images / "train"), "--backbone", tiny_vit, *FAST)[0] == 0
    shutil.copytree(tiny_images / "train/class00", "more/class00")
    shutil.copytree(tiny_images / "test/class01", "more/class01")
    shutil.copy(tiny_images / "test/class01/1.png", "more/class00/other.png")
    Path("more/notes.txt").write_text("for later")
    Path("more/class00/notes.txt").write_text("from Monday")
    code, out, err = onea("teach", "all.onea", "more", "--threads", "1")
    assert code == 0, err
    assert "repeated photos, counted once: 6 of 10" in out
    assert "photos with two class names: 1 (1.png: 'class00' and 'class01'); undo if one is wrong" in out
    assert "files ignored (not images, or outside the class folders): 2 (notes.txt, notes.txt)" in out
    result = json.loads(onea("evaluate", "all.onea", "more", "--json")[1])
    assert (result["taught_images"], len(result["ignored_files"])) == (10, 2), "JSON reports them as well"
