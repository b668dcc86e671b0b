"""`rlkit train --dry-run`: a run in small, on a service that is not there, and what the whole one will take.

Invariant: what the environments do is theirs and real; of the service nothing is, and nothing is asked for unless a
pilot is. What could not be tried is named.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlkit._util.priority_semaphore import Slots
from rlkit._util.threads import in_thread
from rlkit.algorithms.advantages import choose_estimators
from rlkit.algorithms.losses import loss
from rlkit.algorithms.lr_schedule import learning_rate
from rlkit.chat.format import ChatFormat
from rlkit.chat.load import load_chat
from rlkit.config import Resolved
from rlkit.config.schema import Config
from rlkit.config.schema.track import TrackConfig
from rlkit.cost.estimate import HOSTED, Estimate, Pair, Rollout, estimate, save_estimate
from rlkit.dry_run.pilot import Pilot, draw_tasks, nudged, run_pilot
from rlkit.dry_run.run_costs import Part, look_up_costs
from rlkit.env import Env, Task, TaskSource
from rlkit.errors import MissingError, RlkitError, UsageError, did_you_mean
from rlkit.evaluation.evaluate import eval_player, eval_tasks
from rlkit.metrics.names import has_by_chance
from rlkit.rollout.player import Player
from rlkit.rollout.settings import env_settings
from rlkit.rollout.task_guard import leftovers_ended
from rlkit.service.connect import ServiceChoice, choose, describe
from rlkit.tasks.decontamination import contents
from rlkit.tasks.epochs import draws, with_steps
from rlkit.tasks.from_config import run_tasks
from rlkit.tasks.provenance import Origins
from rlkit.tasks.sources import Tasks
from rlkit.testing import ByteChat, Latency, SimulatedTinker, World
from rlkit.trackers import RunResult
from rlkit.training.trainer import RLTrainer
from rlkit.types import Group, Json

_SHORT = 0.1
"""Of the tokens that a completion may have, those of a short one."""

_CUT_OFF = 10.0
"""Likewise of a long one, so that all are cut off at what they may have."""

_TASKS = 2
"""That are played of each environment: one with short replies, and one with long ones."""

_AT_ONCE = Latency(
    first_s=0, token_s=0, gradient_s=0, trained_tokens_per_s=math.inf, step_s=0, save_s=0, load_s=0, sigma=0.3
)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How a dry run went.

    Args:
        parts: what was tried, and what was not.
        estimate: what the whole run takes; None where something failed.
        hosted: what it takes on the hosted service, where the run would be the embedded engine's and the price of the
            model is known.
    """

    parts: Sequence[Part]
    estimate: Estimate | None
    hosted: Estimate | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(part.status != "failed" for part in self.parts)


@leftovers_ended()
async def rehearse(
    resolved: Resolved | Config,
    *,
    envs: Mapping[str, Tasks] | None = None,
    chat: ChatFormat | None = None,
    pilot: int = 0,
    note: Callable[[str], None] = lambda message: None,
) -> Rehearsal:
    """Play a run in small on the simulated service: for nothing, and without a key.

    Each environment plays a group with short replies and one with long ones, all of them nonsense; then the training
    loop takes a step, saves it, and goes on from there as after an interruption. The environments, their graders, the
    model's format, the estimators and the losses are the run's own.

    Args:
        resolved: the configuration of the run.
        envs: tasks made in Python, as for `RLTrainer`.
        chat: the model's format; by default its own.
        pilot: groups of each environment that are played on the run's own service besides, and then trained on; 0 for
            no pilot.
        note: told what is being done.

    Raises:
        ConfigError: the configuration is wrong, or an environment cannot be loaded.
        UsageError: a pilot of less than no groups.
        RlkitError: the pilot failed.
    """
    if pilot < 0:
        raise UsageError(f"pilot: {pilot} is no number of groups; 0 is for no pilot")
    config = resolved.config if isinstance(resolved, Resolved) else resolved
    choice = choose(config.service)
    costs = await in_thread(look_up_costs, config, choice, note)
    # Before environments are played, which may take long.
    choose_estimators(config, {})
    loss(config.loss)
    parts = list[Part]()
    if chat is None:
        chat, known = await _chat(config, choice, note, pilot=pilot)
        parts.append(known)
    note("loading the environments")
    tests = eval_tasks(config.eval.envs, seed=config.seed, note=note)
    tasks = run_tasks(config, envs or {}, tested=contents(tests), note=note, origins=Origins())
    config = with_steps(config, tasks, note=note)
    learning_rate(config)
    small = in_small(config)
    states = {name: (source, source.state_dict()) for name, source in tasks.items() if isinstance(source, TaskSource)}
    stage = _Stage(small, chat, tasks, states, tests, parts, note)
    rollouts = {name: await stage.play(name) for name in small.envs}
    evaluated = {name: (await stage.evaluate(name), len(tests[name])) for name in small.eval.envs}
    if stage.works:
        await stage.train(config)
    speed = HOSTED if choice.kind == "hosted" else None
    if pilot and stage.works:
        stage.rewind()
        result = await run_pilot(config, tasks, chat, choice, groups=pilot, note=note)
        rollouts, speed = result.rollouts, result.speed
        parts.append(Part("service", "ok", _piloted(result, choice)))
    parts.extend(_not_tried(config, choice, piloted=bool(pilot)))
    parts.extend(costs.parts)
    if not stage.works:
        return Rehearsal(parts, None)
    expect = partial(estimate, config, rollouts, evaluated, draws=draws(config, tasks))
    own = expect(price=costs.own, speed=speed)
    await in_thread(save_estimate, config, own)
    return Rehearsal(parts, own, costs.hosted and expect(price=costs.hosted, speed=HOSTED))


def in_small(config: Config) -> Config:
    """A run with as few and as small groups as its settings allow, and without limits."""
    tree = config.model_dump(mode="json")
    tree |= {"name": None, "epochs": None, "budget_usd": None, "budget_tokens": None, "max_hours": None}
    tree["best"] |= {"goal": None, "patience": None, "min_gain": 0.0}
    tree["batch"]["groups"] = max(config.batch.substeps, 2)
    for spec in tree["eval"]["envs"].values():
        spec["tasks"] = min(spec["tasks"], _TASKS)
    largest = max(spec.group_size or config.batch.group_size for spec in config.envs.values())
    for size in range(2, largest):
        smaller = json.loads(json.dumps(tree))
        for section in (smaller["batch"], *smaller["envs"].values()):
            if section["group_size"] is not None:
                section["group_size"] = min(section["group_size"], size)
        try:
            return Config.model_validate_json(json.dumps(smaller), strict=True)
        except ValueError:  # an estimator or a minimum of valid episodes needs more
            continue
    return Config.model_validate_json(json.dumps(tree), strict=True)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a rehearsal plays with, and the parts that it has found."""

    config: Config
    chat: ChatFormat
    tasks: Mapping[str, Tasks]
    states: Mapping[str, tuple[TaskSource, Mapping[str, Json]]]
    tests: Mapping[str, Sequence[Env]]
    parts: list[Part]
    note: Callable[[str], None]

    @property
    def works(self) -> bool:
        return all(part.status != "failed" for part in self.parts)

    def rewind(self) -> None:
        """Set the sources of tasks that are the user's own back to their beginning."""
        for name, (source, state) in self.states.items():
            try:
                source.load_state_dict(state)
            except Exception as error:  # the user's own code
                told = f"load_state_dict failed on what state_dict gave: {type(error).__name__}: {error}"
                self.parts.append(Part(f"envs.{name}", "failed", told))

    async def play(self, name: str) -> Pair:
        """Play short and long rollouts of an environment."""
        config, slots = self.config, Slots(self.config.rollouts.max_live)
        player = Player(self.chat, env_settings(config, context=None), seed=config.seed, slots=slots)
        return await self._play(f"envs.{name}", draw_tasks(config, name, self.tasks[name], _TASKS), player)

    async def evaluate(self, name: str) -> Pair:
        """Play short and long rollouts of an evaluation."""
        drawn = [Task(draw, name, env) for draw, env in enumerate(self.tests[name][:_TASKS])]
        slots = Slots(self.config.rollouts.max_live)
        player = eval_player(self.config, self.chat, slots=slots, context=None)
        return await self._play(f"eval.envs.{name}", drawn, player)

    async def _play(self, field: str, drawn: Sequence[Task], player: Player) -> Pair:
        if not drawn:
            self.parts.append(Part(field, "failed", "there are no tasks"))
            return NOTHING, NOTHING
        self.note(f"playing {field}")
        most = player.settings[drawn[0].name].sampling.max_tokens
        began = time.monotonic()
        groups = list[Group]()
        for task, mean in ((drawn[0], max(1.0, _SHORT * most)), (drawn[-1], _CUT_OFF * most)):
            service = SimulatedTinker(latency=replace(_AT_ONCE, mean_tokens=mean))
            sampler = await service.sampler(model=self.config.model)
            groups.append(await player.play(task, lambda sampler=sampler: sampler))
        short, long = Rollout.of(groups[:1]), Rollout.of(groups[1:])
        self.parts.append(_seen(field, groups, short, long, seconds=time.monotonic() - began))
        return short or long or NOTHING, long or short or NOTHING

    async def train(self, whole: Config) -> None:
        """Take two steps of the whole run, with a checkpoint and an interruption between them."""
        self.note("training, saving and going on")
        self.rewind()
        world, metrics = World(), set[str]()
        if (path := self.config.load_checkpoint) is not None:
            world.checkpoints[path] = 0
        mean = max(1.0, _SHORT * self.config.sampling.max_tokens)
        service = SimulatedTinker(latency=replace(_AT_ONCE, mean_tokens=mean), world=world)
        try:
            with tempfile.TemporaryDirectory(prefix="rlkit-dry-run-") as folder:
                for steps in (1, 2):
                    result = await self._trained(service, Path(folder) / "run", steps=steps)
                    metrics |= result.metrics.keys()
                    if result.steps < steps:
                        detail = f"ended after {result.steps} steps, {result.reason or 'as the tasks have run out'}"
                        self.parts.append(Part("training", "failed" if steps == 1 else "not tried", detail))
                        return
        except RlkitError as error:
            self.parts.append(Part("training", "failed", str(error)))
            return
        sequences = sum(map(len, world.trained))
        if not sequences:
            detail = "nothing was left to train on: look at batch.max_tokens, batch.too_long and batch.clip_advantages"
            self.parts.append(Part("training", "failed", detail))
            return
        detail = (
            f"{len(world.trained)} optimiser steps on {sequences} sequences, the later from the former's checkpoint"
        )
        self.parts.append(Part("training", "ok", detail))
        self.parts.extend(_unseen(whole, metrics))

    async def _trained(self, service: SimulatedTinker, directory: Path, *, steps: int) -> RunResult:
        """Train up to a step, from where the run in the directory stands."""
        trainer = RLTrainer(
            self.config.model_copy(update={"steps": steps, "track": TrackConfig()}),
            envs=self.tasks,
            estimators={name: nudged(one) for name, one in choose_estimators(self.config, {}).items()},
            directory=directory,
            resume=steps > 1,
            service=service,
            chat=self.chat,
        )
        return await trainer.train()


NOTHING = Rollout(0, 0, 0, 0, 0, 0, 0)
"""Stands for rollouts that could not be played."""


async def _chat(
    config: Config, choice: ServiceChoice, note: Callable[[str], None], *, pilot: int
) -> tuple[ChatFormat, Part]:
    try:
        chat = await in_thread(lambda: load_chat(config, engine=choice.kind == "engine", note=note, fetch=bool(pilot)))
    except MissingError as error:
        if pilot:
            raise
        return ByteChat(), Part("chat", "not tried", f"{error}; bytes stand in for tokens, and are counted as such")
    asked = len(chat.render([{"role": "user", "content": "?"}]))
    return chat, Part("chat", "ok", f"a question of one letter is {asked} tokens of {config.model}")


def _seen(field: str, groups: Sequence[Group], short: Rollout | None, long: Rollout | None, *, seconds: float) -> Part:
    """What there is to say of rollouts that were played."""
    episodes = [episode for group in groups for episode in group.episodes]
    errors = [episode.error for episode in episodes if episode.error is not None]
    if errors:
        return Part(field, "failed", f"{len(errors)} of {len(episodes)} rollouts failed: {errors[0]}")
    if short is None or long is None:
        return Part(field, "failed", f"none of {len(episodes)} rollouts asked the model for anything")
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return Part(
        field,
        "ok",
        f"{len(episodes)} rollouts in {seconds:.1f} s; {_range(short.turns, long.turns)} turns, "
        f"{_range(short.first, long.first)} tokens in the first prompt, "
        f"{_range(short.sampled, long.sampled)} sampled; rewards {_range(min(rewards), max(rewards))}",
    )


def _range(one: float, other: float) -> str:
    low, high = sorted((one, other))
    return f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}"


def _unseen(config: Config, seen: Set[str]) -> list[Part]:
    """What weights are to be compared by, where only an environment or a service can say whether that is there."""
    metric = config.best_metric
    if metric is None or metric in seen:
        return []
    if metric.partition("/")[0] not in ("env", "eval", "service") or has_by_chance(metric, config):
        return []
    detail = f"whether a step has a {metric!r}: none of the dry run had.{did_you_mean(metric, sorted(seen))}"
    return [Part("best.metric", "not tried", detail)]


def _piloted(found: Pilot, choice: ServiceChoice) -> str:
    done = "" if found.usage.trained_tokens == 0 else " and an optimiser step"
    told = f"{found.played} rollouts{done} in {found.seconds:.1f} s, {found.usage.tokens:,} tokens"
    unknown = "; too little was done to say how fast it is" if found.speed is None else ""
    return f"{describe(choice)}: {told}{unknown}"


def _not_tried(config: Config, choice: ServiceChoice, *, piloted: bool) -> list[Part]:
    """What only the service itself knows."""
    parts = list[Part]()
    if not piloted:
        detail = f"{describe(choice)}; --pilot 1 plays a group of each environment on it"
        parts.append(Part("service", "not tried", detail))
        if config.load_checkpoint is not None:
            parts.append(Part("load_checkpoint", "not tried", f"whether {config.load_checkpoint} is there"))
    if config.kl_penalty.coefficient and config.kl_penalty.reference != "base" and not piloted:
        parts.append(Part("kl_penalty.reference", "not tried", f"whether {config.kl_penalty.reference} is there"))
    return parts
