"""The system calls that no process of a sandbox may make.

Invariant: what is forbidden fails with an error number, as on a kernel without it; it kills nothing. On a processor
that the table does not know there is no filter, and the sandbox says so.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
FIRST_ARGUMENT, SECOND_ARGUMENT = 16, 24
"""Where their lower halves stand in what a filter sees of a call; the call's number stands at 0."""

_NEW_NAMESPACES = 0x7E020080  # each CLONE_NEW… but time's, which clone cannot ask for
_CLONE3 = 435  # its flags are in memory, where a filter cannot look; without it the C library uses clone
_FAMILIES = (1, 2, 10, 16)
"""Of sockets: Unix, IPv4, IPv6, netlink. Others are in no network namespace, such as those to the host of a virtual
machine (vsock), or lead deep into the kernel for no task's sake."""

_SAME = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)  # io_uring, and the newer calls that mount

_PROCESSORS: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {
    # the processor's number, those of clone, socket and prlimit64, and mount, umount2, pivot_root, unshare, setns,
    # add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, open_by_handle_at, kexec (two), modules (three)
    "x86_64": (0xC000003E, 56, 41, 302,
               (165, 166, 155, 272, 308, 248, 249, 250, 321, 298, 323, 304, 246, 320, 175, 313, 176)),
    "aarch64": (0xC00000B7, 220, 198, 261,
                (40, 39, 41, 97, 268, 217, 218, 219, 280, 241, 282, 265, 104, 294, 105, 273, 106)),
}  # fmt: skip


def program(also: Sequence[bytes] = ()) -> bytes | None:
    """Return the filter for this processor, as the kernel reads it; None if there is none.

    Each further step in `also` finds the number of the call loaded, and leaves it so.
    """
    numbers = _PROCESSORS.get(os.uname().machine)
    if numbers is None:
        return None
    processor, clone, socket, prlimit, forbidden = numbers
    steps = [step(LOAD, 4), step(EQUAL, processor, when=1), ABSENT]  # 32-bit programs have other numbers
    steps += [step(LOAD, 0), step(_AT_LEAST, 0x40000000, unless=1), ABSENT]
    steps += refused((*forbidden, *_SAME))
    steps += only(prlimit, EQUAL, [0])  # its own limits, and not those of a verifier
    steps += [step(EQUAL, _CLONE3, unless=1), ABSENT, *also]
    steps += [
        step(EQUAL, clone, unless=3),
        step(LOAD, FIRST_ARGUMENT),
        step(ANY_BIT, _NEW_NAMESPACES, unless=1),
        REFUSE,
    ]
    steps += [step(LOAD, 0), step(EQUAL, socket, unless=len(_FAMILIES) + 2), step(LOAD, FIRST_ARGUMENT)]
    steps += [step(EQUAL, family, when=len(_FAMILIES) - place) for place, family in enumerate(_FAMILIES)]
    return b"".join([*steps, _UNSUPPORTED, step(_RETURN, _ALLOW)])


def refused(calls: Sequence[int]) -> list[bytes]:
    """Return steps that refuse calls of these numbers."""
    return [part for number in calls for part in (step(EQUAL, number, unless=1), REFUSE)]


def only(number: int, test: int, values: Sequence[int], *, argument: int = FIRST_ARGUMENT) -> list[bytes]:
    """Return steps that refuse a call unless one of its arguments passes a test against one of the values."""
    count = len(values)
    tests = [step(test, value, when=count - place) for place, value in enumerate(values)]
    return [step(EQUAL, number, unless=count + 3), step(LOAD, argument), *tests, REFUSE, step(LOAD, 0)]


def step(code: int, value: int, *, when: int = 0, unless: int = 0) -> bytes:
    """Return one instruction; `when` and `unless` are numbers of following instructions to skip."""
    return struct.pack("=HBBI", code, when, unless, value)


REFUSE = step(_RETURN, _ERRNO | errno.EPERM)
ABSENT = step(_RETURN, _ERRNO | errno.ENOSYS)
_UNSUPPORTED = step(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
