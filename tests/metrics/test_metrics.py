"""Metrics of a step equal a recount by independent code from the recorded episodes."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import FrameType
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import rlkit
from rlkit._util.priority_semaphore import Slots
from rlkit.config.schema.operation import BestConfig, CheckpointConfig
from rlkit.metrics.metrics import departure, group_metrics
from rlkit.metrics.step_timer import StepTimer
from rlkit.service.watch import ServiceWatch
from rlkit.store import RunStore
from rlkit.testing import Latency, World, run_virtual
from rlkit.trackers import Broadcast
from rlkit.training.checkpoints import CheckpointSaver
from rlkit.training.model_selection import ModelSelection
from rlkit.training.reporter import Reporter
from rlkit.types import Group
from tests.builders import episode, group, turn
from tests.simulation import Ears, Simulation

SCHEDULES = {
    "sync": {},
    "stream": {"mode": "stream"},
    "paced": {"mode": "async", "max_staleness": 2},
    "strict": {"mode": "async", "max_staleness": 1, "staleness": "strict"},
}
SHAPED = {
    "length_penalty": {"coefficient": 0.5, "from_tokens": 10, "to_tokens": 20},
    "batch": {"groups": 3, "group_size": 4, "max_tokens": 40, "clip_advantages": 0.3},
}
PLAIN = {"batch": {"groups": 3, "group_size": 4, "replace_uninformative": True, "max_replaced_groups": 6}}
MIN_VALID = 3


class Coin(rlkit.SingleTurnEnv):
    """Random rewards: nearly always right in some tasks, failing at times."""

    def __init__(self, number: int) -> None:
        self.right = (1, 4, 11)[number % 3]
        self.task_id = f"coin-{number}"

    def prompt(self) -> str:
        return self.task_id

    def grade(self, reply: rlkit.Reply) -> float:
        chance = crc32(reply.text.encode())
        if chance % 5 < 2:
            raise ValueError("broken")
        return float(chance % 12 < self.right)


class Chat(rlkit.Env):
    """Several turns with forced tokens and two conversations, sometimes truncated or failing."""

    def __init__(self, number: int) -> None:
        self.task_id = f"chat-{number}"

    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
        messages: list[rlkit.Message] = [{"role": "user", "content": self.task_id}]
        text = ""
        for number in range(3):
            reply = await policy.chat(messages, forced="ab" if number == 1 else ())
            text += reply.text
            chance = crc32(text.encode())
            if chance % 9 == 0:
                raise ValueError("broken")
            if chance % 2:
                break
            messages = [*messages, reply.message, {"role": "user", "content": "more"}]
            if chance % 5 == 0:  # another conversation
                messages = [{"role": "user", "content": text[:3]}]
        metrics = {"spoken": float(len(text))} if len(text) % 2 else {}
        return rlkit.Outcome(
            text.count("e") / 2, metrics=metrics, truncated=len(text) % 5 == 0, masked=len(text) % 3 == 0
        )


CHATS = [Chat(number) for number in range(200)]


def run_simulation(directory: Path, schedule: str, seed: int, **settings: object) -> Simulation:
    chosen: dict[str, object] = {
        "steps": 4,
        "envs": {"words": {}, "chats": {"env": f"{__name__}:CHATS"}},
        "sampling": {"max_tokens": 25},
        "rollouts": {"min_valid": MIN_VALID, "max_retries": 2, "max_concurrent": 9},
        "schedule": SCHEDULES[schedule],
        "seed": seed,
        **settings,
    }
    run = Simulation(directory, World(seed), settings=chosen, tasks=[Coin(number) for number in range(200)])
    assert run.train().status == "completed"
    return run


def read_step_rows(run: Simulation, step: int) -> list[dict[str, Any]]:
    episodes = pd.read_parquet(run.directory / "episodes")
    rows = episodes[episodes.step == step].to_dict("records")
    return [{str(key): value for key, value in row.items()} for row in rows]


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles: the smallest value that p % of the values do not exceed."""
    return {
        f"p{p}": min(v for v in values if 100 * sum(other <= v for other in values) >= p * len(values))
        for p in (10, 50, 90)
    }


def count_sampled_tokens(turn: Mapping[str, Any]) -> int:
    return int(sum(turn["sampled"]))


def group_by_draw(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    draws = sorted({(row["env"], row["draw"]) for row in rows})  # evaluations count those of each environment
    return [[row for row in rows if (row["env"], row["draw"]) == draw] for draw in draws]


def bigrams(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [
        (turn["completion"][i], turn["completion"][i + 1])
        for turn in row["turns"]
        for i in range(len(turn["completion"]) - 1)
        if turn["sampled"][i] and turn["sampled"][i + 1]
    ]


def recount_env(attempts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Recount `env/<name>/…` from the rows of the environment in a step."""
    rows = [row for row in attempts if row["final"]]
    valid = [row for row in rows if row["status"] != "failed"]
    groups = group_by_draw(rows)
    metrics: dict[str, float] = {
        "groups": len(groups),
        "episodes": len(rows),
        "failed": len(rows) - len(valid),
        "retries": len(attempts) - len(rows),
    }
    if not valid:
        return metrics
    rewards = [row["reward"] for row in valid]
    turns = [turn for row in valid for turn in row["turns"]]
    tokens = [sum(map(count_sampled_tokens, row["turns"])) for row in valid]
    env_metrics = [json.loads(row["metrics"]) for row in valid]
    metrics |= {
        "reward/mean": mean(rewards),
        "reward/std": mean((reward - mean(rewards)) ** 2 for reward in rewards) ** 0.5,
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        **{f"reward/{p}": value for p, value in percentiles(rewards).items()},
        "solved": mean(reward >= 1 for reward in rewards),
        "solved_at_limit": mean(
            row["reward"] >= 1 and any(turn["stop"] == "length" for turn in row["turns"]) for row in valid
        ),
        "truncated": mean(row["status"] == "truncated" for row in valid),
        "masked": mean(row["masked"] for row in valid),
        "turns": mean(len(row["turns"]) for row in valid),
        "segments": mean(sum(np.isnan(t["parent"] or 0) or t["parent"] is None for t in row["turns"]) for row in valid),
        "forks": mean(count_forks(row["turns"]) for row in valid),
        "stop/length": mean(turn["stop"] == "length" for turn in turns),
        "stop/stop": mean(turn["stop"] == "stop" for turn in turns),
    }
    for name, lengths in (("tokens", tokens), ("turn_tokens", list(map(count_sampled_tokens, turns)))):
        metrics |= {f"{name}/mean": mean(lengths), f"{name}/max": max(lengths)}
        metrics |= {f"{name}/{p}": value for p, value in percentiles(lengths).items()}
    if any(map(bigrams, valid)):
        metrics["unique_bigrams"] = mean(len({*bigrams(row)}) / len(bigrams(row)) for row in valid if bigrams(row))
    for name in {name for episode_metrics in env_metrics for name in episode_metrics}:
        metrics[name] = mean(episode_metrics[name] for episode_metrics in env_metrics if name in episode_metrics)
    return metrics | recount_groups([[row for row in rows if row["status"] != "failed"] for rows in groups])


def count_forks(turns: Sequence[dict[str, Any]]) -> int:
    parents = [turn["parent"] for turn in turns if turn["parent"] is not None and not np.isnan(turn["parent"])]
    return len(parents) - len({*parents})


def recount_groups(groups: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    valid_groups = [rows for rows in groups if rows]
    distinct = [{row["reward"] for row in rows} for rows in valid_groups]
    metrics = {
        "groups/mixed": mean(len(rewards) > 1 for rewards in distinct),
        "groups/all_good": mean(len(rewards) == 1 and min(rewards) >= 1 for rewards in distinct),
        "groups/all_bad": mean(len(rewards) == 1 and max(rewards) < 1 for rewards in distinct),
    }
    for k in (2, 4):
        large_groups = [rows for rows in valid_groups if len(rows) >= k]
        if large_groups:
            chances = [
                mean(any(r["reward"] >= 1 for r in subset) for subset in combinations(rows, k)) for rows in large_groups
            ]
            metrics[f"pass_at_{k}"] = mean(chances)
    gaps = [
        mean(row["reward"] for row in rows if row["attempt"])
        - mean(row["reward"] for row in rows if not row["attempt"])
        for rows in valid_groups
        if 0 < sum(row["attempt"] > 0 for row in rows) < len(rows)
    ]
    return {**metrics, "retried/groups": len(gaps), **({"retried/gap": mean(gaps)} if gaps else {})}


def recount_batch(rows: Sequence[dict[str, Any]], step: int, *, shaped: bool) -> dict[str, float]:
    """Recount `batch/…`."""
    final = [row for row in rows if row["final"]]
    untrained_groups = group_by_draw([row for row in final if not row["counts"]])
    replaced = [sum(row["status"] != "failed" for row in group) >= MIN_VALID for group in untrained_groups]
    trained_groups = group_by_draw([row for row in final if row["counts"]])
    ages = [
        step - 1 - t["version"]
        for rows in trained_groups
        for row in rows
        if row["status"] != "failed"
        for t in row["turns"]
    ]
    metrics: dict[str, float] = {
        "groups": len(trained_groups),
        "replaced": sum(replaced),
        "dropped": len(untrained_groups) - sum(replaced),
        "sampled_tokens": sum(count_sampled_tokens(turn) for row in final for turn in row["turns"]),
        "staleness/mean": mean(ages),
        "staleness/max": max(ages),
        "excess": 0,
    }
    return metrics | (recount_shaping(trained_groups) if shaped else {})


def recount_shaping(groups: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    penalties, shares, excess = list[float](), list[float](), 0
    for rows in groups:
        valid = [row for row in rows if row["status"] != "failed"]
        penalty_values = [
            0.5 * min(max((sum(map(count_sampled_tokens, row["turns"])) - 10) / 10, 0), 1) for row in valid
        ]
        shaped_rewards = [row["reward"] - penalty for row, penalty in zip(valid, penalty_values, strict=True)]
        advantages = [
            0 if row["masked"] else reward - mean(shaped_rewards)
            for row, reward in zip(valid, shaped_rewards, strict=True)
        ]
        clipped_turns = sum(len(row["turns"]) for row, a in zip(valid, advantages, strict=True) if abs(a) > 0.3)
        penalties.append(mean(penalty_values))
        shares.append(clipped_turns / sum(len(row["turns"]) for row in rows))
        taught = [row for row, a in zip(valid, advantages, strict=True) if abs(a) > 1e-9]
        excess += sum(tokens > 40 for row in taught for tokens in segment_tokens(row["turns"]))
    return {"length_penalty": mean(penalties), "clipped": mean(shares), "excess": excess}


def segment_tokens(turns: Sequence[Mapping[str, Any]]) -> list[int]:
    """Count the tokens of each segment; no turn is continued twice here."""
    lengths = list[int]()
    for record in turns:
        if record["parent"] is None or np.isnan(record["parent"]):
            lengths.append(0)
        lengths[-1] += len(record["prompt"]) + len(record["completion"])
    return lengths


def recount(rows: Sequence[dict[str, Any]], step: int, *, shaped: bool) -> dict[str, float]:
    metrics = {f"env/all/{key}": value for key, value in recount_env(rows).items()}
    for env in {row["env"] for row in rows}:
        of_env = recount_env([row for row in rows if row["env"] == env])
        metrics |= {f"env/{env}/{key}": value for key, value in of_env.items()}
    return metrics | {f"batch/{key}": value for key, value in recount_batch(rows, step, shaped=shaped).items()}


OPTIONAL = {
    "advantage": "entropic_adaptive",
    "sampling": {"max_tokens": 6, "budget_forcing": {"context_window_tokens": 400, "phrase": "so"}},
    "loss": {"name": "ppo"},
    "kl_penalty": {"coefficient": 0.01},
    "teachers": {"own": {"weight": 0.5}},
    "prices": {"prefill": 1.0, "sample": 2.0, "train": 3.0},
    "envs": {
        "words": {"curriculum": {"name": "filter"}},
        "chats": {"env": f"{__name__}:CHATS", "curriculum": {"name": "target"}},
    },
}
"""Settings that have numbers of their own."""

OF_A_SEARCH = {
    f"env/<name>/tasks/{key}" for key in ("best", "median", "size", "generation", "expansions", "cpu_s", "scripted")
}
"""Numbers of `discovery`, whose own tests play them."""

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def read_documented_keys(*sections: str) -> set[str]:
    """Read the keys in the first column of the tables of the page."""
    keys = set[str]()
    for section in sections:
        text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
        keys |= {key for cell in cells for key in re.findall(r"`([a-z_]+/[^`]+)`", cell)}
    return keys


def to_documented_key(key: str) -> str:
    """Replace the variable parts of a key by the placeholders of the page."""
    key = re.sub(r"pass_at_\d+", "pass_at_<k>", re.sub("^env/(all|words|chats|warm_start)/", "env/<name>/", key))
    key = re.sub("^service/.*", "service/<name>", key).replace("/spoken", "/<metric>")
    return key.replace("/teacher/own/", "/teacher/<teacher>/")


def test_documented_metrics_are_exactly_the_metrics_of_a_step(tmp_path: Path) -> None:
    listed = read_documented_keys("Episodes", "Batch", "Update", "Time and cost")
    assert len(listed) > 70
    keys = set[str]()
    talks = Path(__file__).parents[2] / "examples" / "warm_start.jsonl"
    warm = {**PLAIN, "warm_start": {"files": str(talks), "steps": 1}}
    for number, settings in enumerate((PLAIN, SHAPED, OPTIONAL, warm)):
        keys |= set().union(*run_simulation(tmp_path / str(number), "sync", 0, **settings).lines()) - {"step"}
    assert {to_documented_key(key) for key in keys} == listed - OF_A_SEARCH
    (row,) = [line for line in PAGE.splitlines() if all(f"`{key}`" in line for key in OF_A_SEARCH)]
    assert "of a search for constructions" in row


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [PLAIN, SHAPED], ids=["filtered", "shaped"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_metrics_of_episodes_equal_a_recount(
    schedule: str, settings: dict[str, object], seed: int, tmp_path: Path
) -> None:
    run = run_simulation(tmp_path / "run", schedule, seed, **settings)
    assert len(run.lines()) == 4
    for line in run.lines():
        step = int(line["step"])
        expected = recount(read_step_rows(run, step), step, shaped=settings is SHAPED)
        metrics = {key: value for key, value in line.items() if key.startswith(("env/", "batch/"))}
        # A number that is new to a step's line must be counted here too.
        assert sorted(metrics) == sorted(expected)
        assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_trained_sequences_and_tokens_equal_a_recount(tmp_path: Path) -> None:
    run = run_simulation(tmp_path / "run", "sync", 0, **PLAIN)
    for line, trained in zip(run.lines(), run.world.step_digests, strict=True):
        valid = [row for row in read_step_rows(run, int(line["step"])) if row["counts"] and row["status"] != "failed"]
        means = {row["draw"]: mean(peer["reward"] for peer in valid if peer["draw"] == row["draw"]) for row in valid}
        taught = [row for row in valid if abs(row["reward"] - means[row["draw"]]) > 1e-9 and not row["masked"]]
        assert line["optim/sequences"] == len(trained) == sum(len(segment_tokens(row["turns"])) for row in taught)
        assert line["optim/tokens"] == sum(count_sampled_tokens(turn) for row in taught for turn in row["turns"])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("sync", [(2, 3 + 5 + 7, 2 + 3 + 5 + 7)] * 3),
        # The groups of the later steps were played while the first one was trained.
        ("paced", [(2, 15, 17), (0, 15, 15), (0, 15, 15)]),
    ],
)
def test_step_times_are_the_latencies_of_the_service(
    schedule: str, expected: list[tuple[float, float, float]], tmp_path: Path
) -> None:
    latency = Latency(first_s=2, token_s=0, gradient_s=3, trained_tokens_per_s=1e12, step_s=5, save_s=7, load_s=11)
    settings = {"schedule": SCHEDULES[schedule], "checkpoint": {"every": 100}}
    run = Simulation(tmp_path / "run", latency=latency, settings=settings)
    run.train()
    keys = ("time/sample_s", "time/train_s", "time/step_s")
    assert [tuple(line[key] for key in keys) for line in run.lines()] == [pytest.approx(times) for times in expected]


TOLD = [Coin(number) for number in range(300, 306)]


@pytest.mark.parametrize("schedule", ["sync", "paced"])
def test_metrics_of_an_evaluation_equal_a_recount(schedule: str, tmp_path: Path) -> None:
    specs = {
        "coins": {"env": f"{__name__}:TOLD", "tasks": 6, "attempts": 3, "temperature": 1.0},
        "chats": {"env": f"{__name__}:CHATS", "tasks": 4},
    }
    run = run_simulation(tmp_path / "run", schedule, 0, eval={"envs": specs, "every": 2})
    evaluations = pd.read_parquet(run.directory / "evaluations")
    assert sorted(set(evaluations.step)) == [0, 2, 4]
    for line in run.lines():
        metrics = {key: value for key, value in line.items() if key.startswith("eval/")}
        rows = [
            {str(k): v for k, v in row.items()}
            for row in evaluations[evaluations.step == line["step"]].to_dict("records")
        ]
        expected = dict[str, float]()
        for name in [*specs, "all"] if rows else []:
            env_rows = [row for row in rows if name in (row["env"], "all")]
            env_metrics = recount_env(env_rows) | {"reward/stderr": standard_error(env_rows)} | recount_scores(env_rows)
            expected |= {f"eval/{name}/{key}": value for key, value in env_metrics.items()}
        assert sorted(metrics) == sorted(expected)
        assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert any(line.get("eval/all/retries") for line in run.lines())


def recount_scores(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Recount avg@k and pass@k with their intervals; k goes up to the most valid attempts of a task."""
    solved = [[row["reward"] >= 1 for row in group if row["status"] != "failed"] for group in group_by_draw(rows)]
    solved = [attempts for attempts in solved if attempts]
    max_attempts = max(map(len, solved))
    values = {"pass_at_1" if max_attempts == 1 else f"avg_at_{max_attempts}": [mean(attempts) for attempts in solved]}
    for k in {k for k in (2, max_attempts) if 1 < k <= max_attempts}:
        values[f"pass_at_{k}"] = [
            mean(map(any, combinations(attempts, k))) for attempts in solved if len(attempts) >= k
        ]
    metrics = dict[str, float]()
    for name, task_values in values.items():
        low, high = interval(task_values)
        metrics |= {name: mean(task_values), f"{name}/low": low, f"{name}/high": high}
    return metrics


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The p with (p − m)² = z² p (1 − p) / n, where n independent tries would have the standard error of the mean m."""
    m, count = mean(values), len(values)
    squared = sum((value - m) ** 2 for value in values) / (count - 1) / count if count > 1 else 0
    tries = m * (1 - m) / squared if squared and 0 < m < 1 else count
    z2 = 1.959963984540054**2 / tries
    low, high = sorted(np.roots([1 + z2, -2 * m - z2, m * m]).real)
    return float(low), float(high)


def standard_error(rows: Sequence[dict[str, Any]]) -> float:
    """Standard error of the mean reward, clustered by task."""
    tasks = [[row["reward"] for row in group if row["status"] != "failed"] for group in group_by_draw(rows)]
    tasks = [rewards for rewards in tasks if rewards]
    centre, count = mean(reward for rewards in tasks for reward in rewards), sum(map(len, tasks))
    spread = sum(sum(reward - centre for reward in rewards) ** 2 for rewards in tasks)
    return float((len(tasks) / (len(tasks) - 1) * spread) ** 0.5 / count)


def test_usage_counts_the_tokens_sampled_in_all_episodes(tmp_path: Path) -> None:
    specs = {"chats": {"env": f"{__name__}:CHATS", "tasks": 4}}
    run = run_simulation(tmp_path / "run", "sync", 0, eval={"envs": specs, "every": 4})
    tables = [pd.read_parquet(run.directory / folder) for folder in ("episodes", "evaluations")]
    sampled = sum(count_sampled_tokens(turn) for table in tables for turns in table.turns for turn in turns)
    usage = json.loads((run.directory / "usage.json").read_text())
    assert usage["sampled_tokens"] == run.world.calls["sampled_tokens"] == sampled


def test_recounted_runs_cover_every_kind_of_episode(tmp_path: Path) -> None:
    plain = run_simulation(tmp_path / "plain", "paced", 0, **PLAIN)
    shaped = run_simulation(tmp_path / "shaped", "sync", 0, **SHAPED)
    for run, keys in (
        (plain, ("batch/replaced", "batch/dropped", "batch/staleness/mean", "env/words/groups/all_good")),
        (shaped, ("batch/excess", "batch/clipped", "batch/length_penalty")),
    ):
        common = ("failed", "retries", "retried/groups", "truncated", "stop/length", "solved", "pass_at_2", "spoken")
        for key in (*keys, *(f"env/all/{key}" for key in common)):
            assert any(line.get(key) for line in run.lines()), key
    assert any(line["env/chats/segments"] > 1 for line in plain.lines())


def test_slots_are_busy_while_episodes_play(tmp_path: Path) -> None:
    run = run_simulation(tmp_path / "run", "sync", 0, **PLAIN)
    for line in run.lines():
        rows = [row for row in read_step_rows(run, int(line["step"])) if row["final"]]
        assert line["time/tokens_per_s"] * line["time/step_s"] == pytest.approx(line["batch/sampled_tokens"])
        assert line["time/episodes_per_s"] * line["time/step_s"] == pytest.approx(len(rows))
        assert 0 < line["time/utilisation"] <= 1
    played = pd.read_parquet(run.directory / "episodes").seconds.sum()
    busy = sum(line["time/utilisation"] * line["time/step_s"] * 9 for line in run.lines())
    assert busy == pytest.approx(played)


def test_no_time_gives_no_throughput() -> None:
    async def lap() -> Mapping[str, float]:
        return StepTimer(Slots(3)).lap(0.0, {})

    assert run_virtual(lap()) == {"time/sample_s": 0.0, "time/train_s": 0.0, "time/step_s": 0.0}


def test_rewards_that_differ_only_by_rounding_are_equal() -> None:
    metrics = group_metrics([group([0.1 + 0.2, 0.3]), group([1.0, 1.0 - 1e-12])], prefix="env")
    shares = [metrics[f"env/all/groups/{kind}"] for kind in ("mixed", "all_good", "all_bad")]
    assert shares == [0.0, 0.5, 0.5]
    assert metrics["env/all/solved"] == 0.5


@given(
    st.lists(st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)), min_size=1), max_size=5)
)
@example([[-9e307, 9e307, *6 * [0.0], -9e307, 9e307, *6 * [0.0]]])  # partial sums are infinite, with both signs
@example([[1.7e308, 1.7e308, -1.7e308, 1.7e308]])
def test_group_shares_of_any_rewards_sum_to_one(rewards: list[list[float | None]]) -> None:
    metrics = group_metrics([group(group_rewards) for group_rewards in rewards], prefix="env")
    if any(reward is not None for group_rewards in rewards for reward in group_rewards):
        assert math.isfinite(metrics["env/all/reward/mean"])
        assert math.isfinite(metrics["env/all/reward/std"])
        shares = [metrics[f"env/all/groups/{kind}"] for kind in ("mixed", "all_good", "all_bad")]
        assert sum(shares) == pytest.approx(1)
        quantiles = [metrics[f"env/all/reward/{name}"] for name in ("min", "p10", "p50", "p90", "max")]
        assert quantiles == sorted(quantiles)
        pass_rates = [value for key, value in metrics.items() if "pass_at_" in key]
        assert all(0 <= value <= 1 for value in pass_rates)


def test_a_model_that_repeats_itself_has_few_bigrams() -> None:
    turns = [turn([1], [7, 7, 7, 7, 7]), turn([1], [1, 2, 3, 4, 5], forced=2)]
    assert bigrams_of(turns[:1]) == 1 / 4
    assert bigrams_of(turns[1:]) == 1  # of the two pairs that were sampled
    assert bigrams_of(turns) == 3 / 6  # no pair spans two turns, and what was forced is not in one
    assert "env/all/unique_bigrams" not in group_metrics([group_of([turn([1], [7])])], prefix="env")


def group_of(turns: Sequence[Any]) -> Group:
    return replace(group([1.0]), episodes=(episode(1.0, turns=turns),))


def bigrams_of(turns: Sequence[Any]) -> float:
    return group_metrics([group_of(turns)], prefix="env")["env/all/unique_bigrams"]


def test_group_metrics_do_not_loop_over_tokens_in_python() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 4096).tolist()
    groups = [group_of([turn([1], tokens)] * 16) for _ in range(16)]
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal lines
        lines += 1
        return count

    previous_trace = sys.gettrace()
    sys.settrace(count)
    try:
        group_metrics(groups, prefix="env")
    finally:
        sys.settrace(previous_trace)
    assert 0 < lines < 200_000


def test_the_departure_is_the_larger_estimate() -> None:
    assert departure({}) is None
    assert departure({"optim/kl_sample_train_v1": -0.02, "optim/kl_sample_train_v2": 0.01}) == 0.02


def reporter_of(store: RunStore, ears: Ears) -> Reporter:
    """Return a reporter of a run that keeps all checkpoints and has no metric to be the best in."""

    async def delete(path: str) -> None:
        raise AssertionError(f"{path} is to be deleted, and all are to be kept")

    trackers, selection = Broadcast([ears]), ModelSelection(BestConfig())
    watch = ServiceWatch(trackers.on_note, timeout_s=1.0)
    checkpoints = CheckpointSaver(CheckpointConfig(), store, trackers, watch, selection=selection, delete=delete)
    return Reporter(store, trackers, checkpoints)


def test_kl_finding_is_noted_each_time_kl_leaves_the_healthy_range(tmp_path: Path) -> None:
    ears = Ears()
    resolved = rlkit.load_config([], settings={"model": "simulated", "envs": {"words": {}}})
    with RunStore(tmp_path / "run", resolved=resolved) as store:
        reporter = reporter_of(store, ears)
        for step, kl in enumerate([0.001, 0.02, 0.03, None, 0.03, 0.009, 0.011], 1):
            reporter.add(step, {"x": 0.0} if kl is None else {"optim/kl_sample_train_v2": kl})
        reporter_of(store, ears).add(8, {"optim/kl_sample_train_v2": 0.02})  # after a resumption
    noted_steps = [note.partition(":")[0] for note in ears.notes if ": KL(" in note]
    assert noted_steps == ["step 2", "step 7"]
    assert "KL(sampler‖trainer) is 0.02 nats per token" in ears.notes[0]
