"""The same tasks in containers, where an engine answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rlkit._util import threads
from rlkit.envs.harbor.checking import check_tasks
from rlkit.envs.harbor.settings import make_environment
from rlkit.envs.harbor.tasks import find_tasks

from .conftest import write_task
from .test_task import SOLVED, played

IMAGE = os.environ.get("RLKIT_TEST_DOCKER_IMAGE", "ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624")
"""With bash and tmux; an engine without a registry needs one that it has."""

DOCKERFILE = f"""FROM {IMAGE}
ENV GREETING=hello
WORKDIR /app
COPY data.txt .
RUN echo built > built
"""


def has_docker() -> bool:
    """Return true if Docker and the compose plugin, which Harbor uses, are available."""
    if shutil.which("docker") is None:
        return False
    commands = (["docker", "info"], ["docker", "compose", "version"])
    return all(
        subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0 for command in commands
    )


pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_docker(), reason="no container engine answers"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path / "tasks" / "greet", dockerfile=DOCKERFILE)


def test_a_task_is_sound_in_a_container_too(task: Path) -> None:
    (checked,) = threads.run(check_tasks(find_tasks(task), environment=make_environment("docker"), jobs=1))
    assert (checked.finding, checked.detail) == ("sound", "")


def test_the_agent_plays_in_a_container_too(task: Path) -> None:
    from rlkit.envs.harbor.settings import TrialSettings
    from rlkit.envs.harbor.task import HarborTask

    outcome, policy = played(HarborTask("greet", task, TrialSettings(environment=make_environment("docker"))), SOLVED)
    assert (outcome.reward, len(policy.turns)) == (1.0, 3)
