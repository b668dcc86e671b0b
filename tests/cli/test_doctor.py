from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlkit.tools.doctor import Finding

GOOD = Finding("python", "ok", "3.12.1")
BAD = Finding("tinker", "fail", "not installed", "run `uv sync`")


def fake_findings(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[bool]:
    engine_flags: list[bool] = []

    def examine_machine(*, engine: bool, note: Callable[[str], None]) -> Iterator[Finding]:
        note("a while")
        engine_flags.append(engine)
        yield from findings

    monkeypatch.setattr("rlkit.tools.doctor.examine_machine", examine_machine)
    return engine_flags


def test_healthy_machine_is_exit_code_0(rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine_flags = fake_findings(monkeypatch, GOOD)
    result = rlkit("doctor", "--no-engine")
    assert (result.exit_code, result.stdout.split()) == (0, ["ok", "python", "3.12.1"])
    assert engine_flags == [False]


def test_missing_requirement_is_exit_code_3_with_a_fix(
    rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_findings(monkeypatch, GOOD, BAD)
    result = rlkit("doctor")
    assert result.exit_code == 3
    assert result.stdout.splitlines()[-1].strip() == "fix: run `uv sync`"


def test_warning_is_exit_code_0(rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_findings(monkeypatch, Finding("docker", "warn", "not found", "install Docker"))
    assert rlkit("doctor").exit_code == 0


def test_json_lists_the_findings(rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_findings(monkeypatch, GOOD, BAD)
    result = rlkit("doctor", "--json")
    assert json.loads(result.stdout)["ok"] is False
    assert json.loads(result.stdout)["findings"][1]["fix"] == "run `uv sync`"
    assert result.exit_code == 3


def test_a_run_is_examined_by_its_name_or_its_folder(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    without_findings = rlkit("doctor", "first")
    assert (without_findings.exit_code, without_findings.stdout) == (
        0,
        "first at step 0: no findings (less certain with fewer than 5 steps)\n",
    )
    keys = {"env/sums/episodes": 8.0, "env/sums/stop/length": 0.75}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **keys}) + "\n" for step in range(1, 8)))
    result = rlkit("doctor", folder)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "first at step 7: 1 finding",
        "truncation in sums, first found in step 5, last in step 7",
        "  in steps 1 to 7, 75% of the turns were truncated at the token limit",
        "  fix: raise envs.sums.max_tokens, or set a length_penalty",
    ]
    record = json.loads(rlkit("doctor", "first", "--json").stdout)
    assert (record["run"], record["step"], record["findings"][0]["name"]) == ("first", 7, "truncation")
    lines = [{"step": 1, "optim/nll": 2.0}, {"step": 2, **keys, "env/sums/groups/mixed": 1.0}]  # after a warm start
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert rlkit("doctor", folder).stdout.splitlines()[:2] == [
        "first at step 2: 1 finding (less certain with fewer than 5 steps)",
        "truncation in sums, first found in step 2, last in step 2",
    ]


def test_missing_run_is_a_usage_error(rlkit: Callable[..., Any]) -> None:
    result = rlkit("doctor", "nothing")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no run 'nothing'" in result.stderr
    assert rlkit("doctor", "nothing", "--no-engine").exit_code == 2
