"""The system calls that a model's program may not make, besides those that no sandbox allows.

Invariant: what is left computes, reads what it may read and writes to what it was given. No process is started, nobody
is signalled, and nothing is said to any other process.
"""

from __future__ import annotations

import os

from . import filter as calls
from .filter import ANY_BIT, EQUAL, FIRST_ARGUMENT, LOAD, REFUSE, step

_THREAD = 0x10000  # CLONE_THREAD
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SAME = (424, 434, 438, 440, 447, 448)
"""pidfd_send_signal, pidfd_open, pidfd_getfd, process_madvise, memfd_secret, process_mrelease: the same everywhere."""

_PROCESSORS: dict[str, tuple[tuple[int, ...], int, int, int, int]] = {
    # execve, execveat, socket, socketpair, connect, bind, listen, accept (two), ptrace, process_vm (two), kill, tkill,
    # rt_sigqueueinfo, rt_tgsigqueueinfo, shared memory (three), semaphores (three), messages (four), mq_open,
    # memfd_create, fork and vfork where there are such; then clone, tgkill, prlimit64 and prctl
    "x86_64": (
        (59, 322, 41, 53, 42, 49, 50, 43, 288, 101, 310, 311, 62, 200, 129, 297, 29, 30, 31, 64, 65, 66, 68, 69, 70, 71,
         240, 319, 57, 58),
        56, 234, 302, 157,
    ),
    "aarch64": (
        (221, 281, 198, 199, 203, 200, 201, 202, 242, 117, 270, 271, 129, 130, 138, 240, 194, 195, 196, 190, 191, 193,
         186, 187, 188, 189, 180, 279),
        220, 131, 261, 167,
    ),
}  # fmt: skip


def program() -> bytes | None:
    """The filter for this process, as the kernel reads it; None if there is none for its processor."""
    known = _PROCESSORS.get(os.uname().machine)
    if known is None:
        return None
    forbidden, clone, signal_thread, limits, control = known
    steps = calls.refused((*forbidden, *_SAME))
    steps += _only(clone, ANY_BIT, _THREAD)
    steps += _only(signal_thread, EQUAL, os.getpid())  # its own threads, which is how abort() ends a process
    steps += _only(limits, EQUAL, 0)
    steps += [step(EQUAL, control, unless=4), step(LOAD, FIRST_ARGUMENT), step(EQUAL, _DEATH_SIGNAL, unless=1), REFUSE]
    return calls.program([*steps, step(LOAD, 0)])


def _only(number: int, test: int, value: int) -> list[bytes]:
    """Steps that refuse a call unless its first argument passes a test."""
    first = step(LOAD, FIRST_ARGUMENT)
    return [step(EQUAL, number, unless=4), first, step(test, value, when=1), REFUSE, step(LOAD, 0)]
