"""Pool of processes that run math-verify and end at a time limit.

Invariant: a process answers each question within the limit or ends, and is replaced; the caller's event loop never
waits for an answer. A process keeps what math-verify has cached, which makes it several times as fast as a fresh one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Literal

type MathVerifyReply = Literal["yes", "no", "gold unread", "timeout"]

_WORKER_PATH = Path(__file__).with_name("math_verify_worker.py")


@cache
def is_installed() -> bool:
    """Tell whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


type _Question = tuple[str, str, Future[MathVerifyReply]]
"""Answer, gold answer and future reply."""


class MathVerifyPool:
    """Fixed number of processes, each with a thread that talks to it; started with the first question.

    Args:
        limit_s: limit of one question in seconds.
    """

    def __init__(self, count: int, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._count = count
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()

    def ask(self, answer: str, gold: str) -> Future[MathVerifyReply]:
        """Return the future reply of math-verify."""
        future: Future[MathVerifyReply] = Future()
        with self._lock:
            if self._pid != os.getpid():  # threads do not survive a fork
                self._questions, self._threads, self._pid = queue.SimpleQueue(), [], os.getpid()
            if len(self._threads) < self._count:
                thread = threading.Thread(target=self._serve, args=(self._questions,), name="math-verify", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._questions.put((answer, gold, future))
        return future

    def close(self) -> None:
        """End the processes after the pending questions; a later question starts new ones."""
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
            reply: MathVerifyReply = "timeout"
            try:
                process = process or _Process(self._limit_s)
                reply = process.ask(answer, gold)
            except OSError:  # the process ended by itself: out of memory or time
                pass
            if reply == "timeout" and process is not None:
                process.kill()
                process = None
            future.set_result(reply)
        if process is not None:
            process.kill()


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


@cache
def shared_pool(count: int, limit_s: float) -> MathVerifyPool:
    """Return the pool of this process with these settings; it outlives graders, which come and go with tasks."""
    return MathVerifyPool(count, limit_s=limit_s)
