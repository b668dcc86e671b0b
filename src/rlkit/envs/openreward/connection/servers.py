"""Local servers that a run starts and ends.

Invariant: a server ends with the last task that uses it, and with this process, however the process ends.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rlkit.errors import UsageError
from rlkit.sandbox.runners import keeper

_PORT = "{port}"
_POLL_S = 0.05
_HEALTH_S = 2.0
_END_S = keeper.GRACE_S + 2.0
_TAIL_CHARS = 300

_servers = weakref.WeakValueDictionary[tuple[str, ...], "LocalServer"]()
_starting = threading.Lock()


class LocalServer:
    """Server for the lifetime of this object; UsageError if it does not answer at `port` within `within_s` seconds."""

    def __init__(self, command: Sequence[str], port: int, *, within_s: float) -> None:
        self.url = f"http://127.0.0.1:{port}"
        log = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the server runs
        line = [sys.executable, "-I", keeper.__file__, *command]
        try:
            process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # otherwise Ctrl-C would end it while the run finishes its step
            )
        except OSError as error:
            raise UsageError(f"server: {command[0]} cannot be started: {error.strerror}") from error
        self._process, self._log, self._command_text = process, log, shlex.join(command)
        self.close = weakref.finalize(self, _stop, process, log)
        try:
            self._wait(within_s)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise UsageError if the server has ended although it is still needed."""
        if self.close.alive:
            self._check_process()

    def _check_process(self) -> None:
        if (code := self._process.poll()) is not None:
            raise UsageError(f"server: `{self._command_text}` ended with exit code {code}: {_tail(self._log)}")

    def _wait(self, within_s: float) -> None:
        until_s = time.monotonic() + within_s
        while not _answers(self.url):
            self._check_process()
            if time.monotonic() > until_s:
                raise UsageError(
                    f"server: `{self._command_text}` does not answer at {self.url}/health within {within_s:g} s: "
                    f"{_tail(self._log)}"
                )
            time.sleep(_POLL_S)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: another process must not end the server."""
        return type(None), ()


def local_server(command: str | Sequence[str], *, within_s: float) -> LocalServer:
    """Return the server that a command starts, or the running one of the same command.

    `{port}` in the command is replaced by the port to listen on, and `python` as its first word by rlkit's Python.

    Raises:
        UsageError: the command lacks `{port}`, cannot be run, or its server does not answer.
    """
    try:
        words = tuple(shlex.split(command) if isinstance(command, str) else command)
    except ValueError as error:
        raise UsageError(f"server: {command!r} is not a valid command: {error}") from None
    if not words or not any(_PORT in word for word in words):
        raise UsageError(
            f"server: {shlex.join(words)!r} has no placeholder for the port; write {_PORT}, as in "
            "`python server.py --port {port}`"
        )
    key = (str(Path.cwd()), *words)
    with _starting:
        running = _servers.get(key)
        if running is None or not running.close.alive:
            port = _free_port()
            program = sys.executable if words[0] == "python" else words[0]
            line = [program, *(word.replace(_PORT, str(port)) for word in words[1:])]
            _servers[key] = running = LocalServer(line, port, within_s=within_s)
        return running


def _answers(url: str) -> bool:
    import httpx

    try:
        # No proxy, because the server is on this machine.
        answer = httpx.get(f"{url}/health", timeout=_HEALTH_S, follow_redirects=True, trust_env=False)
        return answer.status_code == 200
    except httpx.HTTPError:
        return False


def _tail(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 4 * _TAIL_CHARS))
    text = " ".join(log.read().decode(errors="replace").split())
    return f"…{text[-_TAIL_CHARS:]}" if len(text) > _TAIL_CHARS else text or "it said nothing"


def _stop(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:  # the command also ends when its keeper is killed
        process.kill()
        process.wait()
    log.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
