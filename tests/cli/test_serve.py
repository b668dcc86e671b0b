from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


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
