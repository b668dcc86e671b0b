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


def task(job: Job) -> Mapping[str, Any]:
    (only,) = cast("list[Mapping[str, Any]]", make_spec(job)["tasks"])
    return only


def executed(described: Mapping[str, Any], **environ: str) -> str:
    """What the command of a task prints, run as Beaker runs it."""
    done = subprocess.run(
        [*described["command"], *described["arguments"]],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environ},
        capture_output=True,
        check=True,
    )
    return done.stdout.decode()


@given(words=WORDS)
def test_the_command_is_what_was_given_word_for_word(words: list[str]) -> None:
    assert task(Job(command=words))["arguments"] == words


@pytest.mark.parametrize(
    "words",
    [
        ["a b", "c"],
        ["$HOME", "`id`", "$(id)", "'", '"', "\\", "a\nb", "*", "", "--", "</answer>", '{"a": 1}', "x=[a, b]", "ä"],
    ],
)
def test_no_shell_reads_the_command(words: list[str]) -> None:
    show = ["python3", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    assert json.loads(executed(task(Job(command=[*show, *words])))) == words


def test_the_job_becomes_the_command_so_that_signals_reach_it() -> None:
    described = task(Job(command=["sh", "-c", "echo $$"]))
    process = subprocess.Popen([*described["command"], *described["arguments"]], stdout=subprocess.PIPE)
    said, _ = process.communicate()
    assert int(said) == process.pid


def test_the_commit_is_fetched_before_the_command_runs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(source)]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "two"], check=True)
    described = task(
        Job(command=["git", "rev-parse", "HEAD"], code=GitCommit(str(source), commit), install="echo installed")
    )
    variables = {one["name"]: one["value"] for one in described["envVars"]}
    assert variables["RLKIT_COMMIT"] == commit
    said = executed(described, **variables, TMPDIR=str(tmp_path))
    assert said.split() == ["installed", commit]


def test_a_limit_that_is_set_before_the_command_holds_for_it() -> None:
    described = task(Job(command=["sh", "-c", "ulimit -n"], install="ulimit -n 321"))
    variables = {one["name"]: one["value"] for one in described["envVars"]}
    assert executed(described, **variables).strip() == "321"


def test_a_specification_has_everything_that_was_said() -> None:
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
def test_beakers_own_types_read_the_specification() -> None:
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
    ("settings", "told"),
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
def test_what_cannot_be_a_job_is_one_line(settings: Mapping[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as raised:
        Job(**{"command": ["a"], **settings})
    assert "0123456789abcdef" not in str(raised.value)


@pytest.mark.parametrize("text", ["/data", "weka:/data", "wekka:a:/b", "weka:a:b", "weka::/b"])
def test_what_is_no_mount_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="is not KIND:SOURCE:/PATH"):
        Mount.parse(text)


def test_what_a_mount_keeps_is_known() -> None:
    job = Job(command=["a"], mounts=[Mount.parse("weka:w:/w"), Mount.parse("dataset:d:/d")])
    assert is_persistent(job, "/w/runs")
    assert not is_persistent(job, "/d/runs")
    assert not is_persistent(job, "/wide")
