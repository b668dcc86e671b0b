"""The loop, through the real Tinker SDK, against the embedded engine and a small real model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.evaluation.evaluate import evaluate
from rlkit.store import RunStore
from rlkit.testing import Latency
from rlkit.trackers import RunInfo, RunResult, Tracker
from rlkit.training.trainer import RLTrainer
from rlkit.types import Checkpoint, Datum
from tests.limits import HANG_S
from tests.simulation import Simulation


@dataclass(frozen=True)
class Digits(rlkit.SingleTurnEnv):
    """Say digits: the reward is the share of the reply's four bytes that are digits."""

    start: str

    def prompt(self) -> str:
        return self.start

    def grade(self, reply: rlkit.Reply) -> float:
        return float(np.mean([ord("0") <= token <= ord("9") for token in reply.turn.completion]))


TASKS = [Digits(text) for text in ("one", "two", "six", "ten")]


@dataclass
class Listener(Tracker):
    """Remembers everything it is told."""

    events: list[str] = field(default_factory=list)
    steps: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    stop: rlkit.StopSignal | None = None

    def on_start(self, run: RunInfo) -> None:
        self.events.append(f"started {run.progress().phase}")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, metrics))
        if self.stop and step == 2:
            self.stop.request()

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.events.append(f"checkpoint {checkpoint.step}")

    def on_note(self, message: str) -> None:
        self.events.append(message)

    def on_finish(self, result: RunResult | None) -> None:
        self.events.append(f"finished {result and result.status}")


def make_settings(model: Path, **more: object) -> dict[str, object]:
    return {
        "model": str(model),
        "envs": {"digits": {}},
        "batch": {"groups": 4, "group_size": 8},
        "sampling": {"max_tokens": 4, "stop": ["\x00"]},
        "optimizer": {"learning_rate": 1e-2},
        "lora": {"rank": 16, "train_unembed": True},
        "service": {"engine_threads": 1},
        **more,
    }


def make_trainer(
    model: Path, *trackers: Tracker, tasks: Sequence[rlkit.Env] = TASKS, stop=None, **more: object
) -> RLTrainer:
    resolved = load_config([], settings=make_settings(model, **more))
    return RLTrainer(resolved, envs={"digits": tasks}, trackers=trackers, stop=stop)


def read_metrics(result: RunResult) -> list[dict[str, float]]:
    return [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]


def test_a_small_model_learns_in_seconds(byte_model_dir: Path) -> None:
    result = asyncio.run(make_trainer(byte_model_dir, steps=20).train())
    rewards = [line["env/digits/reward/mean"] for line in read_metrics(result)]
    assert rewards[0] < 0.15
    assert rewards[-1] > 0.9


def test_while_a_step_trains_its_finished_rollouts_are_shown(byte_model_dir: Path) -> None:
    class Watcher(Tracker):
        def __init__(self) -> None:
            self.seen = set[tuple[str, int, int]]()
            self.has_ended = threading.Event()

        def on_start(self, run: RunInfo) -> None:
            threading.Thread(target=self.watch, args=(run,), daemon=True).start()

        def watch(self, run: RunInfo) -> None:
            while not self.has_ended.wait(0.001):
                progress = run.progress()
                self.seen.add((progress.phase, progress.step, progress.finished))

        def on_finish(self, result: RunResult | None) -> None:
            self.has_ended.set()

    watcher = Watcher()
    asyncio.run(make_trainer(byte_model_dir, watcher, steps=2).train())
    assert {("training", 0, 32), ("training", 1, 32)} <= watcher.seen
    assert max(finished for _, _, finished in watcher.seen) == 32


def test_the_same_seed_gives_the_same_run_bit_for_bit(byte_model_dir: Path) -> None:
    def run(seed: int) -> list[dict[str, float]]:
        result = asyncio.run(make_trainer(byte_model_dir, steps=4, seed=seed).train())
        return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(result)]

    assert run(3) == run(3) != run(4)


def test_sampler_and_trainer_agree_before_and_after_training(byte_model_dir: Path) -> None:
    result = asyncio.run(make_trainer(byte_model_dir, steps=6).train())
    for line in read_metrics(result):
        assert abs(line["optim/kl_sample_train_v1"]) < 1e-4
        assert line["optim/kl_sample_train_v2"] < 1e-8


@dataclass(frozen=True)
class Equal(Digits):
    """Each reply has the same reward."""

    reward: float = 1.0

    def grade(self, reply: rlkit.Reply) -> float:
        return self.reward


@pytest.mark.parametrize("reward", [0.5, 1.0])
def test_a_step_of_solved_tasks_is_not_called_one_without_anything_to_learn(
    byte_model_dir: Path, reward: float
) -> None:
    listener = Listener()
    resolved = load_config([], settings=make_settings(byte_model_dir, steps=2))
    envs = {"digits": [Equal(task.start, reward) for task in TASKS]}
    result = asyncio.run(RLTrainer(resolved, envs=envs, trackers=[listener]).train())
    assert result.metrics["optim/skipped"] == 1
    assert sum("nothing to learn" in event for event in listener.events) == (reward < 1)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
@pytest.mark.parametrize("advantage", ["group_mean", "grpo"])
def test_every_loss_and_estimator_trains_a_step(byte_model_dir: Path, loss: str, advantage: str) -> None:
    result = asyncio.run(make_trainer(byte_model_dir, steps=1, loss={"name": loss}, advantage=advantage).train())
    assert result.metrics["optim/skipped"] == 0
    assert result.metrics["service/loss:sum"] != 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ppo", {"clip_low": 0.999, "clip_high": 1.001}),
        ("cispo", {"clip_low": 0.999, "clip_high": 1.001}),
        ("gspo", {"clip_low": 0.9999, "clip_high": 1.0001}),
        ("dro", {"beta": 3.0}),
    ],
)
def test_the_settings_of_a_loss_reach_the_gradient(byte_model_dir: Path, name: str, settings: dict[str, float]) -> None:
    # The second half of a step is trained on with weights that have moved.
    halves = {"groups": 4, "group_size": 8, "substeps": 2}

    def last(**more: float) -> Mapping[str, float]:
        run = make_trainer(byte_model_dir, steps=2, batch=halves, loss={"name": name, **more})
        return asyncio.run(run.train()).metrics

    default, tight = last(), last(**settings)
    assert default["optim/ratio/effective"] < 1
    assert default["service/loss:sum"] != tight["service/loss:sum"]
    if name != "dro":
        assert default["optim/ratio/clipped"] < tight["optim/ratio/clipped"]


def test_reward_and_advantage_shaping_is_applied_and_reported(byte_model_dir: Path) -> None:
    batch = {"groups": 4, "group_size": 8, "normalize": "sequence", "clip_advantages": 0.05}
    length = {"coefficient": 0.5, "to_tokens": 8}
    plain = asyncio.run(make_trainer(byte_model_dir, steps=1).train()).metrics
    shaped = asyncio.run(make_trainer(byte_model_dir, steps=1, batch=batch, length_penalty=length).train()).metrics
    assert shaped["env/digits/reward/mean"] == plain["env/digits/reward/mean"]
    assert shaped["batch/length_penalty"] == 0.25
    assert 0 < shaped["batch/clipped"] <= 1
    # A mean over groups of means over episodes of means over tokens, on-policy: it is bounded by an advantage.
    assert 0 < abs(shaped["service/loss:sum"]) < 0.05
    assert "batch/clipped" not in plain


def test_a_learning_rate_follows_its_schedule(byte_model_dir: Path) -> None:
    optimizer = {"learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 1}
    lines = read_metrics(asyncio.run(make_trainer(byte_model_dir, steps=4, optimizer=optimizer).train()))
    assert [line["optim/learning_rate"] for line in lines] == pytest.approx([5e-3, 1e-2, 2e-2 / 3, 1e-2 / 3])


@pytest.mark.slow
def test_kl_penalty_keeps_the_policy_near_the_base_model(byte_model_dir: Path) -> None:
    def distances(coefficient: float, mode: str) -> list[float]:
        penalty = {"coefficient": coefficient, "discount": 0.5}
        run = make_trainer(byte_model_dir, steps=5, kl_penalty=penalty, schedule={"mode": mode})
        return [line["kl_reference/v2"] for line in read_metrics(asyncio.run(run.train()))]

    unpenalized, penalized = distances(1e-9, "sync"), distances(3.0, "sync")
    assert unpenalized[0] == penalized[0] < 1e-8
    assert penalized[-1] < unpenalized[-1] / 5
    assert distances(3.0, "stream")[-1] < unpenalized[-1] / 5


@pytest.mark.slow
def test_kl_penalty_returns_the_policy_to_a_checkpoint(byte_model_dir: Path) -> None:
    first = asyncio.run(make_trainer(byte_model_dir, steps=4, name="first").train())
    assert first.checkpoint
    penalty = {"coefficient": 100.0, "reference": first.checkpoint.sampler}
    lines = read_metrics(asyncio.run(make_trainer(byte_model_dir, steps=8, kl_penalty=penalty).train()))
    assert lines[0]["kl_reference/v2"] > 0.01
    assert lines[-1]["kl_reference/v2"] < lines[0]["kl_reference/v2"] / 2


def test_missing_reference_is_a_usage_error(byte_model_dir: Path) -> None:
    penalty = {"coefficient": 1.0, "reference": "tinker://nobody:train:0/sampler_weights/none"}
    with pytest.raises(rlkit.UsageError, match="tinker://nobody:train:0/sampler_weights/none"):
        asyncio.run(make_trainer(byte_model_dir, steps=1, kl_penalty=penalty).train())


def reinforce(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    terms = [-(torch.tensor(d.advantages) * logp).sum() for d, logp in zip(data, logprobs, strict=True)]
    return torch.stack(terms).sum(), {"sequences_seen": float(len(data))}


def broken(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    raise KeyError("beta")


def test_custom_loss_trains(byte_model_dir: Path) -> None:
    loss = {"name": "custom", "function": f"{__file__}:reinforce"}
    result = asyncio.run(make_trainer(byte_model_dir, steps=12, loss=loss).train())
    rewards = [line["env/digits/reward/mean"] for line in read_metrics(result)]
    assert rewards[-1] > rewards[0] + 0.2
    assert result.metrics["service/sequences_seen"] == 32


def test_a_function_is_a_loss(byte_model_dir: Path) -> None:
    settings: dict[str, Any] = {"steps": 1, "trackers": [], "batch": {"groups": 2, "group_size": 4}}
    settings |= {"sampling": {"max_tokens": 4}, "lora": {"rank": 2}}
    result = rlkit.train(model=str(byte_model_dir), envs=TASKS, loss=reinforce, **settings)
    assert result.metrics["service/sequences_seen"] > 0


def test_failing_custom_loss_is_named(byte_model_dir: Path) -> None:
    loss = {"name": "custom", "function": f"{__file__}:broken"}
    with pytest.raises(rlkit.UsageError, match=r"loss\.function: KeyError: 'beta'"):
        asyncio.run(make_trainer(byte_model_dir, steps=1, loss=loss).train())


def test_trackers_get_every_step_and_a_failing_one_does_no_harm(byte_model_dir: Path) -> None:
    class Broken(Listener):
        def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise OSError("no space")

    listener = Listener()
    asyncio.run(make_trainer(byte_model_dir, Broken(), listener, steps=3, checkpoint={"every": 2}).train())
    assert [step for step, _ in listener.steps] == [1, 2, 3]
    assert listener.events == [
        "starting the embedded engine: there is neither a Tinker credential nor TINKER_BASE_URL",
        f"starting a training session for {byte_model_dir}",
        "started preparing",
        "the tracker Broken failed and may be incomplete: OSError: no space",
        "checkpoint 2",
        "checkpoint 3",
        "finished completed",
    ]


def test_stopped_run_finishes_its_step_and_saves(byte_model_dir: Path) -> None:
    stop = rlkit.StopSignal()
    listener = Listener(stop=stop)
    result = asyncio.run(make_trainer(byte_model_dir, listener, stop=stop, steps=50).train())
    # The listener asks after step 2; on a busy machine the next step may be requested by then, and is finished.
    assert (result.status, result.steps in (2, 3)) == ("interrupted", True)
    assert result.checkpoint and result.checkpoint.step == result.steps
    assert json.loads((result.directory / "run.json").read_text())["status"] == "interrupted"


def test_evaluation_uses_its_own_tasks_and_checkpoints_can_be_evaluated_later(byte_model_dir: Path) -> None:
    digits = {"env": f"{__file__}:TASKS", "tasks": 3, "attempts": 4, "temperature": 1.0}
    evaluation = {"every": 2, "envs": {"held_out": digits}}
    listener = Listener()
    result = asyncio.run(make_trainer(byte_model_dir, listener, steps=6, eval=evaluation).train())
    evaluated = [step for step, metrics in listener.steps if "eval/held_out/reward/mean" in metrics]
    assert evaluated == [0, 2, 4, 6]
    assert listener.steps[0][1]["eval/held_out/groups"] == 3
    resolved = load_config([], settings=make_settings(byte_model_dir, eval=evaluation))
    assert result.checkpoint
    later = asyncio.run(evaluate(resolved, checkpoint=result.checkpoint.sampler))
    assert later["eval/held_out/reward/mean"] == result.metrics["eval/held_out/reward/mean"] > 0.1


def test_a_run_that_starts_from_a_checkpoint_has_its_weights(byte_model_dir: Path) -> None:
    evaluation = {"envs": {"digits": {"env": f"{__file__}:TASKS", "attempts": 16, "temperature": 1.0}}}
    first = asyncio.run(make_trainer(byte_model_dir, steps=3, eval=evaluation, name="first").train())
    assert first.checkpoint
    listener = Listener()
    more = {"steps": 1, "eval": evaluation, "name": "second", "load_checkpoint": first.checkpoint.state}
    asyncio.run(make_trainer(byte_model_dir, listener, **more).train())
    at_the_end = {k: v for k, v in first.metrics.items() if k.startswith("eval/")}
    assert {k: v for k, v in listener.steps[0][1].items() if not k.startswith("usage/")} == at_the_end
    # What was found before the first step is something else, though one number may be the same by chance.
    before = read_metrics(first)[0]
    assert any(before[name] != value for name, value in at_the_end.items() if name.startswith("eval/digits/"))


class Failing(rlkit.Env):
    async def rollout(self, policy: rlkit.Policy) -> float:
        raise RuntimeError("the sandbox is gone")


def test_run_without_successful_rollouts_fails_with_the_reason(byte_model_dir: Path) -> None:
    listener = Listener()
    with pytest.raises(
        rlkit.RunFailed, match="8 groups in a row had too many failed rollouts; the last: RuntimeError: the sandbox"
    ):
        asyncio.run(make_trainer(byte_model_dir, listener, tasks=[Failing()], name="bad").train())
    assert listener.events[-1] == "finished None"


def test_steps_before_a_failure_are_saved(byte_model_dir: Path) -> None:
    draws = list[int]()

    def tired(group: rlkit.Group) -> np.ndarray:
        draws.append(group.draw)
        if len(draws) > 4:
            raise RuntimeError("enough")
        return group.rewards - group.rewards.mean()

    listener = Listener()
    resolved = load_config([], settings=make_settings(byte_model_dir, steps=9))
    run = RLTrainer(resolved, envs={"digits": TASKS}, estimators={"digits": tired}, trackers=[listener])
    with pytest.raises(rlkit.EnvironmentFault, match="RuntimeError: enough"):
        asyncio.run(run.train())
    assert "checkpoint 1" in listener.events


def test_trained_steps_are_saved_if_the_disk_is_full(byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RunStore, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(RunStore, "add_metrics", full)
    listener = Listener()
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(make_trainer(byte_model_dir, listener, steps=9).train())
    assert "checkpoint 1" in listener.events


def test_full_disk_does_not_prevent_saving_a_step_with_a_successor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(self: RunStore, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(RunStore, "add_metrics", full)
    run = Simulation(tmp_path / "run", latency=Latency(first_s=0.01, token_s=0.0, gradient_s=5.0, step_s=5.0))
    run.settings = {"steps": 6, "schedule": {"mode": "async", "max_staleness": 4}, "checkpoint": {"every": 0}}
    with pytest.raises(OSError, match="no space left"):
        run.train()
    assert "replaying step 1 from its recorded groups, without sampling" in run.ears.notes, "a step was begun behind it"
    assert run.ears.saved == [1]


class Endless(rlkit.StepEnv[None]):
    """Talks until the context is full."""

    max_turns = 10_000

    def reset(self) -> tuple[None, list[rlkit.Message]]:
        return None, [{"role": "user", "content": "x" * 3000}]

    async def step(self, state: None, reply: rlkit.Reply) -> rlkit.Step:
        return rlkit.Step([{"role": "user", "content": "y" * 500}], reward=1.0)


def test_conversation_that_fills_the_context_is_truncated_and_graded(byte_model_dir: Path) -> None:
    small = {"groups": 1, "group_size": 2}
    result = asyncio.run(make_trainer(byte_model_dir, tasks=[Endless()], steps=1, batch=small).train())
    assert result.metrics["env/digits/truncated"] == 1
    assert result.metrics["env/digits/reward/mean"] == result.metrics["env/digits/turns"] >= 2


class Boasting(rlkit.Env):
    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
        await policy.sample("hello")
        return rlkit.Outcome(1.0, metrics={"reward/mean": 99.0, "own": 2.0})


def test_environment_cannot_replace_built_in_metrics(byte_model_dir: Path) -> None:
    result = asyncio.run(make_trainer(byte_model_dir, tasks=[Boasting()], steps=1).train())
    assert (result.metrics["env/digits/reward/mean"], result.metrics["env/digits/own"]) == (1.0, 2.0)


def test_environment_name_missing_in_the_configuration_is_an_error(byte_model_dir: Path) -> None:
    resolved = load_config([], settings=make_settings(byte_model_dir))
    with pytest.raises(rlkit.UsageError, match=r"no environment 'digit'\. Did you mean 'digits'"):
        RLTrainer(resolved, envs={"digit": TASKS})


SCRIPT = """
import os, signal, threading
import rlkit
from rlkit.envs.arithmetic import arithmetic
from rlkit.trackers.console import ConsoleTracker

class Interrupting(ConsoleTracker):
    def on_step(self, step, metrics):
        if step == 1:
            {interrupt}

result = rlkit.train(
    model="{model}", envs=arithmetic(), trackers=[Interrupting()], steps=10**6,
    batch={{"groups": 1, "group_size": 2}}, sampling={{"max_tokens": 2}},
)
print(result.status, result.checkpoint.step)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "interrupt", ["os.kill(os.getpid(), signal.SIGINT)", "signal.pthread_kill(threading.get_ident(), signal.SIGINT)"]
)
def test_an_interrupt_of_a_script_finishes_the_step_and_saves(
    byte_model_dir: Path, tmp_path: Path, interrupt: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=byte_model_dir, interrupt=interrupt))
    completed = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    status, step = completed.stdout.split()
    assert status == "interrupted"
    assert 1 <= int(step) < 100


def test_unknown_model_is_a_usage_error() -> None:
    with pytest.raises((rlkit.UsageError, rlkit.MissingError), match="no-such/model"):
        asyncio.run(make_trainer(Path("no-such/model")).train())


def test_train_works_inside_a_running_event_loop(byte_model_dir: Path) -> None:
    async def notebook() -> RunResult:
        keywords = make_settings(byte_model_dir, steps=1)
        keywords.pop("envs")
        return rlkit.train(envs=TASKS, trackers=[], **keywords)  # type: ignore[arg-type]

    result = asyncio.run(notebook())
    assert result.status == "completed"
    assert result.name.startswith("Digits-")
