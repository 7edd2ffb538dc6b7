"""Who may teach: whoever knows the token."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from fastapi import Request
from fastapi.security import HTTPBearer

from onea.errors import OneaError
from onea.serve.problems import Problem
from onea.serve.settings import Settings

TOKEN_VARIABLE = "ONEA_TOKEN"
_SHORTEST = 16
_OFF = "Teaching is switched off here; start the service with ONEA_TOKEN or --token-file to allow it."
_ONLY = "This service only predicts; teach the model with `onea teach`."

bearer = HTTPBearer(auto_error=False, description="The token that the service was started with.")


def read_token(file: Path | None) -> str | None:
    """The token from a file or, without one, from the environment; None where neither has one.

    Raises:
        OneaError: it cannot be read, or is too short to keep anyone out.
    """
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        source = TOKEN_VARIABLE
    else:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OneaError(f"The token file {file} cannot be read; check the path and its permissions.") from error
        source = f"The token in {file}"
    if not token and file is None:
        return None
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise OneaError(
            f"{source} must have {_SHORTEST} or more plain characters; make one with `openssl rand -hex 24`."
        )
    return token


def check_token(request: Request, settings: Settings) -> None:
    """Let through whoever sends the token.

    Raises:
        Problem: 403 where nobody may teach, 401 where the token is missing or wrong.
    """
    if settings.prediction_only:
        raise Problem(403, _ONLY)
    if settings.token is None:
        raise Problem(403, _OFF)
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # In constant time: how long it takes must not tell how much of a guess is right.
    right = hmac.compare_digest(given.strip().encode(), settings.token.encode())
    if scheme.lower() != "bearer" or not right:
        raise Problem(401, "The token is missing or wrong; send it as 'Authorization: Bearer TOKEN'.", _CHALLENGE)


_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="onea"'}
