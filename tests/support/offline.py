# SPDX-License-Identifier: Apache-2.0
"""``python offline.py -c CODE ARGUMENTS``: Python code in a process that is stopped when it uses the network.

On Linux the kernel ends the process, or a child of it, at the first connection or message to an address, whichever
library makes it (seccomp; needs no rights); looking up a name takes one. Python's own look-ups and connections are
refused on every system. Listening is allowed. In front of ``-c``, ``--loopback`` allows connections within the machine,
and ``--workers`` those to sockets that are files, by which processes pass each other tensors.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence

STOPPED = 97
"""The exit status of a process whose Python code uses the network."""
_LOOPBACK = {"127.0.0.1", "::1", "localhost", "", None}

# struct seccomp_data: int nr; __u32 arch; __u64 instruction_pointer; __u64 args[6]
_NUMBER, _ARCH, _DOMAIN, _TYPE, _ADDRESS = 0, 4, 16, 24, 48
# Of each kind of machine: its number, and those of socket, connect, sendto and sendmmsg.
_CALLS = {"x86_64": (0xC000003E, 41, 42, 44, 307), "aarch64": (0xC00000B7, 198, 203, 206, 269)}
KERNEL_GUARDS = sys.platform == "linux" and platform.machine() in _CALLS
_UNIX, _INET, _INET6, _STREAM = 1, 2, 10, 1
_KILL, _REFUSE, _ALLOW = ((0x06, 0, 0, value) for value in (0x80000000, 0x00050000 | 13, 0x7FFF0000))  # 13: EACCES
_LOAD, _MASK, _EQUAL = 0x20, 0x54, 0x15
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


Steps = list[tuple[int, int, int, int]]
"""Steps of a filter: code, number of steps to skip if equal and if not, operand."""


def _where(place: int, value: int, *then: Steps | tuple[int, int, int, int]) -> Steps:
    """Steps that apply if a field of the call has this value."""
    steps = [step for part in then for step in (part if isinstance(part, list) else [part])]
    return [(_LOAD, 0, 0, place), (_EQUAL, 0, len(steps), value), *steps]


def _steps(loopback: bool, workers: bool) -> Steps:
    """The filter. It cannot see the address that a socket connects to, so it restricts the kinds of sockets.

    A process reaches a resolver elsewhere (nscd, systemd-resolved) through a Unix socket. Without these sockets, it has
    to look up names itself.
    """
    arch, socket, connect, sendto, sendmmsg = _CALLS[platform.machine()]
    if workers:  # no internet sockets; urllib3 tests whether there is IPv6
        internet = [*_where(_DOMAIN, _INET, _KILL), *_where(_DOMAIN, _INET6, _REFUSE)]
    elif loopback:  # only stream sockets, which do not look up names
        stream = [(_LOAD, 0, 0, _TYPE), (_MASK, 0, 0, 0xF), (_EQUAL, 0, 1, _STREAM), _ALLOW, _KILL]
        internet = [*_where(_DOMAIN, _INET, stream), *_where(_DOMAIN, _INET6, stream)]
    else:  # any socket, but none can connect: libuuid reads the address of the network card from one
        internet = []
    return [
        *((_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), _KILL),
        *_where(_NUMBER, connect, _ALLOW if loopback or workers else _KILL),
        *_where(_NUMBER, sendmmsg, _KILL),
        *_where(_NUMBER, sendto, _where(_ADDRESS, 0, _where(_ADDRESS + 4, 0, _ALLOW)), _KILL),
        *_where(_NUMBER, socket, _where(_DOMAIN, _UNIX, _ALLOW if workers else _REFUSE), internet, _ALLOW),
        _ALLOW,
    ]


def guard_calls(loopback: bool = False, workers: bool = False) -> None:
    """Make the kernel end this process and its children when they use the network."""
    steps = _steps(loopback, workers)
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(packed))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program)) == 0, os.strerror(ctypes.get_errno())


def guard_python(loopback: bool = False, workers: bool = False) -> None:
    """End this process when its Python code looks up a name or connects."""

    def check(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
            allowed = arguments[0] in _LOOPBACK
        elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            address = arguments[1]
            within = isinstance(address, tuple) and address[0] in _LOOPBACK
            allowed = address is None or (loopback and within) or (workers and isinstance(address, str | bytes))
        else:
            return
        if not allowed:
            os.write(2, f"{event} {arguments}\n".encode(errors="replace"))
            os._exit(STOPPED)

    sys.addaudithook(check)


def main(words: Sequence[str]) -> None:
    """Run code like ``python -c``."""
    allowed = {"loopback": words[0] == "--loopback", "workers": words[0] == "--workers"}
    flag, code, *arguments = words[any(allowed.values()) :]
    assert flag == "-c"
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""
    guard_python(**allowed)
    if KERNEL_GUARDS:
        guard_calls(**allowed)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(sys.argv[1:])
