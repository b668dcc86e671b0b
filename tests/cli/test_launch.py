"""The options of a launch, and what is said of a job before it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

SAFE = [
    *("--workspace", "ai2/davidh", "--code", "image", "--secret", "TINKER_API_KEY"),
    *("--mount", "weka:oe-eval-default:/oe-eval-default", "--runs-dir", "/oe-eval-default/runs"),
]


def launched(rlkit: Callable[..., Any], *arguments: str) -> Mapping[str, Any]:
    result = rlkit("launch", "beaker", "--dry-run", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_every_option_of_the_predecessors_launcher_has_one_here(rlkit: Callable[..., Any]) -> None:
    options = [
        *("--hostname", "node-1", "--retries", "2", "--gpus", "1", "--replicas", "2", "--image", "ai2/cuda"),
        *("--description", "conductor", "--name", "papergym-tinker", "--priority", "high", "--not-preemptible"),
        *("--env", "A=b c", "--secret", "HF_TOKEN=me_HF_TOKEN", "--code", "image"),
    ]
    spec = launched(rlkit, *options, "--", "python", "x.py", "--stop_strings", "</answer>", '{"a/b": 1.0}')["spec"]
    (task,) = spec["tasks"]
    assert task["constraints"] == {"hostname": ["node-1"]}
    assert spec["retry"] == {"allowedTaskRetries": 2}
    assert (task["resources"]["gpuCount"], task["replicas"], task["image"]) == (1, 2, {"beaker": "ai2/cuda"})
    assert (spec["description"], task["name"]) == ("conductor", "papergym-tinker")
    assert task["context"] == {"priority": "high", "preemptible": False}
    assert {"name": "A", "value": "b c"} in task["envVars"]
    assert {"name": "HF_TOKEN", "secret": "me_HF_TOKEN"} in task["envVars"]
    assert task["hostNetworking"] is False
    assert task["arguments"] == ["python", "x.py", "--stop_strings", "</answer>", '{"a/b": 1.0}']


def test_the_specification_is_printed_as_beaker_takes_it(rlkit: Callable[..., Any]) -> None:
    words = ["true", "a\nb", " x \n\ty ", "\x07\n", "#\n", "yes", "1e3", "", "ä…", "- a: |\n"]
    result = rlkit("launch", "beaker", "--dry-run", "--workspace", "a/b", "--code", "image", "--", *words)
    assert result.stdout.startswith("# workspace: a/b\n# experiment: a name that Beaker makes up\n")
    assert yaml.safe_load(result.stdout)["tasks"][0]["arguments"] == words


def test_a_run_that_would_begin_anew_after_a_preemption_is_told(rlkit: Callable[..., Any]) -> None:
    run = ["--", "rlkit", "train", "a.yaml"]
    result = rlkit("launch", "beaker", "--dry-run", "--code", "image", *run)
    assert "no mount keeps: a job that is preempted begins anew" in result.stderr
    assert "the job has no TINKER_API_KEY" in result.stderr
    result = rlkit("launch", "beaker", "--dry-run", *SAFE, *run)
    assert result.stderr == ""


def test_the_value_of_a_secret_is_in_no_specification(
    rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    for given in ("WANDB_API_KEY", "OTHER=sk-0123456789abcdef0123"):
        result = rlkit("launch", "beaker", "--dry-run", "--code", "image", "--env", given, "--", "true")
        assert result.exit_code == 2
        assert "give --secret" in result.stderr
        assert "0123456789abcdef" not in result.output
    secret = "0123456789abcdef0123456789abcdef01234567"
    for given in (
        ["--env", f"HEADERS=a: {secret}", "--", "true"],
        ["--install", f"pip install --index-url https://me:{secret}@host/simple", "--", "true"],
        ["--description", secret, "--", "true"],
        ["--", "curl", "-H", f"Authorization: Bearer {secret}"],
        ["--", "curl", "-H", "Authorization: Bearer tml-0123456789abcdef"],
    ):
        result = rlkit("launch", "beaker", "--dry-run", "--code", "image", *given)
        assert result.exit_code == 2
        assert "holds a secret, and anyone who sees the job would see it" in result.stderr
        assert "0123456789abcdef" not in result.output
    found = launched(rlkit, "--code", "image", "--secret", "WANDB_API_KEY", "--", "true")
    assert "0123456789abcdef" not in json.dumps(found)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--priority", "hihg", "--", "true"],
            "--priority: 'hihg' is none of low, normal, high, urgent, immediate. Did",
        ),
        (["--code", "gti", "--", "true"], "--code: 'gti' is neither git nor image. Did you mean 'git'?"),
        (["--mount", "/x", "--", "true"], "--mount: '/x' is not KIND:SOURCE:/PATH"),
        (["--env", "NO_SUCH_VARIABLE", "--", "true"], "--env: NO_SUCH_VARIABLE is not set here"),
        (["--preemptible", "--min-runtime", "2h", "--code", "image", "--", "true"], "leave --preemptible out"),
        (["--", "true"], "is no git repository"),
    ],
)
def test_what_cannot_be_launched_is_one_line(arguments: list[str], told: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("launch", "beaker", "--dry-run", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_without_an_account_the_fix_is_named(rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEAKER_TOKEN", raising=False)
    monkeypatch.setenv("BEAKER_CONFIG", "/nowhere/config.yml")
    result = rlkit("launch", "beaker", "--code", "image", "--", "true")
    assert result.exit_code == 3
    assert "set BEAKER_TOKEN" in result.stderr or "uv sync --extra beaker" in result.stderr
