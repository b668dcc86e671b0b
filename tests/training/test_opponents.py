"""Self-play: a policy against its earlier weights, which are never trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.evaluation.evaluate import evaluate
from rlkit.store import checkpoints
from rlkit.store.history import load_history
from rlkit.testing import Latency
from rlkit.tools.audit import audit_run
from rlkit.types import Episode
from rlkit.view.run_reader import RunReader
from tests.marks import split_slow
from tests.simulation import Simulation

ASK: list[rlkit.Message] = [{"role": "user", "content": "Move."}]


@dataclass(frozen=True)
class Duel(rlkit.Env):
    """The policy and an opponent write a word each; more letters e win. Both roles of `both` are trained."""

    task_id: str
    opponent: Mapping[str, object] = field(default_factory=lambda: {"step": -2})
    both: bool = False

    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
        rival = policy.opponent(**self.opponent)  # pyright: ignore[reportArgumentType]  what a user may write
        theirs = await rival.chat([{"role": "user", "content": self.task_id}])
        mine = await policy.role("white").chat([{"role": "user", "content": theirs.text[:3]}])
        won = {"white": float(mine.text.count("e") - theirs.text.count("e"))}
        if self.both:
            await policy.role("black").chat(ASK)
            won["black"] = float(mine.text.count("a"))
        return rlkit.Outcome(rewards=won)


def make_run(folder: Path, tasks: Sequence[Duel] | None = None, **settings: object) -> Simulation:
    tasks = tasks or [Duel(f"duel-{n}", both=bool(n % 2)) for n in range(40)]
    return Simulation(folder, tasks=tasks, settings={"steps": 8, **settings})


def episodes_of(folder: Path) -> list[Episode]:
    history = load_history(folder)
    groups = [recorded.group for step in range(1, history.step + 1) for recorded in history.groups(step)]
    return [episode for group in groups for episode in group.episodes]


def versions(episode: Episode) -> tuple[int, int]:
    """Versions of the policy and of its opponent."""
    (own,) = {turn.version for turn in episode.turns if not turn.frozen}
    (frozen,) = [turn.version for turn in episode.turns if turn.frozen]
    return own, frozen


def test_an_opponent_plays_with_the_last_checkpoint_that_is_due(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.train()
    pairs = {versions(episode) for episode in episodes_of(run.directory)}
    assert pairs == {(version, max(version - 2, 0) // 2 * 2) for version in range(8)}


@pytest.mark.parametrize("seconds", split_slow([6.0, 11.0, 17.0, 23.0], lambda seconds: seconds == 11.0))
def test_an_interrupted_run_meets_the_same_opponents(tmp_path: Path, seconds: float) -> None:
    def rows(run: Simulation) -> list[object]:
        return [
            [(turn.role, turn.version, turn.completion.tolist()) for turn in episode.turns]
            for episode in episodes_of(run.directory)
        ]

    latency = Latency(token_s=0.1)
    whole, cut = make_run(tmp_path / "whole"), make_run(tmp_path / "cut")
    whole.latency = cut.latency = latency
    whole.train()
    assert whole.virtual_s > 25
    cut.train_until(seconds)
    cut.train(resume=True)
    assert rows(whole) == rows(cut)
    assert whole.weights() == cut.weights()


def test_a_resumed_group_keeps_episodes_against_old_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [Duel("start", {"step": 0})] * 40)
    run.latency = Latency(token_s=0.1)
    run.train_until(20)
    run.train(resume=True)
    attempts = [episode for member in load_history(run.directory).attempts.values() for episode in member]
    assert all(episode.attempt == 0 for episode in [*attempts, *episodes_of(run.directory)])


@pytest.mark.parametrize("mode", ["stream", "async"])
def test_every_schedule_trains_against_opponents(tmp_path: Path, mode: str) -> None:
    run = make_run(tmp_path / "run", schedule={"mode": mode})
    result = run.train()
    assert result.steps == 8
    for episode in episodes_of(run.directory):
        (frozen,) = [turn.version for turn in episode.turns if turn.frozen]
        assert frozen % 2 == 0
    assert max(line.get("batch/staleness/max", 0) for line in run.lines()) <= 2  # opponents are older, and do not count


@pytest.mark.parametrize(
    ("opponent", "settings", "message"),
    [
        ({"step": 5}, {}, "opponent(step=5): the newest weights are those of step 0; ask for an earlier step"),
        ({"step": -1}, {"checkpoint": {"every": 0}}, "no weights are saved; set checkpoint.every to 1 or more"),
        ({"step": -4}, {"checkpoint": {"every": 2, "keep_last": 1}}, "or raise checkpoint.keep_last"),
        ({"step": 0, "checkpoint": "tinker://x"}, {}, "needs a whole number as step, or a checkpoint"),
        ({"step": 0, "role": "a b"}, {}, "the role 'a b' must have"),
    ],
)
def test_missing_weights_name_the_fix(
    tmp_path: Path, opponent: Mapping[str, object], settings: Mapping[str, object], message: str
) -> None:
    run = make_run(tmp_path / "run", [Duel("duel", opponent)] * 60, **settings)
    with pytest.raises(rlkit.RunFailed) as failure:
        run.train()
    assert message in str(failure.value)


def test_a_run_that_began_with_a_checkpoint_has_no_weights_of_its_start(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", steps=2)
    first.train()
    path = checkpoints(first.directory)[-1].state
    second = Simulation(
        tmp_path / "second", world=first.world, tasks=[Duel("duel")] * 9, settings={"load_checkpoint": path}
    )
    with pytest.raises(rlkit.RunFailed, match="the run began with load_checkpoint: give the checkpoint of sampler"):
        second.train()


def test_a_checkpoint_of_another_run_is_an_opponent(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", steps=2)
    first.train()
    path = checkpoints(first.directory)[-1].sampler
    second = Simulation(tmp_path / "second", world=first.world, tasks=[Duel("duel", {"checkpoint": path})] * 9)
    second.train()
    assert {versions(episode)[1] for episode in episodes_of(second.directory)} == {-1}


@dataclass(frozen=True)
class Digits(rlkit.Env):
    """Two roles and an opponent write four bytes; digits are good for white, and letters for black."""

    task_id: str

    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
        white, black, rival = policy.role("white"), policy.role("black"), policy.opponent(step=-2)
        text, rewards = self.task_id, dict[str, float]()
        for role, player, good in (("white", white, range(48, 58)), ("", rival, ()), ("black", black, range(97, 123))):
            reply = await player.sample(f"{self.task_id} {role}")
            text += reply.text
            if role:
                rewards[role] = float(np.mean([token in good for token in reply.turn.completion]))
        return rlkit.Outcome(rewards=rewards)


def settings_of(model: Path, **more: object) -> dict[str, object]:
    return {
        "model": str(model),
        "batch": {"groups": 4, "group_size": 8},
        "sampling": {"max_tokens": 4, "stop": ["\x00"]},
        "optimizer": {"learning_rate": 1e-2},
        "lora": {"rank": 16, "train_unembed": True},
        "service": {"engine_threads": 1},
        "checkpoint": {"every": 2},
        **more,
    }


TASKS = [Digits(name) for name in ("one", "two", "six", "ten")]


def train(model: Path, tasks: Sequence[rlkit.Env] = TASKS, **more: object) -> rlkit.RunResult:
    trainer = rlkit.RLTrainer(load_config([], settings=settings_of(model, envs={"e": {}}, **more)), envs={"e": tasks})
    return asyncio.run(trainer.train())


def lines_of(result: rlkit.RunResult) -> list[dict[str, float]]:
    return [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_roles_learn_opposite_things_against_an_opponent(byte_model_dir: Path) -> None:
    result = train(byte_model_dir, steps=24)
    lines = lines_of(result)
    for role in ("white", "black"):
        assert np.mean([line[f"env/e/reward/{role}/mean"] for line in lines[:2]]) < 0.3
        assert np.mean([line[f"env/e/reward/{role}/mean"] for line in lines[-2:]]) > 0.8
    _, audits = asyncio.run(audit_run(result.directory))
    assert audits["e"].mismatch is None
    episodes = episodes_of(result.directory)
    trained = sum(len(t.completion) for episode in episodes for t in episode.turns if not t.frozen)
    assert 0 < audits["e"].tokens <= trained
    total = sum(len(t.completion) for episode in episodes for t in episode.turns)
    assert lines[-1]["usage/sampled_tokens"] == total > trained  # opponents cost money, too
    first = episodes[0]
    shown = RunReader(result.directory).read_episode(("step", 1), (0, first.member, first.attempt))["turns"]
    assert [turn["messages"][-1]["name"] for turn in shown] == [turn.role for turn in first.turns]
    assert all(turn["sampled"] == [[0, len(turn["completion"])]] for turn in shown)  # also those of the opponent
    for role, digits in (("white", True), ("black", False)):
        sent = [t.completion for t in (turn for episode in episodes[-8:] for turn in episode.turns) if t.role == role]
        assert np.mean([(token in range(48, 58)) == digits for tokens in sent for token in tokens]) > 0.8


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_missing_checkpoint_ends_the_run_with_its_path(byte_model_dir: Path, workers: int) -> None:
    tasks = [Duel("duel", {"checkpoint": "tinker://none/sampler_weights/x"})] * 20
    with pytest.raises(rlkit.RunFailed, match="tinker://none/sampler_weights/x"):
        train(byte_model_dir, tasks, steps=1, rollouts={"workers": workers})


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [Duel("duel", {"checkpoint": "tinker://a/sampler_weights/x"})] * 20)
    run.world.model = "other"
    run.settings = {**run.settings, "load_checkpoint": "tinker://a/weights/x"}
    run.world.checkpoints["tinker://a/weights/x"] = 1
    with pytest.raises(rlkit.RunFailed, match="its model is other, and the run trains simulated"):
        run.train()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_meet_the_same_opponents(byte_model_dir: Path, workers: int) -> None:
    def rows(result: rlkit.RunResult) -> list[object]:
        return [
            (episode.rewards, [(t.version, t.completion.tolist(), t.logprobs.tobytes()) for t in episode.turns])
            for episode in episodes_of(result.directory)
        ]

    here = train(byte_model_dir, steps=4, name="here")
    there = train(byte_model_dir, steps=4, name="there", rollouts={"workers": workers})
    assert rows(here) == rows(there)


def test_an_evaluation_plays_against_the_start(byte_model_dir: Path) -> None:
    tested = {"e": {"env": f"{__file__}:TASKS", "tasks": 2, "attempts": 2}}
    config = load_config([], settings=settings_of(byte_model_dir, envs={"arithmetic": {}}, eval={"envs": tested}))
    metrics = asyncio.run(evaluate(config))
    assert metrics["eval/e/episodes"] == 4
    assert metrics["eval/e/failed"] == 0
