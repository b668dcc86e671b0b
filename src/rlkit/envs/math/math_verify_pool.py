"""Pool of processes that run math-verify and end at a time limit.

Invariant: a process answers each question within the limit or ends, and is replaced; the caller's event loop never
waits for an answer. A process keeps what math-verify has cached, which makes it several times as fast as a fresh one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Literal

from rlkit._util.threads import DaemonThreadPool

type MathVerifyReply = Literal["yes", "no", "gold unread", "timeout"]

_WORKER_PATH = Path(__file__).with_name("math_verify_worker.py")


@cache
def is_installed() -> bool:
    """Tell whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def ask(answer: str, gold: str, *, processes: int, limit_s: float) -> Future[MathVerifyReply]:
    """Return the future reply of math-verify.

    Args:
        processes: number of processes, shared by callers with the same settings and started when a question needs them.
        limit_s: limit of one question in seconds.
    """
    return _threads(processes, limit_s).submit(_ask_in_thread, answer, gold, limit_s)


@cache
def _threads(count: int, limit_s: float) -> DaemonThreadPool:
    return DaemonThreadPool(count, name=f"math-verify-{limit_s:g}s")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork


def _ask_in_thread(answer: str, gold: str, limit_s: float) -> MathVerifyReply:
    """Ask the process of this thread; a process that ended is replaced at the next question."""
    reply: MathVerifyReply = "timeout"
    try:
        process = _thread.process = _thread.process or _Process(limit_s)
        reply = process.ask(answer, gold)
    except OSError:  # the process ended by itself: out of memory or time
        pass
    if reply == "timeout" and _thread.process is not None:
        _thread.process.kill()
        _thread.process = None
    return reply


class _Process:
    """Process that runs math-verify; methods raise `OSError` after it ended."""

    def __init__(self, limit_s: float) -> None:
        command = [sys.executable, "-P", str(_WORKER_PATH), str(limit_s)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        if not self._read_line():
            self.kill()
            raise OSError("math-verify does not start")

    def ask(self, answer: str, gold: str) -> MathVerifyReply:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps([answer, gold]) + "\n")
        stdin.flush()
        line = self._read_line()
        if not line:
            return "timeout"
        verdict: bool | None = json.loads(line)
        return "gold unread" if verdict is None else "yes" if verdict else "no"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()  # also closes the pipes

    def _read_line(self) -> str:
        """Return the next line; nothing if the process ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class _Thread(threading.local):
    process: _Process | None = None


_thread = _Thread()
