# SPDX-License-Identifier: Apache-2.0
"""Wrong tokens, counted by client, so that whoever tries many of them is slowed down."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable

FREE = 10  # wrong tokens of a client in a minute before it is slowed down
WINDOW = 60.0  # seconds
_CLIENTS = 1_000  # that are remembered; one more, and the one that failed least recently is forgotten
_FIRST, _LONGEST = 0.25, 4.0  # seconds that an answer is delayed, doubled with every failure
_DELAYED = 16  # answers at the same time: each keeps a connection and a place among the requests


class FailedTokens:
    """How often each client failed within a minute. The right token is never asked for here, so it is never refused.

    Args:
        clock: seconds, as ``time.monotonic`` counts them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, and how many
        self.delayed = 0

    def __len__(self) -> int:
        return len(self._failures)

    def add(self, address: str) -> tuple[int, float]:
        """Note a wrong token: seconds until the client may try again, 0 if at once, and those to delay the answer."""
        client, now = _network(address), self._clock()
        since, failures = self._failures.pop(client, (now, 0))
        if now - since >= WINDOW:
            since, failures = now, 0
        self._failures[client] = since, failures + 1
        if len(self._failures) > _CLIENTS:
            self._failures.popitem(last=False)
        beyond = failures + 1 - FREE
        if beyond <= 0:
            return 0, 0.0
        delay = min(_LONGEST, _FIRST * 2.0 ** min(beyond - 1, 10)) if self.delayed < _DELAYED else 0.0
        return math.ceil(since + WINDOW - now), delay


def _network(address: str) -> str:
    """The address, or of IPv6 the network of a household, whose owner has all of its addresses.

    >>> _network("192.0.2.1"), _network("2001:db8::1:2"), _network("testclient")
    ('192.0.2.1', '2001:db8::/64', 'testclient')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else address
