"""From an image file of any common kind to RGB pixels, or to one sentence that says why not."""

from __future__ import annotations

import errno
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import SEEK_END, BytesIO
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from onea.data.dataset import Pixels
from onea.errors import OneaError

MAX_PIXELS = 300_000_000
"""An image that claims more pixels than this is refused before any of them is decoded."""

# Named, because Pillow's full list has formats that start other programs (EPS, WMF) or hold no pictures (HDF5, MPEG).
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "DIB", "GIF", "TIFF", "PPM", "JPEG2000", "ICO", "PCX", "QOI", "TGA")

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
    at_least: int | None = None,
    name: str = "image",
    max_pixels: int | None = None,
) -> Image.Image:
    """Read one image as it is meant to be seen: RGB, turned upright, transparency on white, first frame.

    Args:
        source: any file in a format that Pillow reads without outside programs, or the bytes of one.
        at_least: the short side that is needed later. A large JPEG is then decoded at a half, a quarter or an
            eighth of its size (never below twice this), which is many times faster and looks the same afterwards.
        name: what messages call an image that is given as bytes.
        max_pixels: an image that claims more is refused before any of them is decoded; ``MAX_PIXELS``, if None.

    Raises:
        BadImage: the file is missing, not an image, broken, or claims more than ``max_pixels`` pixels.
    """
    if isinstance(source, bytes):
        opened: AbstractContextManager[Image.Image] = _decoded(BytesIO(source), Path(name), max_pixels)
    else:
        opened = _opened(Path(source), max_pixels)
    with opened as image:
        if at_least is not None:
            image.draft(None, (2 * at_least, 2 * at_least))
        image.load()
        return upright_rgb(image)


def upright_rgb(image: Image.Image) -> Image.Image:
    """An image that is open already, as it is meant to be seen: RGB, turned upright, transparency on white."""
    orientation = _orientation(image)
    return _to_rgb(image.transpose(_TURN_BACK[orientation]) if orientation in _TURN_BACK else image)


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


def to_square(image: Image.Image, size: int) -> Pixels:
    """Resize the short side to ``size`` (bicubic, antialiased) and cut the middle: ``uint8 [3, size, size]``.

    >>> to_square(Image.new("RGB", (40, 30)), 8).shape
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
        image = image.resize(covering, Image.Resampling.BICUBIC)
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
def _opened(path: Path, max_pixels: int | None = None) -> Iterator[Image.Image]:
    """Open an image lazily; whatever goes wrong with the file, here or in the body, becomes a ``BadImage``."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        raise BadImage(path, "there is no such file") from None
    except IsADirectoryError:
        raise BadImage(path, "it is a folder") from None
    except PermissionError:
        raise BadImage(path, "there is no permission to read it") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files says nothing about this one
            raise
        raise BadImage(path, f"it cannot be opened ({error.strerror})") from error
    with stream, _decoded(stream, path, max_pixels) as image:
        yield image


@contextmanager
def _decoded(stream: BinaryIO, path: Path, limit: int | None) -> Iterator[Image.Image]:
    max_pixels = MAX_PIXELS if limit is None else min(limit, MAX_PIXELS)
    try:
        _lift_pillow_limit()
        with Image.open(stream, formats=_formats()) as image:
            if image.width * image.height > max_pixels:
                raise BadImage(path, _too_many_pixels(max_pixels))
            yield image
    except BadImage:
        raise
    except Exception as error:
        # Decoders meet broken bytes with almost any exception (OSError, SyntaxError, struct.error, IndexError...).
        raise BadImage(path, _reason(stream, error, max_pixels)) from error


def _lift_pillow_limit() -> None:
    """Raise Pillow's process-wide pixel limit to ours; it is never lowered, nor put back where someone removed it."""
    if Image.MAX_IMAGE_PIXELS is not None and Image.MAX_IMAGE_PIXELS < MAX_PIXELS:
        Image.MAX_IMAGE_PIXELS = MAX_PIXELS


@functools.cache
def _formats() -> tuple[str, ...]:
    """Those of our formats that this Pillow was built with."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


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
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        page = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(page, layer).convert("RGB")
    return image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Pixels:
    """Integers are taken for 16-bit ones; floats for 0..1 when none is above 1, and for 0..255 otherwise."""
    values = np.nan_to_num(np.asarray(image).astype(np.float32), nan=0.0, posinf=255.0, neginf=0.0)
    if image.mode != "F":
        values = values / 257.0
    elif values.max(initial=0.0) <= 1.0:
        values = values * 255.0
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def _reason(stream: BinaryIO, error: Exception, max_pixels: int) -> str:
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return _too_many_pixels(max_pixels)
    if isinstance(error, UnidentifiedImageError):
        return "the file is empty" if stream.seek(0, SEEK_END) == 0 else "it is not an image in a format we know"
    if isinstance(error, MemoryError):
        return "there is not enough memory to decode it"
    if "truncated" in str(error).lower():
        return "the file is cut short"
    return f"the image data is broken ({_one_line(error)})"


def _too_many_pixels(max_pixels: int) -> str:
    return f"it has more than {max_pixels // 1_000_000} megapixels"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__
