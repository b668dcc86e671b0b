"""Seccomp filter of a model's program: system calls forbidden in addition to those of `sandbox_filter`.

Invariant: a program can compute, read permitted files and write to its open descriptors. It cannot start, signal, slow
down or migrate a process, or communicate with another process. It cannot change owners, modes, times or attributes of
files: Landlock protects allow_only the contents of files.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from . import sandbox_filter
from .sandbox_filter import ANY_BIT, EQUAL, SECOND_ARGUMENT, allow_only, refuse_values

_THREAD = 0x10000  # CLONE_THREAD
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_ALLOWED_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: used by libraries on their own descriptors."""
_FORBIDDEN_FCNTLS = (8, 10, 15, 1024, 1026)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX, which let a descriptor signal any process; F_SETLEASE and F_NOTIFY."""

_COMMON_CALLS = (424, 434, 438, 440, 447, 448, 452, 463, 466, 469)
"""pidfd_send_signal, pidfd_open, pidfd_getfd, process_madvise, memfd_secret, process_mrelease, fchmodat2, setxattrat,
removexattrat, file_setattr: the numbers are the same on all processors."""


class _Numbers(NamedTuple):
    """Numbers of system calls on one kind of processor."""

    forbidden: tuple[int, ...]
    self_only: tuple[int, ...]  # the first argument must be 0, this process
    clone: int  # only for threads
    tgkill: int  # only to this process
    prctl: int  # except for the signal at the death of the parent
    ioctl: int  # only for _ALLOWED_IOCTLS
    fcntl: int  # except for _FORBIDDEN_FCNTLS


_PROCESSORS: dict[str, _Numbers] = {
    # Forbidden: execve, execveat, socket, socketpair, connect, bind, listen, accept (two), ptrace, process_vm (two),
    # kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, shared memory (three), semaphores (three), messages (four),
    # mq_open, memfd_create; chmod (three), chown (four), times (four) and extended attributes (six) as far as they
    # exist; inotify (three) and fanotify_init; sync, syncfs, setpriority, ioprio_set, migrate_pages, move_pages, kcmp,
    # personality, and on x86 modify_ldt, fork and vfork.
    # Self allow_only: sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr.
    "x86_64": _Numbers(
        (59, 322, 41, 53, 42, 49, 50, 43, 288, 101, 310, 311, 62, 200, 129, 297, 29, 30, 31, 64, 65, 66, 68, 69, 70, 71,
         240, 319, 90, 91, 268, 92, 93, 94, 260, 132, 235, 261, 280, 188, 189, 190, 197, 198, 199, 253, 254, 294, 300,
         162, 306, 141, 251, 256, 279, 312, 135, 154, 57, 58),
        (142, 144, 203, 314), clone=56, tgkill=234, prctl=157, ioctl=16, fcntl=72,
    ),
    "aarch64": _Numbers(
        (221, 281, 198, 199, 203, 200, 201, 202, 242, 117, 270, 271, 129, 130, 138, 240, 194, 195, 196, 190, 191, 193,
         186, 187, 188, 189, 180, 279, 52, 53, 54, 55, 88, 5, 6, 7, 14, 15, 16, 26, 27, 262, 81, 267, 140, 30, 238, 239,
         272, 92),
        (118, 119, 122, 274), clone=220, tgkill=131, prctl=167, ioctl=29, fcntl=25,
    ),
}  # fmt: skip


def program() -> bytes | None:
    """Return the filter for this process in the kernel's format; None if its processor is not supported."""
    numbers = _PROCESSORS.get(os.uname().machine)
    if numbers is None:
        return None
    steps = sandbox_filter.refuse_calls((*numbers.forbidden, *_COMMON_CALLS))
    steps += allow_only(numbers.clone, ANY_BIT, [_THREAD])
    steps += allow_only(numbers.tgkill, EQUAL, [os.getpid()])  # its own threads: abort() uses it
    for number in numbers.self_only:
        steps += allow_only(number, EQUAL, [0])
    steps += refuse_values(numbers.prctl, EQUAL, [_DEATH_SIGNAL])
    steps += allow_only(numbers.ioctl, EQUAL, _ALLOWED_IOCTLS, argument=SECOND_ARGUMENT)
    steps += refuse_values(numbers.fcntl, EQUAL, _FORBIDDEN_FCNTLS, argument=SECOND_ARGUMENT)
    return sandbox_filter.program(steps)
