"""Every example passes a dry run offline, but for those whose tasks are elsewhere.

Those that take some seconds of processor time each are tried where `RLKIT_ALL_DRY_RUNS` is set, as in CI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.marks import split_slow

from .cli.conftest import rlkit
from .sandbox.conftest import can_sandbox, sandbox_cache

__all__ = ["can_sandbox", "rlkit", "sandbox_cache"]

EXAMPLES = Path(__file__).parent.parent / "examples"

QUICK = (
    "arithmetic.yaml",
    "arithmetic_hard.yaml",
    "circle_packing.yaml",
    "copy_rule.yaml",
    "distillation.yaml",
    "erdos.yaml",
    "erdos_small.yaml",
    "erdos_templates.yaml",
    "erdos_ttt.yaml",
    "erdos_ttt_discover.yaml",
    "maths/arithmetic.yaml",
    "migrated/tinking_arithmetic.yaml",
    "warm_start.yaml",
)


def _here(*envs: str) -> list[str]:
    """Settings for folders of the user's own, and containers: the examples' tasks stand in, in local sandboxes."""
    arguments = ("tasks_dir=examples/tasks", "environment=local", "max_turns=2")
    return [f"{env}.args.{argument}" for env in envs for argument in arguments]


SLOW: Mapping[str, Sequence[str]] = {
    "harbor_local.yaml": (),
    "openreward_local.yaml": (),
    "terminal_small.yaml": (),
    "papergym.yaml": _here("envs.papergym", "eval.envs.papergym"),
    "migrated/tinking_papergym.yaml": _here("envs.papers"),
    "migrated/tinking_small_scale.yaml": _here("envs.papers"),
    "migrated/trainer_terminal_bench.yaml": _here("envs.terminal"),
}
_HUB = "its dataset is on the hub of Hugging Face"
_PLATFORM = "its environments are OpenReward's, which want a key"
_REGISTRY = "its dataset is in Harbor's registry"
_OWN_TEST = "its agent or server comes from another package, and its own test trains it"
ELSEWHERE: Mapping[str, str] = {
    "agents/command_line_agent.yaml": _OWN_TEST,
    "agents/langgraph_agent.yaml": _OWN_TEST,
    "agents/litellm_agent.yaml": _OWN_TEST,
    "agents/openai_agents.yaml": _OWN_TEST,
    "openenv.yaml": _OWN_TEST,
    "verifiers.yaml": _OWN_TEST,
    "maths/gsm8k.yaml": _HUB,
    "maths/hendrycks.yaml": _HUB,
    "maths/math500.yaml": _HUB,
    "maths/polaris.yaml": _HUB,
    "migrated/tinking_hendrycks.yaml": _HUB,
    "migrated/tinking_math500.yaml": _HUB,
    "migrated/tinking_polaris.yaml": _HUB,
    "migrated/openreward_resume.yaml": _PLATFORM,
    "migrated/openreward_two.yaml": _PLATFORM,
    "migrated/openreward_whodunit.yaml": _PLATFORM,
    "openreward_hosted.yaml": _PLATFORM,
    "migrated/tinking_hello_world.yaml": _REGISTRY,
    "migrated/tinking_hello_world_debug.yaml": _REGISTRY,
    "terminal_bench.yaml": _REGISTRY,
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)


def run_dry(rlkit: Callable[..., Any], name: str, *settings: str) -> None:
    result = rlkit("train", EXAMPLES / name, *settings, "--dry-run", "--quiet")
    assert result.exit_code == 0, result.output
    assert "the whole run takes" in result.stdout


def test_every_example_is_tested_or_listed_as_remote() -> None:
    configs = {path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.yaml")}
    assert sorted(str(path) for path in configs) == sorted([*QUICK, *SLOW, *ELSEWHERE])


@pytest.mark.parametrize("name", split_slow(QUICK, lambda name: name in QUICK[::3]))
def test_an_example_passes_a_dry_run(name: str, rlkit: Callable[..., Any]) -> None:
    run_dry(rlkit, name)


@pytest.mark.skipif(not os.environ.get("RLKIT_ALL_DRY_RUNS"), reason="RLKIT_ALL_DRY_RUNS is not set")
@pytest.mark.usefixtures("can_sandbox")
@pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", SLOW)
def test_an_example_with_an_environment_of_processes_passes_a_dry_run(name: str, rlkit: Callable[..., Any]) -> None:
    run_dry(rlkit, name, *SLOW[name])


@pytest.mark.parametrize("name", [name for name, reason in ELSEWHERE.items() if reason == _HUB])
def test_example_with_a_missing_dataset_is_an_error(name: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", EXAMPLES / name, "--dry-run", "--quiet")
    assert result.exit_code == 3
    assert "is not on this machine, and HF_HUB_OFFLINE is set" in result.stderr
