from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harbor.models.trial.config import EnvironmentConfig

from rlkit.config.loading.targets import load_target
from rlkit.redteam.report import RedTeamReport
from tests.envs.harbor.conftest import write_task

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


def test_good_environment_of_a_file_passes(rlkit: Callable[..., Any]) -> None:
    result = rlkit("check", "good.py:Echo")
    assert result.exit_code == 0, result.stdout
    assert "passed" in result.stdout
    assert "failed" not in result.stdout


def test_fault_is_exit_code_1_with_a_fix(rlkit: Callable[..., Any]) -> None:
    result = rlkit("check", "bad.py:Generous")
    assert result.exit_code == 1
    assert "fix: " in result.stdout.split("failed", 1)[1]


def test_json_has_every_finding_and_no_output_of_the_environment(rlkit: Callable[..., Any]) -> None:
    result = rlkit("check", "bad.py:Generous", "--json")
    record = json.loads(result.stdout)
    assert record["ok"] is False
    findings = record["envs"]["bad.py:Generous"]["findings"]
    assert any(finding["status"] == "failed" and finding["fix"] for finding in findings)


def test_literal_secret_is_a_warning_with_its_field_and_a_fix(
    rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORD", "s3cret-canary")
    args = '{word: "${WORD}", copies: 1}'
    (tmp_path / "clean.yaml").write_text(f"envs: {{a: {{env: 'good.py:Echo', args: {args}}}}}")
    assert "warning" not in rlkit("check", "clean.yaml", "--tasks", "1").stderr
    (tmp_path / "login.py").write_text(GOOD.replace("word: str", "db_pass: str = '', word: str"))
    (tmp_path / "written.yaml").write_text("envs: {a: {env: 'login.py:Echo', args: {db_pass: canary}}}")
    result = rlkit("check", "written.yaml", "--tasks", "1")
    assert result.exit_code == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "warning" in line]
    assert "envs.a.args.db_pass looks like a literal secret" in line
    assert "write ${NAME} instead" in line
    assert "canary" not in result.stderr
    stderr = rlkit("check", "login.py:Echo", "--args", "db_pass=canary", "--tasks", "1").stderr
    assert "--args.db_pass looks like a literal secret" in stderr


@pytest.mark.parametrize("secret", ["sk-proj-abcdefghijklmnop1234", "hf_abcdefghijklmnopqrst", "AKIAIOSFODNN7EXAMPLE"])
def test_credential_of_a_known_shape_is_an_error_in_any_field(
    rlkit: Callable[..., Any], tmp_path: Path, secret: str
) -> None:
    (tmp_path / "a.yaml").write_text(f"envs: {{a: {{env: 'good.py:Echo', args: {{word: {secret}}}}}}}")
    refused = rlkit("check", "a.yaml")
    assert refused.exit_code == 2
    assert "envs.a.args.word contains a secret: write ${NAME} instead" in refused.stderr
    assert secret not in refused.stderr


@pytest.mark.parametrize("arguments", [["--args", "word=no", "--args", "copies=2"], ["--args", "word=no", "copies=2"]])
def test_arguments_reach_the_environment(rlkit: Callable[..., Any], arguments: list[str]) -> None:
    assert rlkit("check", "good.py:Echo", *arguments, "--tasks", "1").exit_code == 0
    (tasks,) = load_target("good.py:Echo", ["word=no", "copies=2"]).values()
    assert [env.gold for env in tasks] == ["nono"]  # type: ignore[union-attr]


def test_all_environments_of_a_configuration_are_checked(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    envs = "{a: {env: good.py:Echo}, b: {env: bad.py:Generous}}"
    (tmp_path / "c.yaml").write_text(f"envs: {envs}\neval: {{envs: {envs}}}\n")
    record = json.loads(rlkit("check", "c.yaml", "--json", "--tasks", "1").stdout)
    expected = {"a": True, "b": False, "eval.envs.a": True, "eval.envs.b": False}
    assert {name: report["ok"] for name, report in record["envs"].items()} == expected


def test_fault_of_an_evaluation_environment_names_its_field(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("envs: {a: {env: good.py:Echo}}\neval: {envs: {a: {env: good.py:Ech}}}\n")
    result = rlkit("check", "c.yaml")
    assert result.exit_code == 2
    assert "eval.envs.a.env: " in result.stderr


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
def test_invalid_target_is_exit_code_2_with_one_line(rlkit: Callable[..., Any], arguments: list[str]) -> None:
    result = rlkit("check", *arguments)
    assert result.exit_code == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line != "an environment that prints"]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")


@pytest.mark.parametrize("section", ["envs", "eval.envs"])
@pytest.mark.parametrize("command", [["check"], ["train"], ["train", "--dry-run"], ["eval"]])
def test_wrong_argument_names_its_line(
    rlkit: Callable[..., Any], tmp_path: Path, section: str, command: list[str]
) -> None:
    bad = "{env: good.py:Echo, args: {copies: many}}"
    (tmp_path / "c.yaml").write_text(
        f"envs:\n  a: {bad}\n"
        if section == "envs"
        else f"envs: {{b: {{env: good.py:Echo}}}}\neval: {{envs: {{a: {bad}}}}}\n"
    )
    result = rlkit(*command, "c.yaml")
    assert result.exit_code == 2
    line = f"error: c.yaml:2: {section}.a.args.copies: expected an integer, found a string"
    assert line in result.stderr.splitlines()
    unknown = rlkit(*command, "c.yaml", "envs.a={env: good.py:Echo}", "envs.a.args.wrod=no", "eval=null")
    assert "error: command line: envs.a.args.wrod: unknown argument. Did you mean 'word'?" in unknown.stderr


def test_missing_table_names_its_folder_and_the_nearest_name(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "data.csv").touch()
    (tmp_path / "own" / "c.yaml").write_text("envs: {a: {env: rows, args: {path: date.csv, answer: b}}}")
    result = rlkit("check", "own/c.yaml")
    assert result.exit_code == 2
    message = f"envs.a: path: there is no file 'date.csv' in {tmp_path / 'own'}. Did you mean 'data.csv'?"
    assert result.stderr == f"error: {message}\n"


def test_redteam_lists_earning_cheats_with_exit_code_1(rlkit: Callable[..., Any]) -> None:
    assert rlkit("check", "good.py:Echo", "--redteam", "--tasks", "1", "word=qwertz").exit_code == 0
    result = rlkit("check", "bad.py:Generous", "--redteam")
    assert result.exit_code == 0, "what is paid for anything is paid for the honest empty attempt, too"
    (path := Path("lax.py")).write_text(GOOD.replace("reply.text.strip() == self.word", "reply.text != ''"))
    result = rlkit("check", f"{path}:Echo", "--redteam")
    assert result.exit_code == 1
    assert [line.split()[:4] for line in result.stdout.splitlines() if line.startswith("prompt-repeated")] == [
        ["prompt-repeated", "earned", "1", "0"]
    ]
    record = json.loads(rlkit("check", f"{path}:Echo", "--redteam", "--json").stdout)
    assert record["ok"] is False
    cheats = {cheat["cheat"]: cheat for cheat in record["envs"]["lax.py:Echo"]["cheats"]}
    assert (cheats["huge-numbers"]["result"], cheats["huge-numbers"]["reward"]) == ("earned", 1.0)
    assert cheats["hostile-program"]["result"] == "not tried"


def test_harbor_tasks_are_attacked_with_task_attacks(
    rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacked: dict[str, Path] = {}

    async def attack_tasks(tasks: dict[str, Path], *, environment: EnvironmentConfig, **_: object) -> RedTeamReport:
        attacked.update(tasks)
        assert environment.kwargs == {"memory_mb": 64}
        return RedTeamReport([], {})

    monkeypatch.setattr("rlkit.redteam.task_attacks.attack_tasks", attack_tasks)
    for name in ("one", "two", "three"):
        write_task(tmp_path / "tasks" / name)
    arguments = ["tasks_dir=tasks", "environment_kwargs.memory_mb=64"]
    assert rlkit("check", "harbor", "--redteam", "--tasks", "2", *arguments).exit_code == 0
    assert len(attacked) == 2
    assert attacked.keys() <= {"one", "two", "three"}
