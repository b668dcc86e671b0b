from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFIG = "envs: {arithmetic: {}}\nsteps: 3\n"


@pytest.fixture(autouse=True)
def _file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CONFIG)


def test_show_prints_every_value_with_its_origin(rlkit: Callable[..., Any]) -> None:
    result = rlkit("config", "show", "a.yaml", "seed=4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any(line.startswith("steps: 3") and "a.yaml:2" in line for line in lines)
    assert any(line.startswith("seed: 4") and "command line" in line for line in lines)
    assert any("group_size: 8" in line and "default" in line for line in lines)


def test_show_as_json_has_values_and_origins(rlkit: Callable[..., Any]) -> None:
    record = json.loads(rlkit("config", "show", "a.yaml", "--json").stdout)
    assert record["config"]["steps"] == 3
    assert record["origins"]["steps"].endswith("a.yaml:2")


def test_show_never_prints_what_was_interpolated(
    rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "canary-value")
    (tmp_path / "b.yaml").write_text(CONFIG + "model: ${WHERE}\n")
    for arguments in (["b.yaml"], ["b.yaml", "--json"], ["b.yaml", "model=3.x${WHERE", "--debug"]):
        result = rlkit("config", "show", *arguments)
        assert "canary" not in result.stdout + result.stderr


def test_schema_is_a_json_schema(rlkit: Callable[..., Any]) -> None:
    text = rlkit("config", "schema").stdout
    line = rlkit("config", "schema", "--json").stdout
    assert json.loads(text) == json.loads(line)
    assert json.loads(text)["$schema"].startswith("https://json-schema.org/")
    assert "steps" in json.loads(text)["properties"]
    assert line.count("\n") == 1 < text.count("\n")


def test_a_wrong_configuration_is_2(rlkit: Callable[..., Any]) -> None:
    result = rlkit("config", "show", "a.yaml", "stepz=3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Did you mean 'steps'?" in result.stderr
