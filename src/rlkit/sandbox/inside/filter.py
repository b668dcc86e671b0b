"""The system calls that no process of a sandbox may make.

Invariant: what is forbidden fails with an error number, as on a kernel without it; it kills nothing. On a processor
that the table does not know there is no filter, and the sandbox says so.
"""

from __future__ import annotations

import errno
import os
import struct

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NEW_NAMESPACES = 0x7E020080  # each CLONE_NEW… but time's, which clone cannot ask for
_CLONE3 = 435  # its flags are in memory, where a filter cannot look; without it the C library uses clone
_FAMILIES = (1, 2, 10, 16)
"""Of sockets: Unix, IPv4, IPv6, netlink. Others are in no network namespace, such as those to the host of a virtual
machine (vsock), or lead deep into the kernel for no task's sake."""

_SAME = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)  # io_uring, and the newer calls that mount

_PROCESSORS: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    # the processor's number, those of clone and socket, and mount, umount2, pivot_root, unshare, setns, add_key,
    # request_key, keyctl, bpf, perf_event_open, userfaultfd, open_by_handle_at, kexec (two), modules (three)
    "x86_64": (
        0xC000003E,
        56,
        41,
        (165, 166, 155, 272, 308, 248, 249, 250, 321, 298, 323, 304, 246, 320, 175, 313, 176),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        198,
        (40, 39, 41, 97, 268, 217, 218, 219, 280, 241, 282, 265, 104, 294, 105, 273, 106),
    ),
}


def program() -> bytes | None:
    """The filter for this processor, as the kernel reads it; None if there is none."""
    known = _PROCESSORS.get(os.uname().machine)
    if known is None:
        return None
    processor, clone, socket, forbidden = known
    refuse = _step(_RETURN, _ERRNO | errno.EPERM)
    absent = _step(_RETURN, _ERRNO | errno.ENOSYS)
    unsupported = _step(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
    steps = [_step(_LOAD, 4), _step(_EQUAL, processor, when=1), absent]  # 32-bit programs have other numbers
    steps += [_step(_LOAD, 0), _step(_AT_LEAST, 0x40000000, unless=1), absent]
    for number in (*forbidden, *_SAME):
        steps += [_step(_EQUAL, number, unless=1), refuse]
    steps += [_step(_EQUAL, _CLONE3, unless=1), absent]
    steps += [_step(_EQUAL, clone, unless=3), _step(_LOAD, 16), _step(_ANY_BIT, _NEW_NAMESPACES, unless=1), refuse]
    steps += [_step(_LOAD, 0), _step(_EQUAL, socket, unless=len(_FAMILIES) + 2), _step(_LOAD, 16)]
    steps += [_step(_EQUAL, family, when=len(_FAMILIES) - place) for place, family in enumerate(_FAMILIES)]
    return b"".join([*steps, unsupported, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, *, when: int = 0, unless: int = 0) -> bytes:
    return struct.pack("=HBBI", code, when, unless, value)
