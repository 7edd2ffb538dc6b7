# SPDX-License-Identifier: Apache-2.0
"""Problem documents (RFC 9457): one sentence that says what is wrong and what to do, and no path of this machine."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from onea.errors import OneaError, is_out_of_memory
from onea.files import NO_SPACE
from onea.text import single_line

MEDIA_TYPE = "application/problem+json"
_TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}  # as newer Pythons call them
_SENTENCES = {
    404: "There is nothing here; see /docs for what there is.",
    405: "This address does not take that method; see /docs for what it takes.",
}
log = logging.getLogger("onea.serve")


class Problem(Exception):  # noqa: N818 - RFC 9457 calls it so
    """A request that is refused, with the status and the sentence that the client gets."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, dict(headers or {})


def busy(
    detail: str = "The service is busy; try again in a moment.", headers: Mapping[str, str] | None = None
) -> Problem:
    """What a client gets that should come again."""
    return Problem(503, detail, {"Retry-After": "1"} | dict(headers or {}))


def document(status: int, detail: str) -> dict[str, Any]:
    """The members of a problem document.

    >>> document(404, "There is no training job 'x'.")
    {'type': 'about:blank', 'title': 'Not Found', 'status': 404, 'detail': "There is no training job 'x'."}
    """
    return {"type": "about:blank", "title": _TITLES.get(status, HTTPStatus(status).phrase), "status": status} | {
        "detail": single_line(detail)
    }


def response(problem: Problem) -> Response:
    """A problem as the client gets it."""
    return JSONResponse(
        document(problem.status, problem.detail), problem.status, problem.headers, media_type=MEDIA_TYPE
    )


def without_path(text: str, path: Path) -> str:
    """A message about the model folder that does not say where it lies.

    >>> without_path("/srv/models/shop.onea is damaged.", Path("/srv/models/shop.onea"))
    'shop.onea is damaged.'
    """
    return text.replace(str(path), path.name)


def of_folder(error: OneaError, path: Path, status: int = 409) -> Problem:
    """What a client gets when the model folder cannot be changed: it is being written, damaged, or the disk is full."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in NO_SPACE:
        status = 507
    return Problem(status, without_path(str(error), path))


def of_system(error: OSError) -> Problem | None:
    """A machine that is short of something; None for what we did not expect."""
    if error.errno in NO_SPACE:
        return Problem(507, "The service has no disk space left for what you sent; send less or ask its operator.")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return busy("The service has too many files open; try again in a moment.")
    return None


def unexpected(error: Exception) -> Problem:
    """A shortage of memory, or a mistake of ours: noted in the log, and no detail of it sent."""
    if is_out_of_memory(error):
        log.error("out of memory: %s", error)
        return Problem(507, "The service has too little memory for this; send fewer or smaller images, or try again.")
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return Problem(500, "The service made a mistake; its log says more.")


def install(app: FastAPI) -> None:
    """Let every error of the app answer with a problem document."""

    async def on_problem(_: Request, error: Exception) -> Response:
        return response(_as_problem(error))

    for kind in (Problem, OneaError, HTTPException, RequestValidationError, ClientDisconnect, OSError):
        app.add_exception_handler(kind, on_problem)


def _as_problem(error: Exception) -> Problem:
    if isinstance(error, Problem):
        return error
    if isinstance(error, OneaError):
        return Problem(422, str(error))
    if isinstance(error, RequestValidationError):
        return Problem(422, _first_mistake(error))
    if isinstance(error, HTTPException):
        detail = _SENTENCES.get(error.status_code) or f"{error.detail}".rstrip(".") + "."
        return Problem(error.status_code, detail, error.headers)
    if isinstance(error, ClientDisconnect):
        return Problem(400, "The request ended before it was complete; send it again.")
    if isinstance(error, OSError) and (known := of_system(error)):
        return known
    return unexpected(error)


def _first_mistake(error: RequestValidationError) -> str:
    mistake = error.errors()[0]
    place = " ".join(str(part) for part in mistake["loc"][1:]) or "the request"
    message = str(mistake["msg"])
    return f"{place}: {message[:1].lower()}{message[1:]}."
