"""Checkouts of one folder of a git repository at one commit.

Invariant: the files are those of the requested commit, whatever kind of fetch the server allows.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rlkit._util.files import make_folder
from rlkit._util.redaction import show_url
from rlkit.envs.harbor.terminal_bench.entries import Entry
from rlkit.envs.harbor.terminal_bench.git import Git, GitError, GitLimits
from rlkit.errors import MissingError

DEFAULT_LIMITS = GitLimits()


def find_newest_commit(entry: Entry, *, note: Callable[[str], None], limits: GitLimits = DEFAULT_LIMITS) -> str:
    """Return the newest commit of an entry's branch.

    Raises:
        MissingError: git is not installed, the repository is unreachable, or it has no such branch.
    """
    reference = f"refs/heads/{entry.branch}"
    try:
        with tempfile.TemporaryDirectory() as folder:  # the working directory may be deleted, or in a repository
            output = Git(Path(folder), note, limits).run_with_retries("ls-remote", "--", entry.github_url, reference)
    except GitError as error:
        raise _make_unreachable_error(entry.github_url, error) from None
    commit = next((line.split()[0] for line in output.splitlines() if line.endswith(f"\t{reference}")), None)
    if commit is None:
        raise MissingError(
            f"dataset: {show_url(entry.github_url)} has no branch {entry.branch}: check the registry's entry"
        )
    return commit


def check_out(entry: Entry, target: Path, *, note: Callable[[str], None], limits: GitLimits = DEFAULT_LIMITS) -> Path:
    """Check out the folder of an entry and return its path; fetch as little of the repository as the server allows.

    Args:
        entry: its `commit_hash` is a commit.
        target: new folder for the repository.
        note: called with progress.

    Raises:
        MissingError: git is not installed, the repository is unreachable, or it has no such commit or folder.
    """
    problem: GitError | None = None
    url, commit = show_url(entry.github_url), entry.commit_hash
    # Begin with the smallest download; every server allows the last.
    fetches = (
        ("--depth=1", "--filter=blob:none", "origin", commit),
        ("--depth=1", "origin", commit),
        ("origin", f"refs/heads/{entry.branch}"),
    )
    for fetch in fetches:
        shutil.rmtree(target, ignore_errors=True)
        make_folder(target)
        try:
            _fetch(entry, Git(target, note, limits), fetch)
        except GitError as error:
            problem = problem or error
            if error.network or error.final:
                raise _make_unreachable_error(entry.github_url, error) from None
        else:
            folder = target / entry.dataset_path
            if not folder.is_dir():
                raise MissingError(
                    f"dataset: {url} has no folder {entry.dataset_path} at commit {commit[:12]}: "
                    "check dataset_path in the registry's entry"
                )
            return folder
    raise MissingError(
        f"dataset: {url} does not provide commit {commit[:12]} of branch {entry.branch} ({problem}): "
        "check the registry's entry"
    )


def _fetch(entry: Entry, git: Git, fetch: Sequence[str]) -> None:
    git.run("init", "--quiet")
    git.run("config", "remote.origin.url", entry.github_url)
    git.run("config", "http.lowSpeedLimit", "1000")
    git.run("config", "http.lowSpeedTime", "120")
    if entry.dataset_path != ".":
        git.run("config", "core.sparseCheckout", "true")
        (git.folder / ".git" / "info" / "sparse-checkout").write_text(f"/{entry.dataset_path}/\n", encoding="utf-8")
    git.run_with_retries("fetch", "--quiet", "--no-tags", *fetch)
    git.run_with_retries("checkout", "--quiet", "--detach", entry.commit_hash)


def _make_unreachable_error(url: str, error: GitError) -> MissingError:
    fix = "check the network, then retry" if error.network else "check the URL and your permission to read it"
    return MissingError(f"dataset: {show_url(url)} cannot be fetched ({error}): {fix}")
