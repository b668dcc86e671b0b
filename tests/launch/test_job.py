from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.errors import UsageError
from rlkit.launch.git_commit import GitCommit
from rlkit.launch.job import SCRIPT, Job, Mount, is_persistent, make_spec

WORDS = st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12), min_size=1, max_size=5)


def make_task(job: Job) -> Mapping[str, Any]:
    (only,) = cast("list[Mapping[str, Any]]", make_spec(job)["tasks"])
    return only


def run_task(task: Mapping[str, Any], **environ: str) -> str:
    """Run the command of a task as Beaker does, and return its output."""
    completed = subprocess.run(
        [*task["command"], *task["arguments"]],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environ},
        capture_output=True,
        check=True,
    )
    return completed.stdout.decode()


@given(words=WORDS)
def test_command_is_passed_word_for_word(words: list[str]) -> None:
    assert make_task(Job(command=words))["arguments"] == words


@pytest.mark.parametrize(
    "words",
    [
        ["a b", "c"],
        ["$HOME", "`id`", "$(id)", "'", '"', "\\", "a\nb", "*", "", "--", "</answer>", '{"a": 1}', "x=[a, b]", "ä"],
    ],
)
def test_command_is_not_interpreted_by_a_shell(words: list[str]) -> None:
    show = ["python3", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    assert json.loads(run_task(make_task(Job(command=[*show, *words])))) == words


def test_job_process_is_replaced_by_the_command() -> None:
    described = make_task(Job(command=["sh", "-c", "echo $$"]))
    process = subprocess.Popen([*described["command"], *described["arguments"]], stdout=subprocess.PIPE)
    output, _ = process.communicate()
    assert int(output) == process.pid


def test_the_commit_is_fetched_before_the_command_runs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(source)]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "two"], check=True)
    described = make_task(
        Job(command=["git", "rev-parse", "HEAD"], code=GitCommit(str(source), commit), install="echo installed")
    )
    variables = {variable["name"]: variable["value"] for variable in described["envVars"]}
    assert variables["RLKIT_COMMIT"] == commit
    output = run_task(described, **variables, TMPDIR=str(tmp_path))
    assert output.split() == ["installed", commit]


def test_limits_set_by_install_apply_to_the_command() -> None:
    described = make_task(Job(command=["sh", "-c", "ulimit -n"], install="ulimit -n 321"))
    variables = {variable["name"]: variable["value"] for variable in described["envVars"]}
    assert run_task(described, **variables).strip() == "321"


def test_specification_has_every_setting() -> None:
    described = make_spec(
        Job(
            command=["rlkit", "train", "a.yaml"],
            name="sums",
            image="ai2/rlkit",
            budget="ai2/oe-base",
            description="sums",
            clusters=["ai2/jupiter", "ai2/ceres"],
            hostnames=["node-1"],
            gpus=1,
            cpus=4,
            memory="32GiB",
            priority="high",
            preemptible=True,
            retries=3,
            replicas=2,
            host_networking=True,
            timeout="24h",
            env={"A": "1"},
            secrets={"TINKER_API_KEY": "my_tinker_key"},
            mounts=[Mount.parse("weka:oe-eval-default:/oe-eval-default"), Mount.parse("dataset:me/data:/data")],
        )
    )
    assert described == {
        "version": "v2",
        "description": "sums",
        "budget": "ai2/oe-base",
        "tasks": [
            {
                "name": "sums",
                "image": {"beaker": "ai2/rlkit"},
                "command": ["/bin/sh", "-euc", SCRIPT, "rlkit-launch"],
                "arguments": ["rlkit", "train", "a.yaml"],
                "envVars": [{"name": "A", "value": "1"}, {"name": "TINKER_API_KEY", "secret": "my_tinker_key"}],
                "datasets": [
                    {"source": {"weka": "oe-eval-default"}, "mountPath": "/oe-eval-default"},
                    {"source": {"beaker": "me/data"}, "mountPath": "/data"},
                ],
                "result": {"path": "/results"},
                "resources": {"gpuCount": 1, "cpuCount": 4, "memory": "32GiB"},
                "context": {"priority": "high", "preemptible": True},
                "hostNetworking": True,
                "timeout": "24h",
                "replicas": 2,
                "constraints": {"cluster": ["ai2/jupiter", "ai2/ceres"], "hostname": ["node-1"]},
            }
        ],
        "retry": {"allowedTaskRetries": 3},
    }


@pytest.mark.filterwarnings("ignore:The 'preemptible' field is deprecated:DeprecationWarning")
def test_specification_is_valid_for_beaker() -> None:
    types = pytest.importorskip("beaker.types")
    job = Job(command=["a b"], clusters=["c"], mounts=[Mount.parse("weka:w:/w")], retries=1, timeout="1h")
    read = types.BeakerExperimentSpec.from_json(make_spec(job))
    (only,) = read.tasks
    assert (only.arguments, only.constraints.cluster, only.timeout) == (["a b"], ["c"], 3600 * 10**9)
    assert only.datasets[0].source == {"weka": "w"}
    assert only.context.preemptible is True
    assert read.retry.allowed_task_retries == 1
    safe = types.BeakerExperimentSpec.from_json(
        make_spec(Job(command=["a"], preemptible=None, min_runtime="2h"))
    ).tasks[0]
    assert (safe.context.min_runtime, safe.context.auto_resume) == (7200 * 10**9, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": []}, "there is no command"),
        ({"env": {"A B": "1"}}, "'A B' is not a valid variable name"),
        (
            {"env": {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567"}},
            "--env WANDB_API_KEY: its value looks",
        ),
        ({"preemptible": True, "min_runtime": "2h"}, "--preemptible exclude each other"),
    ],
)
def test_invalid_job_is_an_error_of_one_line(settings: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        Job(**{"command": ["a"], **settings})
    assert "0123456789abcdef" not in str(raised.value)


@pytest.mark.parametrize("text", ["/data", "weka:/data", "wekka:a:/b", "weka:a:b", "weka::/b"])
def test_invalid_mount_is_an_error_of_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="is not KIND:SOURCE:/PATH"):
        Mount.parse(text)


def test_mount_knows_whether_it_persists() -> None:
    job = Job(command=["a"], mounts=[Mount.parse("weka:w:/w"), Mount.parse("dataset:d:/d")])
    assert is_persistent(job, "/w/runs")
    assert not is_persistent(job, "/d/runs")
    assert not is_persistent(job, "/wide")
