"""Checkouts of one folder of a git repository at one commit.

Invariant: what is checked out is of the commit that was asked for, whichever way the server let it be fetched.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlkit._util.files import make_folder
from rlkit._util.redaction import show_url
from rlkit.envs.harbor.terminal_bench.git import Git, GitError, GitLimits
from rlkit.errors import MissingError

DEFAULT_LIMITS = GitLimits()


@dataclass(frozen=True)
class Place:
    """A folder of a repository at a commit of a branch: a path from the root, `.` for all, and a whole hash."""

    url: str
    branch: str
    commit: str
    folder: str


def newest_commit(url: str, branch: str, *, note: Callable[[str], None], limits: GitLimits = DEFAULT_LIMITS) -> str:
    """Ask a repository for the newest commit of a branch.

    Raises:
        MissingError: git is not installed, the repository cannot be reached, or has no such branch.
    """
    reference = f"refs/heads/{branch}"
    try:
        with tempfile.TemporaryDirectory() as folder:  # the working directory may be gone, or a repository
            listed = Git(Path(folder), note, limits).repeat("ls-remote", "--", url, reference)
    except GitError as error:
        raise _unreachable(url, error) from None
    commit = next((line.split()[0] for line in listed.splitlines() if line.endswith(f"\t{reference}")), None)
    if commit is None:
        raise MissingError(f"dataset: {show_url(url)} has no branch {branch}: check the registry's entry")
    return commit


def check_out(place: Place, target: Path, *, note: Callable[[str], None], limits: GitLimits = DEFAULT_LIMITS) -> Path:
    """Check a folder out, of whose repository no more is fetched than the server allows to leave out.

    Args:
        target: a folder for the repository, which must not exist.
        note: called with progress.

    Returns:
        The folder, below `target`.

    Raises:
        MissingError: git is not installed, the repository cannot be reached, or has no such commit or folder.
    """
    problem: GitError | None = None
    # From the way that takes least to the one that every server allows.
    ways = (
        ("--depth=1", "--filter=blob:none", "origin", place.commit),
        ("--depth=1", "origin", place.commit),
        ("origin", f"refs/heads/{place.branch}"),
    )
    for fetch in ways:
        shutil.rmtree(target, ignore_errors=True)
        make_folder(target)
        try:
            _fetch(place, Git(target, note, limits), fetch)
        except GitError as error:
            problem = problem or error
            if error.network or error.final:
                raise _unreachable(place.url, error) from None
        else:
            folder = target / place.folder
            if not folder.is_dir():
                raise MissingError(
                    f"dataset: {show_url(place.url)} has no folder {place.folder} at commit "
                    f"{place.commit[:12]}: check dataset_path in the registry's entry"
                )
            return folder
    raise MissingError(
        f"dataset: {show_url(place.url)} does not give commit {place.commit[:12]} of branch {place.branch} "
        f"({problem}): check the registry's entry"
    )


def _fetch(place: Place, git: Git, fetch: Sequence[str]) -> None:
    git.run("init", "--quiet")
    git.run("config", "remote.origin.url", place.url)
    git.run("config", "http.lowSpeedLimit", "1000")
    git.run("config", "http.lowSpeedTime", f"{git.limits.silence_s:.0f}")
    if place.folder != ".":
        git.run("config", "core.sparseCheckout", "true")
        (git.folder / ".git" / "info" / "sparse-checkout").write_text(f"/{place.folder}/\n", encoding="utf-8")
    git.repeat("fetch", "--progress", "--no-tags", *fetch)
    git.repeat("checkout", "--progress", "--detach", place.commit)


def _unreachable(url: str, error: GitError) -> MissingError:
    fix = "check the network, then try again" if error.network else "check the URL and the rights to read it"
    return MissingError(f"dataset: {show_url(url)} cannot be fetched ({error}): {fix}")
