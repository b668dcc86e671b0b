"""A git repository in the layout of terminal-bench 1's, and a registry that points to it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.envs.harbor.conftest import cache, can_sandbox, sandbox_cache
from tests.envs.harbor.test_convert import old_task

__all__ = ["cache", "can_sandbox", "sandbox_cache"]

BRANCH = "dataset/terminal-bench-core/v0.1.x"


@dataclass(frozen=True)
class Upstream:
    """A repository with tasks, and a registry in terminal-bench 1's form that names one of its commits.

    Args:
        repository: its working tree.
        commit: the commit of the registry, which is not the newest of its branch.
        registry: the file.
    """

    repository: Path
    commit: str
    registry: Path

    def write_registry(self, **fields: object) -> Path:
        """Write the registry anew with fields of its entry changed."""
        entry = {
            "name": "terminal-bench-core",
            "version": "0.1.1",
            "description": "Tasks of the tests.",
            "terminal_bench_version": ">=0.2.4",
            "github_url": self.repository.as_uri(),
            "dataset_path": "./tasks",
            "branch": BRANCH,
            "commit_hash": self.commit,
            "task_id_subset": ["answer", "keystrokes", "services"],
        }
        self.registry.write_text(json.dumps([entry | fields]))
        return self.registry

    def commit_all(self) -> str:
        """Commit what the working tree holds; the new commit's hash."""
        git(self.repository, "add", "--all")
        git(self.repository, "commit", "--quiet", "--message", "tasks")
        return git(self.repository, "rev-parse", "HEAD")


def git(folder: Path, *arguments: str, **variables: str) -> str:
    """Run the real git, with settings of no user."""
    git_identity: Mapping[str, str] = {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_AUTHOR_NAME": "t",
        "GIT_AUTHOR_EMAIL": "t@localhost",
        "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@localhost",
    }
    command = ["git", *arguments]
    environment = {**os.environ, **git_identity, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    repository = tmp_path / "upstream"
    tasks = repository / "tasks"
    for name in ("answer", "keystrokes", "services", "no-member"):
        old_task(tasks / name)
    (tasks / "keystrokes" / "solution.sh").unlink()
    (tasks / "keystrokes" / "solution.yaml").write_text("- command: echo 42 > answer\n")
    compose = (tasks / "services" / "docker-compose.yaml").read_text()
    (tasks / "services" / "docker-compose.yaml").write_text(f"{compose}  database:\n    image: postgres\n")
    (repository / "large.bin").write_bytes(os.urandom(1 << 16))
    git(tmp_path, "init", "--quiet", "--initial-branch", BRANCH, str(repository))
    git_upstream = Upstream(repository, "", tmp_path / "registry.json")
    git_upstream = Upstream(repository, git_upstream.commit_all(), git_upstream.registry)
    (tasks / "answer" / "task.yaml").write_text("instruction: Write 43.\n")
    git_upstream.commit_all()
    git_upstream.write_registry()
    return git_upstream


@pytest.fixture
def notes() -> list[str]:
    return []
