# SPDX-License-Identifier: Apache-2.0
"""Uploaded images: read from forms, zips and raw bodies, and decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from onea.data.dataset import Pixels
from onea.data.decode import BadImage, fit, pixel_count, read_image
from onea.data.file_checks import OnBad, summarise_reasons
from onea.data.pixel_limit import MEGAPIXEL
from onea.model.learning.images import DecodedImages
from onea.serve.archive import read_archive
from onea.serve.problems import Problem
from onea.serve.settings import Limits
from onea.serve.workers import DecoderPool, DecodingJob

_IN_MEMORY_BYTES = 1_000_000  # of a body; larger ones are stored on disk
_RAW_TYPES = ("image/", "application/octet-stream")
_ZIP_TYPES = ("application/zip", "application/x-zip-compressed")
Result = TypeVar("Result")


@dataclass(frozen=True)
class UploadedImage:
    """An image in a request: its name, a function that reads its bytes, and its class if it has one."""

    name: str
    read: Callable[[], bytes]
    label: str | None = None

    def count_pixels(self) -> int:
        """Number of pixels, from the header of the file."""
        return pixel_count(self.read())

    def decode(self, side: int, limits: Limits) -> Pixels:
        """The image as a square of pixels.

        Raises:
            BadImage: it cannot be read, or has more pixels than allowed.
        """
        image = read_image(self.read(), min_side=side, name=self.name, limit=limits.pixels, untrusted=True)
        return fit(image, side, side)


@dataclass(frozen=True)
class LearnUpload:
    """The content of a teaching request.

    Attributes:
        images: images with their classes; background images have none.
        left_out: names of files in a zip that are not images of a class.
        update_name: name of the update in the history.
    """

    images: list[UploadedImage]
    left_out: tuple[str, ...] = ()
    update_name: str | None = None


async def decode_for_prediction(
    images: Sequence[UploadedImage], side: int, limits: Limits, decoders: DecoderPool, client: str, on_bad: OnBad
) -> tuple[DecodedImages, dict[int, str]]:
    """All readable images, and the reasons why the others cannot be read, by their positions.

    Raises:
        BadImage: an image cannot be read, and ``on_bad`` is ``fail``.
        Problem: no image can be read, or they have too many pixels.
    """
    run = partial(decoders.run, ("predict", client), max_pixels=limits.waiting_pixels)
    pixels, reasons = await _decode_all(images, side, limits, run, limits.predict_pixels, stop=on_bad == "fail")
    if len(reasons) == len(images):
        raise _unreadable(images, reasons)
    good = [n for n in range(len(images)) if n not in reasons]
    return DecodedImages(pixels[good], None, tuple(images[n].name for n in good)), reasons


async def decode_for_learning(
    upload: LearnUpload, side: int, limits: Limits, decoders: DecoderPool, client: str, on_bad: OnBad
) -> DecodedImages:
    """All readable images with their classes.

    Raises:
        Problem: images cannot be read and ``on_bad`` is ``fail``, no image can be read, or they have too many pixels.
    """
    images = upload.images
    run = partial(decoders.run, ("learn", client), max_pixels=limits.learn_pixels)
    pixels, reasons = await _decode_all(images, side, limits, run, limits.learn_pixels)
    if len(reasons) == len(images) or (reasons and on_bad == "fail"):
        raise _unreadable(images, reasons)
    good = [n for n in range(len(images)) if n not in reasons]
    labels = tuple(images[n].label or "" for n in good)
    names = tuple(images[n].name for n in good)
    skipped = tuple(_lines(images, reasons))
    return DecodedImages(pixels[good] if reasons else pixels, labels, names, skipped, ignored_files=upload.left_out)


async def _decode_all(
    images: Sequence[UploadedImage],
    side: int,
    limits: Limits,
    run: Callable[[Sequence[DecodingJob[Any]]], Coroutine[Any, Any, list[Any]]],
    max_pixels: int,
    stop: bool = False,
) -> tuple[Pixels, dict[int, str]]:
    """The pixels of all images, and the reasons why some cannot be read; ``stop`` raises the first error."""
    counts = await run([DecodingJob(image.count_pixels, 0) for image in images])
    if sum(counts) > max_pixels:
        megapixels = max_pixels // MEGAPIXEL
        raise Problem(413, f"The images have more than {megapixels:,} megapixels together; send fewer at a time.")
    pixels = np.empty((len(images), 3, side, side), np.uint8)
    reasons: dict[int, str] = {}

    def decode(n: int) -> None:
        try:
            pixels[n] = images[n].decode(side, limits)
        except BadImage as error:
            if stop:
                raise
            reasons[n] = error.reason

    await run([DecodingJob(partial(decode, n), count) for n, count in enumerate(counts)])
    return pixels, dict(sorted(reasons.items()))


def _lines(images: Sequence[UploadedImage], reasons: dict[int, str]) -> list[str]:
    return [f"{images[n].name}: {reason}" for n, reason in reasons.items()]


def _unreadable(images: Sequence[UploadedImage], reasons: dict[int, str]) -> Problem:
    them = "it" if len(reasons) == 1 else "them"
    names = summarise_reasons(_lines(images, reasons))
    detail = (
        f"{len(reasons)} of {len(images)} images cannot be read ({names}); leave {them} out and send the rest again."
    )
    return Problem(422, detail)


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def read_predict_request(request: Request, limits: Limits) -> AsyncIterator[list[UploadedImage]]:
    """The images of a request: every file of a form, or the body itself. They are deleted at the end of the block."""
    media_type = _media_type(request)
    if media_type == "multipart/form-data":
        async with _open_form(request, limits.predict_images, ("images",)) as form:
            yield _form_images(form)
    elif media_type.startswith(_RAW_TYPES):
        async with _open_body(request) as body:
            yield [UploadedImage("1", partial(_read_all, body))]
    else:
        raise Problem(415, "Send an image as the body with its type (image/jpeg), or a form (multipart/form-data).")


@asynccontextmanager
async def read_learn_request(request: Request, limits: Limits, background: bool = False) -> AsyncIterator[LearnUpload]:
    """The content of a teaching request. The images are deleted at the end of the block."""
    media_type = _media_type(request)
    if background:
        if media_type != "multipart/form-data":
            raise Problem(415, "Send a form (multipart/form-data) with images of none of the classes.")
        async with _open_form(request, limits.learn_files, ("images", "name")) as form:
            yield LearnUpload(_form_images(form), update_name=_text(form, "name"))
    elif media_type in _ZIP_TYPES:
        async with _open_body(request) as body:
            yield await run_in_threadpool(_read_zip, body, limits)
    elif media_type == "multipart/form-data":
        async with _open_form(request, limits.learn_files, ("images", "class", "zip", "name")) as form:
            yield await run_in_threadpool(_read_learn_form, form, limits)
    else:
        raise Problem(
            415,
            "Send a zip of class folders (application/zip), or a form (multipart/form-data) with a class and images.",
        )


def _form_images(form: FormData) -> list[UploadedImage]:
    images = [_form_image(file, n) for n, file in enumerate(_files(form, "images"))]
    if not images:
        raise Problem(422, "The form has no image; send at least one file in the field 'images'.")
    return images


def _read_learn_form(form: FormData, limits: Limits) -> LearnUpload:
    zips, files, labels = _files(form, "zip"), _files(form, "images"), _texts(form, "class")
    name = _text(form, "name")
    if zips and (files or labels):
        raise Problem(422, "The form has both a zip and images of a class; send one of the two.")
    if len(zips) > 1:
        raise Problem(422, "The form has several zips; send each in a separate request.")
    if zips:
        return _read_zip(zips[0].file, limits, name)
    if not labels or not files:
        raise Problem(422, "The form needs a class name in the field 'class' and its images in the field 'images'.")
    if len(labels) not in (1, len(files)):
        raise Problem(422, "The form must have one class for all images, or one for each of them, in their order.")
    labels = labels * len(files) if len(labels) == 1 else labels
    return LearnUpload([_form_image(file, n, labels[n]) for n, file in enumerate(files)], update_name=name)


def _read_zip(file: BinaryIO, limits: Limits, update_name: str | None = None) -> LearnUpload:
    entries, left_out = read_archive(file, limits)
    return LearnUpload([UploadedImage(name, read, label) for label, name, read in entries], left_out, update_name)


def _form_image(upload: UploadFile, number: int, label: str | None = None) -> UploadedImage:
    """An image of a form. Its file name is only used in messages, and only the last part of it."""
    name = (upload.filename or "").replace("\\", "/").rsplit("/", 1)[-1].strip()[:100]
    if not name or not name.isprintable():
        name = str(number + 1)
    return UploadedImage(name, partial(_read_all, upload.file), label)


def _read_all(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


@asynccontextmanager
async def _open_form(request: Request, max_files: int, fields: tuple[str, ...]) -> AsyncIterator[FormData]:
    try:
        async with request.form(max_files=max_files, max_fields=max_files + 10, max_part_size=10_000) as form:
            for name in form:
                if name not in fields:
                    allowed = ", ".join(fields)
                    raise Problem(422, f"The form has an unknown field '{name[:50]}'; the fields are: {allowed}.")
            yield form
    except HTTPException as error:
        raise _form_problem(str(error.detail), max_files) from error


def _form_problem(reason: str, max_files: int) -> Problem:
    if reason.startswith("Too many files"):
        return Problem(413, f"The form has more than {max_files} files; send several requests, or a zip to learn.")
    if reason.startswith(("Too many fields", "Part exceeded")):
        return Problem(413, "The form has too many fields, or fields that are too long; send images as files.")
    return Problem(400, "The form cannot be read; send it as multipart/form-data with a boundary.")


def _files(form: FormData, name: str) -> list[UploadFile]:
    values = form.getlist(name)
    if not all(isinstance(value, UploadFile) for value in values):
        raise Problem(422, f"The field '{name}' is text; send files in it.")
    return cast(list[UploadFile], values)


def _texts(form: FormData, name: str) -> list[str]:
    values = form.getlist(name)
    if any(isinstance(value, UploadFile) for value in values):
        raise Problem(422, f"The field '{name}' must be text.")
    return cast(list[str], values)


def _text(form: FormData, name: str) -> str | None:
    texts = _texts(form, name)
    if len(texts) > 1:
        raise Problem(422, f"The field '{name}' may occur only once.")
    return texts[0] if texts else None


@asynccontextmanager
async def _open_body(request: Request) -> AsyncIterator[BinaryIO]:
    with SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as file:
        async for chunk in request.stream():
            file.write(chunk)
        file.seek(0)
        yield cast(BinaryIO, file)
