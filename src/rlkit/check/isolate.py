"""A process of its own for a piece of work that may hang, crash or change the process.

Invariant: whatever the work does, the caller gets its answer within the silence that it allows, and no process is left.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from rlkit.errors import MissingError, RlkitError
from rlkit.types import Json

type Say = Callable[[Json], None]

POLL_S = 0.1


class Died(RlkitError):
    """The process ended without finishing its work: it was killed, or ended itself."""


class Silent(RlkitError):
    """The process said nothing for too long."""


def isolated(work: Callable[[Say], None], *, silence_s: float, stop: threading.Event) -> Iterator[Json]:
    """Run `work` in a forked process and yield what it says, as it says it.

    A fork, so that the work may hold objects that cannot be pickled, such as an instance of a local class.

    Args:
        work: given a function that sends one JSON value to the caller.
        silence_s: longer without a word ends the process.
        stop: set by another thread to end it.

    Raises:
        Silent: nothing was said for `silence_s`.
        Died: the process ended before the work did.
        MissingError: the platform cannot fork.
    """
    if not hasattr(os, "fork"):
        raise MissingError("checking an environment needs os.fork: use Linux, macOS or WSL")
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fork copies one thread only: the others are not needed
        pid = os.fork()
    if pid == 0:
        os.close(receiver)
        _work(work, sender)
    os.close(sender)
    try:
        yield from _heard(receiver, pid, silence_s=silence_s, stop=stop)
    finally:
        os.close(receiver)
        _kill(pid)


def _heard(receiver: int, pid: int, *, silence_s: float, stop: threading.Event) -> Iterator[Json]:
    buffer, heard_s = b"", time.monotonic()
    while not stop.is_set():
        if not select.select([receiver], [], [], POLL_S)[0]:
            if time.monotonic() - heard_s > silence_s:
                raise Silent(f"nothing happened for {silence_s:g} s")
            continue
        data = os.read(receiver, 65_536)
        if not data:
            raise Died("the process ended on its own (a crash, os._exit, or out of memory)")
        *lines, buffer = (buffer + data).split(b"\n")
        heard_s = time.monotonic()
        for line in lines:
            message: Json = json.loads(line)
            if message is None:
                return
            yield message


def _kill(pid: int) -> None:
    for target in (lambda: os.killpg(pid, signal.SIGKILL), lambda: os.kill(pid, signal.SIGKILL)):
        try:
            target()
        except (ProcessLookupError, PermissionError):  # gone already, or not yet the leader of a group
            continue
    os.waitpid(pid, 0)


def _work(work: Callable[[Say], None], sender: int) -> NoReturn:
    def say(message: Json) -> None:
        os.write(sender, json.dumps(message).encode() + b"\n")

    try:
        os.setsid()
        _silence()
        work(say)
        say(None)
    except BaseException:
        say({"broken": traceback.format_exc()})
    finally:
        os._exit(0)  # without the caller's exit handlers, and whatever still runs


def _silence() -> None:
    """What the work prints, logs or warns of is not the caller's output."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  open until the process ends
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
