# SPDX-License-Identifier: Apache-2.0
"""Uploaded images, from forms and raw bodies; always decoded, never read by a path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from onea.data.dataset import Pixels
from onea.data.decode import BadImage, fit, pixel_count, read_image
from onea.data.image_files import OnBad, named_by_reason
from onea.data.pixel_limit import MEGAPIXEL
from onea.model.learning.images import DecodedImages
from onea.serve.archive import Archive
from onea.serve.decoding import Decoders, DecodingJob
from onea.serve.problems import Problem
from onea.serve.settings import Limits

_IN_MEMORY = 1_000_000  # bytes of an upload; larger ones wait on disk
_RAW = ("image/", "application/octet-stream")
_ZIP = ("application/zip", "application/x-zip-compressed")
LeftOut = tuple[str, ...]
Reader = Callable[[], bytes]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Sent:
    """An image that a client sent: what to call it, how to read it, and its class where one was given."""

    name: str
    read: Reader
    label: str | None = None


def square(sent: Sent, side: int, limits: Limits) -> Pixels:
    """The image as a square of pixels.

    Raises:
        BadImage: it cannot be read as an image, or has more pixels than allowed.
    """
    image = read_image(sent.read(), at_least=side, name=sent.name, limit=limits.pixels, wary=True)
    return fit(image, side, side)


async def askable(
    images: Sequence[Sent], side: int, limits: Limits, decoders: Decoders, client: str, on_bad: OnBad = "fail"
) -> tuple[DecodedImages, dict[int, str]]:
    """All images, as the network takes them; and, where they may be skipped, why some could not be read.

    Raises:
        BadImage: one cannot be read.
        Problem: none can, or they are too many pixels.
    """
    pixels = np.empty((len(images), 3, side, side), np.uint8)
    bad: dict[int, str] = {}

    def place(row: int) -> None:
        try:
            pixels[row] = square(images[row], side, limits)
        except BadImage as error:
            if on_bad == "fail":
                raise
            bad[row] = error.reason

    turn = partial(decoders.results, ("ask", client), most=limits.waiting_pixels)
    await _with_each(images, place, turn, limits.predict_pixels)
    good = [row for row in range(len(images)) if row not in bad]
    if not good:
        raise _unreadable([f"{images[row].name}: {reason}" for row, reason in sorted(bad.items())], len(images))
    return DecodedImages(pixels[good], None, tuple(images[row].name for row in good)), dict(sorted(bad.items()))


async def learnable(
    images: Sequence[Sent],
    left_out: LeftOut,
    side: int,
    limits: Limits,
    decoders: Decoders,
    client: str,
    on_bad: OnBad = "fail",
) -> DecodedImages:
    """All images with their classes; those that cannot be read may be skipped.

    Raises:
        Problem: some cannot be read, and the message names them; or they are too many pixels.
    """
    pixels = np.empty((len(images), 3, side, side), np.uint8)

    def place_or_reason(row: int) -> str | None:
        try:
            pixels[row] = square(images[row], side, limits)
        except BadImage as error:
            return f"{images[row].name}: {error.reason}"
        return None

    turn = partial(decoders.results, ("learn", client), most=limits.learn_pixels)
    reasons = await _with_each(images, place_or_reason, turn, limits.learn_pixels)
    bad, good = list(filter(None, reasons)), [row for row, reason in enumerate(reasons) if reason is None]
    if bad and (on_bad == "fail" or not good):
        raise _unreadable(bad, len(images))
    labels = tuple(images[row].label or "" for row in good)
    names = tuple(images[row].name for row in good)
    return DecodedImages(pixels[good] if bad else pixels, labels, names, tuple(bad), left_out=left_out)


def _unreadable(bad: Sequence[str], total: int) -> Problem:
    it = "it" if len(bad) == 1 else "them"
    return Problem(
        422,
        f"{len(bad)} of {total} images cannot be read ({named_by_reason(bad)}); leave {it} out and send the rest "
        "again.",
    )


async def _with_each(
    images: Sequence[Sent],
    work: Callable[[int], Result],
    turn: Callable[[Sequence[DecodingJob[Any]]], Coroutine[Any, Any, list[Any]]],
    most: int,
) -> list[Result]:
    """What comes of some work with each image, by its row, when their turn has come."""
    counts = await turn([DecodingJob(partial(_pixels_of, sent), 0) for sent in images])
    if sum(counts) > most:
        raise Problem(
            413, f"The images have more than {most // MEGAPIXEL:,} megapixels together; send fewer at a time."
        )
    return await turn([DecodingJob(partial(work, row), count) for row, count in enumerate(counts)])


def _pixels_of(sent: Sent) -> int:
    return pixel_count(sent.read())


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What comes of some work, which is given up when the client goes away.

    Raises:
        ClientDisconnect: it has gone away.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def images_to_predict(request: Request, limits: Limits) -> AsyncIterator[list[Sent]]:
    """The images of a request: every file of a form, or the body itself; gone when the block is left."""
    kind = _kind(request)
    if kind == "multipart/form-data":
        async with _form(request, limits.predict_images, ("images",)) as form:
            yield _images_in(form)
    elif kind.startswith(_RAW):
        async with _body(request) as body:
            yield [Sent("1", partial(_whole, body))]
    else:
        raise Problem(415, "Send an image as the body with its type (image/jpeg), or a form (multipart/form-data).")


@asynccontextmanager
async def images_to_learn(
    request: Request, limits: Limits, background: bool = False
) -> AsyncIterator[tuple[list[Sent], LeftOut, str | None]]:
    """The images of a training job with their classes, files that are none, and its name in the history.

    Those of the ``background`` have no class. They are gone when the block is left.
    """
    kind = _kind(request)
    if background:
        if kind != "multipart/form-data":
            raise Problem(415, "Send a form (multipart/form-data) with images of none of the classes.")
        async with _form(request, limits.learn_files, ("images", "name")) as form:
            yield _images_in(form), (), _text(form, "name")
    elif kind in _ZIP:
        async with _body(request) as body:
            yield (*await run_in_threadpool(_of_zip, body, limits), None)
    elif kind == "multipart/form-data":
        async with _form(request, limits.learn_files, ("images", "class", "zip", "name")) as form:
            yield (*await run_in_threadpool(_of_form, form, limits), _text(form, "name"))
    else:
        raise Problem(
            415,
            "Send a zip of class folders (application/zip), or a form (multipart/form-data) with a class and images.",
        )


def _images_in(form: Any) -> list[Sent]:
    images = [_of_file(file, n) for n, file in enumerate(_files(form, "images"))]
    if not images:
        raise Problem(422, "The form has no image; send at least one file in the field 'images'.")
    return images


def _of_form(form: Any, limits: Limits) -> tuple[list[Sent], LeftOut]:
    zips, files, labels = _files(form, "zip"), _files(form, "images"), _texts(form, "class")
    if zips and (files or labels):
        raise Problem(422, "The form has a zip as well as images of one class; send one of the two.")
    if len(zips) > 1:
        raise Problem(422, "The form has several zips; send one after the other.")
    if zips:
        return _of_zip(zips[0].file, limits)
    if not labels or not files:
        raise Problem(422, "The form needs a class name in the field 'class' and its photos in the field 'images'.")
    if len(labels) not in (1, len(files)):
        raise Problem(422, "The form must name one class for all images, or one for each of them, in their order.")
    return [_of_file(file, n, labels[n if len(labels) > 1 else 0]) for n, file in enumerate(files)], ()


def _of_zip(file: BinaryIO, limits: Limits) -> tuple[list[Sent], LeftOut]:
    archive = Archive(file, limits)
    return [Sent(name, read, label) for label, name, read in archive.entries], archive.left_out


def _of_file(upload: UploadFile, number: int, label: str | None = None) -> Sent:
    """Clients name files as they like; a name is only ever shown, and only its last part."""
    name = (upload.filename or "").replace("\\", "/").rsplit("/", 1)[-1].strip()[:100]
    shown = name if name and name.isprintable() else str(number + 1)
    return Sent(shown, partial(_whole, upload.file), label)


def _whole(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


@asynccontextmanager
async def _form(request: Request, files: int, known: tuple[str, ...]) -> AsyncIterator[Any]:
    try:
        opened: AbstractAsyncContextManager[Any] = request.form(
            max_files=files, max_fields=files + 10, max_part_size=10_000
        )
        async with opened as form:
            for name in form:
                if name not in known:
                    takes = ", ".join(known)
                    raise Problem(422, f"The form has an unknown field '{name[:50]}'; the fields are: {takes}.")
            yield form
    except HTTPException as error:
        raise _form_problem(str(error.detail), files) from error


def _form_problem(reason: str, files: int) -> Problem:
    if reason.startswith("Too many files"):
        return Problem(
            413, f"The form has more than {files} files; send them in several requests, or as a zip to learn."
        )
    if reason.startswith(("Too many fields", "Part exceeded")):
        return Problem(413, "The form has more or longer fields than needed; send images as files.")
    return Problem(400, "The form cannot be read; send it as multipart/form-data with a boundary.")


def _files(form: Any, name: str) -> list[UploadFile]:
    found = form.getlist(name)
    if not all(isinstance(value, UploadFile) for value in found):
        raise Problem(422, f"The field '{name}' is text; send files in it.")
    return list(found)


def _texts(form: Any, name: str) -> list[str]:
    found = form.getlist(name)
    if any(isinstance(value, UploadFile) for value in found):
        raise Problem(422, f"The field '{name}' must be text.")
    return [str(value) for value in found]


def _text(form: Any, name: str) -> str | None:
    found = _texts(form, name)
    if len(found) > 1:
        raise Problem(422, f"The field '{name}' must be one piece of text.")
    return found[0] if found else None


@asynccontextmanager
async def _body(request: Request) -> AsyncIterator[BinaryIO]:
    with SpooledTemporaryFile(max_size=_IN_MEMORY) as file:
        async for part in request.stream():
            file.write(part)
        file.seek(0)
        yield cast(BinaryIO, file)
