# SPDX-License-Identifier: Apache-2.0
"""Access: the host names that the service answers to, and the token that teaching needs."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.security import HTTPBearer

from onea.errors import OneaError
from onea.serve.failed_tokens import FailedTokens
from onea.serve.problems import Problem
from onea.serve.settings import LOOPBACK, Settings

TOKEN_VARIABLE = "ONEA_TOKEN"
_SHORTEST, _LONGEST = 16, 1_000
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::[0-9]{1,5})?")
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
            with file.open("rb") as opened:
                token = opened.read(_LONGEST + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OneaError(f"The token file {file} cannot be read; check the path and its permissions.") from error
        source = f"The token in {file}"
    if not token and file is None:
        return None
    if not _SHORTEST <= len(token) <= _LONGEST or not token.isascii() or not token.isprintable() or " " in token:
        raise OneaError(
            f"{source} must have {_SHORTEST} or more plain characters, at most {_LONGEST:,}; make one with "
            "`openssl rand -hex 24`."
        )
    return token


def names_for(listening: str, allowed: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The names that a service goes by, and whether it goes by IP addresses too, as ``Settings`` takes them.

    A browser can be made to ask this machine for a page of another name, and then lets that page read the answers.
    An IP address cannot be taken over like that, but at a loopback address there is no need for others than its own.

    Args:
        listening: the address that the service listens on.
        allowed: names that its operator adds.

    >>> names_for("127.0.0.1", [])
    (('localhost', '127.0.0.1', '[::1]'), False)
    >>> names_for("0.0.0.0", ["Shop.example"])
    (('localhost', '127.0.0.1', '[::1]', 'shop.example'), True)

    Raises:
        OneaError: a name has a port, or is no name.
    """
    for name in allowed:
        if not name or (name != "*" and _name(name) != name.lower()):
            raise OneaError(f"--allowed-host is '{name}'; give a name alone, such as shop.example, or * for any.")
    return (*LOOPBACK, *(name.lower() for name in allowed)), not _is_loopback(listening)


def goes_by(host: str, settings: Settings) -> bool:
    """Whether the service goes by what a request has as its ``Host``."""
    name = _name(host)
    return "*" in settings.hosts or name in settings.hosts or (settings.addresses and _is_address(name))


def _name(host: str) -> str:
    """A ``Host`` without its port; empty where it is none.

    >>> _name("LOCALHOST:8000"), _name("[::1]:8000"), _name("a b")
    ('localhost', '[::1]', '')
    """
    found = _HOST.fullmatch(host.lower())
    return found[1] if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_loopback(listening: str) -> bool:
    try:
        address = socket.getaddrinfo(listening, None, type=socket.SOCK_STREAM)[0][4][0]
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    except (OSError, UnicodeError, ValueError):  # whoever listens there hears what is wrong with it
        return True


async def check_token(request: Request, settings: Settings, failed: FailedTokens) -> None:
    """Let through whoever sends the token; whoever sends many wrong ones waits for the answer.

    Raises:
        Problem: 403 where nobody may teach, 401 where the token is missing or wrong, 429 after many wrong ones.
    """
    if settings.prediction_only:
        raise Problem(403, _ONLY)
    if settings.token is None:
        raise Problem(403, _OFF)
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # In constant time: how long it takes must not tell how much of a guess is right.
    right = hmac.compare_digest(given.strip().encode(), settings.token.encode())
    if scheme.lower() == "bearer" and right:
        return
    if given.strip():
        await _slow_down(request, failed)
    raise Problem(401, "The token is missing or wrong; send it as 'Authorization: Bearer TOKEN'.", _CHALLENGE)


async def _slow_down(request: Request, failed: FailedTokens) -> None:
    seconds, delay = failed.add(client_address(request.scope))
    if not seconds:
        return
    if delay:
        failed.delayed += 1
        try:
            await asyncio.sleep(delay)
        finally:
            failed.delayed -= 1
    detail = "Too many wrong tokens came from this address; send the right one, or try again in a minute."
    raise Problem(429, detail, _CHALLENGE | {"Retry-After": str(seconds), "Connection": "close"})


def client_address(scope: Mapping[str, Any]) -> str:
    """The address of the client of a request."""
    return scope["client"][0] if scope.get("client") else ""


_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="onea"'}
