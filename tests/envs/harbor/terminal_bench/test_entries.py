from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.envs.harbor.terminal_bench.entries import HEAD, PUBLISHED, find_entry, is_published
from rlkit.errors import UsageError

RECORDED = Path(__file__).parents[3] / "data" / "registries"
(CORE,) = json.loads((RECORDED / "terminal_bench_1.json").read_text())["rows"]


def test_the_published_entry_is_parsed() -> None:
    entry = find_entry([CORE], "terminal-bench-core", "0.1.1", registry="recorded")
    assert (entry.label, entry.github_url) == (
        "terminal-bench-core==0.1.1",
        "https://github.com/laude-institute/terminal-bench",
    )
    assert (entry.dataset_path, entry.branch) == ("tasks", "dataset/terminal-bench-core/v0.1.x")
    assert entry.commit_hash == "91e10457b5410f16c44364da1a34cb6de8c488a5"
    assert entry.task_id_subset is not None
    assert len(entry.task_id_subset) == 80


def test_a_name_without_a_version_means_the_newest_release() -> None:
    rows = [CORE | {"version": version} for version in ("head", "0.1.9", "0.1.10")]
    assert find_entry(rows, CORE["name"], None, registry="r").version == "0.1.10"
    assert find_entry(rows[:1], CORE["name"], None, registry="r").version == HEAD


def test_datasets_of_the_published_registry_are_known_by_name_and_version() -> None:
    assert is_published("terminal-bench-core", "0.1.1")
    assert is_published("terminal-bench-core", None)
    assert is_published("usaco", HEAD)
    assert not is_published("usaco", "2.0")  # Harbor's
    assert not is_published("usaco", None)
    assert sum(map(len, PUBLISHED.values())) == 19


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("terminal-bench-cor", "0.1.1", "r has no 'terminal-bench-cor'. Did you mean 'terminal-bench-core'?"),
        ("terminal-bench-core", "0.2", "r has no version '0.2' of terminal-bench-core; it has 0.1.1"),
    ],
)
def test_a_dataset_missing_from_the_registry_is_an_error(name: str, version: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_entry([CORE], name, version, registry="r")
    assert message in str(raised.value)


@pytest.mark.parametrize("url", ["https://host/t.git", "ssh://git@host/t.git", "git@host:t.git", "host:t", "/srv/t"])
def test_a_repository_is_a_url_or_an_absolute_path(url: str) -> None:
    rows = [CORE | {"github_url": url}]
    assert find_entry(rows, "terminal-bench-core", "0.1.1", registry="r").github_url == url


def test_the_error_on_a_rejected_repository_hides_its_credentials() -> None:
    rows = [CORE | {"github_url": "https://me:se cret@host/t.git"}]
    with pytest.raises(UsageError, match=r"github_url: .* because it is an argument of git") as raised:
        find_entry(rows, "terminal-bench-core", "0.1.1", registry="r")
    assert "cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("github_url", "--upload-pack=touch x", "because it is an argument of git"),
        ("github_url", None, "valid string"),
        ("github_url", "../tasks", "is a relative path: give a URL, or an absolute path"),
        ("github_url", "tasks/a:b", "is a relative path: give a URL, or an absolute path"),
        ("github_url", "~/tasks", "is a relative path: give a URL, or an absolute path"),
        ("branch", "-q", "because it is an argument of git"),
        ("commit_hash", "main", "neither a full commit hash nor 'head'"),
        ("dataset_path", "../up", "not a folder below the repository's root"),
        ("dataset_path", "/etc", "not a folder below the repository's root"),
        ("dataset_path", "tasks\n*", "not a folder below the repository's root"),
        ("task_id_subset", "hello-world", "valid tuple"),
    ],
)
def test_an_invalid_entry_is_a_one_line_error(field: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^registry: r: terminal-bench-core\[0\.1\.1\]\.{field}[\w.]*: .*{message}"):
        find_entry([CORE | {field: value}], "terminal-bench-core", "0.1.1", registry="r")
