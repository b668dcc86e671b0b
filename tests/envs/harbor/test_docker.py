"""The same tasks in containers, where an engine answers."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from rlkit._util import threads
from rlkit.envs.harbor import harbor
from rlkit.envs.harbor.checking import check_tasks
from rlkit.envs.harbor.settings import make_environment
from rlkit.envs.harbor.tasks import find_tasks
from rlkit.rollout.recorder import RecordingPolicy
from tests import calling_model

from .conftest import write_task
from .test_task import SOLVED, played

IMAGE = os.environ.get("RLKIT_TEST_DOCKER_IMAGE", "ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624")
"""With bash and tmux, and for the agent its program; an engine without a registry needs one that it has."""

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


AGENT = "mini-swe-agent"


def has_agent() -> bool:
    command = ["docker", "run", "--rm", IMAGE, "bash", "-c", f"command -v {AGENT}"]
    return subprocess.run(command, capture_output=True, check=False, timeout=300).returncode == 0


def find_host() -> str:
    """Return the address under which containers reach this machine: the first of Docker's own network."""
    command = ["docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}"]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=20)
    return str(ipaddress.ip_network(done.stdout.strip())[1])


def write_reply(prompt: str, *, seed: int, word: str) -> str:
    if prompt.count("<tool_response>") == 0:
        return calling_model.write_call("bash", command=f"echo {word} data > out; echo blue")
    return calling_model.write_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def test_an_agent_in_a_container_is_trained_through_the_address_of_this_machine(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlkit.envs.harbor.settings import Agent, TrialSettings
    from rlkit.envs.harbor.task import HarborTask

    if not has_agent():
        pytest.skip(f"{IMAGE} has no {AGENT}")
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    host = find_host()

    def play(policy: RecordingPolicy) -> None:
        policy.endpoint_host = host
        settings = TrialSettings(environment=make_environment("docker"), agent=Agent(AGENT))
        threads.run(HarborTask("greet", task, settings).rollout(policy))

    authors = [partial(write_reply, word=word) for word in ("hello", "half")]
    model = calling_model.teach_agent(tmp_path / "model", play, authors)
    tasks = harbor(tasks_dir=str(task), environment="docker", agent=AGENT)
    calling_model.train_agent(
        model, tasks, steps=1, group_size=8, learning_rate=0.0005, calls=1, rollouts={"endpoint_host": host}
    )
