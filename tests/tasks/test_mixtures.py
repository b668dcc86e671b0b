"""A run on three environments with settings of their own, counted again from its tables."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tinker

import rlkit
from rlkit.algorithms.datums import Preparation, PreparedGroup
from rlkit.config.loading.load import load_config
from rlkit.testing import ByteChat, SimulatedTinker, run_virtual
from rlkit.testing.simulated_service import SimulatedSamplingClient
from rlkit.training.trainer import RLTrainer
from rlkit.types import Group

STEPS, GROUPS = 8, 12
ENVS: dict[str, dict[str, object]] = {
    "pairs": {"weight": 1.0, "group_size": 2, "temperature": 0.5, "max_retries": 0, "advantage": "group_mean"},
    "threes": {"weight": 3.0, "group_size": 3, "temperature": 1.0, "max_retries": 1, "advantage": "grpo"},
    "fives": {"weight": 2.0, "group_size": 5, "temperature": 1.3, "max_retries": 3, "advantage": "rank"},
}


class Letters(rlkit.SingleTurnEnv):
    """The reward is how often the reply has an e; a reply that begins with one of five letters breaks the grader."""

    def __init__(self, env: str, number: int) -> None:
        self.task_id = f"{env}-{number}"

    def prompt(self) -> str:
        return self.task_id

    def grade(self, reply: rlkit.Reply) -> rlkit.Outcome:
        if reply.text[:1] in "abcde":
            raise ValueError("broken")
        return rlkit.Outcome(float(reply.text.count("e")), metrics={"length": float(len(reply.text))})


def group_mean(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean()


def grpo(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean()) / (rewards.std() or 1.0)


def rank(rewards: np.ndarray) -> np.ndarray:
    if len(rewards) < 2:
        return np.zeros(len(rewards))
    below = (rewards[None, :] < rewards[:, None]).sum(1)
    equal = (rewards[None, :] == rewards[:, None]).sum(1) - 1
    return (below + equal / 2) / (len(rewards) - 1) - 0.5


ESTIMATORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"pairs": group_mean, "threes": grpo, "fives": rank}


def train(directory: Path) -> None:
    settings = {
        "model": "simulated",
        "seed": 3,
        "envs": ENVS,
        "steps": STEPS,
        "batch": {"groups": GROUPS},
        "rollouts": {"min_valid": 2},
        "sampling": {"max_tokens": 30},
    }
    run_virtual(
        RLTrainer(
            load_config([], settings=settings),
            envs={name: [Letters(name, number) for number in range(10)] for name in ENVS},
            directory=directory,
            service=SimulatedTinker(),
            chat=ByteChat(),
        ).train()
    )


def test_each_environment_of_a_mixture_uses_its_own_settings_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temperatures = defaultdict[str, set[float]](set)
    advantages = dict[int, list[float]]()
    sample, prepare = SimulatedSamplingClient.sample, Preparation.prepare

    def record_sample(
        self: SimulatedSamplingClient, prompt: tinker.ModelInput, num_samples: int, params: tinker.SamplingParams
    ):
        text = bytes(token for token in prompt.to_ints() if token < 256).decode()
        temperatures[text.partition("-")[0]].add(params.temperature)
        return sample(self, prompt, num_samples, params)

    async def record_group(self: Preparation, group: Group, *more: Any) -> PreparedGroup:
        prepared = await prepare(self, group, *more)
        advantages[group.draw] = [float(row[0]) for row in prepared.advantages]
        return prepared

    monkeypatch.setattr(SimulatedSamplingClient, "sample", record_sample)
    monkeypatch.setattr(Preparation, "prepare", record_group)
    train(tmp_path / "run")

    rows = pd.read_parquet(tmp_path / "run" / "episodes")
    final = rows[rows["final"]]
    assert set(final["env"]) == set(ENVS)
    assert temperatures == {name: {spec["temperature"]} for name, spec in ENVS.items()}
    for _, group in rows.groupby("draw"):
        spec = ENVS[group["env"].iloc[0]]
        env_rows = group[group["final"]].sort_values("member")
        assert len(env_rows) == spec["group_size"]
        failed_again = int((~group["final"]).sum())
        assert failed_again <= spec["max_retries"]
        # a group ends with failures only when all that may be played again was
        assert not (env_rows["status"] == "failed").any() or failed_again == spec["max_retries"]
        expected, valid = np.zeros(len(env_rows)), env_rows["reward"].notna().to_numpy()
        if valid.any():
            expected[valid] = ESTIMATORS[group["env"].iloc[0]](env_rows["reward"].to_numpy()[valid])
        assert advantages[group["draw"].iloc[0]] == pytest.approx(expected)
    for name, spec in ENVS.items():  # each budget was used up at least once
        retries = rows[rows["env"] == name].groupby("draw")["final"].apply(lambda is_final: int((~is_final).sum()))
        assert retries.max() == spec["max_retries"]

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        step = final[final["step"].astype(int) == line["step"]]
        assert step[step["counts"]]["draw"].nunique() == GROUPS
        for name in (*ENVS, "all"):
            env_rows = step if name == "all" else step[step["env"] == name]
            metrics = {key.removeprefix(f"env/{name}/"): v for key, v in line.items() if key.startswith(f"env/{name}/")}
            expected = recount(env_rows)  # what else is measured is counted again elsewhere
            assert {key: metrics[key] for key in expected} == pytest.approx(expected), (line["step"], name)


def recount(rows: pd.DataFrame) -> dict[str, float]:
    """The metrics of an environment in a step, from its rows alone."""
    if rows.empty:
        return {}
    valid = rows[rows["status"] != "failed"]
    counts = {"groups": rows["draw"].nunique(), "episodes": len(rows), "failed": len(rows) - len(valid)}
    if valid.empty:
        return counts
    by_draw = valid.groupby("draw")["reward"]
    turns = valid["turns"]
    return {
        **counts,
        "reward/mean": valid["reward"].mean(),
        "reward/std": valid["reward"].std(ddof=0),
        "reward/min": valid["reward"].min(),
        "reward/max": valid["reward"].max(),
        "groups/mixed": (by_draw.nunique() > 1).mean(),
        "truncated": (valid["status"] == "truncated").mean(),
        "turns": turns.map(len).mean(),
        "segments": turns.map(lambda episode_turns: sum(pd.isna(turn["parent"]) for turn in episode_turns)).mean(),
        "tokens/mean": turns.map(
            lambda episode_turns: sum(int(np.sum(turn["sampled"])) for turn in episode_turns)
        ).mean(),
        "stop/length": turns.explode().map(lambda turn: turn["stop"] == "length").mean(),
        "length": valid["metrics"].map(lambda text: json.loads(text)["length"]).mean(),
    }


class Fragile(Letters):
    """The first rollout of each of its groups breaks."""

    def __init__(self, env: str, number: int) -> None:
        super().__init__(env, number)
        self.broken = False

    def grade(self, reply: rlkit.Reply) -> rlkit.Outcome:
        if not self.broken:
            self.broken = True
            raise ValueError("broken")
        return rlkit.Outcome(float(reply.text.count("e")))


@pytest.mark.parametrize(
    ("strict", "lenient"),
    [({"min_valid": 4}, {"min_valid": 3}), ({"max_failing_rollouts": 0}, {"max_failing_rollouts": 1})],
)
def test_group_is_dropped_below_the_min_valid_of_its_environment(
    strict: dict[str, int], lenient: dict[str, int], tmp_path: Path
) -> None:
    run = RLTrainer(
        load_config(
            [],
            settings={
                "model": "simulated",
                "epochs": 1,
                "envs": {"strict": strict, "lenient": lenient},
                "rollouts": {"max_retries": 0},
                "batch": {"groups": 2, "group_size": 4},
            },
        ),
        envs={name: [Fragile(name, number) for number in range(3)] for name in ("strict", "lenient")},
        directory=tmp_path / "run",
        service=SimulatedTinker(),
        chat=ByteChat(),
    )
    run_virtual(run.train())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["batch/groups"] for line in lines) == 3
    table = pd.concat(pd.read_parquet(path) for path in sorted((tmp_path / "run").glob("episodes/*/*.parquet")))
    assert set(table[table["counts"]]["env"]) == {"lenient"}
