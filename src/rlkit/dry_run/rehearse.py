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
from typing import Literal

from rlkit._util.priority_semaphore import Slots
from rlkit._util.threads import in_thread
from rlkit.chat.format import ChatFormat
from rlkit.chat.hub import hub_problem
from rlkit.chat.load import load_chat
from rlkit.chat.tokenizers import has_weights
from rlkit.config import Resolved
from rlkit.config.loading.objects import load_estimators, load_loss
from rlkit.config.schema import DEFAULT_MODEL, Config
from rlkit.config.schema.track import track_config
from rlkit.cost.estimate import HOSTED, Estimate, Pair, Rollout, estimate, save_estimate
from rlkit.cost.usage import Price, listed_price, price_of, similar_model
from rlkit.dry_run.pilot import Nudged, Pilot, draw_tasks, run_pilot
from rlkit.env import Env, Task, TaskSource
from rlkit.errors import MissingError, RlkitError, UsageError, did_you_mean
from rlkit.evaluation.evaluate import load_eval_tasks, make_eval_player
from rlkit.metrics.metrics import has_by_chance
from rlkit.rollout.player import Player
from rlkit.rollout.settings import make_env_settings
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.service.connect import ServiceChoice, choose_service, describe_service
from rlkit.tasks.from_config import count_draws, resolve_steps, run_tasks, task_contents
from rlkit.tasks.provenance import TaskManifest
from rlkit.tasks.sources import Tasks
from rlkit.testing import ByteChat, Latency, SimulatedTinker, World
from rlkit.trackers import RunResult
from rlkit.training.from_config import make_learning_rate
from rlkit.training.trainer import RLTrainer
from rlkit.types import Group, Json

_SHORT = 0.1
"""Length of a short completion, as a part of the tokens that it may have."""

_CUT_OFF = 10.0
"""Mean length of long completions, likewise: all are cut off."""

_TASKS = 2
"""Tasks of each environment that are played: one with short replies, and one with long ones."""

_AT_ONCE = Latency(
    first_s=0, token_s=0, gradient_s=0, trained_tokens_per_s=math.inf, step_s=0, save_s=0, load_s=0, sigma=0.3
)


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a run needs.

    Args:
        name: of the part; the field of the configuration that it belongs to, where there is one.
        status: whether it works.
        detail: what was seen, or why it was not tried.
    """

    name: str
    status: Literal["ok", "failed", "not tried"]
    detail: str


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The result of a dry run.

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


@stop_leftover_tasks()
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
        envs: tasks made in Python, as for `RLTrainer`.
        chat: the model's format; by default its own.
        pilot: groups of each environment that are played on the run's own service besides, and then trained on.
        note: told what is being done.

    Raises:
        ConfigError: the configuration is wrong, or an environment cannot be loaded.
        UsageError: a pilot of less than no groups.
        RlkitError: the pilot failed.
    """
    if pilot < 0:
        raise UsageError(f"pilot: {pilot} is no number of groups; 0 is for no pilot")
    config = resolved.config if isinstance(resolved, Resolved) else resolved
    choice = choose_service(config.service)
    price, hosted_price, price_parts = await in_thread(_prices, config, choice, note)
    # Before environments are played, which may take long.
    load_estimators(config, {})
    load_loss(config.loss)
    parts = list[Part]()
    if chat is None:
        chat, part = await _chat(config, choice, note, pilot=pilot)
        parts.append(part)
    note("loading the environments")
    tests = load_eval_tasks(config.eval.envs, seed=config.seed, note=note)
    tasks = run_tasks(config, envs or {}, evaluated=task_contents(tests), note=note, manifest=TaskManifest())
    config = resolve_steps(config, tasks, note=note)
    make_learning_rate(config)
    stage = _Stage(in_small(config), chat, tasks, _states(tasks), tests, parts, note)
    rollouts = {name: await stage.play(name) for name in config.envs}
    evaluated = {name: (await stage.evaluate(name), len(tests[name])) for name in config.eval.envs}
    if stage.works:
        await stage.train(config)
    speed = HOSTED if choice.kind == "hosted" else None
    if pilot and stage.works:
        stage.rewind()
        result = await run_pilot(config, tasks, chat, choice, groups=pilot, note=note)
        rollouts, speed = result.rollouts, result.speed
        parts.append(Part("service", "ok", _piloted(result, choice)))
    parts += [*_not_tried(config, choice, piloted=bool(pilot)), *price_parts]
    if not stage.works:
        return Rehearsal(parts, None)
    estimate_run = partial(estimate, config, rollouts, evaluated, draws=count_draws(config, tasks))
    expected = estimate_run(price=price, speed=speed)
    await in_thread(save_estimate, config, expected)
    return Rehearsal(parts, expected, hosted_price and estimate_run(price=hosted_price, speed=HOSTED))


def in_small(config: Config) -> Config:
    """Return a run with as few and as small groups as its settings allow, and without limits."""
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
    """The means of a rehearsal, and the parts that it has tried."""

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

    def fail(self, name: str, detail: str) -> None:
        self.parts.append(Part(name, "failed", detail))

    def rewind(self) -> None:
        """Set the sources of tasks that are the user's own back to their beginning."""
        for name, (source, state) in self.states.items():
            try:
                source.load_state_dict(state)
            except Exception as error:  # the user's own code
                reason = f"{type(error).__name__}: {error}"
                self.fail(f"envs.{name}", f"load_state_dict failed on what state_dict gave: {reason}")

    async def play(self, name: str) -> Pair:
        """Play short and long rollouts of an environment."""
        config, slots = self.config, Slots(self.config.rollouts.max_live)
        player = Player(self.chat, make_env_settings(config, context=None), seed=config.seed, slots=slots)
        return await self._play(f"envs.{name}", draw_tasks(config, name, self.tasks[name], _TASKS), player)

    async def evaluate(self, name: str) -> Pair:
        """Play short and long rollouts of an evaluation."""
        drawn = [Task(draw, name, env) for draw, env in enumerate(self.tests[name][:_TASKS])]
        slots = Slots(self.config.rollouts.max_live)
        player = make_eval_player(self.config, self.chat, slots=slots, context=None)
        return await self._play(f"eval.envs.{name}", drawn, player)

    async def _play(self, field: str, drawn: Sequence[Task], player: Player) -> Pair:
        if not drawn:
            self.fail(field, "there are no tasks")
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
            return self.fail("training", str(error))
        sequences = sum(map(len, world.trained))
        if not sequences:
            settings = "batch.max_tokens, batch.too_long and batch.clip_advantages"
            return self.fail("training", f"nothing was left to train on: look at {settings}")
        steps = f"{len(world.trained)} optimiser steps on {sequences} sequences"
        self.parts.append(Part("training", "ok", f"{steps}, the later from the former's checkpoint"))
        self.parts.extend(_unseen(whole, metrics))

    async def _trained(self, service: SimulatedTinker, directory: Path, *, steps: int) -> RunResult:
        """Train up to a step, from where the run in the directory stands."""
        trainer = RLTrainer(
            self.config.model_copy(update={"steps": steps, "track": track_config()}),
            envs=self.tasks,
            estimators={name: Nudged(inner=one) for name, one in load_estimators(self.config, {}).items()},
            directory=directory,
            resume=steps > 1,
            service=service,
            chat=self.chat,
        )
        return await trainer.train()


NOTHING = Rollout(0, 0, 0, 0, 0, 0, 0)
"""Stands for rollouts that could not be played."""


def _prices(
    config: Config, choice: ServiceChoice, note: Callable[[str], None]
) -> tuple[Price | None, Price | None, Sequence[Part]]:
    """Look up the prices of the run's own service and of the hosted one, and for the engine the weights.

    A run is free only where the embedded engine has the weights of its model. Nothing here needs a key, and only for
    weights that are missing the hub is asked whether it can be reached. The second price is for runs on the engine.
    """
    own, model = price_of(config, choice.kind), config.model
    hint = similar_model(model)
    if choice.kind != "engine":
        if own is None:
            remedy = "set prices.prefill, prices.sample and prices.train, in US dollars per million tokens"
            detail = f"no price of {model} is known: {remedy}{'.' + hint if hint else ''}"
            return own, None, [Part("prices", "not tried", detail)]
        return own, None, [_listed(own)] if own.date else []
    hosted = listed_price(model)
    prices = [] if hosted is None else [_listed(hosted)]
    if model == DEFAULT_MODEL or has_weights(model, note):
        return own, hosted, prices
    hub = hub_problem()
    detail = (
        f"the weights of {model} are not on this machine, "
        f"{'a run would fetch them from the hub' if hub is None else f'and {hub}'}; the hosted service needs none "
        "here: set TINKER_API_KEY"
    )
    unlisted = Part("prices", "not tried", f"{model} is not in the price table of the hosted service.{hint}")
    return None, hosted, [Part("model", "not tried", detail), *(prices or [unlisted])]


def _listed(price: Price) -> Part:
    return Part(
        "prices",
        "ok",
        f"of the hosted service on {price.date}, for a million tokens: ${price.prefill:g} prefill, "
        f"${price.cached:g} cached, ${price.sample:g} sample, ${price.train:g} train",
    )


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


def _states(tasks: Mapping[str, Tasks]) -> dict[str, tuple[TaskSource, Mapping[str, Json]]]:
    """Return the sources among the tasks, each with the state in which it begins."""
    return {name: (source, source.state_dict()) for name, source in tasks.items() if isinstance(source, TaskSource)}


def _seen(field: str, groups: Sequence[Group], short: Rollout | None, long: Rollout | None, *, seconds: float) -> Part:
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
    """Name the metric that weights are compared by, where only an environment or a service knows whether it exists."""
    metric = config.best_metric
    if metric is None or metric in seen:
        return []
    if metric.partition("/")[0] not in ("env", "eval", "service") or has_by_chance(metric, config):
        return []
    detail = f"whether a step has a {metric!r}: none of the dry run had.{did_you_mean(metric, sorted(seen))}"
    return [Part("best.metric", "not tried", detail)]


def _piloted(pilot: Pilot, choice: ServiceChoice) -> str:
    step = " and an optimiser step" if pilot.usage.trained_tokens else ""
    done = f"{pilot.played} rollouts{step} in {pilot.seconds:.1f} s, {pilot.usage.tokens:,} tokens"
    caveat = "; too little was done to say how fast it is" if pilot.speed is None else ""
    return f"{describe_service(choice)}: {done}{caveat}"


def _not_tried(config: Config, choice: ServiceChoice, *, piloted: bool) -> list[Part]:
    """Name what only the service itself knows."""
    if piloted:
        return []
    reference = config.kl_penalty.reference if config.kl_penalty.coefficient else "base"
    paths = {"load_checkpoint": config.load_checkpoint, "kl_penalty.reference": reference}
    service = f"{describe_service(choice)}; --pilot 1 plays a group of each environment on it"
    return [
        Part("service", "not tried", service),
        *(
            Part(name, "not tried", f"whether {path} is there")
            for name, path in paths.items()
            if path not in (None, "base")
        ),
    ]
