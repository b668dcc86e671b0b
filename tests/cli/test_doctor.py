from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlkit.tools.doctor import Finding

GOOD = Finding("python", "ok", "3.12.1")
BAD = Finding("tinker", "fail", "not installed", "run `uv sync`")


def examined(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[bool]:
    asked: list[bool] = []

    def examine_machine(*, engine: bool, note: Callable[[str], None]) -> Iterator[Finding]:
        note("a while")
        asked.append(engine)
        yield from findings

    monkeypatch.setattr("rlkit.tools.doctor.examine_machine", examine_machine)
    return asked


def test_a_healthy_machine_is_0(rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = examined(monkeypatch, GOOD)
    result = rlkit("doctor", "--no-engine")
    assert (result.exit_code, result.stdout.split()) == (0, ["ok", "python", "3.12.1"])
    assert asked == [False]


def test_something_needed_that_is_missing_is_3_with_its_fix(
    rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    examined(monkeypatch, GOOD, BAD)
    result = rlkit("doctor")
    assert result.exit_code == 3
    assert result.stdout.splitlines()[-1].strip() == "fix: run `uv sync`"


def test_a_warning_alone_is_0(rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    examined(monkeypatch, Finding("docker", "warn", "not found", "install Docker"))
    assert rlkit("doctor").exit_code == 0


def test_json(rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    examined(monkeypatch, GOOD, BAD)
    result = rlkit("doctor", "--json")
    assert json.loads(result.stdout)["ok"] is False
    assert json.loads(result.stdout)["findings"][1]["fix"] == "run `uv sync`"
    assert result.exit_code == 3


def test_a_run_is_examined_by_its_name_or_its_folder(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    nothing = rlkit("doctor", "first")
    assert (nothing.exit_code, nothing.stdout) == (0, "first at step 0: no findings\n")
    keys = {"env/sums/episodes": 8.0, "env/sums/stop/length": 0.75}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **keys}) + "\n" for step in range(1, 8)))
    found = rlkit("doctor", folder)
    assert found.exit_code == 0
    assert found.stdout.splitlines() == [
        "first at step 7: 1 finding",
        "truncation in sums, first found in step 5, last in step 7",
        "  in steps 1 to 7, 75% of the turns were truncated at the token limit",
        "  fix: raise envs.sums.max_tokens, or set a length_penalty",
    ]
    told = json.loads(rlkit("doctor", "first", "--json").stdout)
    assert (told["run"], told["step"], told["findings"][0]["name"]) == ("first", 7, "truncation")


def test_a_run_that_is_not_there_is_the_users_mistake(rlkit: Callable[..., Any]) -> None:
    result = rlkit("doctor", "nothing")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no run 'nothing'" in result.stderr
    assert rlkit("doctor", "nothing", "--no-engine").exit_code == 2
