"""Calls of git for the checkout of a folder at a commit.

Invariant: git never prompts, and never runs a program of the repository. A call ends at its time limit, and with its
caller.
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
from time import monotonic, sleep

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
"""Names of files, repositories and branches in git's messages; they may contain any of the words above."""

_TAIL_CHARACTERS = 300


@dataclass(frozen=True)
class GitLimits:
    """Time limits of a call of git."""

    total_s: float = 1800.0
    waits_s: Sequence[float] = (2.0, 10.0)  # waiting time before each retry
    note_every_s: float = 15.0  # interval of messages about a long call


class GitError(Exception):
    """A call of git failed; the message is one line without credentials.

    Args:
        network: the network failed, so a retry may succeed.
        final: no other kind of fetch can succeed.
    """

    def __init__(self, reason: str, *, network: bool, final: bool) -> None:
        super().__init__(reason)
        self.network, self.final = network, final


@dataclass(frozen=True)
class Git:
    """Git in a folder."""

    folder: Path
    note: Note
    limits: GitLimits

    def run(self, *arguments: str) -> str:
        """Run a command and return its output; raise GitError if it fails or exceeds a limit."""
        program = shutil.which("git")
        if program is None:
            raise MissingError("git is not installed: install it, or set tasks_dir to a folder of tasks")
        return self._call(program, arguments, _make_environment() | self._choose_ssh_command(program))

    def _choose_ssh_command(self, program: str) -> dict[str, str]:
        """Return the variable for ssh without prompts; empty if the user has configured an ssh command."""
        if os.environ.keys() & {"GIT_SSH", "GIT_SSH_COMMAND"}:
            return {}
        try:
            self._call(program, ("config", "--get", "core.sshCommand"), _make_environment())
        except GitError:
            return {"GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=30"}
        return {}

    def _call(self, program: str, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
        safe = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", "-c", "gc.auto=0")
        start_s = monotonic()
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
                while (outputs := self._wait(process, start_s=start_s)) is None:
                    self.note(f"git: {arguments[0]} has been running for {monotonic() - start_s:.0f} s")
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with git's helper processes
        out, messages = outputs
        if process.returncode != 0:
            message = " ".join(messages.decode(errors="replace").split())
            anonymous = _NAMES.sub("NAME", message)
            final = _FINAL.search(anonymous) is not None
            network = not final and _NETWORK.search(anonymous) is not None
            reason = hide_credentials(message)[-_TAIL_CHARACTERS:] or f"exit code {process.returncode}"
            raise GitError(reason, network=network, final=final)
        return out.decode(errors="replace").strip()

    def run_with_retries(self, *arguments: str) -> str:
        """Run a command, and retry it after network errors."""
        for wait_s in self.limits.waits_s:
            try:
                return self.run(*arguments)
            except GitError as error:
                if not error.network:
                    raise
                self.note(f"git: {error}; retrying in {wait_s:g} s")
                sleep(wait_s)
        return self.run(*arguments)

    def _wait(self, process: subprocess.Popen[bytes], *, start_s: float) -> tuple[bytes, bytes] | None:
        """Return the output and messages of a call; None if it runs on, GitError at its time limit."""
        left_s = start_s + self.limits.total_s - monotonic()
        try:
            return process.communicate(timeout=max(0.0, min(left_s, self.limits.note_every_s)))
        except subprocess.TimeoutExpired:
            if left_s > self.limits.note_every_s:
                return None
            problem = f"git did not finish within {self.limits.total_s:g} s"
            raise GitError(problem, network=True, final=False) from None


def _make_environment() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    return variables | {"GIT_TERMINAL_PROMPT": "0", "GCM_INTERACTIVE": "never", "GIT_ASKPASS": "true", "LC_ALL": "C"}


# Git sets these for hooks, and rlkit may run in a hook.
_REPOSITORY_VARIABLES = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX"}
)
