"""Git commit that a job runs.

Invariant: the commit can be fetched on another machine, and its URL contains no credential.
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
    """Hash of a commit, and the URL of a repository that contains it."""

    repository: str
    commit: str


def read_git_commit(directory: Path, *, allow_dirty: bool) -> GitCommit:
    """Return the commit that is checked out in a folder.

    The repository is the first remote with the commit; `origin` comes before the others.

    Args:
        allow_dirty: accept uncommitted changes; the job runs without them.

    Raises:
        UsageError: there is no repository or no remote, there are uncommitted changes, no remote has the commit, or
            the URL of the remote is malformed.
        MissingError: git is not installed.
    """
    if _run_git(directory, "rev-parse", "--is-inside-work-tree") != "true":
        raise UsageError(f"{directory} is not a git repository: run the command in one, or use --code image")
    commit = _run_git(directory, "rev-parse", "HEAD")
    if commit is None:
        raise UsageError(f"{directory} has no commit yet: commit, or use --code image")
    remotes = (_run_git(directory, "remote") or "").split()
    if not remotes:
        raise UsageError(
            f"{directory} has no remote from which a job could fetch the code: push the code, or use --code image"
        )
    if not allow_dirty and _run_git(directory, "status", "--porcelain"):
        raise UsageError(
            "there are uncommitted changes, and the job would run without them: commit them, or use --allow-dirty"
        )
    branches = ("branch", "--remotes", "--contains", commit, "--list")
    holders = [name for name in remotes if _run_git(directory, *branches, f"{name}/*")]
    if not holders:
        raise UsageError(
            f"no remote has the commit {commit[:12]}, so a job could not fetch it: push it, or use --code image "
            "(if it was pushed from another machine: git fetch)"
        )
    remote = "origin" if "origin" in holders else holders[0]
    url = _run_git(directory, "remote", "get-url", remote) or ""
    if is_malformed_url(url):
        raise UsageError(
            f"the URL of the remote {remote} is malformed: percent-encode its user and password, or use --code image"
        )
    return GitCommit(make_public_url(url), commit)


def parse_code(source: str, directory: Path, *, allow_dirty: bool) -> GitCommit | None:
    """Return the commit of a folder if `source` is `git`, None if it is `image`; UsageError otherwise."""
    if source not in ("git", "image"):
        raise UsageError(f"--code: {source!r} is neither git nor image.{did_you_mean(source, ('git', 'image'))}")
    return read_git_commit(directory, allow_dirty=allow_dirty) if source == "git" else None


def make_public_url(url: str) -> str:
    """Return a URL without credentials; an SSH URL becomes HTTPS."""
    if match := _SSH.fullmatch(url):
        return f"https://{match['host']}/{match['path']}"
    return show_url(url)


def _run_git(directory: Path, *arguments: str) -> str | None:
    """Return the output of git; None if it fails."""
    try:
        process = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise MissingError("git is not installed: install it, or use --code image") from error
    return process.stdout.strip() if process.returncode == 0 else None
