from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOOD = """
import rlkit

class Echo(rlkit.SingleTurnEnv):
    def __init__(self, word: str = "yes", copies: int = 1):
        print("an environment that prints")
        self.word = word * copies
        self.gold = self.word

    def prompt(self):
        return f"Say {self.word}:"

    def grade(self, reply):
        return float(reply.text.strip() == self.word)
"""
BAD = GOOD.replace("float(reply.text.strip() == self.word)", "1.0").replace("Echo", "Generous")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)


def test_a_good_environment_of_a_file_passes(rlkit: Callable[..., Any]) -> None:
    result = rlkit("check", "good.py:Echo")
    assert result.exit_code == 0, result.stdout
    assert "passed" in result.stdout
    assert "failed" not in result.stdout


def test_a_fault_is_1_and_comes_with_its_fix(rlkit: Callable[..., Any]) -> None:
    result = rlkit("check", "bad.py:Generous")
    assert result.exit_code == 1
    assert "fix: " in result.stdout.split("failed", 1)[1]


def test_json_has_every_finding_and_nothing_that_the_environment_prints(rlkit: Callable[..., Any]) -> None:
    result = rlkit("check", "bad.py:Generous", "--json")
    record = json.loads(result.stdout)
    assert record["ok"] is False
    found = record["envs"]["bad.py:Generous"]["findings"]
    assert any(finding["status"] == "failed" and finding["fix"] for finding in found)


@pytest.mark.parametrize("arguments", [["--args", "word=no", "--args", "copies=2"], ["--args", "word=no", "copies=2"]])
def test_arguments_reach_the_environment(rlkit: Callable[..., Any], arguments: list[str]) -> None:
    from rlkit.cli.check import environments

    assert rlkit("check", "good.py:Echo", *arguments, "--tasks", "1").exit_code == 0
    (tasks,) = environments("good.py:Echo", ["word=no", "copies=2"], seed=0).values()
    assert [env.gold for env in tasks] == ["nono"]  # type: ignore[union-attr]


def test_all_environments_of_a_configuration_are_checked(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("envs: {a: {env: good.py:Echo}, b: {env: bad.py:Generous}}\n")
    record = json.loads(rlkit("check", "c.yaml", "--json").stdout)
    assert {name: report["ok"] for name, report in record["envs"].items()} == {"a": True, "b": False}


@pytest.mark.parametrize(
    "arguments",
    [
        ["arithmetik"],
        ["good.py:Ech"],
        ["no-such-file.py:Echo"],
        ["no-such-file.yaml"],
        ["good.py:Echo", "--args", "wrod=no"],
        ["good.py:Echo", "--args", "copies=many"],
        ["good.py:Echo", "--args", "copies"],
        ["good.py:Echo", "--args", "=1"],
        ["good.py:Echo", "--args", "word=[1"],
        [""],
    ],
)
def test_a_target_that_cannot_be_made_is_2_and_one_clear_line(rlkit: Callable[..., Any], arguments: list[str]) -> None:
    result = rlkit("check", *arguments)
    assert result.exit_code == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line != "an environment that prints"]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
