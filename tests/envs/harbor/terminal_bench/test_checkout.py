from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rlkit.envs.harbor.terminal_bench.checkout import check_out, find_newest_commit
from rlkit.envs.harbor.terminal_bench.entries import HEAD, Entry
from rlkit.envs.harbor.terminal_bench.git import GitLimits
from rlkit.errors import MissingError

from .conftest import BRANCH, Upstream, git

AT_ONCE = GitLimits(waits_s=(0.0, 0.0))


def make_entry(url: str, *, branch: str = BRANCH, commit: str = HEAD, folder: str = "tasks") -> Entry:
    return Entry(name="d", version="1", github_url=url, branch=branch, commit_hash=commit, dataset_path=folder)


def place(upstream: Upstream, *, url: str | None = None, commit: str = "", folder: str = "tasks") -> Entry:
    return make_entry(url or upstream.repository.as_uri(), commit=commit or upstream.commit, folder=folder)


def settings(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Settings of git for all that a test runs."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(values)))
    for index, (name, value) in enumerate(values.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{index}", name.replace("__", "."))
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{index}", value)


def test_only_a_folder_is_checked_out_at_its_commit(upstream: Upstream, tmp_path: Path, notes: list[str]) -> None:
    git(upstream.repository, "config", "uploadpack.allowFilter", "true")
    folder = check_out(place(upstream), tmp_path / "out", note=notes.append, limits=AT_ONCE)
    assert sorted(path.name for path in folder.iterdir()) == ["answer", "keystrokes", "no-member", "services"]
    assert "42" in (folder / "answer" / "task.yaml").read_text()  # the newest commit of the branch says 43
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".git", "tasks"]
    large = git(upstream.repository, "rev-parse", f"{upstream.commit}:large.bin")
    missing = git(tmp_path / "out", "rev-list", "--objects", "--missing=print", "HEAD").splitlines()
    assert f"?{large}" in missing


@pytest.mark.parametrize("protocol", ["0", "2"])
def test_a_server_without_commit_fetches_is_asked_for_the_branch(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str], protocol: str
) -> None:
    settings(monkeypatch, protocol__version=protocol)
    folder = check_out(place(upstream), tmp_path / "out", note=notes.append, limits=AT_ONCE)
    assert "42" in (folder / "answer" / "task.yaml").read_text()
    history = git(tmp_path / "out", "rev-list", "--count", "HEAD")
    assert history == "1"
    assert (tmp_path / "out" / ".git" / "shallow").exists() == (protocol == "2")


def test_a_whole_repository_can_be_the_folder(upstream: Upstream, tmp_path: Path, notes: list[str]) -> None:
    folder = check_out(place(upstream, folder="."), tmp_path / "out", note=notes.append, limits=AT_ONCE)
    assert (folder / "large.bin").stat().st_size == 1 << 16


def test_the_newest_commit_of_a_branch_is_looked_up(upstream: Upstream, notes: list[str]) -> None:
    url = upstream.repository.as_uri()
    assert find_newest_commit(make_entry(url), note=notes.append) == git(upstream.repository, "rev-parse", BRANCH)
    with pytest.raises(MissingError, match="has no branch gone: check the registry's entry"):
        find_newest_commit(make_entry(url, branch="gone"), note=notes.append)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commit": "a" * 40}, r"does not provide commit aaaaaaaaaaaa of branch .*: check the registry's entry"),
        ({"folder": "gone"}, r"has no folder gone at commit [0-9a-f]{12}: check dataset_path"),
        (
            {"url": "file:///no/such/repository"},
            r"cannot be fetched \(.*does not .*\): check the URL and your permission",
        ),
    ],
)
def test_missing_commits_and_folders_are_one_line_errors(
    upstream: Upstream, tmp_path: Path, notes: list[str], change: dict[str, str], message: str
) -> None:
    with pytest.raises(MissingError, match=message) as raised:
        check_out(place(upstream, **change), tmp_path / "out", note=notes.append, limits=AT_ONCE)
    assert len(str(raised.value).splitlines()) == 1


def test_an_unreachable_repository_is_retried_and_then_an_error(
    upstream: Upstream, tmp_path: Path, notes: list[str]
) -> None:
    unreachable = place(upstream, url="http://user:secret@127.0.0.1:9/t.git?token=secret")
    with pytest.raises(MissingError, match=r"cannot be fetched \(.*\): check the network, then retry$") as raised:
        check_out(unreachable, tmp_path / "out", note=notes.append, limits=AT_ONCE)
    assert [note.rpartition("; ")[2] for note in notes] == ["retrying in 0 s"] * 2
    assert "secret" not in str(raised.value) + "".join(notes)


def test_names_that_resemble_network_errors_are_not_retried(
    upstream: Upstream, tmp_path: Path, notes: list[str]
) -> None:
    repository = upstream.repository.rename(tmp_path / "openssl-connection-reset.git")
    odd = make_entry(repository.as_uri(), branch="fix-tls/ssl", commit="a" * 40)
    with pytest.raises(
        MissingError, match=r"does not provide commit aaaaaaaaaaaa of branch fix-tls/ssl \(.*\): check the"
    ):
        check_out(odd, tmp_path / "out", note=notes.append, limits=AT_ONCE)
    missing_folder = make_entry(
        f"{tmp_path.as_uri()}/openssl/rpc-failed-early eof.git".replace(" ", "%20"), commit="a" * 40
    )
    with pytest.raises(MissingError, match="check the URL and your permission to read it"):
        check_out(missing_folder, tmp_path / "out", note=notes.append, limits=AT_ONCE)
    assert not any("retrying" in note for note in notes)


@pytest.mark.parametrize(
    ("reason", "network"),
    [
        ("fatal: unable to access 'https://host/t.git/': OpenSSL SSL_connect: Connection reset by peer", True),
        ("fatal: unable to access 'https://host/t.git/': gnutls_handshake() failed: Error in the pull function.", True),
        ("error: RPC failed; curl 56 OpenSSL SSL_read: error:0A000126:SSL routines::unexpected eof", True),
        ("error: 503 while accessing https://host/t.git/", True),
        ("fatal: unable to access 'https://host/openssl.git/': The requested URL returned error: 403", False),
        ("fatal: could not read Password for 'https://me@ssl.host': terminal prompts disabled", False),
        ("fatal: remote error: upload-pack: not our ref, see https://host/tls/timed%20out", False),
        ("fatal: bad config line 1 in file '/home/ssl/timed out'", False),
        ("fatal: couldn't find remote ref refs/heads/early-ssl", False),
    ],
)
def test_only_network_errors_are_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str], reason: str, network: bool
) -> None:
    (tmp_path / "message").write_text(reason)
    program = tmp_path / "git"  # stand-in for git at a server that fails so
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/message >&2\nexit 128\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(MissingError):
        find_newest_commit(make_entry("https://host/t.git"), note=notes.append, limits=AT_ONCE)
    assert len(notes) == (2 if network else 0)


def test_a_deleted_working_folder_does_not_prevent_a_checkout(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    commit = find_newest_commit(make_entry(upstream.repository.as_uri()), note=notes.append)
    folder = check_out(place(upstream, commit=commit), tmp_path / "out", note=notes.append, limits=AT_ONCE)
    assert "43" in (folder / "answer" / "task.yaml").read_text()


SSH = """#!/bin/sh
echo "$0 $*" >>LOG
while [ $# -gt 1 ]; do shift; done
eval "$1"
"""


@pytest.mark.parametrize(
    ("variable", "setting", "used"),
    [
        ("", "", "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=30 "),
        ("", "own", "own "),
        ("GIT_SSH", "", "own "),
        ("GIT_SSH_COMMAND", "", "own "),
        ("GIT_SSH_COMMAND", "ssh", "own "),
    ],
)
def test_the_ssh_program_that_a_user_set_is_used(
    upstream: Upstream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    notes: list[str],
    variable: str,
    setting: str,
    used: str,
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("ssh", "own"):
        (programs / name).write_text(SSH.replace("LOG", str(tmp_path / "log")))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name in ("GIT_SSH", "GIT_SSH_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "own")
    settings(monkeypatch, ssh__variant="simple", **({"core__sshCommand": setting} if setting else {}))
    url = f"ssh://host{upstream.repository}"
    assert find_newest_commit(make_entry(url), note=notes.append, limits=AT_ONCE) != upstream.commit
    (call,) = (tmp_path / "log").read_text().splitlines()
    assert call.startswith(f"{programs}/{used}host git-upload-pack")


class Private(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("WWW-Authenticate", "Basic")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def private_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Private)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/t.git"
    server.shutdown()
    server.server_close()


def test_a_repository_that_needs_a_password_is_an_error_without_a_prompt(
    upstream: Upstream, tmp_path: Path, private_url: str, notes: list[str]
) -> None:
    with pytest.raises(MissingError, match="check the URL and your permission to read it"):
        check_out(place(upstream, url=private_url), tmp_path / "out", note=notes.append, limits=AT_ONCE)
    assert notes == []


def test_a_silent_server_times_out(upstream: Upstream, tmp_path: Path, notes: list[str]) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    url = f"git://127.0.0.1:{silent.getsockname()[1]}/t.git"
    with silent, pytest.raises(MissingError, match=r"git did not finish within 0\.2 s\): check the network"):
        find_newest_commit(make_entry(url), note=notes.append, limits=GitLimits(total_s=0.2, waits_s=()))


def test_a_long_call_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "git"  # runs until a note is seen
    program.write_text(f"#!/bin/sh\nuntil [ -e {tmp_path}/seen ]; do sleep 0.01; done\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    notes = list[str]()

    def note(message: str) -> None:
        notes.append(message)
        (tmp_path / "seen").touch()

    with pytest.raises(MissingError):
        find_newest_commit(make_entry("https://host/t.git"), note=note, limits=GitLimits(note_every_s=0.01))
    assert notes[0] == "git: config has been running for 0 s"


def test_missing_git_is_named_in_the_error(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match=r"^git is not installed: install it, or set tasks_dir to a folder of tasks"):
        check_out(place(upstream), tmp_path / "out", note=notes.append)


def test_user_hooks_and_the_surrounding_repository_are_ignored(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "post-checkout").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (hooks / "post-checkout").chmod(0o755)
    settings(monkeypatch, core__hooksPath=str(hooks))
    monkeypatch.setenv("GIT_DIR", str(upstream.repository / ".git"))
    check_out(place(upstream), tmp_path / "out", note=notes.append, limits=AT_ONCE)
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "out" / ".git").is_dir()
    assert os.environ["GIT_DIR"]
