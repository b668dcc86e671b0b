from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlkit.engine import EngineServer
from rlkit.engine.server.server import load_api_key
from rlkit.testing import byte_model


def test_an_address_that_is_not_there_is_2(rlkit: Callable[..., Any]) -> None:
    result = rlkit("serve", "--host", "203.0.113.1", "--json")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot listen on 203.0.113.1")
    assert json.loads(result.stdout)["exit_code"] == 2


@pytest.mark.parametrize("model", ["./no/such/folder", "", "a b", "empty"])
def test_a_model_that_is_none_is_2_before_anything_starts(
    rlkit: Callable[..., Any], tmp_path: Path, model: str
) -> None:
    (tmp_path / "empty").mkdir()
    result = rlkit("serve", "--model", model)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")


def test_a_model_that_the_engine_cannot_run_is_2(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    config = byte_model(tmp_path) / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "Gemma3ForConditionalGeneration"))
    result = rlkit("serve", "--model", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {config}: the embedded engine cannot run")


def test_a_restart_has_the_key_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = load_api_key(path)
    assert load_api_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    with EngineServer(root=tmp_path / "root", api_key=key) as server:
        assert server.api_key == key


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--api-key", "secret"], "api_key must start with 'tml-'"),
        (["--api-key", ""], "api_key must start with 'tml-'"),
        (["--api-key", "tml-x", "--api-key-file", "key"], "--api-key and --api-key-file: give one of them"),
        (["--api-key-file", "empty"], "empty: holds no API key; write one into it, or remove it for a new one"),
        (["--api-key-file", "."], ".: cannot hold the API key: Is a directory"),
        (["--api-key-file", "no/such/folder"], "no/such/folder: cannot hold the API key: No such file or directory"),
        (["--api-key-file", "binary"], "binary: cannot hold the API key: 'utf-8' codec can't decode"),
    ],
)
def test_a_key_that_is_none_is_2(
    rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"tml-\xff")
    result = rlkit("serve", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {problem}")


def test_a_probe_needs_no_key(tmp_path: Path) -> None:
    with EngineServer(root=tmp_path) as server:
        assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
        assert httpx.get(f"{server.url}/api/v1/training_runs").status_code == 401
