"""Checkouts of one folder of a git repository at one commit.

Invariant: the files are those of the requested commit, whatever kind of fetch the server allows.
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
class GitFolder:
    """Folder of a repository at a commit of a branch."""

    url: str
    branch: str
    commit: str  # full hash
    folder: str  # path from the root; `.` for the whole repository


def find_newest_commit(
    url: str, branch: str, *, note: Callable[[str], None], limits: GitLimits = DEFAULT_LIMITS
) -> str:
    """Return the newest commit of a branch of a repository.

    Raises:
        MissingError: git is not installed, the repository is unreachable, or it has no such branch.
    """
    reference = f"refs/heads/{branch}"
    try:
        with tempfile.TemporaryDirectory() as folder:  # the working directory may be deleted, or in a repository
            output = Git(Path(folder), note, limits).run_with_retries("ls-remote", "--", url, reference)
    except GitError as error:
        raise _make_unreachable_error(url, error) from None
    commit = next((line.split()[0] for line in output.splitlines() if line.endswith(f"\t{reference}")), None)
    if commit is None:
        raise MissingError(f"dataset: {show_url(url)} has no branch {branch}: check the registry's entry")
    return commit


def check_out(
    source: GitFolder, target: Path, *, note: Callable[[str], None], limits: GitLimits = DEFAULT_LIMITS
) -> Path:
    """Check out a folder and return its path; fetch as little of the repository as the server allows.

    Args:
        target: new folder for the repository.
        note: called with progress.

    Raises:
        MissingError: git is not installed, the repository is unreachable, or it has no such commit or folder.
    """
    problem: GitError | None = None
    # Begin with the smallest download; every server allows the last.
    fetches = (
        ("--depth=1", "--filter=blob:none", "origin", source.commit),
        ("--depth=1", "origin", source.commit),
        ("origin", f"refs/heads/{source.branch}"),
    )
    for fetch in fetches:
        shutil.rmtree(target, ignore_errors=True)
        make_folder(target)
        try:
            _fetch(source, Git(target, note, limits), fetch)
        except GitError as error:
            problem = problem or error
            if error.network or error.final:
                raise _make_unreachable_error(source.url, error) from None
        else:
            folder = target / source.folder
            if not folder.is_dir():
                raise MissingError(
                    f"dataset: {show_url(source.url)} has no folder {source.folder} at commit "
                    f"{source.commit[:12]}: check dataset_path in the registry's entry"
                )
            return folder
    raise MissingError(
        f"dataset: {show_url(source.url)} does not provide commit {source.commit[:12]} of branch {source.branch} "
        f"({problem}): check the registry's entry"
    )


def _fetch(source: GitFolder, git: Git, fetch: Sequence[str]) -> None:
    git.run("init", "--quiet")
    git.run("config", "remote.origin.url", source.url)
    git.run("config", "http.lowSpeedLimit", "1000")
    git.run("config", "http.lowSpeedTime", "120")
    if source.folder != ".":
        git.run("config", "core.sparseCheckout", "true")
        (git.folder / ".git" / "info" / "sparse-checkout").write_text(f"/{source.folder}/\n", encoding="utf-8")
    git.run_with_retries("fetch", "--quiet", "--no-tags", *fetch)
    git.run_with_retries("checkout", "--quiet", "--detach", source.commit)


def _make_unreachable_error(url: str, error: GitError) -> MissingError:
    fix = "check the network, then retry" if error.network else "check the URL and your permission to read it"
    return MissingError(f"dataset: {show_url(url)} cannot be fetched ({error}): {fix}")
