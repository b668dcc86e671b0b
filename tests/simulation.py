"""Short runs on virtual time with the simulated service, for tests of the training loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import rlkit
from rlkit.algorithms.advantages import AnyEstimator
from rlkit.chat.format import ChatFormat
from rlkit.config.loading.load import load_config
from rlkit.store.history import read_metrics
from rlkit.testing import ByteChat, Latency, SimulatedTinker, World, run_virtual
from rlkit.trackers import RunInfo, RunResult, Tracker
from rlkit.training.trainer import RLTrainer
from rlkit.types import Checkpoint


class Word(rlkit.SingleTurnEnv):
    """Reward the number of letters e in the reply."""

    def __init__(self, number: int) -> None:
        self.task_id = f"task-{number}"

    def prompt(self) -> str:
        return self.task_id

    def grade(self, reply: rlkit.Reply) -> float:
        return float(reply.text.count("e"))


class Talk(rlkit.StepEnv[None]):
    """Ask for more in each turn, with a tool that takes two seconds."""

    max_turns = 4

    def __init__(self, number: int) -> None:
        self.task_id = f"task-{number}"

    def reset(self) -> tuple[None, list[rlkit.Message]]:
        return None, [{"role": "user", "content": self.task_id}]

    async def step(self, state: None, reply: rlkit.Reply) -> rlkit.Step:
        await asyncio.sleep(2)
        return rlkit.Step([{"role": "user", "content": "more"}], reward=float(reply.text.count("e")))


@dataclass
class Ears(Tracker):
    """Record the calls that a run makes to its tracker."""

    notes: list[str] = field(default_factory=list)
    steps: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    result: RunResult | None = None

    def on_start(self, run: RunInfo) -> None:
        pass

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, metrics))

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.saved.append(checkpoint.step)

    def on_note(self, message: str) -> None:
        self.notes.append(message)

    def on_finish(self, result: RunResult | None) -> None:
        self.result = result


@dataclass
class Simulation:
    """A run, which can be interrupted and gone on with.

    Args:
        directory: of the run.
        world: of the service.
        settings: over the defaults of these tests.
        tasks: by default 40 of `Word`.
        chat: the model's format.
        estimators: instead of the configured ones.
    """

    directory: Path
    world: World = field(default_factory=World)
    latency: Latency = field(default_factory=Latency)
    repeatable: bool = True
    settings: Mapping[str, object] = field(default_factory=dict)
    tasks: Sequence[rlkit.Env] = field(default_factory=lambda: [Word(number) for number in range(40)])
    chat: ChatFormat = field(default_factory=ByteChat)
    estimators: Mapping[str, AnyEstimator] = field(default_factory=dict)
    ears: Ears = field(default_factory=Ears)
    virtual_s: float = 0.0
    cancel: Callable[[], object] | None = None
    """Cancels the run, from any thread, while there is one."""

    def train(self, *, resume: bool = False, stop: rlkit.StopSignal | None = None) -> RunResult:
        """To the end."""
        return run_virtual(self._timed(self.trainer(resume=resume, stop=stop)))

    def train_until(self, seconds: float) -> None:
        """To a point in time, and no further: the run is cancelled then."""

        async def cancelled() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._timed(self.trainer())

        run_virtual(cancelled())

    def trainer(self, *, resume: bool = False, stop: rlkit.StopSignal | None = None) -> RLTrainer:
        """Return the trainer of the run."""
        base: dict[str, object] = {
            "model": "simulated",
            "envs": {"words": {}},
            "steps": 3,
            "batch": {"groups": 2, "group_size": 3},
            "checkpoint": {"every": 2},
        }
        return RLTrainer(
            load_config([], settings=base | dict(self.settings)),
            envs={"words": self.tasks},
            estimators=self.estimators,
            trackers=[self.ears],
            stop=stop,
            directory=self.directory,
            resume=resume,
            service=SimulatedTinker(world=self.world, latency=self.latency, is_repeatable=self.repeatable),
            chat=self.chat,
        )

    async def _timed(self, trainer: RLTrainer) -> RunResult:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await trainer.train()
        finally:
            self.cancel = None
            self.virtual_s = loop.time()

    def lines(self) -> list[dict[str, float]]:
        """The metrics of each step, and its number as `step`."""
        return [{"step": step, **metrics} for step, metrics in read_metrics(self.directory / "metrics.jsonl")]

    def weights(self) -> list[float | None]:
        """After each step: a number that remembers all that was trained on; None where there was nothing to learn."""
        return [line.get("service/weights") for line in self.lines() if line["step"]]
