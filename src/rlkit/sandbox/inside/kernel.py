"""System calls that Python does not wrap.

Invariant: a failed call raises an OSError that names the call and its target.
"""

from __future__ import annotations

import ctypes
import os
import struct

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_SLAVE = 1 << 12, 1 << 13, 1 << 14, 1 << 18, 1 << 19
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4

CAP_SETPCAP = 8
ROOT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10})
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service: needed to install packages."""

_CAPABILITIES = 64
_MOUNT_SETATTR = 442  # the same on every architecture
_OPEN_TREE, _MOVE_MOUNT = 428, 429
_AT_FDCWD, _AT_RECURSIVE, _AT_SYMLINK_NOFOLLOW = -100, 0x8000, 0x100
_CLONE_TREE, _CLOSE_ON_EXEC, _FROM_DESCRIPTOR = 1, os.O_CLOEXEC, 0x4
_libc = ctypes.CDLL(None, use_errno=True)


def _check_result(result: int, description: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{description}: {os.strerror(number)}")


def describe(error: BaseException) -> str:
    """Return the text of an error, with its file."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror


def call(number: int, *arguments: object, description: str) -> int:
    """Make a system call by its number, and return its result."""
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    _check_result(min(result, 0), description)
    return result


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system: mount(2)."""
    fields = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None)
    _check_result(_libc.mount(*fields), f"mount {kind or 'of ' + source} on {target}")


def restrict_mount(target: str, flags: int) -> None:
    """Add flags to a mount and all mounts below it."""
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    path = (ctypes.c_int(_AT_FDCWD), target.encode(), ctypes.c_uint(_AT_RECURSIVE))
    size = ctypes.c_size_t(len(attributes))
    call(_MOUNT_SETATTR, *path, attributes, size, description=f"mount_setattr of {target}")


def clone_tree(path: str) -> int:
    """Return a descriptor of an unattached copy of the mounts at and below a path; a final link is not followed."""
    flags = _CLONE_TREE | _CLOSE_ON_EXEC | _AT_RECURSIVE | _AT_SYMLINK_NOFOLLOW
    place = (ctypes.c_int(_AT_FDCWD), os.fsencode(path))
    return call(_OPEN_TREE, *place, ctypes.c_uint(flags), description=f"open_tree of {path}")


def attach_tree(tree: int, target: str) -> None:
    """Mount a copy made by `clone_tree`."""
    source = (ctypes.c_int(tree), b"", ctypes.c_int(_AT_FDCWD), os.fsencode(target))
    call(_MOVE_MOUNT, *source, ctypes.c_uint(_FROM_DESCRIPTOR), description=f"move_mount to {target}")


def unmount(target: str) -> None:
    """Detach a mount and all mounts below it; they end when nothing uses them."""
    _check_result(_libc.umount2(target.encode(), MNT_DETACH), f"umount of {target}")


def pivot_root(new: str, old: str) -> None:
    """Change the root file system: pivot_root(2)."""
    _check_result(_libc.pivot_root(new.encode(), old.encode()), f"pivot_root to {new}")


def control(option: int, value: int = 0) -> None:
    """Set an option of this process: prctl(2) with a number."""
    _check_result(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def install_filter(program: bytes) -> None:
    """Install a seccomp filter for all system calls of this process and its children."""
    instructions = ctypes.create_string_buffer(program, len(program))
    sock_fprog = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    _check_result(_libc.prctl(22, 2, sock_fprog, 0, 0), "seccomp")  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def keep_capabilities(capabilities: frozenset[int]) -> None:
    """Drop all other capabilities permanently: they are removed from the bounding set, too."""
    for number in range(_CAPABILITIES):
        if number not in capabilities and _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # beyond the last capability of this kernel
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    bits = sum(1 << number for number in capabilities)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    header = struct.pack("=Ii", 0x20080522, 0)
    _check_result(_libc.capset(header, struct.pack("=6I", low, low, 0, high, high, 0)), "capset")
