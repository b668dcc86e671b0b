"""Landlock: restriction of the files that a process, and all that it starts, can reach.

Invariant: what is not named cannot be opened, whoever it belongs to; nothing can be executed or made, and no TCP port
bound or connected to where the kernel knows that.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture
_VERSION, _BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""On files, by the version of the interface that brought them."""
_NETWORK_FROM, _NETWORK = 4, 0b11
_SCOPES_FROM, _SCOPES = 6, 0b11  # abstract sockets, and signals
_SIGNALS = 0b10
_MOVE_FROM = 2
"""The version that can permit moving a file to another folder: a domain refuses that unless a rule permits it."""

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the version of the kernel's interface; 0 without one."""
    number = _libc.syscall(ctypes.c_long(_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    return max(number, 0)


def restrict(readable: Sequence[str], writable: Sequence[str], listed: Sequence[str] = ()) -> None:
    """Leave this process nothing but to read these folders and files, and to write to those.

    It must have `no_new_privs`. What is not there is left out. Of the folders in `listed`, names can be read, but no
    file in them.
    """
    with _enforced(version(), _NETWORK, _SCOPES) as ruleset:
        for path in readable:
            _allow(ruleset, path, _READ_FILE | _READ_DIR)
        for path in listed:
            _allow(ruleset, path, _READ_DIR)
        for path in writable:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)


def confinement_problem() -> str:
    """Return the reason why `confine` does not work on this kernel; an empty text where it does."""
    abi = version()
    if abi < _MOVE_FROM:
        return f"the kernel has Landlock {abi}, and {_MOVE_FROM} is needed" if abi else "the kernel has no Landlock"
    return ""


def confine() -> str:
    """Put this process, and all that it starts, into a domain that permits everything but reaching out of it.

    A process in a domain can neither trace a process outside of it nor follow the links in that one's `/proc` folder,
    whatever its user and capabilities; from version 6 on it cannot signal it, either. Only what lies below this
    process's root can be opened: a folder of another root is of no use to it, though it may be given a descriptor of
    that. Needs CAP_SYS_ADMIN. The text is the reason where this kernel cannot do it, else empty.
    """
    if problem := confinement_problem():
        return problem
    abi = version()
    with _enforced(abi, 0, _SIGNALS) as ruleset:
        _allow(ruleset, "/", _rights(abi))
        _allow_descriptor(ruleset, 0, _READ_FILE | _WRITE_FILE)  # the host's null device, which commands read
    return ""


@contextmanager
def _enforced(abi: int, network: int, scopes: int) -> Generator[int]:
    """Enforce a new ruleset, with the rules that are added to it inside, as far as this version knows its parts."""
    network, scopes = network if abi >= _NETWORK_FROM else 0, scopes if abi >= _SCOPES_FROM else 0
    attributes = struct.pack("=QQQ", _rights(abi), network, scopes)
    size = 24 if abi >= _SCOPES_FROM else 16 if abi >= _NETWORK_FROM else 8
    ruleset = _call(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0))
    try:
        yield ruleset
        _call(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _rights(abi: int) -> int:
    return sum(bits for since, bits in _RIGHTS.items() if since <= abi)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= ~_READ_DIR
        _allow_descriptor(ruleset, descriptor, rights)
    finally:
        os.close(descriptor)


def _allow_descriptor(ruleset: int, descriptor: int, rights: int) -> None:
    beneath = struct.pack("=Qi", rights, descriptor)
    _call(_ADD, ctypes.c_int(ruleset), ctypes.c_int(_BENEATH), beneath, ctypes.c_uint(0))


def _call(number: int, *arguments: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock: {os.strerror(number)}")
    return result
