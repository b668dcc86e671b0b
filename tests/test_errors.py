from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

from rlkit.config.loading.objects import load_envs
from rlkit.config.schema import EnvConfig
from rlkit.errors import EXTRAS, MissingError, ServiceError, did_you_mean, missing_extra


def test_every_named_extra_is_one_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) | {"all"} == set(project["optional-dependencies"])


def test_a_missing_extra_is_one_line_with_the_command() -> None:
    error = missing_extra("math_verify")
    assert str(error).startswith("math_verify is not installed: run `uv sync --extra math-verify`")
    assert error.exit_code == 3


def test_an_environment_that_needs_a_missing_extra_says_how_to_install_it(tmp_path: Path) -> None:
    absent = next((name for name in EXTRAS if importlib.util.find_spec(name) is None), None)
    if absent is None:
        pytest.skip("every extra is installed here")
    (tmp_path / "mine.py").write_text(f"import {absent}\n")
    with pytest.raises(MissingError, match=f"{absent} is not installed: run `uv sync --extra"):
        load_envs("mine", EnvConfig(env=f"{tmp_path}/mine.py:Task"), field="envs.mine", seed=0)


def test_a_service_error_carries_the_request() -> None:
    assert str(ServiceError("sampling: gone", request_id="r-7")) == "sampling: gone (request r-7)"


def test_the_nearest_word_is_suggested_and_nothing_else() -> None:
    assert did_you_mean("grop", ["grpo", "group_mean"]) == " Did you mean 'grpo'?"
    assert did_you_mean("zzz", ["grpo"]) == ""
