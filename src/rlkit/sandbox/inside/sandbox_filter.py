"""Seccomp filter of a sandbox: system calls that no process in it may make.

Invariant: a forbidden call fails with an error number, as on a kernel without it; the process is not killed. On a
processor that is not in the table there is no filter, and the sandbox reports this.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_FIRST_ARGUMENT, SECOND_ARGUMENT = 16, 24
"""Offsets of the lower halves of arguments in the data that a filter gets; the call's number is at offset 0."""

_NEW_NAMESPACES = 0x7E020080  # each CLONE_NEW… except time's, which clone does not support
_CLONE3 = 435  # its flags are in memory, which a filter cannot read; without it the C library uses clone
_FAMILIES = (1, 2, 10, 16)
"""Allowed families of sockets: Unix, IPv4, IPv6, netlink. Others are not confined by network namespaces, such as vsock
(sockets to the host of a virtual machine), or expose parts of the kernel that no task needs."""

_COMMON_CALLS = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)  # io_uring, and the newer mount calls

_PROCESSORS: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {
    # numbers of the processor, of clone, socket and prlimit64, and of mount, umount2, pivot_root, unshare, setns,
    # add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, open_by_handle_at, kexec (two), modules (three)
    "x86_64": (0xC000003E, 56, 41, 302,
               (165, 166, 155, 272, 308, 248, 249, 250, 321, 298, 323, 304, 246, 320, 175, 313, 176)),
    "aarch64": (0xC00000B7, 220, 198, 261,
                (40, 39, 41, 97, 268, 217, 218, 219, 280, 241, 282, 265, 104, 294, 105, 273, 106)),
}  # fmt: skip


def program(extra_steps: Sequence[bytes] = ()) -> bytes | None:
    """Return the filter for this processor in the kernel's format; None if the processor is not supported.

    When `extra_steps` begin, the number of the call is loaded; it must be loaded again at their end.
    """
    numbers = _PROCESSORS.get(os.uname().machine)
    if numbers is None:
        return None
    processor, clone, socket, prlimit, forbidden = numbers
    steps = [step(LOAD, 4), step(EQUAL, processor, when=1), ABSENT]  # 32-bit programs have other numbers
    steps += [step(LOAD, 0), step(_AT_LEAST, 0x40000000, unless=1), ABSENT]
    steps += refuse_calls((*forbidden, *_COMMON_CALLS))
    steps += allow_only(prlimit, EQUAL, [0])  # its own limits, not those of a verifier
    steps += [step(EQUAL, _CLONE3, unless=1), ABSENT, *extra_steps]
    steps += refuse_values(clone, ANY_BIT, [_NEW_NAMESPACES])
    steps += [step(EQUAL, socket, unless=len(_FAMILIES) + 2), step(LOAD, _FIRST_ARGUMENT)]
    steps += [step(EQUAL, family, when=len(_FAMILIES) - place) for place, family in enumerate(_FAMILIES)]
    return b"".join([*steps, _UNSUPPORTED, step(_RETURN, _ALLOW)])


def refuse_calls(calls: Sequence[int]) -> list[bytes]:
    """Return steps that refuse calls of these numbers."""
    return [part for number in calls for part in (step(EQUAL, number, unless=1), REFUSE)]


def allow_only(number: int, test: int, values: Sequence[int], *, argument: int = _FIRST_ARGUMENT) -> list[bytes]:
    """Return steps that refuse a call unless one of its arguments passes a test against one of the values."""
    count = len(values)
    tests = [step(test, value, when=count - place) for place, value in enumerate(values)]
    return [step(EQUAL, number, unless=count + 3), step(LOAD, argument), *tests, REFUSE, step(LOAD, 0)]


def refuse_values(number: int, test: int, values: Sequence[int], *, argument: int = _FIRST_ARGUMENT) -> list[bytes]:
    """Return steps that refuse a call if one of its arguments passes a test against one of the values."""
    tests = [part for value in values for part in (step(test, value, unless=1), REFUSE)]
    return [step(EQUAL, number, unless=len(tests) + 2), step(LOAD, argument), *tests, step(LOAD, 0)]


def step(code: int, value: int, *, when: int = 0, unless: int = 0) -> bytes:
    """Return one instruction; `when` and `unless` are numbers of following instructions to skip."""
    return struct.pack("=HBBI", code, when, unless, value)


REFUSE = step(_RETURN, _ERRNO | errno.EPERM)
ABSENT = step(_RETURN, _ERRNO | errno.ENOSYS)
_UNSUPPORTED = step(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
