"""Tasks of a registry in terminal-bench 1's form, played with a scripted policy to a verified reward."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlkit.config.loading.load import load_config
from rlkit.envs.harbor import harbor
from tests.cli.conftest import rlkit
from tests.envs.harbor.playing import working_in_turn
from tests.envs.harbor.test_task import played, says
from tests.scripted_model import train

from .conftest import Upstream

__all__ = ["rlkit"]

pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

# What the tests run with stands where this suite's Python does, which a sandbox of the host's does not show by itself.
FOLDERS = sorted({sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])})
RUN_TESTS = f"""#!/bin/bash
set -e
{sys.executable} -m pytest -p no:cacheprovider -rA $TEST_DIR/test_outputs.py
"""
TEST_OUTPUTS = """from pathlib import Path


def test_answer():
    assert Path("/app/answer").read_text().strip() == "42"
"""


EXAMPLES = Path(__file__).parents[4] / "examples" / "migrated"


@pytest.fixture
def tasks(upstream: Upstream) -> Upstream:
    """The repository with a task that real pytest verifies."""
    answer = upstream.repository / "tasks" / "answer"
    (answer / "tests" / "check.sh").unlink()
    (answer / "tests" / "test_outputs.py").write_text(TEST_OUTPUTS)
    (answer / "run-tests.sh").write_text(RUN_TESTS)
    upstream.write_registry(commit_hash=upstream.commit_all())
    return upstream


def replies(answer: str) -> list[str]:
    return [says(f"echo {answer} > answer\n"), says(done=True), says(done=True)]


@pytest.mark.slow
def test_a_task_is_played_to_the_reward_of_its_own_tests(cache: Path, tasks: Upstream) -> None:
    (task,) = harbor(
        dataset="terminal-bench-core==0.1.1",
        registry=str(tasks.registry),
        task_ids=["answer"],
        environment_kwargs={"host_folders": FOLDERS},
    )
    assert [played(task, replies(answer))[0].reward for answer in ("42", "41")] == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tinking_hello_world.yaml", "tinking_hello_world_debug.yaml"])
def test_the_hello_world_of_tinking_is_trained_on_from_a_registry(
    name: str, cache: Path, tasks: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tasks.repository / "tasks" / "answer", tasks.repository / "tasks" / "hello-world")
    tasks.write_registry(commit_hash=tasks.commit_all(), task_id_subset=["hello-world", "answer"])
    here = {"registry": str(tasks.registry), "environment": "local", "environment_kwargs": {"host_folders": FOLDERS}}
    small = {"steps": 1, "batch": {"group_size": 2}, "track": None, "envs": {"hello_world": {"args": here}}}
    resolved = load_config([EXAMPLES / name], settings=small)
    model = working_in_turn("echo 42 > answer\n")
    result, requests = train(resolved, model, monkeypatch, directory=tmp_path / "run")
    assert (result.status, result.steps) == ("completed", 1)
    episodes = pd.read_parquet(tmp_path / "run" / "episodes")
    assert list(episodes.task) == ["hello-world"] * 2
    assert sorted(episodes.reward) == [0.0, 1.0]
    assert {params.max_tokens for params in requests.sampled} == {2048}
    assert [gradient[1:] for gradient in requests.gradients] == [("importance_sampling", None)]


class Model(BaseHTTPRequestHandler):
    """Stand-in for an endpoint: plays the agent's part by the turns that a conversation has had."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        message = {"role": "assistant", "content": replies("42")[min(turn, 2)]}
        choice = {"message": message, "finish_reason": "stop"}
        answer = {"id": "r", "choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 9}}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_dataset_is_evaluated_from_the_command_line_in_the_place_of_tb_run(
    cache: Path, tasks: Upstream, url: str, tmp_path: Path, rlkit: Callable[..., Any]
) -> None:
    arguments = {"dataset": "terminal-bench-core==0.1.1", "registry": str(tasks.registry), "task_ids": ["answer"]}
    env = {"env": "harbor", "args": arguments | {"environment_kwargs": {"host_folders": FOLDERS}}}
    config = tmp_path / "eval.yaml"
    config.write_text(json.dumps({"model": "any", "envs": {"core": env}, "eval": {"envs": {"core": env}}}))
    result = rlkit("eval", config, "--endpoint", url, "--model", "scripted", "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["metrics"]["eval/core/reward/mean"] == 1.0
    assert summary["metrics"]["eval/core/rewards/reward"] == 1.0
    assert f"converting the 4 tasks of {arguments['dataset']}" in result.stderr
