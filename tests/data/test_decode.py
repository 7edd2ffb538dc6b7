# SPDX-License-Identifier: Apache-2.0
"""Reading images: every kind of pixel, every kind of broken file."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from onea.data import decode, pixel_limit
from onea.data.decode import BadImage, fit, image_size, read_image
from onea.errors import OneaError, OutOfMemory

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def corners(image: Image.Image) -> list[tuple[int, int, int]]:
    """Top left, top right, bottom left, bottom right."""
    right, bottom = image.width - 1, image.height - 1
    pixels = np.asarray(image).astype(int)
    return [tuple(pixels[y, x].tolist()) for y, x in ((0, 0), (0, right), (bottom, 0), (bottom, right))]


def four_colours(width: int, height: int) -> Image.Image:
    image = Image.new("RGB", (width, height), RED)
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    image.paste(WHITE, (width // 2, height // 2, width, height))
    return image


def saved(folder: Path, image: Image.Image, name: str = "image.png", **options: object) -> Path:
    path = folder / name
    image.save(path, **options)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.ppm", "a.tif", "a.gif", "a.tga", "a.pcx"])
def test_lossless_formats_keep_every_pixel(tmp_path: Path, name: str) -> None:
    image = four_colours(6, 4)
    read = read_image(saved(tmp_path, image, name))
    assert read.mode == "RGB"
    assert np.array_equal(np.asarray(read), np.asarray(image))


def test_only_decoders_of_our_formats_are_loaded() -> None:
    """In a new process: Pillow itself would load forty more, one of which runs Ghostscript."""
    code = (
        "from onea.data import decode; found = decode._formats(False); from PIL import Image; "
        "assert {*decode._PLUGINS} <= {*found} == {*Image.OPEN}, {*Image.OPEN}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_extension_does_not_matter(tmp_path: Path) -> None:
    path = saved(tmp_path, four_colours(6, 4), "photo.jpg", format="PNG")
    assert corners(read_image(path)) == [RED, GREEN, BLUE, WHITE]


def test_heic_with_pillow_heif(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif").register_heif_opener()
    path = saved(tmp_path, four_colours(64, 48), "photo.heic", quality=100)
    assert image_size(path) == (48, 64)
    for read in (read_image(path), read_image(path, min_side=16), read_image(path.read_bytes(), untrusted=True)):
        assert (read.mode, read.size) == ("RGB", (64, 48))
        assert np.abs(np.array(corners(read)) - np.array([RED, GREEN, BLUE, WHITE])).max() < 20


def test_heic_without_pillow_heif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr(Image, "OPEN", {name: how for name, how in Image.OPEN.items() if name != "HEIF"})
    monkeypatch.setattr(decode, "_formats", decode._formats.__wrapped__)
    path = tmp_path / "photo.heic"
    path.write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heic")
    with pytest.raises(
        BadImage, match=r"HEIC photo; `pip install pillow-heif`, or save it as JPEG .on an iPhone: Settings"
    ):
        read_image(path)
    with pytest.raises(BadImage, match="HEIC photo; save it as JPEG"):
        read_image(path.read_bytes(), untrusted=True)


@pytest.mark.parametrize(("mode", "colour", "expected"), [("L", 128, (128, 128, 128)), ("1", 1, WHITE)])
def test_grayscale(tmp_path: Path, mode: str, colour: int, expected: tuple[int, int, int]) -> None:
    assert corners(read_image(saved(tmp_path, Image.new(mode, (3, 3), colour))))[0] == expected


def test_palette(tmp_path: Path) -> None:
    path = saved(tmp_path, four_colours(4, 4).convert("P", palette=Image.Palette.ADAPTIVE))
    with Image.open(path) as stored:
        assert stored.mode == "P"
    assert corners(read_image(path)) == [RED, GREEN, BLUE, WHITE]


def test_cmyk(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "ink.jpg", quality=100)
    red, green, blue = corners(read_image(path))[0]
    assert red > 250
    assert green < 5
    assert blue < 5


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_composited_on_white(tmp_path: Path, mode: str) -> None:
    black = (0, 0, 0, 0) if mode == "RGBA" else (0, 0)
    image = Image.new(mode, (2, 1), black)
    image.putpixel((1, 0), (*black[:-1], 255))
    assert np.asarray(read_image(saved(tmp_path, image))).tolist() == [[[255] * 3, [0] * 3]]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparency_is_the_same_in_strips_as_in_one_go(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (37, 23, 4), dtype=np.uint8)
    image = Image.fromarray(pixels).convert("P" if mode == "P" else "LA" if mode != "RGBA" else "RGBA").convert(mode)
    if mode == "P":
        image.info["transparency"] = 7
    page = Image.new("RGBA", image.size, "white")
    whole = Image.alpha_composite(page, image.convert("RGBA")).convert("RGB")
    for strip in (1, 50, 10**6):
        monkeypatch.setattr(decode, "_STRIP", strip)
        assert np.array_equal(np.asarray(decode.upright_rgb(image)), np.asarray(whole))


@pytest.mark.parametrize("mode", ["P", "RGB", "L"])
def test_a_transparent_colour_is_composited_on_white(tmp_path: Path, mode: str) -> None:
    image = Image.new(mode, (2, 2), 0)
    path = saved(tmp_path, image, transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert corners(read_image(path))[0] == WHITE


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_16_bit_is_scaled_not_clipped(tmp_path: Path, name: str) -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    read = read_image(saved(tmp_path, Image.fromarray(values), name))
    assert np.asarray(read)[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize(("values", "expected"), [([0.0, 0.5, 1.0], [0, 128, 255]), ([0.0, 40.0, 300.0], [0, 40, 255])])
def test_float_pixels(tmp_path: Path, values: list[float], expected: list[int]) -> None:
    path = saved(tmp_path, Image.fromarray(np.array([values], dtype=np.float32)), "float.tif")
    assert np.asarray(read_image(path))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo.tif", "photo.webp"])
def test_exif_rotation_is_applied(tmp_path: Path, name: str, orientation: int) -> None:
    upright = four_colours(48, 32)
    # What a camera held in another way stores: the inverse of the turn that shows the picture upright.
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(turns[orientation]) if orientation in turns else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path, stored, name, exif=exif, quality=100)
    read = read_image(path)
    assert read.size == (48, 32)
    assert image_size(path) == (32, 48)
    nearest = [min((RED, GREEN, BLUE, WHITE), key=lambda c: np.abs(np.subtract(c, got)).sum()) for got in corners(read)]
    assert nearest == [RED, GREEN, BLUE, WHITE]


def test_broken_exif_data_is_ignored(tmp_path: Path) -> None:
    path = saved(tmp_path, four_colours(16, 8), "photo.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff", quality=100)
    assert read_image(path).size == (16, 8)


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), BLUE)]
    path = tmp_path / "moving.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert corners(read_image(path))[0] == RED


def test_large_jpeg_is_decoded_at_reduced_size(tmp_path: Path) -> None:
    path = saved(tmp_path, four_colours(800, 640), "large.jpg", quality=95)
    assert read_image(path).size == (800, 640)
    reduced = read_image(path, min_side=32)
    assert reduced.size == (100, 80)
    assert read_image(path, min_side=400).size == (800, 640)
    full = fit(read_image(path), 32, 32).astype(int)
    assert np.abs(fit(reduced, 32, 32).astype(int) - full).mean() < 2


@pytest.mark.parametrize("reader", [read_image, image_size])
def test_too_many_pixels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: object) -> None:
    path = saved(tmp_path, Image.new("RGB", (20, 10)))
    monkeypatch.setattr(pixel_limit, "DEFAULT_MAX_PIXELS", 199)
    with pytest.raises(BadImage, match=r"it has 0\.0 megapixels; the limit is 0, see --max-megapixels"):
        reader(path)  # type: ignore[operator]


def test_the_limit_allows_large_cameras_and_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the header is read: a small file that declares many pixels does not take gigabytes."""
    header = b"\x89PNG\r\n\x1a\n" + bytes([0, 0, 0, 13]) + b"IHDR"
    monkeypatch.setenv("ONEA_MAX_MEGAPIXELS", "")

    def png(width: int, height: int) -> Path:
        head = b"IHDR" + width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
        assert header.endswith(head[:4])
        (tmp_path / "x.png").write_bytes(header + head[4:] + zlib.crc32(head).to_bytes(4) + bytes(4) + b"IDAT")
        return tmp_path / "x.png"

    for camera_or_panorama in ((11_648, 8_736), (12_000, 9_000), (16_382, 3_894)):
        with decode._opened(png(*camera_or_panorama)) as image:
            assert image.size == camera_or_panorama
    message = "it has 168.0 megapixels; the limit is 110, see --max-megapixels (or ONEA_MAX_MEGAPIXELS)"
    with pytest.raises(BadImage, match=re.escape(message)):
        read_image(png(14_000, 12_000))
    pixel_limit.allow_megapixels(168)
    with decode._opened(png(14_000, 12_000)) as image:
        assert image.size == (14_000, 12_000)
    for odd in (0, 301, 10**30, "x", "-1"):
        monkeypatch.setenv("ONEA_MAX_MEGAPIXELS", str(odd))
        with pytest.raises(OneaError, match=r"--max-megapixels .* choose a whole number from 1 to 300"):
            image_size(png(10, 10))


def test_the_size_is_checked_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All formats are checked, because some are decoded when they are opened."""
    loaded: list[str] = []
    monkeypatch.setattr(pixel_limit, "DEFAULT_MAX_PIXELS", 4_999)
    for name in decode._formats(untrusted=False):
        path = saved(tmp_path, four_colours(100, 50), f"image.{name}", format=name)
        with monkeypatch.context() as patch:
            patch.setattr(ImageFile.ImageFile, "load", lambda self: loaded.append(self.format))
            with pytest.raises(BadImage, match="the limit is 0, see --max-megapixels"):
                read_image(path)
    assert loaded == []


def test_icons_are_not_read(tmp_path: Path) -> None:
    """Pillow decodes them before their size can be checked."""
    with pytest.raises(BadImage, match="not an image in a supported format"):
        read_image(saved(tmp_path, noise(), "icon.ico"))


def test_pillows_own_limit_has_our_error_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, Image.new("RGB", (20, 10)))
    monkeypatch.setattr(decode, "_lift_pillow_limit", lambda: None)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(BadImage, match="more than 300 megapixels"):
        read_image(path)


@pytest.mark.parametrize(("before", "after"), [(10, pixel_limit.MAX_PIXEL_LIMIT), (10**12, 10**12), (None, None)])
def test_pillows_limit_is_never_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", before)
    read_image(saved(tmp_path, Image.new("RGB", (20, 10))))
    assert after == Image.MAX_IMAGE_PIXELS


def noise(side: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", ["cut.jpg", "cut.png", "cut.webp", "cut.bmp", "cut.tif", "cut.gif"])
def test_truncated_files(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, noise(), name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadImage) as caught:
        read_image(path)
    assert str(caught.value).startswith(f"Cannot read image {path}: ")


def test_a_truncated_jpeg_is_reported_as_cut_short(tmp_path: Path) -> None:
    path = saved(tmp_path, noise(), "cut.jpg")
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(BadImage, match="the file is cut short"):
        read_image(path)


def test_files_that_are_not_images(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not an image, only words")
    (tmp_path / "empty.jpg").touch()
    for path, reason in (
        (tmp_path / "notes.txt", "it is not an image in a supported format"),
        (tmp_path / "empty.jpg", "the file is empty"),
        (tmp_path / "none.jpg", "there is no such file"),
        (tmp_path, "it is a folder"),
        (tmp_path / ("x" * 300), "it cannot be opened (File name too long)"),
    ):
        with pytest.raises(BadImage) as caught:
            read_image(path)
        assert str(caught.value) == f"Cannot read image {path}: {reason}."


def test_no_permission_and_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, noise())

    def refuse(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(BadImage, match="permission to read it was denied"):
            read_image(path)

    def exhaust(_: Image.Image) -> None:
        raise MemoryError

    monkeypatch.setattr(decode, "_to_rgb", exhaust)
    with pytest.raises(OutOfMemory, match="There is not enough memory to decode"):
        read_image(path)


def test_too_many_open_files_is_not_a_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        read_image(tmp_path / "a.png")


def test_postscript_is_not_run(tmp_path: Path) -> None:
    path = saved(tmp_path, noise(8), "figure.eps")
    with pytest.raises(BadImage, match="not an image in a supported format"):
        read_image(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]))
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_give_an_image_or_bad_image(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "image"
    noise(8).save(path, format=kind)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    message = ""
    try:
        # 60,000 x 60,000 declared pixels are refused; only small images are decoded in this test.
        if max(image_size(path)) < 2000:
            assert read_image(path).mode == "RGB"
    except BadImage as error:
        message = str(error)
    assert "\n" not in message


def test_bad_image_is_a_user_error_and_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(BadImage(Path("a.jpg"), "the file is cut short")))
    assert isinstance(error, OneaError)
    assert (error.path, error.reason) == (Path("a.jpg"), "the file is cut short")


def test_fit_crops_the_centre() -> None:
    image = Image.new("RGB", (90, 30), RED)
    image.paste(GREEN, (30, 0, 60, 30))
    square = fit(image, 30, 30)
    assert square.shape == (3, 30, 30)
    assert square.dtype == np.uint8
    assert (square == np.array(GREEN, dtype=np.uint8)[:, None, None]).all()


def test_fit_does_not_change_an_image_of_that_size() -> None:
    image = noise(24)
    assert np.array_equal(fit(image, 24, 24).transpose(1, 2, 0), np.asarray(image))


@pytest.mark.parametrize(("width", "height"), [(61, 47), (47, 61), (40, 40), (20, 33)])
def test_fit_agrees_with_torchvision(width: int, height: int) -> None:
    from torchvision.transforms import functional

    image = noise(64).resize((width, height))
    resized = functional.resize(image, [32], functional.InterpolationMode.BICUBIC)
    expected = np.asarray(functional.center_crop(resized, [32, 32])).transpose(2, 0, 1)
    assert np.array_equal(fit(image, 32, 32), expected)


def test_an_extreme_strip_stays_small() -> None:
    assert fit(Image.new("RGB", (60_000, 1), BLUE), 224, 224).shape == (3, 224, 224)


@settings(max_examples=50, deadline=None)
@given(*[st.integers(1, 90)] * 2, *[st.integers(1, 40)] * 2)
def test_fit_always_fills_the_frame(width: int, height: int, to_height: int, to_width: int) -> None:
    pixels = fit(Image.new("RGB", (width, height), WHITE), to_height, to_width)
    assert pixels.shape == (3, to_height, to_width)
    assert (pixels == 255).all()  # a crop that reached over the edge would bring in black
