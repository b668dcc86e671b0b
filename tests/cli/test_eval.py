from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlkit.errors import ServiceError
from rlkit.evaluation.report import render_rewards, render_scores, score_parts, summarize_env
from rlkit.metrics.intervals import Score
from rlkit.trackers import Progress
from tests.builders import group
from tests.limits import HANG_S

METRICS = {
    "eval/sums/groups": 100.0,
    "eval/sums/episodes": 102.0,
    "eval/sums/failed": 1.0,
    "eval/sums/reward/mean": 0.83,
    "eval/sums/reward/stderr": 0.04,
    "eval/all/reward/mean": 0.83,
}
CONFIG = "envs: {arithmetic: {}}\neval: {envs: {sums: {env: arithmetic}}}\n"


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def evaluate(
        resolved: object, *, checkpoint: str | None, note: Callable[[str], None], **named: object
    ) -> Mapping[str, float]:
        note("fetching the model")
        if checkpoint == "tinker://gone/sampler_weights/x":
            raise ServiceError("the checkpoint does not exist", request_id="r-1")
        return METRICS

    monkeypatch.setattr("rlkit.evaluation.evaluate.evaluate", evaluate)
    (tmp_path / "a.yaml").write_text(CONFIG)


def test_row_has_mean_error_and_environment() -> None:
    assert summarize_env(METRICS, "eval/sums") == {"episodes": 102, "failed": 1, "reward": 0.83, "stderr": 0.04}


@pytest.mark.parametrize(("episodes", "failed"), [(0.0, 0.0), (3.0, 3.0)])
def test_row_without_valid_episodes_has_no_mean(episodes: float, failed: float) -> None:
    row = summarize_env({"eval/x/episodes": episodes, "eval/x/failed": failed}, "eval/x")
    assert row == {"episodes": episodes, "failed": failed}
    assert " - " in render_rewards({"x": row})


def test_large_reward_keeps_the_table_aligned() -> None:
    row = {"reward": -1e308, "stderr": 0.5, "episodes": 3, "failed": 0}
    cells = render_rewards({"x": row}).splitlines()[1].split()
    assert cells == ["x", "-1e+308", "±", "0.500", "3", "0"]


def test_environment_with_failed_rollouts_only_is_exit_code_1(
    rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def evaluate(resolved: object, **named: object) -> Mapping[str, float]:
        return {"eval/sums/episodes": 3.0, "eval/sums/failed": 3.0}

    monkeypatch.setattr("rlkit.evaluation.evaluate.evaluate", evaluate)
    result = rlkit("eval", "a.yaml")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split() == ["sums", "-", "3", "3"]


def test_progress_is_printed_from_time_to_time(rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = threading.Event()

    def read_progress() -> Progress:
        is_read.set()
        return Progress(finished=4, running=2, queued=3, tokens=1234)

    async def evaluate(resolved: object, *, on_progress: Callable[..., None], **named: object) -> Mapping[str, float]:
        on_progress(read_progress)
        await asyncio.to_thread(is_read.wait, limit_s)
        return METRICS

    monkeypatch.setattr("rlkit.evaluation.evaluate.evaluate", evaluate)
    monkeypatch.setattr("rlkit.cli.common.progress.EVERY_S", 0.05)
    limit_s = HANG_S
    assert "4 of 9 rollouts done, 2 running; 1,234 tokens\n" in rlkit("eval", "a.yaml").stderr
    is_read.clear()
    limit_s = 0.2
    assert rlkit("eval", "a.yaml", "--quiet").stderr == ""


def test_result_is_a_table(rlkit: Callable[..., Any]) -> None:
    result = rlkit("eval", "a.yaml")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].split() == ["sums", "0.830", "±", "0.040", "102", "1"]
    assert result.stderr == "fetching the model\n"


def test_scores_have_a_row_for_all_tasks_and_for_each_part() -> None:
    scores = {"": {"avg_at_4": Score(0.5, 0.4, 0.6)}, "level/3": {"avg_at_4": Score(0.25, 0.1, 0.5)}}
    lines = render_scores({"sums": scores})
    assert lines[1:] == [
        "           avg@4",
        "sums       0.500 [0.40, 0.60]",
        "  level 3  0.250 [0.10, 0.50]",
    ]


def test_without_scores_there_is_no_table() -> None:
    assert render_scores({"sums": score_parts([group([None, None])])}) == []


def test_json_has_the_rows_and_every_metric(rlkit: Callable[..., Any]) -> None:
    record = json.loads(rlkit("eval", "a.yaml", "--json", "--quiet").stdout)
    assert record["envs"]["sums"]["reward"] == 0.83
    assert record["metrics"] == METRICS
    assert record["checkpoint"] is None


def test_endings_are_listed_by_environment_and_task(rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def evaluate(
        resolved: object, *, on_groups: Callable[[object], None], **named: object
    ) -> Mapping[str, float]:
        on_groups([group([1.0, 0.0], env="sums"), group([None, 0.0], env="sums")])
        return METRICS

    monkeypatch.setattr("rlkit.evaluation.evaluate.evaluate", evaluate)
    lines = rlkit("eval", "a.yaml", "--tasks").stdout.splitlines()
    assert lines[7] == "sums: completed 2, failed 1, solved 1"  # after the tables of rewards and scores
    assert lines[9].split() == ["task", "1/2", "0.500", "completed", "1,", "solved", "1"]
    assert len(rlkit("eval", "a.yaml").stdout.splitlines()) == 8
    record = json.loads(rlkit("eval", "a.yaml", "--json").stdout)
    assert record["envs"]["sums"]["endings"] == {"completed": 2, "failed": 1, "solved": 1}
    assert record["tasks"][0]["endings"] == {"solved": 1, "completed": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "http://x/v1"], "give both"),
        (["--model", "big"], "give both"),
        (["--endpoint", "http://x/v1", "--model", "big", "--checkpoint", "tinker://a/b"], "--checkpoint has no effect"),
    ],
)
def test_an_endpoint_has_a_model_and_no_checkpoint(
    rlkit: Callable[..., Any], arguments: list[str], message: str
) -> None:
    result = rlkit("eval", "a.yaml", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("checkpoint", ["", "step-3", "/no/such", "http://x"])
def test_malformed_checkpoint_path_is_exit_code_2(rlkit: Callable[..., Any], checkpoint: str) -> None:
    result = rlkit("eval", "a.yaml", "--checkpoint", checkpoint)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --checkpoint: ")


def test_service_error_is_exit_code_1_with_its_request(rlkit: Callable[..., Any]) -> None:
    result = rlkit("eval", "a.yaml", "--checkpoint", "tinker://gone/sampler_weights/x")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: the checkpoint does not exist (request r-1)"


def test_an_agent_is_that_of_the_environments_of_harbor(
    rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = list[object]()

    async def evaluate(resolved: Any, **named: object) -> Mapping[str, float]:
        agents.extend(spec.args.get("agent") for spec in resolved.config.eval.envs.values())
        return METRICS | {f"eval/terminal/{name}": 1.0 for name in ("episodes", "reward/mean")}

    monkeypatch.setattr("rlkit.evaluation.evaluate.evaluate", evaluate)
    Path("b.yaml").write_text(
        "envs: {arithmetic: {}}\neval: {envs: {sums: {env: arithmetic}, terminal: {env: harbor}}}\n"
    )
    assert rlkit("eval", "b.yaml", "--agent", "codex").exit_code == 0
    assert agents == [None, "codex"]


def test_an_agent_without_an_environment_of_harbor_is_an_error(rlkit: Callable[..., Any]) -> None:
    result = rlkit("eval", "a.yaml", "--agent", "codex")
    assert result.exit_code == 2
    assert "--agent has no effect: no environment of eval.envs has env: harbor" in result.output
