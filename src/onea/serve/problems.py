# SPDX-License-Identifier: Apache-2.0
"""Problem documents (RFC 9457): one sentence about the problem and its solution, without paths of this machine."""

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
_DETAILS = {
    404: "There is nothing at this address; see /docs for the API.",
    405: "This address does not accept this method; see /docs for the API.",
}
log = logging.getLogger("onea.serve")


class Problem(Exception):  # noqa: N818 - the term of RFC 9457
    """A refused request, with the status and the detail of its response."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, dict(headers or {})


def busy(
    detail: str = "The service is busy; try again in a moment.", headers: Mapping[str, str] | None = None
) -> Problem:
    """The problem for a request that the client may repeat later."""
    return Problem(503, detail, {"Retry-After": "1"} | dict(headers or {}))


def document(status: int, detail: str) -> dict[str, Any]:
    """The members of a problem document.

    >>> document(404, "There is no training job 'x'.")
    {'type': 'about:blank', 'title': 'Not Found', 'status': 404, 'detail': "There is no training job 'x'."}
    """
    title = _TITLES.get(status, HTTPStatus(status).phrase)
    return {"type": "about:blank", "title": title, "status": status, "detail": single_line(detail)}


def response(problem: Problem) -> Response:
    """The response of a problem."""
    return JSONResponse(
        document(problem.status, problem.detail), problem.status, problem.headers, media_type=MEDIA_TYPE
    )


def without_path(text: str, path: Path) -> str:
    """A message about the model folder without the path to it.

    >>> without_path("/srv/models/shop.onea is damaged.", Path("/srv/models/shop.onea"))
    'shop.onea is damaged.'
    """
    return text.replace(str(path), path.name)


def from_folder_error(error: OneaError, path: Path) -> Problem:
    """The problem of a model folder that cannot be changed: it is locked, damaged, or the disk is full."""
    cause = error.__cause__
    is_full = isinstance(cause, OSError) and cause.errno in NO_SPACE
    return Problem(507 if is_full else 409, without_path(str(error), path))


def unexpected(error: Exception) -> Problem:
    """The problem for lack of memory or a bug, which is logged; the client gets no details."""
    if is_out_of_memory(error):
        log.error("out of memory: %s", error)
        return Problem(
            507, "The service does not have enough memory for this; send fewer or smaller images, or try again."
        )
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return Problem(500, "Internal error of the service; see its log.")


def install(app: FastAPI) -> None:
    """Answer every error of the app with a problem document."""

    async def on_error(_: Request, error: Exception) -> Response:
        return response(_from_error(error))

    for kind in (Problem, OneaError, HTTPException, RequestValidationError, ClientDisconnect, OSError):
        app.add_exception_handler(kind, on_error)


def _from_error(error: Exception) -> Problem:
    if isinstance(error, Problem):
        return error
    if isinstance(error, OneaError):
        return Problem(422, str(error))
    if isinstance(error, RequestValidationError):
        return Problem(422, _first_validation_error(error))
    if isinstance(error, HTTPException):
        detail = _DETAILS.get(error.status_code) or f"{error.detail}".rstrip(".") + "."
        return Problem(error.status_code, detail, error.headers)
    if isinstance(error, ClientDisconnect):
        return Problem(400, "The request ended before it was complete; send it again.")
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return Problem(507, "The service has no disk space left for this request; send less or ask its operator.")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return busy("The service has too many open files; try again in a moment.")
    return unexpected(error)


def _first_validation_error(error: RequestValidationError) -> str:
    first = error.errors()[0]
    place = " ".join(str(part) for part in first["loc"][1:]) or "the request"
    message = str(first["msg"])
    return f"{place}: {message[:1].lower()}{message[1:]}."
