"""The first turns of a group are a single request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.policy import Sampler
from rlkit.rollout.request_batcher import RequestBatcher
from rlkit.testing import Fault, World, run_virtual
from rlkit.types import Completion, Prompt, Sampling
from tests.simulation import Simulation, Word


class Talk(rlkit.StepEnv[int]):
    max_turns = 3

    def __init__(self, number: int) -> None:
        self.task_id = f"task-{number}"

    def reset(self) -> tuple[int, list[rlkit.Message]]:
        return 0, [{"role": "user", "content": self.task_id}]

    async def step(self, state: int, reply: rlkit.Reply) -> rlkit.Step:
        return rlkit.Step([{"role": "user", "content": "more"}], reward=float(reply.text.count("e")))


def train(directory: Path, coalesce: str, tasks: list[rlkit.Env]) -> Simulation:
    run = Simulation(directory, World(), settings={"rollouts": {"coalesce": coalesce}}, tasks=tasks)
    run.train()
    return run


def test_batching_first_turns_does_not_change_episodes(tmp_path: Path) -> None:
    together = train(tmp_path / "together", "always", [Talk(number) for number in range(9)])
    alone = train(tmp_path / "alone", "never", [Talk(number) for number in range(9)])
    groups, size, turns = 6, 3, 3
    assert alone.world.calls["sample"] == groups * size * turns
    assert together.world.calls["sample"] == groups + groups * size * (turns - 1)
    assert together.world.calls["samples"] == alone.world.calls["samples"]
    assert together.weights() == alone.weights()


def test_the_prompt_of_single_turn_groups_is_computed_once_by_default(tmp_path: Path) -> None:
    together = train(tmp_path / "together", "single_turn", [Word(number) for number in range(9)])
    alone = train(tmp_path / "alone", "never", [Word(number) for number in range(9)])
    assert together.world.calls["prefill_tokens"] * 3 == alone.world.calls["prefill_tokens"]
    assert together.weights() == alone.weights()


def test_conversations_do_not_wait_for_each_other_by_default(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "single_turn", [Talk(number) for number in range(9)])
    assert run.world.calls["sample"] == run.world.calls["samples"]


class Impatient(Word):
    """Cancel the first turn of a single rollout while the other rollouts of the group wait."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        asking = asyncio.ensure_future(policy.chat([{"role": "user", "content": self.task_id}]))
        await asyncio.sleep(0.1)
        if np.random.default_rng().random() < 0.5:
            asking.cancel()
            return 0.0
        return float((await asking).text.count("e"))


def test_cancelled_rollout_does_not_cancel_the_batched_request(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "always", [Impatient(number) for number in range(40)])
    assert [line["env/all/failed"] for line in run.lines()] == [0.0] * 3


def test_failed_batched_request_fails_each_rollout(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "run", World(), settings={"rollouts": {"coalesce": "always"}})
    run.settings = {**run.settings, "service": {"timeout_s": 10.0}}
    run.world.faults = [Fault("500", call="sample")]
    with pytest.raises(rlkit.ServiceError, match="sampling"):
        run.train()


class Miser(Sampler):
    """Return a single sample whatever the number requested."""

    version = 0

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        return [Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop")]


def test_too_few_samples_fail_each_rollout() -> None:
    async def run() -> list[object]:
        batcher = RequestBatcher()
        prompt = Prompt(np.arange(3, dtype=np.int32))
        requests = [batcher.sample(Miser(), prompt, Sampling(max_tokens=5), seed) for seed in range(3)]
        return list(await asyncio.gather(*requests, return_exceptions=True))

    failures = run_virtual(run())
    assert [str(failure) for failure in failures] == ["sampling: requested 3 samples, got 1"] * 3
    assert all(isinstance(failure, rlkit.ServiceError) for failure in failures)
