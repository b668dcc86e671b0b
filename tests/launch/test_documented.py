"""The launches of the documentation, word for word as they stand there: what they print, and what Beaker would get.

What each prints is in `recorded`, whole. `RLKIT_RECORD=1` writes it anew, to be read before it is committed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlkit.launch.job import SCRIPT
from tests.cli.conftest import rlkit
from tests.doc_commands import ROOT, fenced_commands, run_of
from tests.launch.fake_beaker import FakeBeaker

__all__ = ["rlkit"]

RECORDED = Path(__file__).parent / "recorded"
PAGES = ["launching", "migrating/tinking", "migrating/terminal-bench-trainer", "migrating/openreward"]


def _launches() -> dict[str, list[str]]:
    """The documented launches by the name of the run that each trains."""
    words = [words for page in PAGES for words in fenced_commands(ROOT / "docs" / f"{page}.md")]
    return {
        command[command.index("--name", command.index("--")) + 1]: command[1:]
        for command in words
        if command[1] == "launch"
    }


LAUNCHES = _launches()
TINKING = ("debug-hello-world", "debug-math-500", "papergym", "erdos-ttt")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of a repository that is on a server, with a commit that is the same each time."""
    place = tmp_path_factory.mktemp("git")
    remote, here = place / "remote", place / "here"
    when = "2026-01-01T00:00:00Z"
    identity = {f"GIT_{who}_{field}": "a@example.com" for who in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    environ = os.environ | identity | {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
    for command in (
        ["git", "init", "--quiet", "--bare", "--object-format=sha1", str(remote)],
        ["git", "init", "--quiet", "--object-format=sha1", "--initial-branch=main", str(here)],
        ["git", "-C", str(here), "-c", "commit.gpgsign=false", "commit", "--quiet", "--allow-empty", "--message=one"],
        ["git", "-C", str(here), "remote", "add", "origin", str(remote)],
        ["git", "-C", str(here), "push", "--quiet", "origin", "main"],
        ["git", "-C", str(here), "remote", "set-url", "origin", "git@github.com:me/rlkit.git"],
    ):
        subprocess.run(command, check=True, env=environ)
    return here


@pytest.fixture(autouse=True)
def _in_the_checkout(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an account of Beaker's."""
    monkeypatch.chdir(checkout)
    for name in ("BEAKER_TOKEN", "BEAKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_every_documented_launch_is_a_complete_dry_run() -> None:
    assert list(LAUNCHES) == ["sums", *TINKING, "train-terminal-bench", "tinker-rl-test-openreward"]
    for words in LAUNCHES.values():
        assert "--dry-run" in words
        assert not [word for word in words if "…" in word or "..." in word]
    assert sorted(path.stem for path in RECORDED.iterdir()) == sorted(LAUNCHES)


@pytest.mark.parametrize("name", LAUNCHES)
def test_documented_launch_prints_the_recorded_specification(name: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit(*LAUNCHES[name])
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "", "nothing is wrong with a documented launch"
    recorded = RECORDED / f"{name}.yaml"
    if os.environ.get("RLKIT_RECORD"):
        recorded.write_text(result.stdout)
    assert result.stdout == recorded.read_text()
    printed = yaml.safe_load(result.stdout)
    (task,) = printed["tasks"]
    assert task["command"] == ["/bin/sh", "-euc", SCRIPT, "rlkit-launch"]
    assert all(set(variable) in ({"name", "value"}, {"name", "secret"}) for variable in task["envVars"])
    words = LAUNCHES[name]
    separator = words.index("--")
    assert json.loads(rlkit(*words[:separator], "--json", *words[separator:]).stdout)["spec"] == printed


@pytest.mark.filterwarnings("ignore:The 'preemptible' field is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", LAUNCHES)
def test_beaker_gets_the_specification_of_the_dry_run(name: str, rlkit: Callable[..., Any], fake: FakeBeaker) -> None:
    printed = yaml.safe_load((RECORDED / f"{name}.yaml").read_text())
    result = rlkit(*(word for word in LAUNCHES[name] if word not in ("--dry-run", "--follow")))
    assert result.exit_code == 0, result.stderr
    (sent,) = fake.submitted
    assert _written_alike(sent["spec"]) == _written_alike(printed)


def _written_alike(spec: Mapping[str, Any]) -> Any:
    """A specification without what is nothing, and with durations in nanoseconds as beaker-py writes them."""
    (task,) = spec["tasks"]
    task = {name: value for name, value in task.items() if value or name == "arguments"}
    hours = {"72h": 72 * 3600 * 10**9, "2h": 2 * 3600 * 10**9}
    for holder, name in ((task, "timeout"), (context := dict(task["context"]), "minRuntime")):
        if name in holder:
            holder[name] = hours.get(holder[name], holder[name])
    task["resources"] = {name: value for name, value in task.get("resources", {}).items() if value}
    return {**spec, "tasks": [task | {"context": context, "resources": task["resources"] or None}]}


@pytest.mark.parametrize("name", LAUNCHES)
def test_documented_jobs_use_existing_environments_and_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = yaml.safe_load((RECORDED / f"{name}.yaml").read_text())["tasks"]
    monkeypatch.chdir(ROOT)
    words = task["arguments"]
    assert words[:2] == ["rlkit", "train"]
    assert words[-1] == "--resume"
    assert run_of(words).envs


@pytest.mark.parametrize("name", TINKING)
def test_tinking_launch_has_the_fields_of_its_previous_launcher(name: str) -> None:
    spec = yaml.safe_load((RECORDED / f"{name}.yaml").read_text())
    (task,) = spec["tasks"]
    assert {
        "budget": spec["budget"],
        "name": task["name"],
        "context": task["context"],
        "resources": task["resources"],
        "hostNetworking": task["hostNetworking"],
        "cluster": task["constraints"]["cluster"],
        "mounts": {dataset["source"]["weka"]: dataset["mountPath"] for dataset in task["datasets"]},
        "result": task["result"],
    } == {
        "budget": "ai2/oe-base",
        "name": "papergym-tinker",
        "context": {"priority": "normal", "preemptible": True},
        "resources": {"gpuCount": 0},
        "hostNetworking": True,
        "cluster": ["ai2/jupiter", "ai2/saturn", "ai2/neptune", "ai2/ceres", "ai2/titan"],
        "mounts": {f"oe-{purpose}-default": f"/oe-{purpose}-default" for purpose in ("adapt", "training", "eval")},
        "result": {"path": "/results"},
    }
    assert "retry" not in spec
    assert "replicas" not in task
