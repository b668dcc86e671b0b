"""Running git for a checkout of one folder at one commit.

Invariant: no call of git asks a person anything, runs a program of the repository's, or goes on for ever: it ends with
its limit, with silence, and with its caller.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import monotonic, sleep
from typing import IO

from rlkit._util.redaction import hide_credentials
from rlkit.errors import MissingError

type Note = Callable[[str], None]

_NETWORK = re.compile(
    r"could not resolve|unable to access|unable to connect|connection (timed out|refused|reset|closed)|timed out|early "
    r"EOF|RPC failed|hung up|network is unreachable|no route to host|operation too slow|gnutls_handshake|"
    r"\b(TLS|SSL) (connect|handshake)|\bSSL_(connect|read|write|ERROR)|error: 5\d\d",
    re.IGNORECASE,
)
_FINAL = re.compile(
    r"repository .*not found|does not exist|does not appear to be a git|authentication failed|"
    r"could not read (username|password)|permission denied|access denied|returned error: 40\d|no space left|"
    r"quota exceeded",
    re.IGNORECASE,
)
_NAMES = re.compile(r"(?<!\w)'[^']*'|\w[\w+.-]*://\S+|\brefs/\S+")
"""Names of files, repositories and branches in what git says: they may have any words."""

_TAIL_CHARACTERS = 300
_READ_BYTES = 4096


@dataclass(frozen=True)
class GitLimits:
    """Seconds of a call of git, of its silence, before each repetition, and between notes on progress."""

    total_s: float = 1800.0
    silence_s: float = 120.0
    waits_s: Sequence[float] = (2.0, 10.0)
    note_every_s: float = 5.0


class GitError(Exception):
    """A call of git failed; the text is one line without credentials.

    `network` says whether a repetition may help, `final` whether no other way of fetching can.
    """

    def __init__(self, reason: str, *, network: bool, final: bool) -> None:
        super().__init__(reason)
        self.network, self.final = network, final


@dataclass(frozen=True)
class Git:
    """The program git, in a folder."""

    folder: Path
    note: Note
    limits: GitLimits

    def run(self, *arguments: str) -> str:
        """Run a command and return what it printed, or raise a GitError where it failed or ran into a limit."""
        program = shutil.which("git")
        if program is None:
            raise MissingError("git is not installed: install it, or give a folder of tasks as tasks_dir")
        return self._call(program, arguments, _environment() | self._ssh_command(program))

    def _ssh_command(self, program: str) -> dict[str, str]:
        """Return the variable of an ssh that asks nothing, unless the user has chosen a program."""
        if os.environ.keys() & {"GIT_SSH", "GIT_SSH_COMMAND"}:
            return {}
        try:
            self._call(program, ("config", "--get", "core.sshCommand"), _environment())
        except GitError:
            return {"GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=30"}
        return {}

    def _call(self, program: str, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
        safe = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", "-c", "gc.auto=0")
        with subprocess.Popen(
            [program, *safe, *arguments],
            cwd=self.folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                out, messages = self._watch(process)
            finally:
                _end(process)
        if process.returncode != 0:
            message = " ".join(messages.decode(errors="replace").split())
            said = _NAMES.sub("NAME", message)
            final = _FINAL.search(said) is not None
            network = not final and _NETWORK.search(said) is not None
            reason = hide_credentials(message)[-_TAIL_CHARACTERS:] or f"exit code {process.returncode}"
            raise GitError(reason, network=network, final=final)
        return out.decode(errors="replace").strip()

    def repeat(self, *arguments: str) -> str:
        """Run a command that asks the network, again where that was in trouble."""
        for wait_s in (*self.limits.waits_s, None):
            try:
                return self.run(*arguments)
            except GitError as error:
                if not error.network or wait_s is None:
                    raise
                self.note(f"git: {error}; trying again in {wait_s:g} s")
                sleep(wait_s)
        raise AssertionError

    def _watch(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        assert process.stdout is not None
        assert process.stderr is not None
        heard = Queue[tuple[bool, bytes]]()
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            Thread(target=_forward, args=(stream, is_error, heard), daemon=True).start()
        printed = {False: bytearray(), True: bytearray()}
        began_s = noted_s = monotonic()
        ends = 0
        while ends < len(printed):
            left_s = began_s + self.limits.total_s - monotonic()
            try:
                is_error, data = heard.get(timeout=max(0.0, min(left_s, self.limits.silence_s)))
            except Empty:
                limit_s = self.limits.total_s if left_s <= self.limits.silence_s else self.limits.silence_s
                what = "did not finish" if limit_s == self.limits.total_s else "said nothing"
                raise GitError(f"git {what} for {limit_s:g} s", network=True, final=False) from None
            ends += not data
            printed[is_error] += data
            if is_error and monotonic() - noted_s > self.limits.note_every_s and (line := _progress(printed[True])):
                self.note(f"git: {line}")
                noted_s = monotonic()
        process.wait()
        return bytes(printed[False]), _without_progress(bytes(printed[True]))


def _forward(stream: IO[bytes], is_error: bool, heard: Queue[tuple[bool, bytes]]) -> None:
    descriptor = stream.fileno()
    while True:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:
            data = b""
        heard.put((is_error, data))
        if not data:
            return


def _environment() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}
    return variables | {"GIT_TERMINAL_PROMPT": "0", "GCM_INTERACTIVE": "never", "GIT_ASKPASS": "true", "LC_ALL": "C"}


# Set for the hooks of a repository, in which rlkit may run.
_OF_A_REPOSITORY = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX"}
)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a call that goes on: git's helpers are of its group."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _progress(data: bytearray) -> str:
    """The last line of progress that is whole, such as `Receiving objects:  45% (9/20)`."""
    lines = re.split(r"[\r\n]", bytes(data[-_READ_BYTES:]).decode(errors="replace"))[:-1]
    return next((" ".join(line.split()) for line in reversed(lines) if "% (" in line), "")


def _without_progress(data: bytes) -> bytes:
    """Keep what git said for good: a line of progress ends with a carriage return."""
    return b"\n".join(line.rpartition(b"\r")[2] for line in data.replace(b"\r\n", b"\n").split(b"\n"))
