"""Landlock: restrict the files that a process and its descendants can access.

Invariant: after `restrict`, paths that are not listed cannot be opened, whoever owns them. Nothing can be executed or
created, and no TCP port can be bound or connected to if the kernel supports this rule.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from . import kernel

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture
_VERSION, _BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""Access rights on files, by the first version of the interface that has them."""
_NETWORK_VERSION, _NETWORK = 4, 0b11
_SCOPES_VERSION, _SCOPES = 6, 0b11  # abstract sockets, and signals
_SIGNALS = 0b10
_MOVE_VERSION = 2
"""First version with a right to move files to another folder; a domain forbids such moves without that right."""


def version() -> int:
    """Return the version of the kernel's Landlock interface; 0 if it has none."""
    with suppress(OSError):
        return kernel.call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION), description="landlock")
    return 0


def restrict(readable: Sequence[str], writable: Sequence[str], listed: Sequence[str] = ()) -> None:
    """Restrict this process to reading `readable` paths, and reading and writing `writable` ones.

    The process must have `no_new_privs`. Missing paths are skipped. The folders in `listed` can be listed, but files in
    them cannot be read.
    """
    with _enforce_ruleset(version(), _NETWORK, _SCOPES) as ruleset:
        for path in readable:
            _allow(ruleset, path, _READ_FILE | _READ_DIR)
        for path in listed:
            _allow(ruleset, path, _READ_DIR)
        for path in writable:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)


def confinement_problem() -> str:
    """Return the reason why `confine` does not work on this kernel; empty if it does."""
    abi = version()
    if abi < _MOVE_VERSION:
        return f"the kernel has Landlock {abi}, {_MOVE_VERSION} is needed" if abi else "the kernel has no Landlock"
    return ""


def confine() -> str:
    """Put this process and its descendants into a domain that permits everything except access to outside processes.

    A process in a domain cannot trace a process outside the domain or follow links in that process's `/proc` folder,
    whatever its user and capabilities. From version 6 on it cannot signal that process, either. Only paths below this
    process's root can be opened, even with a descriptor of a folder of another root. Needs CAP_SYS_ADMIN.

    Returns:
        The reason why this kernel cannot do it; empty if it can.
    """
    if problem := confinement_problem():
        return problem
    abi = version()
    with _enforce_ruleset(abi, 0, _SIGNALS) as ruleset:
        _allow(ruleset, "/", _list_rights(abi))
        _allow_descriptor(ruleset, 0, _READ_FILE | _WRITE_FILE)  # the host's null device, which commands read
    return ""


@contextmanager
def _enforce_ruleset(abi: int, network: int, scopes: int) -> Generator[int]:
    """Enforce a new ruleset with the rules added inside the context; skip parts that this version does not support."""
    network, scopes = network if abi >= _NETWORK_VERSION else 0, scopes if abi >= _SCOPES_VERSION else 0
    attributes = struct.pack("=QQQ", _list_rights(abi), network, scopes)
    size = 24 if abi >= _SCOPES_VERSION else 16 if abi >= _NETWORK_VERSION else 8
    ruleset = kernel.call(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0), description="landlock")
    try:
        yield ruleset
        kernel.call(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0), description="landlock")
    finally:
        os.close(ruleset)


def _list_rights(abi: int) -> int:
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
    rule = (ctypes.c_int(ruleset), ctypes.c_int(_BENEATH), beneath, ctypes.c_uint(0))
    kernel.call(_ADD, *rule, description="landlock")
