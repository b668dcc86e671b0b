"""Processes that ask math-verify, and are killed when it takes too long.

Invariant: every question is answered within its limit once its turn has come; the caller's event loop never waits for
one; a process that hangs is killed and replaced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

type Said = Literal["yes", "no", "gold unread", "timeout"]

START_S = 120.0
"""A process that has not loaded math-verify by then is taken for broken."""

GRACE_S = 1.0
"""The process ends itself so much later than it is killed: in case nobody kills it."""

_PROGRAM = Path(__file__).with_name("oracle.py")
_CHUNK_BYTES = 65_536


@cache
def installed() -> bool:
    """Whether math-verify is there."""
    return importlib.util.find_spec("math_verify") is not None


type _Question = tuple[str, str, Future[Said]]
"""An answer, the gold one, and what becomes known of them."""


class Workers:
    """A fixed number of processes, each with a thread that talks to it; started with the first question.

    Args:
        limit_s: seconds that one question may take.
    """

    def __init__(self, count: int, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._count = count
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._owner = os.getpid()

    def ask(self, answer: str, gold: str) -> Future[Said]:
        """What math-verify says; returns at once."""
        future: Future[Said] = Future()
        with self._lock:
            if self._owner != os.getpid():  # a fork has none of its parent's threads
                self._questions, self._threads, self._owner = queue.SimpleQueue(), [], os.getpid()
            if len(self._threads) < self._count:
                thread = threading.Thread(target=self._serve, args=(self._questions,), name="math-verify", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._questions.put((answer, gold, future))
        return future

    def close(self) -> None:
        """End the processes once what was asked is answered; a later question starts them anew."""
        with self._lock:
            threads, self._threads = self._threads, []
            for _ in threads:
                self._questions.put(None)
        for thread in threads:
            thread.join()

    def _serve(self, questions: queue.SimpleQueue[_Question | None]) -> None:
        process: _Process | None = None
        while (question := questions.get()) is not None:
            answer, gold, future = question
            if not future.set_running_or_notify_cancel():
                continue
            said: Said = "timeout"
            try:
                process = process or _Process(self._limit_s)
                said = process.ask(answer, gold)
            except OSError:  # it ended by itself: out of memory, or out of time
                pass
            if said == "timeout" and process is not None:
                process.kill()
                process = None
            future.set_result(said)
        if process is not None:
            process.kill()


class _Process:
    """Run math-verify in a process; its methods raise `OSError` once that has ended."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        command = [sys.executable, "-P", str(_PROGRAM), str(limit_s + GRACE_S)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._buffer = b""
        if not self._line(START_S):
            self.kill()
            raise OSError("math-verify does not start")

    def ask(self, answer: str, gold: str) -> Said:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps([answer, gold]).encode() + b"\n")
        stdin.flush()
        line = self._line(self._limit_s)
        if not line:
            return "timeout"
        verdict: bool | None = json.loads(line)
        return "gold unread" if verdict is None else "yes" if verdict else "no"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # of what was not written yet
                pipe.close()

    def _line(self, limit_s: float) -> bytes:
        """Return the next line; nothing where it does not come in time, or the process ended."""
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                return b""
            data = os.read(stdout.fileno(), _CHUNK_BYTES)
            if not data:
                return b""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


@cache
def shared(count: int, limit_s: float) -> Workers:
    """The workers of this process with these settings, whoever asks: graders come and go with their tasks."""
    return Workers(count, limit_s=limit_s)
