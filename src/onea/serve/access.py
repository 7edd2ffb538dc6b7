# SPDX-License-Identifier: Apache-2.0
"""Access control: allowed host names, the token that teaching requires, and the throttling of wrong tokens."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import math
import os
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.security import HTTPBearer

from onea.errors import OneaError
from onea.serve.problems import Problem
from onea.serve.settings import LOOPBACK, Settings

TOKEN_VARIABLE = "ONEA_TOKEN"
_MIN_LENGTH, _MAX_LENGTH = 16, 1_000  # of a token
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::[0-9]{1,5})?")
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="onea"'}

FREE_ATTEMPTS = 10  # wrong tokens of a client within WINDOW before it is throttled
WINDOW = 60.0  # seconds
_MAX_CLIENTS = 1_000  # above this, the client with the oldest failure is dropped
_MIN_DELAY, _MAX_DELAY = 0.25, 4.0  # seconds; doubled with every failure
_MAX_DELAYED = 16  # delayed responses at the same time: each occupies a connection and a request slot

bearer = HTTPBearer(auto_error=False, description="The token that the service was started with.")


def read_token(file: Path | None) -> str | None:
    """The token from a file or, without one, from the environment; None if neither has one.

    Raises:
        OneaError: it cannot be read, or is too short to be safe.
    """
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        source = TOKEN_VARIABLE
        if not token:
            return None
    else:
        try:
            with file.open("rb") as stream:
                token = stream.read(_MAX_LENGTH + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OneaError(f"Cannot read the token file {file}; check the path and its permissions.") from error
        source = f"The token in {file}"
    if not _MIN_LENGTH <= len(token) <= _MAX_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise OneaError(
            f"{source} must have {_MIN_LENGTH} to {_MAX_LENGTH:,} printable ASCII characters without spaces; make one "
            "with `openssl rand -hex 24`."
        )
    return token


def allowed_hosts(listen_address: str, extra: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """``Settings.hosts`` and ``Settings.any_ip`` for a service that listens on an address.

    The check prevents DNS rebinding: a web page may resolve its own name to this machine and read the responses. An IP
    address cannot be taken over like that, but a service on a loopback address needs no other addresses.

    Args:
        listen_address: address that the service listens on.
        extra: names that the operator allows.

    >>> allowed_hosts("127.0.0.1", [])
    (('localhost', '127.0.0.1', '[::1]'), False)
    >>> allowed_hosts("0.0.0.0", ["Shop.example"])
    (('localhost', '127.0.0.1', '[::1]', 'shop.example'), True)

    Raises:
        OneaError: a name has a port, or is not a host name.
    """
    for name in extra:
        if not name or (name != "*" and _host_name(name) != name.lower()):
            raise OneaError(f"--allowed-host is '{name}'; give a host name without a port, such as shop.example, or *.")
    return (*LOOPBACK, *(name.lower() for name in extra)), not _is_loopback(listen_address)


def is_allowed_host(host: str, settings: Settings) -> bool:
    """Whether the service accepts this ``Host`` header."""
    name = _host_name(host)
    return "*" in settings.hosts or name in settings.hosts or (settings.any_ip and _is_ip(name))


def _host_name(host: str) -> str:
    """A ``Host`` header without its port; empty if it is invalid.

    >>> _host_name("LOCALHOST:8000"), _host_name("[::1]:8000"), _host_name("a b")
    ('localhost', '[::1]', '')
    """
    match = _HOST.fullmatch(host.lower())
    return match[1] if match else ""


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_loopback(listen_address: str) -> bool:
    try:
        address = socket.getaddrinfo(listen_address, None, type=socket.SOCK_STREAM)[0][4][0]
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    except (OSError, UnicodeError, ValueError):  # binding to it reports the error
        return True


async def check_token(request: Request, settings: Settings, failures: TokenFailures) -> None:
    """Accept requests with the correct token; delay the responses to clients that send many wrong ones.

    Raises:
        Problem: 403 if teaching is disabled, 401 if the token is missing or wrong, 429 after many wrong ones.
    """
    if settings.prediction_only:
        raise Problem(403, "This service only predicts; teach the model with `onea teach`.")
    if settings.token is None:
        raise Problem(403, "Teaching is disabled; start the service with ONEA_TOKEN or --token-file to enable it.")
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # In constant time: the duration must not reveal how many characters of a guess are correct.
    is_correct = hmac.compare_digest(token.strip().encode(), settings.token.encode())
    if scheme.lower() == "bearer" and is_correct:
        return
    if token.strip():
        await _throttle(request, failures)
    raise Problem(401, "The token is missing or wrong; send it as 'Authorization: Bearer TOKEN'.", _CHALLENGE)


async def _throttle(request: Request, failures: TokenFailures) -> None:
    retry_after, delay = failures.add(client_address(request.scope))
    if not retry_after:
        return
    if delay:
        failures.delayed += 1
        try:
            await asyncio.sleep(delay)
        finally:
            failures.delayed -= 1
    detail = "Too many wrong tokens came from this address; send the correct one, or try again in a minute."
    raise Problem(429, detail, _CHALLENGE | {"Retry-After": str(retry_after), "Connection": "close"})


class TokenFailures:
    """Number of wrong tokens of each client within a minute. A request with the correct token is never refused.

    Args:
        clock: returns the time in seconds, like ``time.monotonic``.

    Attributes:
        delayed: number of responses that are being delayed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()  # start of the window, and number
        self.delayed = 0

    def __len__(self) -> int:
        return len(self._failures)

    def add(self, address: str) -> tuple[int, float]:
        """Record a wrong token; returns seconds until the client may try again, and seconds to delay the response."""
        client, now = _client_network(address), self._clock()
        start, failures = self._failures.pop(client, (now, 0))
        if now - start >= WINDOW:
            start, failures = now, 0
        self._failures[client] = start, failures + 1
        if len(self._failures) > _MAX_CLIENTS:
            self._failures.popitem(last=False)
        excess = failures + 1 - FREE_ATTEMPTS
        if excess <= 0:
            return 0, 0.0
        delay = min(_MAX_DELAY, _MIN_DELAY * 2.0 ** min(excess - 1, 10)) if self.delayed < _MAX_DELAYED else 0.0
        return math.ceil(start + WINDOW - now), delay


def client_address(scope: Mapping[str, Any]) -> str:
    """The IP address of the client of a request."""
    return scope["client"][0] if scope.get("client") else ""


def _client_network(address: str) -> str:
    """The IPv4 address, or the /64 network of an IPv6 address, because one household may use all of its addresses.

    >>> _client_network("192.0.2.1"), _client_network("2001:db8::1:2"), _client_network("testclient")
    ('192.0.2.1', '2001:db8::/64', 'testclient')
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ipaddress.ip_network((ip, 64), strict=False)) if ip.version == 6 else address
