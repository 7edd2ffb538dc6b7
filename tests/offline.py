# SPDX-License-Identifier: Apache-2.0
"""``python offline.py -c CODE ARGUMENTS``: Python code in a process that is stopped when it uses the network.

On Linux the kernel ends the process, or a child of it, at the first socket for datagrams, which a look-up needs, and at
the first connection, whichever library makes it (seccomp; needs no rights). Python's own look-ups and connections are
refused on every system. Listening is allowed; with ``--loopback`` in front, so are connections within the machine.
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
_NUMBER, _ARCH, _DOMAIN, _TYPE = 0, 4, 16, 24
_CALLS = {"x86_64": (0xC000003E, 41, 42), "aarch64": (0xC00000B7, 198, 203)}  # architecture, socket, connect
KERNEL_GUARDS = sys.platform == "linux" and platform.machine() in _CALLS
_UNIX, _INET, _INET6, _STREAM = 1, 2, 10, 1
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | 13, 0x7FFF0000  # the second with EACCES
_LOAD, _MASK, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def _steps(loopback: bool) -> list[tuple[int, int, int, int]]:
    """Code, steps to skip if equal and if not, and operand of each step.

    A resolver that runs elsewhere (nscd, systemd-resolved) is asked through a socket of the machine; those are refused,
    so that the process has to look up names by itself.
    """
    arch, socket, connect = _CALLS[platform.machine()]
    return [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 1, connect),
        (_RETURN, 0, 0, _ALLOW if loopback else _KILL),
        (_EQUAL, 1, 0, socket),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _DOMAIN),
        (_EQUAL, 0, 1, _UNIX),
        (_RETURN, 0, 0, _REFUSE),
        (_EQUAL, 2, 0, _INET),
        (_EQUAL, 1, 0, _INET6),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _TYPE),
        (_MASK, 0, 0, 0xF),
        (_EQUAL, 1, 0, _STREAM),
        (_RETURN, 0, 0, _KILL),
        (_RETURN, 0, 0, _ALLOW),
    ]


def guard_calls(loopback: bool = False) -> None:
    """Have the kernel end this process, and those that it starts, when they use the network."""
    steps = _steps(loopback)
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(packed))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program)) == 0, os.strerror(ctypes.get_errno())


def guard_python(loopback: bool = False) -> None:
    """End this process when Python code of it looks up a name or connects."""

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
            allowed = arguments[0] in _LOOPBACK
        elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            address = arguments[1]
            allowed = address is None or (loopback and isinstance(address, tuple) and address[0] in _LOOPBACK)
        else:
            return
        if not allowed:
            os.write(2, f"{event} {arguments}\n".encode(errors="replace"))
            os._exit(STOPPED)

    sys.addaudithook(look)


def main(words: Sequence[str]) -> None:
    """Run code as ``python -c`` does."""
    loopback = words[0] == "--loopback"
    flag, code, *arguments = words[loopback:]
    assert flag == "-c"
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""
    guard_python(loopback)
    if KERNEL_GUARDS:
        guard_calls(loopback)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(sys.argv[1:])
