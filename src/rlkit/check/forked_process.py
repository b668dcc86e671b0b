"""A forked process for work that may hang, crash or change the process.

Invariant: the caller gets a result however the work ends, within a time limit, and no process is left behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Coroutine
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from rlkit.check.player import GRACE_S, Abort
from rlkit.errors import MissingError, RlkitError, UsageError

MARGIN_S = 1.0
"""Seconds of silence, beyond the limits of a rollout and its clean-up, that mean that the process is blocked."""

POLL_S = 0.02

type Send[T] = Callable[[T | str], None]
"""Function that sends a result, or a text that describes the next activity, to the caller."""

type Work[T] = Callable[[Send[T]], Coroutine[object, object, None]]


async def run_isolated[T](work: Work[T], *, timeout_s: float) -> tuple[list[T], Abort | None]:
    """Run work in a forked process; return the sent results, and an `Abort` if the work did not finish.

    A fork allows objects that cannot be pickled, such as an instance of a local class.

    Args:
        work: called in the forked process; returns the coroutine to run. It must send a text before each rollout.

    Raises:
        UsageError: the work raised a UsageError.
        MissingError: the platform cannot fork.
        RlkitError: the work raised another exception.
    """
    if not hasattr(os, "fork"):
        raise MissingError("checking an environment needs os.fork: use Linux, macOS or WSL")
    receiver, sender = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork copies one thread only; the others are not needed
        pid = os.fork()
    if pid == 0:
        _run_work(work, sender)
    sender.close()
    try:
        return await _receive(receiver, timeout_s)
    finally:
        receiver.close()
        _kill(pid)


async def _receive(receiver: Connection, timeout_s: float) -> tuple[list[Any], Abort | None]:
    results, activity = list[Any](), ""
    while True:
        waited_s = 0.0  # not by a clock: it also runs while a machine is suspended, or too busy for both processes
        while not receiver.poll():
            if waited_s > timeout_s + GRACE_S + MARGIN_S:
                fix = "await slow calls (asyncio.to_thread for plain functions), and give them a time limit"
                return results, Abort(f"{activity}: it blocks the event loop for more than {timeout_s:g} s", fix)
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
        try:
            message: object = receiver.recv()
        except EOFError:
            reason = f"{activity}: the process ended on its own (a crash, os._exit, or out of memory)"
            return results, Abort(reason, "run code that can crash or exit in a separate process")
        match message:
            case None | Abort():
                return results, message
            case str():
                activity = message
            case UsageError():
                raise message
            case RlkitError():
                raise RlkitError(f"the checker itself failed at {activity}: {message}")
            case _:
                results.append(message)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or has no group of its own yet
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _run_work(work: Work[Any], sender: Connection) -> NoReturn:
    async def finish(coroutine: Coroutine[object, object, None]) -> None:
        end = None
        try:
            await coroutine
        except Abort as abort:
            end = abort
        sender.send(end)  # here, because the end of `asyncio.run` waits for a rollout that swallows cancellation

    try:
        os.setsid()
        _silence_output()
        asyncio.run(finish(work(sender.send)))
    except UsageError as error:
        sender.send(error)
    except BaseException:
        sender.send(RlkitError(traceback.format_exc()))
    finally:
        os._exit(0)  # skips the caller's exit handlers and running threads


def _silence_output() -> None:
    """Discard prints, logs and warnings of the work."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  open until the process ends
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
