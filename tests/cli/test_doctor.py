from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlkit.doctor import Finding

GOOD = Finding("python", "ok", "3.12.1")
BAD = Finding("tinker", "fail", "not installed", "run `uv sync`")


def examined(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[bool]:
    asked: list[bool] = []

    def examine(*, engine: bool) -> Iterator[Finding]:
        asked.append(engine)
        yield from findings

    monkeypatch.setattr("rlkit.doctor.examine", examine)
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
