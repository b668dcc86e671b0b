"""A process of its own for work that may hang, crash or change the process.

Invariant: whatever the work does, the caller gets its answer within the silence that it allows, and no process is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from rlkit.check.player import GRACE_S
from rlkit.errors import MissingError, RlkitError, UsageError

MARGIN_S = 1.0
"""Longer than a rollout and its clean-up may take by so much, a silent process counts as blocked."""

POLL_S = 0.02

type Send[T] = Callable[[T | str], None]
"""Sends a result to the caller, or a text that says what is about to be done."""

type Work[T] = Callable[[Send[T]], Coroutine[object, object, None]]


@dataclass(frozen=True, slots=True)
class Abort:
    """The reason why work did not end, and what to do about it."""

    reason: str
    fix: str


async def run_isolated[T](work: Work[T], *, timeout_s: float) -> tuple[list[T], Abort | None]:
    """Run work in a forked process; return the results that it sent, and why it did not end where it did not.

    A fork, so that the work may hold objects that cannot be pickled, such as an instance of a local class.

    Args:
        work: called in the process; the coroutine that it returns is run there. It sends a text before each rollout.
        timeout_s: the limit of one rollout, in seconds.

    Raises:
        UsageError: raised by the work before its coroutine ran.
        MissingError: the platform cannot fork.
        RlkitError: the work raised anything else.
    """
    if not hasattr(os, "fork"):
        raise MissingError("checking an environment needs os.fork: use Linux, macOS or WSL")
    receiver, sender = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fork copies one thread only: the others are not needed
        pid = os.fork()
    if pid == 0:
        _work(work, sender)
    sender.close()
    try:
        return await _receive(receiver, timeout_s)
    finally:
        receiver.close()
        _kill(pid)


async def _receive(receiver: Connection, timeout_s: float) -> tuple[list[Any], Abort | None]:
    results, doing, heard_s = list[Any](), "", time.monotonic()
    while True:
        if not receiver.poll():
            if time.monotonic() - heard_s > timeout_s + GRACE_S + MARGIN_S:
                fix = "await what takes long (asyncio.to_thread for plain functions), and give it a time limit"
                return results, Abort(f"{doing}: it blocks the event loop for more than {timeout_s:g} s", fix)
            await asyncio.sleep(POLL_S)
            continue
        try:
            message: object = receiver.recv()
        except EOFError:
            reason = f"{doing}: the process ended on its own (a crash, os._exit, or out of memory)"
            return results, Abort(reason, "run what can crash or exit in a process of its own")
        heard_s = time.monotonic()
        match message:
            case None:
                return results, None
            case str():
                doing = message
            case UsageError():
                raise message
            case RlkitError():
                raise RlkitError(f"the checker itself failed at {doing}: {message}")
            case _:
                results.append(message)


def _kill(pid: int) -> None:
    for target in (lambda: os.killpg(pid, signal.SIGKILL), lambda: os.kill(pid, signal.SIGKILL)):
        try:
            target()
        except (ProcessLookupError, PermissionError):  # gone already, or not yet the leader of a group
            continue
    os.waitpid(pid, 0)


def _work(work: Work[Any], sender: Connection) -> NoReturn:
    async def finish(playing: Coroutine[object, object, None]) -> None:
        await playing
        sender.send(None)
        os._exit(0)  # at once: to end, the loop would wait for a rollout that swallows cancellation

    try:
        os.setsid()
        _silence()
        asyncio.run(finish(work(sender.send)))
    except UsageError as error:
        sender.send(error)
    except BaseException:
        sender.send(RlkitError(traceback.format_exc()))
    finally:
        os._exit(0)  # without the caller's exit handlers, and whatever still runs


def _silence() -> None:
    """Keep what the work prints, logs or warns of out of the caller's output."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  open until the process ends
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
