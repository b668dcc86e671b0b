"""`rlkit train --dry-run`, with the real engine's formats and without its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.rehearse import longest_s
from rlkit.config import load_config
from rlkit.testing import byte_model
from tests.limits import HANG_S

CONFIG = """
envs: {vowels: {env: vowels.py:Vowels}}
steps: 3
batch: {groups: 2, group_size: 4}
"""

VOWELS = """
import rlkit

class Vowels(rlkit.SingleTurnEnv):
    def prompt(self): return "?"
    def grade(self, reply): return float(sum(token % 7 for token in reply.turn.completion.tolist()))
"""

LOUD = """
import sys, threading, time
import rlkit

print("loaded")

def chatter():
    for _ in range(500):
        sys.stdout.write("on and on\\n")
        time.sleep(0.001)

class Loud(rlkit.SingleTurnEnv):
    def prompt(self): return "?"
    def grade(self, reply):
        if threading.active_count() < 9:
            threading.Thread(target=chatter, daemon=True).start()
        print("graded")
        return float(len(reply.text))
"""

HELD = """
import re
import rlkit

class Held(rlkit.SingleTurnEnv):
    def prompt(self): return "?"
    def grade(self, reply):
        return float(bool(re.match("(a+)+b", "a" * 99)))  # it backtracks for ever, and lets no other thread run
"""

BROKEN = """
import rlkit

class Broken(rlkit.SingleTurnEnv):
    def prompt(self): return "?"
    def grade(self, reply): return None
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    model = byte_model(tmp_path / "model")
    (tmp_path / "vowels.py").write_text(VOWELS)
    (tmp_path / "a.yaml").write_text(f"{CONFIG}model: {model}\n")
    return "a.yaml"


def test_a_dry_run_says_what_works_and_what_the_run_takes(config: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", config, "--dry-run", "--name", "mine")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["ok", "ok", "ok", "not"]
    assert "the whole run takes " in result.stdout
    assert " tokens, $0.00" in result.stdout
    assert "time: not known; --pilot 1 measures it" in result.stdout
    assert "a dry run" in result.stderr
    assert rlkit("train", config, "--dry-run", "--quiet").stderr == ""


def test_the_real_run_is_compared_with_its_dry_run(config: str, rlkit: Callable[..., Any]) -> None:
    before = rlkit("train", config)
    assert "used          " in before.stdout
    assert "expected" not in before.stdout
    dry = json.loads(rlkit("train", config, "--dry-run", "--pilot", "1", "--json").stdout)
    assert dry["ok"]
    service = next(part for part in dry["parts"] if part["name"] == "service")
    assert service["status"] == "ok"
    assert "4 rollouts and an optimiser step" in service["detail"]
    assert dry["estimate"]["seconds"]["low"] > 0
    result = json.loads(rlkit("train", config, "--json").stdout.splitlines()[-1])
    assert result["estimate"] == dry["estimate"]
    low, high = (result["estimate"]["tokens"][end] for end in ("low", "high"))
    assert low < result["spent"]["tokens"] < high
    assert "(the dry run expected " in rlkit("train", config).stdout


def test_what_does_not_work_is_exit_code_1(config: str, rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    result = rlkit("train", config, "envs=null", "envs.broken.env=broken.py:Broken", "--dry-run", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["ok"]
    assert found["estimate"] is None
    failed = [part for part in found["parts"] if part["status"] == "failed"]
    assert [part["name"] for part in failed] == ["envs.broken"]
    assert "Broken returned NoneType" in failed[0]["detail"]


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_what_environments_print_does_not_come_between_the_lines_of_the_result(
    config: str, rlkit: Callable[..., Any], tmp_path: Path, json_too: list[str]
) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    result = rlkit("train", config, "envs=null", "envs.loud.env=loud.py:Loud", "--dry-run", *json_too)
    assert result.exit_code == 0
    assert "graded" in result.stderr
    if json_too:
        assert json.loads(result.stdout)["ok"]
    else:
        first = [line.split()[0] for line in result.stdout.splitlines()]
        assert first == ["ok", "ok", "ok", "not", "the", "time:"]


def process(*arguments: str, folder: Path) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "rlkit", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_grader_that_never_returns_ends_the_dry_run_by_name(config: str, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    own = ("envs=null", "envs.held.env=held.py:Held", "envs.held.timeout_s=0.5")
    code, out, err = process("train", config, *own, "--dry-run", "--json", folder=tmp_path)
    assert code == 1
    error = json.loads(out)["error"]
    assert error.startswith("playing envs.held: a rollout held up everything else for more than 0.5 s (timeout_s), at ")
    assert "held.py:8, in grade: it must await what takes long" in error
    assert err.splitlines()[-1] == f"error: {error}"


def test_no_rollout_is_ended_before_the_longest_may_end() -> None:
    def longest(**settings: object) -> float:
        return longest_s(load_config([], settings=settings).config)

    envs = {"a": {"env": "arithmetic", "timeout_s": 5.0}, "b": {"env": "arithmetic", "timeout_s": 9.0}}
    assert longest(envs=envs) == 9
    assert longest(envs=envs, eval={"envs": {"c": {"env": "arithmetic"}}}) == 3600
    assert longest(envs={**envs, "c": {"env": "arithmetic"}}, rollouts={"timeout_s": 70.0}) == 70


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--pilot", "1"], "--pilot has no effect: give --dry-run too"),
        (["--dry-run", "--pilot", "0"], "'--pilot': Input should be greater than or equal to 1"),
        (["--pilot", "0"], "'--pilot': Input should be greater than or equal to 1"),
        (["--dry-run", "envs.vowels.max_turns=2"], "envs.vowels.max_turns: has no effect"),
        (["--dry-run", "best.metric=optim/entropi"], "Did you mean 'optim/entropy'?"),
        (["--dry-run", "--resume"], "--resume has no effect on a dry run"),
        (["--dry-run", "steps=none"], "steps"),
        (["--dry-run", "budget_usd=1"], "budget_usd has no effect"),
        (["--dry-run", "envs.vowels.env=nonsense"], "nonsense"),
    ],
)
def test_bad_usage_is_one_line(config: str, arguments: list[str], told: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", config, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr
