"""The schedule `stream`, played twice with groups that finish in other orders: its requests, and its results."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tinker import types

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.testing import ByteChat, Latency, SimulatedTinker, run_virtual
from rlkit.testing.futures import SimulatedFuture
from rlkit.testing.simulated_service import SimulatedTrainingClient
from rlkit.training.trainer import RLTrainer

GROUPS, STEPS = 5, 3

ORDERS = {
    "the first drawn last": list(range(GROUPS))[::-1],
    **{f"shuffled {seed}": Random(seed).sample(range(GROUPS), GROUPS) for seed in range(3)},
}


@dataclass
class Turnstile:
    """Lets the groups of a step finish in one order, and only in that.

    Args:
        order: of the places of groups in their step.
        members: of each group.
        pause_s: after each group, so that a gradient may be computed meanwhile.
        held: the draw that never finishes.
    """

    order: Sequence[int]
    members: int
    pause_s: float
    stuck_draw: int | None = None
    _left: Counter[int] = field(default_factory=Counter[int])
    _done: defaultdict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    async def leave(self, draw: int) -> None:
        """Wait until the groups of the step that finish before this one have finished."""
        if draw == self.stuck_draw:
            await asyncio.Event().wait()
        step, place = divmod(draw, GROUPS)
        rank = self.order.index(place)
        if rank:
            await self._done[step * GROUPS + self.order[rank - 1]].wait()
            await asyncio.sleep(self.pause_s)
        self._left[draw] += 1
        if self._left[draw] == self.members:
            self._done[draw].set()


class Vowels(rlkit.SingleTurnEnv):
    """Say vowels: the reward is their share among the bytes of the reply."""

    def __init__(self, number: int, turnstile: Turnstile) -> None:
        self.task_id = f"task-{number}"
        self.number, self.turnstile = number, turnstile

    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome | float:
        played = await super().rollout(policy)
        await self.turnstile.leave(self.number)
        return played

    def prompt(self) -> str:
        return self.task_id

    def grade(self, reply: rlkit.Reply) -> float:
        return float(np.mean([token in b"aeiou" for token in (0, *reply.turn.completion)]))


class Numbered(rlkit.TaskSource):
    """Tasks 0, 1, 2 and so on, which are the numbers of their draws."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile, self.draw_count = turnstile, 0

    def next(self) -> rlkit.Env:
        self.draw_count += 1
        return Vowels(self.draw_count - 1, self.turnstile)

    def observe(self, group: rlkit.Group) -> None:
        pass

    def state_dict(self) -> Mapping[str, rlkit.Json]:
        return {"drawn": self.draw_count}

    def load_state_dict(self, state: Mapping[str, rlkit.Json]) -> None:
        self.draw_count = int(str(state["drawn"]))


def settings(model: str, *, substeps: int, members: int, max_tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "envs": {"vowels": {}},
        "steps": STEPS,
        "batch": {"groups": GROUPS, "group_size": members, "substeps": substeps},
        "schedule": {"mode": "stream"},
        "sampling": {"max_tokens": max_tokens},
    }


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """The metrics of each step, without what measures time."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "time/" not in name} for line in lines]


def describe_datum(datum: types.Datum) -> str:
    """All that a training sequence holds."""
    inputs = {name: np.asarray(data.data).tolist() for name, data in datum.loss_fn_inputs.items()}
    return json.dumps([[int(token) for token in datum.model_input.to_ints()], inputs])


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """All requests for training that the simulated service gets, in their order, with all that they hold."""
    requests = list[tuple[object, ...]]()
    forward_backward, optim_step = SimulatedTrainingClient.forward_backward, SimulatedTrainingClient.optim_step

    def gradient(
        client: SimulatedTrainingClient, data: Sequence[types.Datum], *more: object
    ) -> SimulatedFuture[types.ForwardBackwardOutput]:
        requests.append(("gradient", [describe_datum(datum) for datum in data], *more))
        return forward_backward(client, data, *more)  # type: ignore[arg-type]  as it came

    def step(client: SimulatedTrainingClient, adam: types.AdamParams) -> SimulatedFuture[types.OptimStepResponse]:
        requests.append(("step", repr(adam)))
        return optim_step(client, adam)

    monkeypatch.setattr(SimulatedTrainingClient, "forward_backward", gradient)
    monkeypatch.setattr(SimulatedTrainingClient, "optim_step", step)
    return requests


def simulate(directory: Path, order: Sequence[int], *, substeps: int = 1, **service: bool) -> None:
    tasks = Numbered(Turnstile(order, members=2, pause_s=4.0))
    resolved = load_config([], settings=settings("simulated", substeps=substeps, members=2, max_tokens=64))
    trainer = RLTrainer(
        resolved,
        envs={"vowels": tasks},
        directory=directory,
        service=SimulatedTinker(latency=Latency(gradient_s=5.0), **service),
        chat=ByteChat(),
    )
    run_virtual(trainer.train())


@pytest.mark.parametrize("substeps", [1, GROUPS])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_requests_do_not_depend_on_the_order_in_which_groups_finish(
    order: list[int], substeps: int, submitted: list[tuple[object, ...]], tmp_path: Path
) -> None:
    simulate(tmp_path / "first", range(GROUPS), substeps=substeps)
    first = [*submitted]
    submitted.clear()
    simulate(tmp_path / "second", order, substeps=substeps)
    assert [name for name, *_ in first].count("gradient") == GROUPS * STEPS, "a group is a request of its own"
    assert submitted == first
    assert read_metrics(tmp_path / "second") == read_metrics(tmp_path / "first")


def test_gradients_are_requested_before_the_step_is_complete(
    submitted: list[tuple[object, ...]], tmp_path: Path
) -> None:
    last = GROUPS - 1
    tasks = Numbered(Turnstile(range(GROUPS), members=2, pause_s=1.0, stuck_draw=last))
    resolved = load_config([], settings=settings("simulated", substeps=1, members=2, max_tokens=64))
    trainer = RLTrainer(
        resolved, envs={"vowels": tasks}, directory=tmp_path / "run", service=SimulatedTinker(), chat=ByteChat()
    )

    async def cut_off() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await trainer.train()

    run_virtual(cut_off())
    assert [name for name, *_ in submitted] == ["gradient"] * last


def test_nondeterministic_service_gets_groups_as_they_finish(
    submitted: list[tuple[object, ...]], tmp_path: Path
) -> None:
    def steps() -> list[list[str]]:
        """The data of each step."""
        data = [list[str]()]
        for name, *arguments in submitted:
            if name == "step":
                data.append([])
            else:
                data[-1] += arguments[0]  # type: ignore[arg-type]  of a gradient, its data
        submitted.clear()
        return data

    simulate(tmp_path / "first", range(GROUPS), is_repeatable=False)
    in_order = steps()
    simulate(tmp_path / "second", range(GROUPS)[::-1], is_repeatable=False)
    reverse = steps()
    assert reverse[0] != in_order[0]
    assert sorted(reverse[0]) == sorted(in_order[0])


def trained(model: Path, directory: Path, order: Sequence[int], *, threads: int) -> dict[str, bytes]:
    """Train on the real engine; the files of the run's last checkpoint."""
    more = {
        "lora": {"rank": 8, "train_unembed": True},
        "optimizer": {"learning_rate": 1e-2},
        "service": {"engine_threads": threads},
    }
    tasks = Numbered(Turnstile(order, members=4, pause_s=0.01))
    resolved = load_config([], settings=settings(str(model), substeps=1, members=4, max_tokens=6) | more)
    trainer = RLTrainer(resolved, envs={"vowels": tasks}, directory=directory, trackers=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLKIT_ENGINE_DIR", str(directory / "engine"))
        asyncio.run(trainer.train())
    files = sorted((directory / "engine").rglob("*.safetensors"))
    assert files
    return {str(file): file.read_bytes() for file in files}


@pytest.mark.slow
def test_engine_result_does_not_depend_on_the_order_in_which_groups_finish(
    byte_model_dir: Path, tmp_path: Path
) -> None:
    first = trained(byte_model_dir, tmp_path / "first", range(GROUPS), threads=1)
    second = trained(byte_model_dir, tmp_path / "second", ORDERS["shuffled 1"], threads=2)
    assert read_metrics(tmp_path / "second") == read_metrics(tmp_path / "first")
    assert [*first.values()] == [*second.values()]
