"""Dry run (`rlkit train --dry-run`): a small run on a simulated service, and an estimate of the whole run.

Invariant: the environments are real, and the service is simulated; only a pilot sends requests to the real service. The
result lists all parts that were not tried.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlkit._util.model_names import DEFAULT_MODEL
from rlkit._util.priority_semaphore import Slots
from rlkit._util.threads import in_thread
from rlkit.algorithms.datums import rooted_data
from rlkit.chat.format import ChatFormat
from rlkit.chat.renderers import load_chat
from rlkit.config.loading.objects import load_estimators, load_loss
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.schema import Config
from rlkit.config.schema.track import track_config
from rlkit.cost.estimate import HOSTED, Band, Estimate, Pair, Rollout, Tests, estimate, save_estimate
from rlkit.cost.usage import Price, hosted_prices, price_of
from rlkit.dry_run.pilot import NudgedEstimator, Pilot, draw_tasks, run_pilot
from rlkit.env import Env, Task, TaskSource
from rlkit.errors import EnvironmentFault, MissingError, RlkitError, UsageError, did_you_mean
from rlkit.evaluation.evaluate import load_eval_tasks, make_eval_player
from rlkit.metrics.metrics import has_by_chance
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import make_env_settings
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.serving.references import load_context
from rlkit.tasks.from_config import count_draws, load_tasks, resolve_steps, task_contents
from rlkit.tasks.sources import Tasks
from rlkit.testing import ByteChat, Latency, SimulatedTinker, World
from rlkit.testing.policies import play_itself
from rlkit.tinker_client.connect import ServiceChoice, choose_service, describe_service
from rlkit.tokenizers.hub import hub_problem
from rlkit.tokenizers.load import has_weights
from rlkit.trackers.rendering import render_band
from rlkit.training.from_config import make_learning_rate
from rlkit.training.trainer import RLTrainer
from rlkit.types import Episode, Group, Json
from rlkit.workers.from_config import open_runner

_SHORT_REPLY = 0.1  # mean length of short completions, as a fraction of the maximum tokens
_LONG_REPLY = 10.0  # mean length of long completions, as a multiple of the maximum tokens; all are truncated
_TASK_COUNT = 2  # number of tasks to play of each environment: one with short replies, and one with long ones

_NO_LATENCY = Latency(
    first_s=0, token_s=0, gradient_s=0, trained_tokens_per_s=math.inf, step_s=0, save_s=0, load_s=0, sigma=0.3
)


@dataclass(frozen=True, slots=True)
class Part:
    """Check of a part of a run."""

    name: str  # key of the configuration that the part belongs to, or a word such as `training`
    status: Literal["ok", "failed", "not tried"]
    detail: str  # result of the check, or the reason why the part was not tried


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Result of a dry run.

    Args:
        parts: checks of all parts, including parts that were not tried.
        estimate: cost and time of the whole run; None if a part failed.
        hosted_estimate: estimate for the hosted service, if a run on the embedded engine has a listed model.
    """

    parts: Sequence[Part]
    estimate: Estimate | None
    hosted_estimate: Estimate | None = None

    @property
    def ok(self) -> bool:
        """True if no part failed."""
        return all(part.status != "failed" for part in self.parts)


@stop_leftover_tasks()
async def rehearse(
    config: ResolvedConfig | Config,
    *,
    envs: Mapping[str, Tasks] | None = None,
    chat: ChatFormat | None = None,
    pilot: int = 0,
    note: Callable[[str], None] = lambda message: None,
) -> Rehearsal:
    """Play a small version of a run on the simulated service, at no cost and without a key.

    Each environment plays a group with short random replies and a group with long random replies. Then the training
    loop takes a step, saves a checkpoint, and resumes as after an interruption. The environments, graders, chat format,
    estimators and losses are those of the run.

    Args:
        envs: tasks created in Python, as for `RLTrainer`.
        chat: chat format of the model; loaded from the model by default.
        pilot: number of groups per environment to play and train on with the real service; 0 for none.

    Raises:
        ConfigError: the configuration is invalid, or an environment cannot be loaded.
        UsageError: `pilot` is negative.
        RlkitError: the pilot failed.
    """
    if pilot < 0:
        raise UsageError(f"pilot: {pilot} must not be negative; use 0 for no pilot")
    config = config.config if isinstance(config, ResolvedConfig) else config
    choice = choose_service(config.service)
    price, hosted_price, price_parts = await in_thread(_load_prices, config, choice, note)
    # Report errors before environments are played, which may take long.
    load_estimators(config, {})
    load_loss(config.loss)
    parts = list[Part]()
    if chat is None:
        chat, parts = await _load_chat(config, choice, note, pilot=pilot)
    note("loading the environments")
    tests = load_eval_tasks(config.eval.envs, seed=config.seed, note=note)
    tasks = load_tasks(config, envs or {}, evaluated=task_contents(tests), note=note, manifest={})
    config = resolve_steps(config, tasks, note=note)
    make_learning_rate(config)
    states = {name: (source, source.state_dict()) for name, source in tasks.items() if isinstance(source, TaskSource)}
    rehearser = _Rehearser(make_small_config(config), chat, tasks, states, parts, note)
    rollouts, evaluated = await rehearser.play(tests)
    if rehearser.is_passing:
        await rehearser.train(config)
    speed = HOSTED if choice.kind == "hosted" else None
    if not pilot:
        parts += _list_untried(config, choice)
    elif rehearser.is_passing:
        rehearser.rewind()
        result = await run_pilot(config, tasks, chat, choice, groups=pilot, note=note)
        rollouts, speed = result.rollouts, result.speed
        parts.append(Part("service", "ok", _render_pilot(result, choice)))
    parts += price_parts
    if not rehearser.is_passing:
        return Rehearsal(parts, None)
    estimate_run = partial(estimate, config, rollouts, evaluated, rehearser.contexts, draws=count_draws(config, tasks))
    expected = estimate_run(price=price, speed=speed)
    await in_thread(save_estimate, config, expected)
    return Rehearsal(parts, expected, hosted_price and estimate_run(price=hosted_price, speed=HOSTED))


def make_small_config(config: Config) -> Config:
    """Return the configuration with the fewest and smallest groups that its settings allow, and without budgets."""
    largest = max(config.batch.group_size, *(spec.group_size or 0 for spec in config.envs.values()))
    for size in range(2, largest):
        with suppress(ValueError):  # an estimator or a minimum of valid episodes needs more
            return _shrink_config(config, size)
    return _shrink_config(config, largest)


def _shrink_config(config: Config, group_size: int) -> Config:
    tree = config.model_dump(mode="json")
    tree |= {"name": None, "epochs": None, "budget_usd": None, "budget_tokens": None, "max_hours": None}
    tree["best"] |= {"goal": None, "patience": None, "min_gain": 0.0}
    tree["batch"]["groups"] = max(config.batch.substeps, 2)
    for section in (tree["batch"], *tree["envs"].values()):
        section["group_size"] = section["group_size"] and min(section["group_size"], group_size)
    if config.warm_start is not None:
        tree["warm_start"]["steps"] = 1
    sections: list[dict[str, Any]] = [tree, *tree["envs"].values()]
    for section in sections:
        teachers: list[dict[str, object] | None] = [section["teacher"], *(section["teachers"] or {}).values()]
        for teacher in filter(None, teachers):
            teacher |= {"first_step": 1, "last_step": None}
    for spec in tree["eval"]["envs"].values():
        spec["tasks"] = min(spec["tasks"], _TASK_COUNT)
    return Config.model_validate_json(json.dumps(tree), strict=True)


@dataclass(frozen=True, slots=True)
class _Rehearser:
    """State of a dry run: settings, and the parts checked so far."""

    config: Config
    chat: ChatFormat
    tasks: Mapping[str, Tasks]
    states: Mapping[str, tuple[TaskSource, Mapping[str, Json]]]
    parts: list[Part]
    note: Callable[[str], None]
    contexts: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])  # see `Contexts`

    @property
    def is_passing(self) -> bool:
        return all(part.status != "failed" for part in self.parts)

    def fail(self, name: str, detail: str) -> None:
        self.parts.append(Part(name, "failed", detail))

    def rewind(self) -> None:
        """Reset all task sources to their initial state."""
        for name, (source, state) in self.states.items():
            try:
                source.load_state_dict(state)
            except Exception as error:  # the user's own code
                reason = f"{type(error).__name__}: {error}"
                self.fail(f"envs.{name}", f"load_state_dict failed on the result of state_dict: {reason}")

    async def play(self, tests: Mapping[str, Sequence[Env]]) -> tuple[Mapping[str, Pair], Tests]:
        """Play short and long rollouts of each environment and each evaluation; leave out those that fail."""
        config, slots = self.config, Slots(self.config.rollouts.max_concurrent)
        rollouts, evaluated = dict[str, Pair](), dict[str, tuple[Pair, int]]()
        async with open_runner(config, LocalRunner(self.chat), self.tasks, tests) as runner:
            player = Player(runner, make_env_settings(config, context=None), seed=config.seed, slots=slots)
            for name, tasks in self.tasks.items():
                drawn = draw_tasks(config, name, tasks, _TASK_COUNT)
                if pair := await self._play(f"envs.{name}", drawn, player):
                    rollouts[name] = pair
            player = make_eval_player(config, runner, slots=slots, context=None)
            for name, envs in tests.items():
                drawn = [Task(draw, name, env) for draw, env in enumerate(envs[:_TASK_COUNT])]
                if pair := await self._play(f"eval.envs.{name}", drawn, player):
                    evaluated[name] = pair, len(envs)
        return rollouts, evaluated

    async def _play(self, part: str, tasks: Sequence[Task], player: Player) -> Pair | None:
        """Play a group with short replies and a group with long ones; return None if a rollout fails."""
        if not tasks:
            return self.fail(part, "there are no tasks")
        self.note(f"playing {part}")
        limit = player.settings[tasks[0].name].sampling.max_tokens
        began_s = time.monotonic()
        groups = list[Group]()
        for task, factor in ((tasks[0], _SHORT_REPLY), (tasks[-1], _LONG_REPLY)):
            sampler = await _simulate(factor * limit).sampler(model=self.config.model)
            player = replace(player, opponents=play_itself)
            groups.append(await player.play(task, lambda sampler=sampler: sampler))
        seconds = time.monotonic() - began_s
        episodes = [episode for group in groups for episode in group.episodes]
        errors = [episode.error for episode in episodes if episode.error is not None]
        if errors:
            return self.fail(part, f"{len(errors)} of {len(episodes)} rollouts failed: {errors[0]}")
        short, long = Rollout.of(groups[:1]), Rollout.of(groups[1:])
        if short is None or long is None:
            return self.fail(part, f"none of {len(episodes)} rollouts made a request to the model")
        try:
            self._measure_contexts(part, tasks[0].name, episodes)
        except EnvironmentFault as error:
            return self.fail(part, str(error))
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        turns = f"{_render_range(short.turns, long.turns)} turn{'' if long.turns == 1 else 's'}"
        detail = (
            f"{len(episodes)} rollouts in {seconds:.1f} s; {turns}, "
            f"{_render_range(short.first, long.first)} tokens in the first prompt, "
            f"{_render_range(short.sampled, long.sampled)} sampled; "
            f"rewards {_render_range(min(rewards), max(rewards))}"
        )
        self.parts.append(Part(part, "ok", detail))
        limits = player.settings[tasks[-1].name].limits.max_turns, getattr(tasks[-1].env, "max_turns", None)
        return short, long.extended(min((turns for turns in limits if isinstance(turns, int)), default=1))

    def _measure_contexts(self, part: str, env: str, episodes: Sequence[Episode]) -> None:
        """Measure the mean number of tokens that the prompt of a teacher adds to a rollout."""
        for name, teacher in self.config.find_teachers(env).items():
            if teacher.prompt is not None:
                make_context = load_context(teacher.prompt, self.chat, f"{name}.prompt")
                roots = [root for episode in episodes for _, root in rooted_data(episode) if root.messages]
                added = sum(len(make_context(root.messages[:-1])) - len(root.prompt) for root in roots)
                self.contexts[part, name] = added / len(episodes)

    async def train(self, whole: Config) -> None:
        """Take two steps, with a checkpoint and a resumption between them."""
        self.note("training, saving and resuming")
        self.rewind()
        world, metrics = World(), set[str]()
        if (path := self.config.load_checkpoint) is not None:
            world.checkpoints[path] = 0
        service = _simulate(_SHORT_REPLY * self.config.sampling.max_tokens, world)
        estimators = load_estimators(self.config, {}).items()
        nudged = {name: NudgedEstimator(inner=estimator) for name, estimator in estimators}
        make_trainer = partial(RLTrainer, envs=self.tasks, estimators=nudged, service=service, chat=self.chat)
        try:
            with tempfile.TemporaryDirectory(prefix="rlkit-dry-run-") as folder:
                for steps in (1, 2):
                    config = self.config.model_copy(update={"steps": steps, "track": track_config()})
                    result = await make_trainer(config, directory=Path(folder) / "run", resume=steps > 1).train()
                    metrics |= result.metrics.keys()
                    if result.steps < steps:
                        reason = result.reason or "because there are no more tasks"
                        status = "failed" if steps == 1 else "not tried"
                        self.parts.append(Part("training", status, f"ended after {result.steps} steps, {reason}"))
                        return
        except RlkitError as error:
            return self.fail("training", str(error))
        sequences = sum(map(len, world.step_digests))
        if not sequences:
            settings = "batch.max_tokens, batch.overlong and batch.clip_advantages"
            return self.fail("training", f"there was no data to train on: check {settings}")
        steps = f"{len(world.step_digests)} optimiser steps on {sequences} sequences"
        self.parts.append(Part("training", "ok", f"{steps}; the second step resumed from the first one's checkpoint"))
        self.parts.extend(_check_best_metric(whole, metrics))


def _simulate(mean_tokens: float, world: World | None = None) -> SimulatedTinker:
    return SimulatedTinker(latency=replace(_NO_LATENCY, mean_tokens=max(1.0, mean_tokens)), world=world)


def _load_prices(
    config: Config, choice: ServiceChoice, note: Callable[[str], None]
) -> tuple[Price | None, Price | None, Sequence[Part]]:
    """Return the price on the run's service, the hosted price of a run on the embedded engine, and the parts.

    A run is free only if the weights of its model are on this machine. The hub is contacted only if they are missing.
    No key is needed.
    """
    price, model = price_of(config, choice.kind), config.model
    hosted = price_of(config, "hosted") if choice.kind == "engine" else None
    is_listed = model in hosted_prices()
    hint = "" if is_listed else did_you_mean(model, hosted_prices())
    if price is None:
        remedy = "set prices.prefill, prices.sample and prices.train, in US dollars per million tokens"
        teachers = " or of a teacher" if any(map(config.find_teachers, config.envs)) else ""
        detail = f"no price of {model}{teachers} is known: {remedy}{'.' + hint if hint else ''}"
        return None, None, [Part("prices", "not tried", detail)]
    listed, parts = hosted or price, list[Part]()
    if listed.date:
        detail = (
            f"of the hosted service on {listed.date}, for a million tokens: ${listed.prefill:g} prefill, "
            f"${listed.cached:g} cached, ${listed.sample:g} sample, ${listed.train:g} train"
        )
        detail += "".join(f"; ${p.prefill:g} prefill by {teacher}" for teacher, p in listed.teachers.items())
        parts.append(Part("prices", "ok", detail))
    if choice.kind != "engine" or model == DEFAULT_MODEL or has_weights(model, note):
        return price, hosted, parts
    hub = hub_problem()
    detail = (
        f"the weights of {model} are not on this machine, "
        f"{'a run would download them from the hub' if hub is None else f'and {hub}'}; the hosted service does not "
        "need them: set TINKER_API_KEY"
    )
    absent = "the model of a teacher" if is_listed else f"{model}.{hint}"
    unlisted = Part("prices", "not tried", f"the price table of the hosted service does not have {absent}")
    return None, hosted, [Part("model", "not tried", detail), *(parts or [unlisted])]


async def _load_chat(
    config: Config, choice: ServiceChoice, note: Callable[[str], None], *, pilot: int
) -> tuple[ChatFormat, list[Part]]:
    try:
        chat = await in_thread(lambda: load_chat(config, engine=choice.kind == "engine", note=note, fetch=bool(pilot)))
    except MissingError as error:
        if pilot:
            raise
        return ByteChat(), [Part("chat", "not tried", f"{error}; bytes are used and counted as tokens")]
    prompt_tokens = len(chat.render([{"role": "user", "content": "?"}]))
    return chat, [Part("chat", "ok", f"a question of one letter is {prompt_tokens} tokens of {config.model}")]


def _render_range(first: float, second: float) -> str:
    return render_band(Band(*sorted((first, second))), "{:.4g}".format)


def _check_best_metric(config: Config, step_metrics: Set[str]) -> list[Part]:
    """Report `best.metric` as not tried if no step of the dry run had this metric, but a real step may have it."""
    metric = config.best_metric
    if metric is None or metric in step_metrics:
        return []
    if metric.partition("/")[0] not in ("env", "eval", "service") or has_by_chance(metric, config):
        return []
    detail = f"no step of the dry run had a {metric!r}.{did_you_mean(metric, sorted(step_metrics))}"
    return [Part("best.metric", "not tried", detail)]


def _render_pilot(pilot: Pilot, choice: ServiceChoice) -> str:
    step = " and an optimiser step" if pilot.usage.trained_tokens else ""
    done = f"{pilot.rollout_count} rollouts{step} in {pilot.seconds:.1f} s, {pilot.usage.tokens:,} tokens"
    caveat = "; too few tokens to measure the speed" if pilot.speed is None else ""
    return f"{describe_service(choice)}: {done}{caveat}"


def _list_untried(config: Config, choice: ServiceChoice) -> list[Part]:
    """Return the parts that only the real service can check."""
    paths = {"load_checkpoint": config.load_checkpoint, "kl_penalty.reference": config.kl_penalty.reference}
    teachers = {field: teacher for name in config.envs for field, teacher in config.find_teachers(name).items()}
    paths |= {field: teacher.checkpoint or teacher.model for field, teacher in teachers.items()}
    details = {"service": f"{describe_service(choice)}; --pilot 1 plays a group of each environment on it"}
    details |= {name: f"existence of {path}" for name, path in paths.items() if path not in (None, "base")}
    return [Part(name, "not tried", detail) for name, detail in details.items()]
