"""Every number of a step about its episodes is counted again here, by other code, from the episodes on the disk."""

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
from rlkit.config.schema.operation import CheckpointConfig
from rlkit.metrics.metrics import departure, group_metrics, throughput
from rlkit.service.watch import ServiceWatch
from rlkit.store import RunStore
from rlkit.testing import Latency, World
from rlkit.trackers import Broadcast
from rlkit.training.checkpoints import CheckpointSaver
from rlkit.training.model_selection import Criterion, ModelSelection
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
    """Right or wrong by chance, in some tasks nearly always, and broken at times."""

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
    """Some turns, with words put into the model's mouth and two conversations, at times cut short or broken."""

    def __init__(self, number: int) -> None:
        self.task_id = f"chat-{number}"

    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
        said: list[rlkit.Message] = [{"role": "user", "content": self.task_id}]
        text = ""
        for number in range(3):
            reply = await policy.chat(said, forced="ab" if number == 1 else ())
            text += reply.text
            chance = crc32(text.encode())
            if chance % 9 == 0:
                raise ValueError("broken")
            if chance % 2:
                break
            said = [*said, reply.message, {"role": "user", "content": "more"}]
            if chance % 5 == 0:  # another conversation
                said = [{"role": "user", "content": text[:3]}]
        own = {"spoken": float(len(text))} if len(text) % 2 else {}
        return rlkit.Outcome(text.count("e") / 2, metrics=own, truncated=len(text) % 5 == 0, masked=len(text) % 3 == 0)


CHATS = [Chat(number) for number in range(200)]


def simulated(directory: Path, schedule: str, seed: int, **settings: object) -> Simulation:
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


def rows_of(run: Simulation, step: int) -> list[dict[str, Any]]:
    episodes = pd.read_parquet(run.directory / "episodes")
    rows = episodes[episodes.step == step].to_dict("records")
    return [{str(key): value for key, value in row.items()} for row in rows]


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The least value that at least so many percent do not exceed."""
    return {
        f"p{p}": min(v for v in values if 100 * sum(other <= v for other in values) >= p * len(values))
        for p in (10, 50, 90)
    }


def drawn(turn: Mapping[str, Any]) -> int:
    return int(sum(turn["sampled"]))


def by_draw(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    draws = sorted({(row["env"], row["draw"]) for row in rows})  # evaluations count those of each environment
    return [[row for row in rows if (row["env"], row["draw"]) == draw] for draw in draws]


def bigrams(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [
        (turn["completion"][i], turn["completion"][i + 1])
        for turn in row["turns"]
        for i in range(len(turn["completion"]) - 1)
        if turn["sampled"][i] and turn["sampled"][i + 1]
    ]


def env_recount(every: Sequence[dict[str, Any]]) -> dict[str, float]:
    """All that `env/<name>/…` says, of the rows of that environment in a step."""
    rows = [row for row in every if row["final"]]
    valid = [row for row in rows if row["status"] != "failed"]
    groups = by_draw(rows)
    found: dict[str, float] = {
        "groups": len(groups),
        "episodes": len(rows),
        "failed": len(rows) - len(valid),
        "retries": len(every) - len(rows),
    }
    if not valid:
        return found
    rewards = [row["reward"] for row in valid]
    turns = [turn for row in valid for turn in row["turns"]]
    tokens = [sum(map(drawn, row["turns"])) for row in valid]
    spoken = [json.loads(row["metrics"]) for row in valid]
    found |= {
        "reward/mean": mean(rewards),
        "reward/std": mean((reward - mean(rewards)) ** 2 for reward in rewards) ** 0.5,
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        **{f"reward/{p}": value for p, value in percentiles(rewards).items()},
        "solved": mean(reward >= 1 for reward in rewards),
        "truncated": mean(row["status"] == "truncated" for row in valid),
        "masked": mean(row["masked"] for row in valid),
        "turns": mean(len(row["turns"]) for row in valid),
        "segments": mean(sum(np.isnan(t["parent"] or 0) or t["parent"] is None for t in row["turns"]) for row in valid),
        "stop/length": mean(turn["stop"] == "length" for turn in turns),
        "stop/stop": mean(turn["stop"] == "stop" for turn in turns),
    }
    for name, lengths in (("tokens", tokens), ("turn_tokens", list(map(drawn, turns)))):
        found |= {f"{name}/mean": mean(lengths), f"{name}/max": max(lengths)}
        found |= {f"{name}/{p}": value for p, value in percentiles(lengths).items()}
    if any(map(bigrams, valid)):
        found["unique_bigrams"] = mean(len({*bigrams(row)}) / len(bigrams(row)) for row in valid if bigrams(row))
    for name in {name for one in spoken for name in one}:
        found[name] = mean(one[name] for one in spoken if name in one)
    return found | by_group([[row for row in rows if row["status"] != "failed"] for rows in groups])


def by_group(groups: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    kept = [rows for rows in groups if rows]
    distinct = [{row["reward"] for row in rows} for rows in kept]
    found = {
        "groups/mixed": mean(len(rewards) > 1 for rewards in distinct),
        "groups/all_good": mean(len(rewards) == 1 and min(rewards) >= 1 for rewards in distinct),
        "groups/all_bad": mean(len(rewards) == 1 and max(rewards) < 1 for rewards in distinct),
    }
    for k in (2, 4):
        enough = [rows for rows in kept if len(rows) >= k]
        if enough:
            chances = [mean(any(r["reward"] >= 1 for r in some) for some in combinations(rows, k)) for rows in enough]
            found[f"pass_at_{k}"] = mean(chances)
    gaps = [
        mean(row["reward"] for row in rows if row["attempt"])
        - mean(row["reward"] for row in rows if not row["attempt"])
        for rows in kept
        if 0 < sum(row["attempt"] > 0 for row in rows) < len(rows)
    ]
    return {**found, "retried/groups": len(gaps), **({"retried/gap": mean(gaps)} if gaps else {})}


def batch_recount(rows: Sequence[dict[str, Any]], step: int, *, shaped: bool) -> dict[str, float]:
    """All that `batch/…` says."""
    final = [row for row in rows if row["final"]]
    others = by_draw([row for row in final if not row["counts"]])
    enough = [sum(row["status"] != "failed" for row in group) >= MIN_VALID for group in others]
    own = by_draw([row for row in final if row["counts"]])
    ages = [step - 1 - t["version"] for rows in own for row in rows if row["status"] != "failed" for t in row["turns"]]
    found: dict[str, float] = {
        "groups": len(own),
        "replaced": sum(enough),
        "dropped": len(others) - sum(enough),
        "sampled_tokens": sum(drawn(turn) for row in final for turn in row["turns"]),
        "staleness/mean": mean(ages),
        "staleness/max": max(ages),
        "excess": 0,
    }
    return found | (shaped_recount(own) if shaped else {})


def shaped_recount(own: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    penalties, shares, excess = list[float](), list[float](), 0
    for rows in own:
        valid = [row for row in rows if row["status"] != "failed"]
        lost = [0.5 * min(max((sum(map(drawn, row["turns"])) - 10) / 10, 0), 1) for row in valid]
        left = [row["reward"] - penalty for row, penalty in zip(valid, lost, strict=True)]
        advantages = [0 if row["masked"] else reward - mean(left) for row, reward in zip(valid, left, strict=True)]
        beyond = sum(len(row["turns"]) for row, a in zip(valid, advantages, strict=True) if abs(a) > 0.3)
        penalties.append(mean(lost))
        shares.append(beyond / sum(len(row["turns"]) for row in rows))
        taught = [row for row, a in zip(valid, advantages, strict=True) if abs(a) > 1e-9]
        excess += sum(tokens > 40 for row in taught for tokens in segment_tokens(row["turns"]))
    return {"length_penalty": mean(penalties), "clipped": mean(shares), "excess": excess}


def segment_tokens(turns: Sequence[Mapping[str, Any]]) -> list[int]:
    """All tokens of each segment; in these environments no turn is continued twice."""
    found = list[int]()
    for one in turns:
        if one["parent"] is None or np.isnan(one["parent"]):
            found.append(0)
        found[-1] += len(one["prompt"]) + len(one["completion"])
    return found


def recount(rows: Sequence[dict[str, Any]], step: int, *, shaped: bool) -> dict[str, float]:
    found = {f"env/all/{key}": value for key, value in env_recount(rows).items()}
    for env in {row["env"] for row in rows}:
        of_env = env_recount([row for row in rows if row["env"] == env])
        found |= {f"env/{env}/{key}": value for key, value in of_env.items()}
    return found | {f"batch/{key}": value for key, value in batch_recount(rows, step, shaped=shaped).items()}


OPTIONAL = {
    "advantage": "entropic_adaptive",
    "sampling": {"max_tokens": 6, "budget_forcing": {"context_window_tokens": 400, "phrase": "so"}},
    "loss": {"name": "ppo"},
    "kl_penalty": {"coefficient": 0.01},
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


def listed_keys(*sections: str) -> set[str]:
    """The keys in the first column of the page's tables."""
    found = set[str]()
    for section in sections:
        text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
        found |= {key for cell in cells for key in re.findall(r"`([a-z_]+/[^`]+)`", cell)}
    return found


def general(key: str) -> str:
    """A key as the page has it, with its placeholders."""
    key = re.sub(r"pass_at_\d+", "pass_at_<k>", re.sub("^env/(all|words|chats)/", "env/<name>/", key))
    return re.sub("^service/.*", "service/<name>", key).replace("/spoken", "/<metric>")


def test_every_number_of_a_step_is_on_the_page_and_every_number_of_the_page_in_a_step(tmp_path: Path) -> None:
    listed = listed_keys("Episodes", "Batch", "Update", "Time and cost")
    assert len(listed) > 70
    keys = set[str]()
    for number, settings in enumerate((PLAIN, SHAPED, OPTIONAL)):
        keys |= set().union(*simulated(tmp_path / str(number), "sync", 0, **settings).lines()) - {"step"}
    assert {general(key) for key in keys} == listed - OF_A_SEARCH
    (row,) = [line for line in PAGE.splitlines() if all(f"`{key}`" in line for key in OF_A_SEARCH)]
    assert "of a search for constructions" in row


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("settings", [PLAIN, SHAPED], ids=["filtered", "shaped"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_number_of_the_episodes_equals_a_recount(
    schedule: str, settings: dict[str, object], seed: int, tmp_path: Path
) -> None:
    run = simulated(tmp_path / "run", schedule, seed, **settings)
    assert len(run.lines()) == 4
    for line in run.lines():
        step = int(line["step"])
        expected = recount(rows_of(run, step), step, shaped=settings is SHAPED)
        told = {key: value for key, value in line.items() if key.startswith(("env/", "batch/"))}
        # A number that is new to a step's line must be counted here too.
        assert sorted(told) == sorted(expected)
        assert told == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_what_was_trained_on_equals_a_recount(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", "sync", 0, **PLAIN)
    for line, trained in zip(run.lines(), run.world.step_digests, strict=True):
        valid = [row for row in rows_of(run, int(line["step"])) if row["counts"] and row["status"] != "failed"]
        means = {row["draw"]: mean(other["reward"] for other in valid if other["draw"] == row["draw"]) for row in valid}
        taught = [row for row in valid if abs(row["reward"] - means[row["draw"]]) > 1e-9 and not row["masked"]]
        assert line["optim/sequences"] == len(trained) == sum(len(segment_tokens(row["turns"])) for row in taught)
        assert line["optim/tokens"] == sum(drawn(turn) for row in taught for turn in row["turns"])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("sync", [(2, 3 + 5 + 7, 2 + 3 + 5 + 7)] * 3),
        # The groups of the later steps were played while the first one was trained.
        ("paced", [(2, 15, 17), (0, 15, 15), (0, 15, 15)]),
    ],
)
def test_the_times_of_a_step_are_those_of_the_service(
    schedule: str, expected: list[tuple[float, float, float]], tmp_path: Path
) -> None:
    latency = Latency(first_s=2, token_s=0, gradient_s=3, trained_tokens_per_s=1e12, step_s=5, save_s=7, load_s=11)
    settings = {"schedule": SCHEDULES[schedule], "checkpoint": {"every": 100}}
    run = Simulation(tmp_path / "run", latency=latency, settings=settings)
    run.train()
    keys = ("time/sample_s", "time/train_s", "time/step_s")
    assert [tuple(line[key] for key in keys) for line in run.lines()] == [pytest.approx(one) for one in expected]


TOLD = [Coin(number) for number in range(300, 306)]


@pytest.mark.parametrize("schedule", ["sync", "paced"])
def test_every_number_of_an_evaluation_equals_a_recount(schedule: str, tmp_path: Path) -> None:
    specs = {
        "coins": {"env": f"{__name__}:TOLD", "tasks": 6, "attempts": 3, "temperature": 1.0},
        "chats": {"env": f"{__name__}:CHATS", "tasks": 4},
    }
    run = simulated(tmp_path / "run", schedule, 0, eval={"envs": specs, "every": 2})
    saved = pd.read_parquet(run.directory / "evaluations")
    assert sorted(set(saved.step)) == [0, 2, 4]
    for line in run.lines():
        told = {key: value for key, value in line.items() if key.startswith("eval/")}
        rows = [{str(k): v for k, v in row.items()} for row in saved[saved.step == line["step"]].to_dict("records")]
        expected = dict[str, float]()
        for name in [*specs, "all"] if rows else []:
            own = [row for row in rows if name in (row["env"], "all")]
            counted = env_recount(own) | {"reward/stderr": standard_error(own)} | score_recount(own)
            expected |= {f"eval/{name}/{key}": value for key, value in counted.items()}
        assert sorted(told) == sorted(expected)
        assert told == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert any(line.get("eval/all/retries") for line in run.lines())


def score_recount(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """avg@k and pass@k, with the ends of their intervals; the largest k is the most attempts that a task has left."""
    solved = [[row["reward"] >= 1 for row in group if row["status"] != "failed"] for group in by_draw(rows)]
    solved = [attempts for attempts in solved if attempts]
    most = max(map(len, solved))
    values = {"pass_at_1" if most == 1 else f"avg_at_{most}": [mean(attempts) for attempts in solved]}
    for k in {k for k in (2, most) if 1 < k <= most}:
        values[f"pass_at_{k}"] = [mean(map(any, combinations(one, k))) for one in solved if len(one) >= k]
    found = dict[str, float]()
    for name, of_tasks in values.items():
        low, high = interval(of_tasks)
        found |= {name: mean(of_tasks), f"{name}/low": low, f"{name}/high": high}
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The p with (p − m)² = z² p (1 − p) / n, where n independent tries would have the standard error of the mean m."""
    m, count = mean(values), len(values)
    squared = sum((value - m) ** 2 for value in values) / (count - 1) / count if count > 1 else 0
    tries = m * (1 - m) / squared if squared and 0 < m < 1 else count
    z2 = 1.959963984540054**2 / tries
    low, high = sorted(np.roots([1 + z2, -2 * m - z2, m * m]).real)
    return float(low), float(high)


def standard_error(rows: Sequence[dict[str, Any]]) -> float:
    """Of the mean reward, where the attempts of a task go together."""
    tasks = [[row["reward"] for row in group if row["status"] != "failed"] for group in by_draw(rows)]
    tasks = [rewards for rewards in tasks if rewards]
    centre, count = mean(reward for rewards in tasks for reward in rewards), sum(map(len, tasks))
    spread = sum(sum(reward - centre for reward in rewards) ** 2 for rewards in tasks)
    return float((len(tasks) / (len(tasks) - 1) * spread) ** 0.5 / count)


def test_what_is_used_is_what_the_episodes_hold(tmp_path: Path) -> None:
    specs = {"chats": {"env": f"{__name__}:CHATS", "tasks": 4}}
    run = simulated(tmp_path / "run", "sync", 0, eval={"envs": specs, "every": 4})
    played = [pd.read_parquet(run.directory / folder) for folder in ("episodes", "evaluations")]
    sampled = sum(drawn(turn) for table in played for turns in table.turns for turn in turns)
    used = json.loads((run.directory / "usage.json").read_text())
    assert used["sampled_tokens"] == run.world.calls["sampled_tokens"] == sampled


def test_the_runs_that_are_recounted_have_all_that_can_happen(tmp_path: Path) -> None:
    plain = simulated(tmp_path / "plain", "paced", 0, **PLAIN)
    shaped = simulated(tmp_path / "shaped", "sync", 0, **SHAPED)
    for run, keys in (
        (plain, ("batch/replaced", "batch/dropped", "batch/staleness/mean", "env/words/groups/all_good")),
        (shaped, ("batch/excess", "batch/clipped", "batch/length_penalty")),
    ):
        common = ("failed", "retries", "retried/groups", "truncated", "stop/length", "solved", "pass_at_2", "spoken")
        for key in (*keys, *(f"env/all/{key}" for key in common)):
            assert any(line.get(key) for line in run.lines()), key
    assert any(line["env/chats/segments"] > 1 for line in plain.lines())


def test_slots_are_busy_as_long_as_episodes_play(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", "sync", 0, **PLAIN)
    for line in run.lines():
        rows = [row for row in rows_of(run, int(line["step"])) if row["final"]]
        assert line["time/tokens_per_s"] * line["time/step_s"] == pytest.approx(line["batch/sampled_tokens"])
        assert line["time/episodes_per_s"] * line["time/step_s"] == pytest.approx(len(rows))
        assert 0 < line["time/utilisation"] <= 1
    played = pd.read_parquet(run.directory / "episodes").seconds.sum()
    busy = sum(line["time/utilisation"] * line["time/step_s"] * 9 for line in run.lines())
    assert busy == pytest.approx(played)


def test_no_time_gives_no_throughput() -> None:
    assert throughput({}, seconds=0.0, busy_s=0.0, slots=3) == {}


def test_rewards_that_differ_only_by_rounding_are_equal() -> None:
    found = group_metrics([group([0.1 + 0.2, 0.3]), group([1.0, 1.0 - 1e-12])], prefix="env")
    shares = [found[f"env/all/groups/{kind}"] for kind in ("mixed", "all_good", "all_bad")]
    assert shares == [0.0, 0.5, 0.5]
    assert found["env/all/solved"] == 0.5


@given(
    st.lists(st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)), min_size=1), max_size=5)
)
@example([[-9e307, 9e307, *6 * [0.0], -9e307, 9e307, *6 * [0.0]]])  # partial sums are infinite, with both signs
@example([[1.7e308, 1.7e308, -1.7e308, 1.7e308]])
def test_whatever_the_rewards_shares_are_shares(rewards: list[list[float | None]]) -> None:
    found = group_metrics([group(one) for one in rewards], prefix="env")
    if any(reward is not None for one in rewards for reward in one):
        assert math.isfinite(found["env/all/reward/mean"])
        assert math.isfinite(found["env/all/reward/std"])
        shares = [found[f"env/all/groups/{kind}"] for kind in ("mixed", "all_good", "all_bad")]
        assert sum(shares) == pytest.approx(1)
        quantiles = [found[f"env/all/reward/{name}"] for name in ("min", "p10", "p50", "p90", "max")]
        assert quantiles == sorted(quantiles)
        passed = [value for key, value in found.items() if "pass_at_" in key]
        assert all(0 <= value <= 1 for value in passed)


def test_a_model_that_repeats_itself_has_few_bigrams() -> None:
    said = [turn([1], [7, 7, 7, 7, 7]), turn([1], [1, 2, 3, 4, 5], forced=2)]
    assert bigrams_of(said[:1]) == 1 / 4
    assert bigrams_of(said[1:]) == 1  # of the two pairs that were sampled
    assert bigrams_of(said) == 3 / 6  # no pair spans two turns, and what was forced is not in one
    assert "env/all/unique_bigrams" not in group_metrics([group_of([turn([1], [7])])], prefix="env")


def group_of(turns: Sequence[Any]) -> Group:
    return replace(group([1.0]), episodes=(episode(1.0, turns=turns),))


def bigrams_of(turns: Sequence[Any]) -> float:
    return group_metrics([group_of(turns)], prefix="env")["env/all/unique_bigrams"]


def test_a_million_tokens_are_not_looked_at_one_by_one() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 4096).tolist()
    groups = [group_of([turn([1], tokens)] * 16) for _ in range(16)]
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        group_metrics(groups, prefix="env")
    finally:
        sys.settrace(before)
    assert 0 < lines < 200_000


def test_the_departure_is_the_larger_estimate() -> None:
    assert departure({}) is None
    assert departure({"optim/kl_sample_train_v1": -0.02, "optim/kl_sample_train_v2": 0.01}) == 0.02


def reporter_of(store: RunStore, ears: Ears) -> Reporter:
    """Return a reporter of a run that keeps all checkpoints and has no metric to be the best in."""

    async def delete(path: str) -> None:
        raise AssertionError(f"{path} is to be deleted, and all are to be kept")

    trackers, selection = Broadcast([ears]), ModelSelection(Criterion())
    watch = ServiceWatch(trackers.on_note, timeout_s=1.0)
    checkpoints = CheckpointSaver(CheckpointConfig(), store, trackers, watch, selection=selection, delete=delete)
    return Reporter(store, trackers, checkpoints=checkpoints, selection=selection)


def test_leaving_the_healthy_range_is_told_once_each_time(tmp_path: Path) -> None:
    ears = Ears()
    resolved = rlkit.load_config([], settings={"model": "simulated", "envs": {"words": {}}})
    with RunStore(tmp_path / "run", resolved=resolved) as store:
        reporter = reporter_of(store, ears)
        for step, kl in enumerate([0.001, 0.02, 0.03, None, 0.03, 0.009, 0.011], 1):
            reporter.add(step, {"x": 0.0} if kl is None else {"optim/kl_sample_train_v2": kl})
        reporter_of(store, ears).add(8, {"optim/kl_sample_train_v2": 0.02})  # after a resumption
    told = [note.partition(":")[0] for note in ears.notes if ": KL(" in note]
    assert told == ["step 2", "step 7"]
    assert "KL(sampler‖trainer) is 0.02 nats per token" in ears.notes[0]
