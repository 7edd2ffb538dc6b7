# SPDX-License-Identifier: Apache-2.0
"""From an image file of any common kind to RGB pixels, or to one sentence that says why not."""

from __future__ import annotations

import errno
import functools
import importlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import SEEK_END, BytesIO
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from onea.data.dataset import Pixels
from onea.data.pixel_limit import MOST_PIXELS, max_pixels, too_many_pixels
from onea.errors import MORE_MEMORY, OneaError, OutOfMemory, is_out_of_memory

_BYTES_PER_PIXEL = 16  # the most that a decoder was seen to take, for a WebP; others take a half or a quarter of it

# Named, because Pillow's full list has formats that start other programs (EPS, WMF), hold no pictures (HDF5, MPEG), or
# are decoded before anyone can look at their size (ICO).
_PLUGINS = {  # of Pillow, by format
    "JPEG": "Jpeg",
    "PNG": "Png",
    "WEBP": "WebP",
    "AVIF": "Avif",
    "BMP": "Bmp",
    "DIB": "Bmp",
    "GIF": "Gif",
    "TIFF": "Tiff",
    "PPM": "Ppm",
    "JPEG2000": "Jpeg2K",
    "PCX": "Pcx",
    "QOI": "Qoi",
    "TGA": "Tga",
}
_HEIF = "HEIF"  # HEIC, the photos of iPhones: known where pillow-heif is installed
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
# What strangers may send: what cameras and browsers make, where the size in the header bounds the work, and where
# Pillow decodes without the interpreter's lock.
COMMON_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
NO_FILE = "there is no such file"

_EXIF_ORIENTATION = 0x0112
_TURN_BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDES_SWAPPED = (5, 6, 7, 8)

_STRIP = 1_000_000  # pixels that are laid on white in one go
_MOST_SCANS = 32  # of a JPEG, each of which goes over all its pixels; encoders make about ten
_SCAN, _END = 0xDA, 0xD9
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # of a JPEG segment, not those that stand alone
_READS, _BYTES_PER_READ = 2_000, 256  # of a stranger's file; encoders write pieces of kilobytes


class BadImage(OneaError):  # noqa: N818 - it names the file, and is raised for it
    """A file that cannot be read as an image.

    >>> print(BadImage("cat.jpg", "the file is empty"))
    Cannot read image cat.jpg: the file is empty.
    """

    def __init__(self, path: str | PathLike[str], reason: str) -> None:
        super().__init__(path, reason)
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"Cannot read image {self.path}: {self.reason}."


def read_image(
    source: str | PathLike[str] | bytes,
    *,
    min_side: int | None = None,
    name: str = "image",
    limit: int | None = None,
    untrusted: bool = False,
) -> Image.Image:
    """Read one image as it is meant to be seen: RGB, turned upright, transparency on white, first frame.

    Args:
        source: any file in a format that Pillow reads without outside programs, or the bytes of one.
        min_side: the short side that is needed later. A large JPEG is then decoded at a half, a quarter or an
            eighth of its size (never below twice this), which is many times faster and looks the same afterwards.
        name: what messages call an image that is given as bytes.
        limit: an image that claims more pixels is refused before any of it is decoded; ``max_pixels()``, if None.
        untrusted: whether bytes come from an untrusted source; then only ``COMMON_FORMATS`` are decoded, with limits.

    Raises:
        BadImage: the file is missing, not an image, broken, or claims too many pixels.
        OutOfMemory: it could not be decoded for want of memory, whatever is wrong with it.
    """
    if isinstance(source, bytes):
        stream = _InFewReads(source) if untrusted else BytesIO(source)
        opened: AbstractContextManager[Image.Image] = _decoded(stream, Path(name), limit, untrusted)
    else:
        opened = _opened(Path(source), limit)
    with opened as image:
        if untrusted and isinstance(source, bytes) and image.format in ("JPEG", "MPO") and _scans(source) > _MOST_SCANS:
            raise BadImage(name, f"it has more than {_MOST_SCANS} scans, each as much work as an image")
        if min_side is not None:
            image.draft(None, (2 * min_side, 2 * min_side))
        image.load()
        return upright_rgb(image)


def upright_rgb(image: Image.Image) -> Image.Image:
    """An image that is open already, as it is meant to be seen: RGB, turned upright, transparency on white."""
    orientation = _orientation(image)
    return _to_rgb(image.transpose(_TURN_BACK[orientation]) if orientation in _TURN_BACK else image)


def pixel_count(content: bytes) -> int:
    """The number of pixels that a stranger's image claims; nothing is decoded. 0 where it cannot be read."""
    try:
        with _decoded(_InFewReads(content), Path("image"), MOST_PIXELS, untrusted=True) as image:
            return image.width * image.height
    except BadImage:
        return 0


def image_size(path: str | PathLike[str]) -> tuple[int, int]:
    """Height and width that ``read_image`` would give, from the header where the format allows it.

    Raises:
        BadImage: as ``read_image``, as far as the header tells.
    """
    with _opened(Path(path)) as image:
        width, height = image.size
        # A square needs no look at the EXIF data, which some formats keep behind the pixels.
        # Pillow already swaps the sides of a turned TIFF when it opens one.
        if width != height and image.format != "TIFF" and _orientation(image) in _SIDES_SWAPPED:
            return width, height
        return height, width


def resize_square(image: Image.Image, size: int) -> Pixels:
    """Resize the short side to ``size`` (bicubic, antialiased) and cut the middle: ``uint8 [3, size, size]``.

    >>> resize_square(Image.new("RGB", (40, 30)), 8).shape
    (3, 8, 8)
    """
    return fit(image, size, size)


def fit(image: Image.Image, height: int, width: int) -> Pixels:
    """Scale an RGB image until it just covers ``height`` x ``width`` and cut the middle: ``uint8 [3, height, width]``.

    An image that has that size already keeps every pixel as it is.
    """
    if image.size != (width, height):
        image = _middle(image, height, width)
        # Whichever side needs the larger factor decides; integers, so that the size is the same everywhere.
        if image.width * height >= image.height * width:
            covering = max(width, image.width * height // image.height), height
        else:
            covering = width, max(height, image.height * width // image.width)
        # One axis after the other, width first: Pillow rounds after each, and its versions differ in which is first.
        for size in ((covering[0], image.height), covering):
            image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        image = image.crop((left, top, left + width, top + height))
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def _middle(image: Image.Image, height: int, width: int) -> Image.Image:
    """Cut what lies far outside the final crop, or a strip of 2 x 100,000 pixels would be scaled to gigabytes."""
    # Twice the crop leaves more margin than the resampling filter reaches.
    spare_x = max(0, (image.width - 2 * -(-image.height * width // height)) // 2)
    spare_y = max(0, (image.height - 2 * -(-image.width * height // width)) // 2)
    if not spare_x and not spare_y:
        return image
    return image.crop((spare_x, spare_y, image.width - spare_x, image.height - spare_y))


@contextmanager
def _opened(path: Path, limit: int | None = None) -> Iterator[Image.Image]:
    """Open an image lazily; whatever goes wrong with the file, here or in the body, becomes a ``BadImage``."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        raise BadImage(path, NO_FILE) from None
    except IsADirectoryError:
        raise BadImage(path, "it is a folder") from None
    except PermissionError:
        raise BadImage(path, "there is no permission to read it") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files says nothing about this one
            raise
        raise BadImage(path, f"it cannot be opened ({error.strerror})") from error
    with stream, _decoded(stream, path, limit) as image:
        yield image


@contextmanager
def _decoded(stream: BinaryIO, path: Path, limit: int | None, untrusted: bool = False) -> Iterator[Image.Image]:
    most = min(limit or max_pixels(), MOST_PIXELS)
    pixels = 0
    try:
        _lift_pillow_limit()
        with Image.open(stream, formats=_formats(untrusted)) as image:
            if (pixels := image.width * image.height) > most:
                raise BadImage(path, too_many_pixels(pixels, limit))
            yield image
    except BadImage:
        raise
    except Exception as error:
        # Decoders that find no memory often call the file broken, and so no file is where there is not enough for it.
        if is_out_of_memory(error) or not _has_room(pixels):
            raise OutOfMemory(f"There is not enough memory to decode {path}; {MORE_MEMORY}") from error
        # Decoders meet broken bytes with almost any exception (OSError, SyntaxError, struct.error, IndexError...).
        raise BadImage(path, _reason(stream, error, limit, untrusted)) from error


def _has_room(pixels: int) -> bool:
    """Whether there is memory to decode so many pixels; none of it is used."""
    try:
        np.empty(min(pixels, MOST_PIXELS) * _BYTES_PER_PIXEL, np.uint8)
    except MemoryError:
        return False
    return True


def _lift_pillow_limit() -> None:
    """Raise Pillow's process-wide pixel limit to ours; it is never lowered, nor put back where someone removed it."""
    if Image.MAX_IMAGE_PIXELS is not None and Image.MAX_IMAGE_PIXELS < MOST_PIXELS:
        Image.MAX_IMAGE_PIXELS = MOST_PIXELS


def upload_formats() -> tuple[str, ...]:
    """The formats that strangers may send and that are read here, as people write them.

    >>> upload_formats()[:5]
    ('JPEG', 'PNG', 'WebP', 'GIF', 'BMP')
    """
    return tuple({"WEBP": "WebP", _HEIF: "HEIC"}.get(name, name) for name in _formats(True))


@functools.cache
def _formats(untrusted: bool) -> tuple[str, ...]:
    """Those of our formats that this Pillow was built with, and HEIC where it can be read."""
    for plugin in _PLUGINS.values():  # and not Image.init(), which loads forty more
        importlib.import_module(f"PIL.{plugin}ImagePlugin")
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    return tuple(name for name in (*(COMMON_FORMATS if untrusted else _PLUGINS), _HEIF) if name in Image.OPEN)


class _InFewReads(BytesIO):
    """A file that must be read in large pieces: Pillow walks through heads of many tiny ones a microsecond each."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._left = _READS + len(content) // _BYTES_PER_READ

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes."""
        self._left -= 1
        if self._left < 0:
            raise OSError("it is in too many pieces")
        return super().read(size)


def _scans(content: bytes) -> int:
    """The number of scans in a JPEG.

    Progressive ones have several. A file of kilobytes can have thousands of empty ones, and each takes a walk over
    all pixels.
    """
    scans, place = 0, 0
    while (marker := _MARKER.search(content, place)) and content[marker.start() + 1] != _END:
        scans += content[marker.start() + 1] == _SCAN
        length = int.from_bytes(content[marker.end() : marker.end() + 2])
        place = marker.end() + length
    return scans


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
    except OSError:  # the pixels themselves are broken: some formats decode them to reach the EXIF data
        raise
    except Exception:  # broken EXIF data is common in otherwise good photographs
        return 1
    return value if isinstance(value, int) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode to RGB; 16-bit and float pixels are scaled, where Pillow's own conversion would clip them."""
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_8_bits(image))
    return _on_white(image) if image.has_transparency_data else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """In strips, as Pillow does it with the interpreter's lock held and all other threads would wait for a whole."""
    page = Image.new("RGB", image.size)
    rows = max(1, _STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        page.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return page


def _to_8_bits(image: Image.Image) -> Pixels:
    """Integers are taken for 16-bit ones; floats for 0..1 when none is above 1, and for 0..255 otherwise."""
    values = np.nan_to_num(np.asarray(image).astype(np.float32), nan=0.0, posinf=255.0, neginf=0.0)
    if image.mode != "F":
        values = values / 257.0
    elif values.max(initial=0.0) <= 1.0:
        values = values * 255.0
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def _reason(stream: BinaryIO, error: Exception, limit: int | None, untrusted: bool) -> str:
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return too_many_pixels(MOST_PIXELS + 1, limit)
    if isinstance(error, UnidentifiedImageError):
        if stream.seek(0, SEEK_END) == 0:
            return "the file is empty"
        stream.seek(0)
        start = stream.read(12)
        if start[4:8] == b"ftyp" and start[8:] in _HEIC_BRANDS and _HEIF not in Image.OPEN:
            how = "save it as JPEG" if untrusted else "`pip install pillow-heif`, or save it as JPEG"
            return f"it is a HEIC photo; {how} (on an iPhone: Settings, Camera, Formats, Most Compatible)"
        known = f" ({', '.join(upload_formats())})" if untrusted else ""
        return f"it is not an image in a format we know{known}"
    if "truncated" in str(error).lower():
        return "the file is cut short"
    return f"the image data is broken ({_one_line(error)})"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__
