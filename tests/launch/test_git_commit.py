from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlkit.errors import UsageError
from rlkit.launch.git_commit import make_public_url, read_git_commit


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    completed = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return completed.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "--bare", "remote")
    git(tmp_path, "init", "-q", "here")
    here = tmp_path / "here"
    git(here, "remote", "add", "origin", str(tmp_path / "remote"))
    git(here, "commit", "-q", "--allow-empty", "-m", "one")
    git(here, "push", "-q", "origin", "HEAD:main")
    return here


def test_the_commit_that_is_checked_out_is_found(checkout: Path, tmp_path: Path) -> None:
    code = read_git_commit(checkout, allow_dirty=False)
    assert (code.repository, code.commit) == (str(tmp_path / "remote"), git(checkout, "rev-parse", "HEAD"))


def test_uncommitted_changes_are_an_error_unless_allowed(checkout: Path) -> None:
    (checkout / "new").touch()
    with pytest.raises(UsageError, match="uncommitted changes"):
        read_git_commit(checkout, allow_dirty=False)
    assert read_git_commit(checkout, allow_dirty=True).commit == git(checkout, "rev-parse", "HEAD")


@pytest.mark.parametrize("allow_dirty", [False, True])
def test_an_unpushed_commit_is_always_an_error(checkout: Path, *, allow_dirty: bool) -> None:
    git(checkout, "commit", "-q", "--allow-empty", "-m", "two")
    with pytest.raises(
        UsageError, match=r"no remote has the commit [0-9a-f]{12}, so a job could not fetch it: push it"
    ):
        read_git_commit(checkout, allow_dirty=allow_dirty)


def test_the_repository_is_a_remote_with_the_commit(checkout: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--bare", "fork")
    git(checkout, "remote", "add", "fork", str(tmp_path / "fork"))
    git(checkout, "commit", "-q", "--allow-empty", "-m", "two")
    git(checkout, "push", "-q", "fork", "HEAD:main")
    assert read_git_commit(checkout, allow_dirty=False).repository == str(tmp_path / "fork")


def test_folder_without_code_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a git repository: run the command in one, or use --code image"):
        read_git_commit(tmp_path, allow_dirty=True)
    git(tmp_path, "init", "-q")
    with pytest.raises(UsageError, match="has no commit yet"):
        read_git_commit(tmp_path, allow_dirty=True)
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    with pytest.raises(UsageError, match="has no remote"):
        read_git_commit(tmp_path, allow_dirty=True)


def test_remote_with_an_ambiguous_credential_is_an_error(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "first")
    git(tmp_path, "remote", "add", "origin", "https://user:can/ary@github.com/a/b")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")  # as after a push
    with pytest.raises(UsageError, match="the URL of the remote origin is malformed") as refused:
        read_git_commit(tmp_path, allow_dirty=True)
    assert "ary" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "public_url"),
    [
        ("https://github.com/a/b", "https://github.com/a/b"),
        ("https://user:canary@github.com/a/b", "https://github.com/a/b"),
        ("https://canary@github.com/a/b", "https://github.com/a/b"),
        ("https://user:cana@ry@github.com/a/b", "https://github.com/a/b"),
        ("git@github.com:a/b.git", "https://github.com/a/b.git"),
        ("ssh://git@github.com/a/b.git", "https://github.com/a/b.git"),
    ],
)
def test_public_url_works_in_a_job_and_has_no_credential(url: str, public_url: str) -> None:
    assert make_public_url(url) == public_url
