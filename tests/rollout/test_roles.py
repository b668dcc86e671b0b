"""Roles of a policy: turns and rewards of their own, and opponents that are never trained."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.algorithms.advantages import estimate_advantages
from rlkit.algorithms.datums import Preparation
from rlkit.algorithms.estimator import Estimator
from rlkit.algorithms.estimators import ESTIMATORS
from rlkit.algorithms.shaping import LengthPenalty
from rlkit.env import Task
from rlkit.errors import EnvironmentFault, RewardError
from rlkit.metrics.metrics import group_metrics
from rlkit.rollout.validation import as_outcome
from rlkit.store import codec, table
from rlkit.store.table import RecordedGroup
from rlkit.testing import ScriptedPolicy
from rlkit.tools.audit import audit_group
from rlkit.types import Episode, Group, Message, Outcome, Turn
from tests.builders import episode, turn
from tests.workers.helpers import play

ASK: list[Message] = [{"role": "user", "content": "Move."}]


def run(play: Callable[[ScriptedPolicy], Coroutine[object, object, object]], *replies: str) -> tuple[Turn, ...]:
    policy = ScriptedPolicy(replies)
    asyncio.run(play(policy))
    return policy.turns


def in_role(role: str | None, *, frozen: bool = False, tokens: int = 2, parent: int | None = None) -> Turn:
    played = replace(turn([1], [3] * tokens, parent=parent), role=role, frozen=frozen)
    return replace(played, sampled_mask=np.zeros(tokens, np.bool_)) if frozen else played


def group_of(*episodes: Episode) -> Group:
    return Group("env", "task", 0, tuple(replace(item, member=member) for member, item in enumerate(episodes)))


def test_turns_belong_to_the_role_of_their_handle() -> None:
    async def talk(policy: ScriptedPolicy) -> None:
        solver, critic = policy.role("solver"), policy.role("critic")
        await solver.chat(ASK)
        await critic.sample("a text")
        await policy.chat(ASK)
        await critic.role("judge").chat(ASK)
        assert solver.turns == critic.turns == policy.turns
        assert solver.max_tokens == policy.max_tokens

    turns = run(talk, "a", "b", "c", "d")
    assert [(turn.role, turn.frozen) for turn in turns] == [
        (role, False) for role in ("solver", "critic", None, "judge")
    ]
    assert all(turn.sampled_mask.all() for turn in turns)


def test_a_role_continues_the_exact_tokens_of_another() -> None:
    async def talk(policy: ScriptedPolicy) -> None:
        reply = await policy.role("solver").chat(ASK)
        await policy.role("critic").chat([*ASK, reply.message, *ASK])

    assert [turn.parent for turn in run(talk, "a", "b")] == [None, 0]


def test_a_role_counts_the_tokens_of_its_next_prompt() -> None:
    async def talk(policy: ScriptedPolicy) -> None:
        reply = await policy.role("solver").chat(ASK)
        messages, critic = [*ASK, reply.message, *ASK], policy.role("critic")
        count = await critic.count_tokens(messages)
        assert len(policy.turns) == 1
        answer = await critic.chat(messages)
        assert count == len(answer.tokens) - len(answer.turn.completion)

    run(talk, "a", "b")


def test_an_opponent_is_recorded_and_has_no_token_to_train() -> None:
    async def talk(policy: ScriptedPolicy) -> None:
        opponent = policy.opponent(step=-3)
        reply = await policy.chat(ASK)
        answer = await opponent.chat([*ASK, reply.message, *ASK])
        await opponent.role("black").chat([*ASK, reply.message, *ASK, answer.message, *ASK])
        await opponent.opponent(checkpoint="tinker://x", role="old").sample("a text")

    turns = run(talk, "a", "b", "c", "d")
    assert [(turn.role, turn.frozen) for turn in turns] == [
        (None, False),
        *[(n, True) for n in ("opponent", "black", "old")],
    ]
    assert [turn.sampled_mask.any() for turn in turns] == [True, False, False, False]
    assert all(turn.logprobs.all() for turn in turns)
    assert [turn.parent for turn in turns] == [None, 0, 1, None]


def test_the_reward_of_a_turn_goes_to_the_last_turn_of_its_role() -> None:
    async def talk(policy: ScriptedPolicy) -> None:
        solver, opponent = policy.role("solver"), policy.opponent(step=0)
        with pytest.raises(ValueError, match="needs a turn"):
            solver.reward(1)
        await solver.chat(ASK)
        with pytest.raises(ValueError, match="needs a turn"):
            policy.reward(1)
        await policy.chat(ASK)
        await opponent.chat(ASK)
        policy.reward(2)
        solver.reward(0.5)
        solver.reward(0.25)
        with pytest.raises(ValueError, match="not trained"):
            opponent.reward(1)

    assert [turn.reward for turn in run(talk, "a", "b", "c")] == [0.75, 2.0, None]


def test_an_endpoint_of_a_role_records_the_role() -> None:
    async def talk(policy: ScriptedPolicy) -> None:
        async with policy.role("critic").endpoint() as endpoint, httpx.AsyncClient() as client:
            body = {"model": "any", "messages": ASK}
            headers = {"Authorization": f"Bearer {endpoint.key}"}
            answer = await client.post(f"{endpoint.url}/chat/completions", json=body, headers=headers)
            assert answer.json()["choices"][0]["message"]["content"] == "fine"

    assert [turn.role for turn in run(talk, "fine")] == ["critic"]


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é\ud800", "x" * 65, "new\nline", 5, None])
def test_a_role_has_a_short_name(name: object) -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        ScriptedPolicy(["a"]).role(name)  # pyright: ignore[reportArgumentType]  what a user may write


@pytest.mark.parametrize(
    "args",
    [{}, {"step": 1, "checkpoint": "tinker://x"}, {"step": 1.5}, {"step": True}, {"checkpoint": ""}, {"step": "1"}],
)
def test_an_opponent_needs_a_step_or_a_checkpoint(args: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="needs a whole number"):
        ScriptedPolicy(["a"]).opponent(**args)  # pyright: ignore[reportArgumentType]  what a user may write


def test_the_reward_is_the_mean_of_the_rewards_unless_it_is_given() -> None:
    assert Outcome(rewards={"solver": 1.0, "critic": 0.25}).reward == 0.625
    assert Outcome(0.0, rewards={"solver": 1.0, "critic": 0.25}).reward == 0.0
    with pytest.raises(RewardError, match="returned an Outcome with the reward NoneType None"):
        as_outcome(Outcome())


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"solver": 1.0}, "no reward of the role critic, which has turns"),
        (
            {"solver": 1.0, "critic": 0.0, "jury": 1.0},
            "reward of the role jury, which has no turn to train; roles with",
        ),
        ({"solver": 1.0, "critic": 0.0, "opponent": 1.0}, "role opponent, which has no turn"),
        ({"solver": 1.0, "critic": math.nan}, "reward critic = float nan; it must be a finite number"),
        ({"solver": 1.0, "critic": "high"}, "reward critic = str 'high'"),
        ({"solver": 1.0, "critic": None}, "reward critic = None"),
        ({"solver": 1.0, "critic": 0.0, 3: 1.0}, "role 3, which has no turn"),
        ([1.0, 0.2], "rewards map roles to numbers"),
        (None, "rewards map roles to numbers"),
    ],
)
def test_rewards_that_are_not_those_of_the_roles_are_an_error(rewards: object, message: str) -> None:
    turns = [in_role("solver"), in_role("critic"), in_role("opponent", frozen=True)]
    with pytest.raises(RewardError, match=message):
        as_outcome(Outcome(0.5, rewards=rewards), turns=turns)  # pyright: ignore[reportArgumentType]  a user's mistake
    good = as_outcome(Outcome(rewards={"critic": np.float32(0.5), "solver": 1}), turns=turns)  # pyright: ignore
    assert (good.reward, good.rewards) == (0.75, {"critic": 0.5, "solver": 1.0})


def test_a_reward_that_is_not_finite_names_its_role() -> None:
    with pytest.raises(RewardError, match="the reward critic = float nan"):
        as_outcome(Outcome(rewards={"solver": 1.0, "critic": math.nan}), turns=[in_role("solver"), in_role("critic")])


def test_a_turn_without_a_role_takes_no_reward_of_roles() -> None:
    turns = [in_role("solver"), in_role(None)]
    with pytest.raises(RewardError, match="turns without one"):
        as_outcome(Outcome(rewards={"solver": 1.0}), turns=turns)
    assert as_outcome(0.5, turns=turns).rewards == {}


class Debate(rlkit.Env):
    """A solver, a critic and an opponent; `rewards` is what the rollout returns."""

    task_id = "debate"

    def __init__(self, rewards: object) -> None:
        self.rewards = rewards

    async def rollout(self, policy: rlkit.Policy) -> Outcome:
        for handle in (policy.role("solver"), policy.role("critic")):
            await handle.chat(ASK)
        return Outcome(rewards=self.rewards)  # pyright: ignore[reportArgumentType]  hostile, too


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_has_the_rewards_of_its_roles_and_a_wrong_reward_fails_it(workers: int) -> None:
    envs = {"good": Debate({"solver": 1, "critic": 0.5}), "bad": Debate({"solver": 1}), "odd": Debate(["solver"])}
    groups = play(envs, workers).groups
    for member in groups["good"].episodes:
        assert (member.status, member.reward, member.rewards) == ("completed", 0.75, {"solver": 1.0, "critic": 0.5})
        assert [turn.role for turn in member.turns] == ["solver", "critic"]
    for name, error in (
        ("bad", "Debate returned no reward of the role critic"),
        ("odd", "rewards map roles to numbers"),
    ):
        for member in groups[name].episodes:
            assert (member.status, member.reward, member.rewards) == ("failed", None, {})
            assert member.error is not None and error in member.error


class ScoredDebate(Debate):
    async def score_group(self, episodes: list[Episode]) -> list[float]:
        return [float(episode.member) for episode in episodes]


def test_the_score_of_a_group_is_the_reward_of_every_role() -> None:
    group = play({"scored": ScoredDebate({"solver": 1, "critic": 0.5})}, 0).groups["scored"]
    assert [(member.reward, member.rewards) for member in group.episodes] == [(float(n), {}) for n in range(4)]
    (rows,) = estimate_advantages(ESTIMATORS["group_mean"](), [group])
    assert [row.tolist() for row in rows] == [[n - 1.5] * 2 for n in range(4)]


class Plays(rlkit.Env):
    async def rollout(self, policy: rlkit.Policy) -> float:
        await policy.opponent(step=0).chat(ASK)
        return 1.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_player_without_a_run_refuses_opponents_in_one_line(workers: int) -> None:
    for member in play({"e": Plays()}, workers).groups["e"].episodes:
        assert member.error == "opponent(): this policy has no weights but its own; play it in a training run"


rewards = st.floats(0, 2).map(lambda value: round(value, 2))
members = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(["white", "black"]), st.booleans(), st.integers(1, 3)), max_size=5),
        rewards,
        rewards,
    ),
    min_size=2,
    max_size=5,
)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(members)
def test_an_estimator_compares_the_rewards_of_one_role(
    name: str, script: list[tuple[list[tuple[str, bool, int]], float, float]]
) -> None:
    estimator: Estimator = ESTIMATORS[name]()
    episodes = list[Episode]()
    for moves, white, black in script:
        turns = [in_role(role, frozen=frozen, tokens=tokens) for role, frozen, tokens in moves]
        played = {turn.role for turn in turns if not turn.frozen}
        both = {"white": white, "black": black}
        rewards = {role: reward for role, reward in both.items() if role in played}
        episodes.append(replace(episode(0.0, turns=turns or [in_role(None)]), rewards=rewards))
    group = group_of(*episodes)
    (rows,) = estimate_advantages(estimator, [group])
    for role in ("white", "black"):
        places = [
            [n for n, turn in enumerate(member.turns) if turn.role == role and not turn.frozen]
            for member in group.episodes
        ]
        alone = [
            replace(member, reward=member.rewards[role], turns=tuple(replace(member.turns[n], role=None) for n in own))
            for member, own in zip(group.episodes, places, strict=True)
            if own
        ]
        expected = estimate_advantages(estimator, [Group("env", "task", 0, tuple(alone))])[0] if alone else []
        found = [row[own] for row, own in zip(rows, places, strict=True) if own]
        assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    for member, row in zip(group.episodes, rows, strict=True):
        assert not any(row[n] for n, turn in enumerate(member.turns) if turn.frozen)


@given(members)
def test_tokens_of_trained_roles_are_trained_once_and_those_of_opponents_never(
    script: list[tuple[list[tuple[str, bool, int]], float, float]],
) -> None:
    episodes = list[Episode]()
    for number, (moves, white, black) in enumerate(script):
        turns = [
            in_role(role, frozen=frozen, tokens=tokens, parent=n - 1 if n and tokens > 1 else None)
            for n, (role, frozen, tokens) in enumerate(moves)
        ]
        roles = {turn.role for turn in turns if not turn.frozen}
        rewards = {role: reward for role, reward in {"white": white, "black": black}.items() if role in roles}
        # distinct tokens, so that each can be found again
        turns = [replace(t, completion=t.completion + 1000 * number + 10 * n) for n, t in enumerate(turns)]
        episodes.append(replace(episode(0.5, turns=turns or [in_role(None)]), rewards=rewards))
    group = group_of(*episodes)
    preparation = Preparation({"env": ESTIMATORS["group_mean"]()}, every_sequence=True)
    prepared = asyncio.run(preparation.prepare(group))
    trained = sum(int(np.count_nonzero(datum.mask)) for datum in prepared.data)
    sampled = sum(len(t.completion) for member in group.episodes for t in member.turns if not t.frozen)
    result = asyncio.run(audit_group(group))
    assert trained == sampled == result.tokens
    assert result.mismatch is None
    assert all(datum.mask.any() and not datum.advantages[~datum.mask].any() for datum in prepared.data)


def test_a_length_penalty_lowers_the_reward_of_each_role() -> None:
    played = replace(episode(0.5, turns=[in_role("a", tokens=4), in_role("b", tokens=4)]), rewards={"a": 1.0, "b": 0.0})
    shaped, mean = LengthPenalty(0.5, 0, 8).apply(group_of(played))
    assert (mean, shaped.episodes[0].reward, shaped.episodes[0].rewards) == (0.5, 0.0, {"a": 0.5, "b": -0.5})


def test_metrics_show_the_mean_of_each_role_and_leave_opponents_out() -> None:
    turns = [in_role("a"), in_role("opponent", frozen=True, tokens=90)]
    metrics = group_metrics(
        [group_of(*(replace(episode(r, turns=turns), rewards={"a": r}) for r in (0.0, 1.0)))], prefix="env"
    )
    assert metrics["env/env/reward/a/mean"] == 0.5
    assert metrics["env/env/turn_tokens/max"] == 2
    assert "env/env/reward/opponent/mean" not in metrics


def test_the_groups_of_a_zero_sum_game_are_mixed() -> None:
    def make_group(*solver_rewards: float) -> Group:
        turns = [in_role("a"), in_role("b")]
        return group_of(*(replace(episode(0.5, turns=turns), rewards={"a": r, "b": 1 - r}) for r in solver_rewards))

    metrics = group_metrics([make_group(0.0, 1.0), make_group(1.0, 1.0)], prefix="env")
    assert metrics["env/env/groups/mixed"] == metrics["env/env/groups/all_bad"] == 0.5


def test_records_keep_roles_and_rewards(tmp_path: Path) -> None:
    turns = [in_role("a"), in_role("opponent", frozen=True), in_role(None)]
    recorded = replace(episode(0.5, turns=turns), rewards={"a": 0.5})
    table.write(tmp_path / "t.parquet", [RecordedGroup(group_of(recorded), True, [recorded])])
    (back,) = table.read_table(tmp_path / "t.parquet")
    for copy in (codec.decode(codec.encode(recorded)), back.attempts[0]):
        assert copy.rewards == {"a": 0.5}
        assert [(turn.role, turn.frozen) for turn in copy.turns] == [("a", False), ("opponent", True), (None, False)]


def test_the_policy_of_a_served_model_has_no_opponents() -> None:
    policy = ScriptedPolicy(["a"])
    policy._has_opponents = False
    with pytest.raises(EnvironmentFault, match="no weights but its own"):
        policy.role("white").opponent(step=0)


def test_a_task_of_roles_is_an_env() -> None:
    assert Task(0, "debate", Debate({})).id == "debate"
