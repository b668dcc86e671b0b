"""Git commit that a job runs.

Invariant: the commit can be fetched on another machine, and its URL holds no credential.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlkit._util.redaction import is_malformed_url, show_url
from rlkit.errors import MissingError, UsageError, did_you_mean

_SSH = re.compile(r"(?:ssh://)?git@(?P<host>[^:/]+)[:/](?P<path>.+)")


@dataclass(frozen=True, slots=True)
class GitCommit:
    """Hash of a commit, and the URL of a repository that has it."""

    repository: str
    commit: str


def read_git_commit(directory: Path, *, allow_dirty: bool) -> GitCommit:
    """Return the commit that is checked out in a folder.

    `allow_dirty` accepts uncommitted or unpushed changes, without which the job runs.

    Raises:
        UsageError: there is no repository or no remote, the changes are not committed or the commit not pushed, or the
            URL of the remote is malformed.
        MissingError: git is not installed.
    """
    if _run_git(directory, "rev-parse", "--is-inside-work-tree") != "true":
        raise UsageError(f"{directory} is no git repository: run this in one, or give --code image")
    commit = _run_git(directory, "rev-parse", "HEAD")
    if commit is None:
        raise UsageError(f"{directory} has no commit yet: commit, or give --code image")
    remotes = (_run_git(directory, "remote") or "").split()
    if not remotes:
        raise UsageError(
            f"{directory} has no remote that a job could fetch the code from: push it, or give --code image"
        )
    remote = "origin" if "origin" in remotes else remotes[0]
    if not allow_dirty:
        if _run_git(directory, "status", "--porcelain"):
            raise UsageError(
                "there are changes that are not committed, and the job would run without them: commit them, or give "
                "--allow-dirty"
            )
        if not _run_git(directory, "branch", "--remotes", "--contains", commit):
            raise UsageError(f"no remote has the commit {commit[:12]}: push it, or give --allow-dirty")
    url = _run_git(directory, "remote", "get-url", remote) or ""
    if is_malformed_url(url):
        raise UsageError(
            f"the URL of the remote {remote} is malformed: percent-encode a user and password in it, or give "
            "--code image"
        )
    return GitCommit(make_public_url(url), commit)


def parse_code(source: str, directory: Path, *, allow_dirty: bool) -> GitCommit | None:
    """Return the commit of a folder for the source `git`, and None for `image`; UsageError for another source."""
    if source not in ("git", "image"):
        raise UsageError(f"--code: {source!r} is neither git nor image.{did_you_mean(source, ('git', 'image'))}")
    return read_git_commit(directory, allow_dirty=allow_dirty) if source == "git" else None


def make_public_url(url: str) -> str:
    """Return a URL without credentials, over HTTPS if it is of SSH."""
    if match := _SSH.fullmatch(url):
        return f"https://{match['host']}/{match['path']}"
    return show_url(url)


def _run_git(directory: Path, *arguments: str) -> str | None:
    """Return the output of git; None if it fails."""
    try:
        process = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise MissingError("git is not installed: install it, or give --code image") from error
    return process.stdout.strip() if process.returncode == 0 else None
