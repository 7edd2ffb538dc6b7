# SPDX-License-Identifier: Apache-2.0
"""Decode image files of common formats to RGB pixels, or report why it is not possible."""

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
from onea.data.pixel_limit import MAX_PIXEL_LIMIT, max_pixels, pixel_limit_reason
from onea.errors import MEMORY_REMEDY, OneaError, OutOfMemory, is_out_of_memory

_BYTES_PER_PIXEL = 16  # of memory, measured for WebP; other decoders need at most half

# An allowlist, because Pillow also has formats that start other programs (EPS, WMF), hold no images (HDF5, MPEG), or
# are decoded before their size is known (ICO).
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
_HEIF = "HEIF"  # HEIC photos of iPhones; requires pillow-heif
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
# Formats for untrusted uploads: written by cameras and browsers, decoding time is bounded by the size in the header,
# and Pillow decodes them without the GIL.
COMMON_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
NO_FILE = "there is no such file"

_EXIF_ORIENTATION = 0x0112
_TRANSPOSE_OF = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDES_SWAPPED = (5, 6, 7, 8)

_STRIP = 1_000_000  # pixels that are composited at once
_MAX_SCANS = 32  # of a JPEG, each of which visits all pixels; encoders write about ten
_SCAN, _END = 0xDA, 0xD9
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # of a JPEG segment, not of standalone markers
_READS, _BYTES_PER_READ = 2_000, 256  # of an untrusted file; encoders write chunks of kilobytes


class BadImage(OneaError):  # noqa: N818
    """An image file that cannot be decoded.

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
    """Decode one image: RGB, upright, transparency on white, first frame.

    Args:
        source: a file in one of the supported formats, or its bytes.
        min_side: the short side after a later resize. A large JPEG is then decoded at a half, a quarter or an eighth of
            its size, but at least twice this side, which is many times faster and gives the same result after resizing.
        name: name of an image given as bytes, for messages.
        limit: maximum number of pixels, checked before decoding; None for ``max_pixels()``.
        untrusted: whether bytes come from an untrusted source; then only ``COMMON_FORMATS`` are decoded, with limits.

    Raises:
        BadImage: the file is missing, not an image, corrupt, or declares too many pixels.
        OutOfMemory: there is not enough memory to decode it.
    """
    if isinstance(source, bytes):
        stream = _LimitedReads(source) if untrusted else BytesIO(source)
        opened: AbstractContextManager[Image.Image] = _decoded(stream, Path(name), limit, untrusted)
    else:
        opened = _opened(Path(source), limit)
    with opened as image:
        if (
            untrusted
            and isinstance(source, bytes)
            and image.format in ("JPEG", "MPO")
            and _count_scans(source) > _MAX_SCANS
        ):
            raise BadImage(name, f"it has more than {_MAX_SCANS} scans, each as expensive to decode as an image")
        if min_side is not None:
            image.draft(None, (2 * min_side, 2 * min_side))
        image.load()
        return upright_rgb(image)


def upright_rgb(image: Image.Image) -> Image.Image:
    """An open image as RGB, upright, transparency on white."""
    orientation = _orientation(image)
    return _to_rgb(image.transpose(_TRANSPOSE_OF[orientation]) if orientation in _TRANSPOSE_OF else image)


def pixel_count(content: bytes) -> int:
    """The number of pixels that an untrusted image declares, without decoding; 0 if it cannot be read."""
    try:
        with _decoded(_LimitedReads(content), Path("image"), MAX_PIXEL_LIMIT, untrusted=True) as image:
            return image.width * image.height
    except BadImage:
        return 0


def image_size(path: str | PathLike[str]) -> tuple[int, int]:
    """Height and width of the result of ``read_image``, from the header if the format allows it.

    Raises:
        BadImage: as in ``read_image``, if the header is enough to detect it.
    """
    with _opened(Path(path)) as image:
        width, height = image.size
        # Squares do not need the EXIF data, which some formats store after the pixels.
        # Pillow already swaps the sides of a rotated TIFF.
        if width != height and image.format != "TIFF" and _orientation(image) in _SIDES_SWAPPED:
            return width, height
        return height, width


def fit(image: Image.Image, height: int, width: int) -> Pixels:
    """Resize an RGB image to cover ``height`` x ``width`` (bicubic, antialiased) and crop the centre.

    >>> fit(Image.new("RGB", (40, 30)), 8, 8).shape  # uint8
    (3, 8, 8)
    """
    if image.size != (width, height):
        image = _crop_margins(image, height, width)
        # The side with the larger factor decides; in integers, so that sizes do not depend on rounding.
        if image.width * height >= image.height * width:
            covering = max(width, image.width * height // image.height), height
        else:
            covering = width, max(height, image.height * width // image.width)
        # One axis at a time, width first: Pillow rounds after each, and versions differ in their order.
        for size in ((covering[0], image.height), covering):
            image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        image = image.crop((left, top, left + width, top + height))
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def _crop_margins(image: Image.Image, height: int, width: int) -> Image.Image:
    """Remove margins far outside the final crop; a strip of 2 x 100,000 pixels would be resized to gigabytes."""
    # Twice the crop leaves more margin than the resampling filter needs.
    spare_x = max(0, (image.width - 2 * -(-image.height * width // height)) // 2)
    spare_y = max(0, (image.height - 2 * -(-image.width * height // width)) // 2)
    if not spare_x and not spare_y:
        return image
    return image.crop((spare_x, spare_y, image.width - spare_x, image.height - spare_y))


@contextmanager
def _opened(path: Path, limit: int | None = None) -> Iterator[Image.Image]:
    """Open an image lazily; errors here or in the body become ``BadImage``."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        raise BadImage(path, NO_FILE) from None
    except IsADirectoryError:
        raise BadImage(path, "it is a folder") from None
    except PermissionError:
        raise BadImage(path, "permission to read it was denied") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files; the image may be fine
            raise
        raise BadImage(path, f"it cannot be opened ({error.strerror})") from error
    with stream, _decoded(stream, path, limit) as image:
        yield image


@contextmanager
def _decoded(stream: BinaryIO, path: Path, limit: int | None, untrusted: bool = False) -> Iterator[Image.Image]:
    allowed = min(limit or max_pixels(), MAX_PIXEL_LIMIT)
    pixels = 0
    try:
        _lift_pillow_limit()
        with Image.open(stream, formats=_formats(untrusted)) as image:
            if (pixels := image.width * image.height) > allowed:
                raise BadImage(path, pixel_limit_reason(pixels, limit))
            yield image
    except BadImage:
        raise
    except Exception as error:
        # Decoders without memory often report a broken file, so check whether there would be enough.
        if is_out_of_memory(error) or not _has_memory_for(pixels):
            raise OutOfMemory(f"There is not enough memory to decode {path}; {MEMORY_REMEDY}") from error
        # Decoders raise almost any exception for broken bytes (OSError, SyntaxError, struct.error, IndexError...).
        raise BadImage(path, _reason(stream, error, limit, untrusted)) from error


def _has_memory_for(pixels: int) -> bool:
    """Whether there is enough memory to decode this many pixels."""
    try:
        np.empty(min(pixels, MAX_PIXEL_LIMIT) * _BYTES_PER_PIXEL, np.uint8)
    except MemoryError:
        return False
    return True


def _lift_pillow_limit() -> None:
    """Raise Pillow's process-wide limit to ``MAX_PIXEL_LIMIT``; a higher limit, or none, stays."""
    if Image.MAX_IMAGE_PIXELS is not None and Image.MAX_IMAGE_PIXELS < MAX_PIXEL_LIMIT:
        Image.MAX_IMAGE_PIXELS = MAX_PIXEL_LIMIT


def upload_formats() -> tuple[str, ...]:
    """The names of the formats that are accepted from untrusted sources.

    >>> upload_formats()[:5]
    ('JPEG', 'PNG', 'WebP', 'GIF', 'BMP')
    """
    return tuple({"WEBP": "WebP", _HEIF: "HEIC"}.get(name, name) for name in _formats(True))


@functools.cache
def _formats(untrusted: bool) -> tuple[str, ...]:
    """The supported formats of this build of Pillow, and HEIC if pillow-heif is installed."""
    for plugin in _PLUGINS.values():  # not Image.init(), which imports forty more
        importlib.import_module(f"PIL.{plugin}ImagePlugin")
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    return tuple(name for name in (*(COMMON_FORMATS if untrusted else _PLUGINS), _HEIF) if name in Image.OPEN)


class _LimitedReads(BytesIO):
    """A file with a limited number of reads, because headers may have many tiny chunks, each of which takes time."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._left = _READS + len(content) // _BYTES_PER_READ

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes."""
        self._left -= 1
        if self._left < 0:
            raise OSError("it has too many chunks")
        return super().read(size)


def _count_scans(content: bytes) -> int:
    """The number of scans in a JPEG.

    Progressive JPEGs have several. A file of kilobytes can have thousands of empty ones, each as slow as an image.
    """
    scans, position = 0, 0
    while (marker := _MARKER.search(content, position)) and content[marker.start() + 1] != _END:
        scans += content[marker.start() + 1] == _SCAN
        length = int.from_bytes(content[marker.end() : marker.end() + 2])
        position = marker.end() + length
    return scans


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
    except OSError:  # broken pixels: some formats decode them to reach the EXIF data
        raise
    except Exception:  # broken EXIF data is common in valid photographs
        return 1
    return value if isinstance(value, int) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow mode to RGB; 16-bit and float pixels are scaled, which Pillow would clip."""
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_8_bits(image))
    return _on_white(image) if image.has_transparency_data else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Composite on white, in strips, because Pillow holds the GIL while compositing."""
    page = Image.new("RGB", image.size)
    rows = max(1, _STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        page.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return page


def _to_8_bits(image: Image.Image) -> Pixels:
    """Scale to 8 bits. Integers are scaled from 16 bits; floats from 0..1 if none is above 1, else from 0..255."""
    values = np.nan_to_num(np.asarray(image).astype(np.float32), nan=0.0, posinf=255.0, neginf=0.0)
    if image.mode != "F":
        values = values / 257.0
    elif values.max(initial=0.0) <= 1.0:
        values = values * 255.0
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def _reason(stream: BinaryIO, error: Exception, limit: int | None, untrusted: bool) -> str:
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return pixel_limit_reason(MAX_PIXEL_LIMIT + 1, limit)
    if isinstance(error, UnidentifiedImageError):
        if stream.seek(0, SEEK_END) == 0:
            return "the file is empty"
        stream.seek(0)
        start = stream.read(12)
        if start[4:8] == b"ftyp" and start[8:] in _HEIC_BRANDS and _HEIF not in Image.OPEN:
            remedy = "save it as JPEG" if untrusted else "`pip install pillow-heif`, or save it as JPEG"
            return f"it is a HEIC photo; {remedy} (on an iPhone: Settings, Camera, Formats, Most Compatible)"
        formats = f" ({', '.join(upload_formats())})" if untrusted else ""
        return f"it is not an image in a supported format{formats}"
    if "truncated" in str(error).lower():
        return "the file is cut short"
    message = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"the image data is broken ({message})"
