"""Evaluation of a model, beside its training or alone.

Invariant: what is measured is never trained on, and draws from random streams of its own.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rlkit._util.loop_holds import loop_holds
from rlkit._util.priority_semaphore import Slots
from rlkit._util.redaction import redact
from rlkit._util.threads import in_thread, run_together
from rlkit.chat.format import ChatFormat
from rlkit.chat.load import load_chat
from rlkit.config import Resolved, load_envs
from rlkit.config.schema import Config, EvalEnvConfig
from rlkit.config.schema.envs import refuse_turn_limit
from rlkit.env import Env, Task
from rlkit.evaluation.openai_endpoint import Endpoint, NoSampler, connect_endpoint
from rlkit.evaluation.scores import compute_score_metrics
from rlkit.metrics.blocking_findings import BlockingFindings
from rlkit.metrics.metrics import group_metrics
from rlkit.policy import Limits, Sampler
from rlkit.rollout.player import EnvSettings, FailureNotes, Player
from rlkit.rollout.settings import make_sampling
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.service.connect import choose_service, connect
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.store.history import upsert_attempt
from rlkit.tasks.from_config import is_single_turn
from rlkit.tasks.provenance import TaskManifest
from rlkit.tasks.sources import as_source
from rlkit.trackers import Progress
from rlkit.types import Episode, Group


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedTask:
    """A task that was evaluated: `attempts` are all its episodes, those that failed and were played again too."""

    group: Group
    attempts: Sequence[Episode]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Tasks that are measured, never trained on.

    Args:
        tasks: tasks by name of the environment, always the same ones.
        player: plays the tasks.
        every: steps between evaluations; 0 for only the first and the last.
    """

    tasks: Mapping[str, Sequence[Env]]
    player: Player
    every: int

    def is_due(self, step: int, *, last: int) -> bool:
        """Say whether the weights of a step are evaluated."""
        return bool(self.tasks) and (step in (0, last) or bool(self.every and step % self.every == 0))

    async def play(self, sampler: Sampler, *, rank: int = 0) -> Sequence[EvaluatedTask]:
        """Play every task with these weights; `rank` is the place in the queue for slots."""
        self.player.counts.done = self.player.counts.failed = 0
        drawn = [Task(draw, name, env) for name, envs in self.tasks.items() for draw, env in enumerate(envs)]
        attempts = defaultdict[tuple[str, int], list[Episode]](list)

        def record(task: Task, episode: Episode) -> None:
            upsert_attempt(attempts[task.name, task.draw], episode)
            self.player.record(task, episode)

        player = replace(self.player, record=record, record_score=record)
        groups = await run_together(player.play(task, lambda: sampler, rank=rank) for task in drawn)
        return [EvaluatedTask(group, attempts[group.env, group.draw]) for group in groups]


async def compute_eval_metrics(tried: Sequence[EvaluatedTask]) -> Mapping[str, float]:
    """Return the metrics of an evaluation, under `eval/…`."""
    groups = [task.group for task in tried]
    return await in_thread(
        # What outcomes report comes first, so that it replaces nothing.
        lambda: (
            group_metrics(groups, prefix="eval")
            | compute_score_metrics(groups, prefix="eval")
            | _standard_errors(groups)
        )
    )


@stop_leftover_tasks()
async def evaluate(
    resolved: Resolved | Config,
    *,
    checkpoint: str | None = None,
    endpoint: Endpoint | None = None,
    note: Callable[[str], None] = lambda message: None,
    progress: Callable[[Callable[[], Progress]], None] = lambda snapshot: None,
    scored: Callable[[Sequence[Group]], None] = lambda groups: None,
) -> Mapping[str, float]:
    """Measure a model: the environments of `eval.envs`, or those of training played as an evaluation plays them.

    Args:
        resolved: the configuration.
        checkpoint: a `tinker://` path of sampler weights; None for the base model.
        endpoint: measured instead of a model of the Tinker service.
        note: receives lines for the user.
        progress: receives a function that returns how far it is.
        scored: receives the groups that were played.

    Returns:
        Metrics under `eval/<env>/…` and `eval/all/…`.

    Raises:
        ConfigError: an environment cannot be loaded.
        ServiceError: the service, or the endpoint, failed after retries.
    """
    config = resolved.config if isinstance(resolved, Resolved) else resolved
    own = config.eval.envs
    specs = own or {
        name: EvalEnvConfig(
            env=spec.env or name,
            args=spec.args,
            max_tokens=spec.max_tokens,
            max_turns=spec.max_turns,
            timeout_s=spec.timeout_s,
        )
        for name, spec in config.envs.items()
    }
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"envs": specs})})
    tasks = load_eval_tasks(specs, seed=config.seed, field="eval.envs" if own else "envs", note=note)
    slots = Slots(config.rollouts.max_live)
    if endpoint is not None:
        async with connect_endpoint(endpoint, timeout_s=config.service.timeout_s) as make:
            player = replace(make_eval_player(config, None, slots=slots, context=None), make_policy=make)
            return await _measure(player, tasks, NoSampler(), note=note, progress=progress, scored=scored)
    choice = choose_service(config.service)
    chat = await in_thread(lambda: load_chat(config, engine=choice.kind == "engine", note=note))
    watch = ServiceWatch(note, config.service.timeout_s, seed=config.seed)
    async with watch.watch_silence(), connect(config.service, choice=choice, note=note) as service:
        sampler = await watch.call(
            lambda: service.sampler(model=config.model, checkpoint=checkpoint), "preparing to sample", retry=True
        )
        context = await watch.call(lambda: service.context_tokens(config.model), "asking for the context", retry=True)
        player = make_eval_player(config, chat, slots=slots, context=context)
        patient = PatientSampler(sampler, watch, sampler.version)
        return await _measure(player, tasks, patient, note=note, progress=progress, scored=scored)


async def _measure(
    player: Player,
    tasks: Mapping[str, Sequence[Env]],
    sampler: Sampler,
    *,
    note: Callable[[str], None],
    progress: Callable[[Callable[[], Progress]], None],
    scored: Callable[[Sequence[Group]], None],
) -> Mapping[str, float]:
    started = time.monotonic()

    def snapshot() -> Progress:
        counts = player.counts
        return Progress(
            phase="evaluating",
            queued=counts.queued,
            live=counts.live,
            done=counts.done,
            failed=counts.failed,
            tokens=counts.tokens,
            seconds=time.monotonic() - started,
        )

    progress(snapshot)
    failures = FailureNotes(note, redact=redact)
    blocking = BlockingFindings(tell=lambda finding: note(str(finding)))
    with loop_holds().watch(blocking.add):
        tried = await Evaluation(tasks, replace(player, record=failures.add), every=0).play(sampler)
    for line in _describe_failures(tried):
        note(line)
    scored([task.group for task in tried])
    return await compute_eval_metrics(tried)


def _describe_failures(tried: Sequence[EvaluatedTask]) -> list[str]:
    """Say for each environment of which rollouts failed how many did, and why the first one."""
    errors = defaultdict[str, list[str]](list)
    plays = Counter(task.group.env for task in tried for _ in task.attempts)
    for task in tried:
        errors[task.group.env] += [episode.error for episode in task.attempts if episode.error is not None]
    return [f"{name}: {len(own)} of {plays[name]} rollouts failed: {own[0]}" for name, own in errors.items() if own]


def _standard_errors(groups: Sequence[Group]) -> dict[str, float]:
    """Return the standard errors of the mean rewards, by environment and over all, of at least two tasks.

    The attempts of a task are not independent, its tasks are: with T tasks, N episodes that have a reward and their
    mean m, it is √(T/(T−1) · Σ_tasks (Σ_episodes (r − m))²) / N. With one attempt each that is s/√N. Source: Liang and
    Zeger 1986, for the mean alone; Miller 2024, "Adding error bars to evals", §2.2 (arXiv:2411.00640).
    """
    errors = dict[str, float]()
    for name in [*dict.fromkeys(group.env for group in groups), "all"]:
        tasks = [group.rewards[group.valid] for group in groups if name in (group.env, "all") and group.valid.any()]
        if len(tasks) < 2:
            continue
        with np.errstate(over="ignore", invalid="ignore"):  # rewards near the ends of the float range
            mean = float(np.concatenate(tasks).mean())
            deviations = np.array([float((rewards - mean).sum()) for rewards in tasks])
            squares = len(tasks) / (len(tasks) - 1) * float(np.square(deviations).sum())
        errors[f"eval/{name}/reward/stderr"] = math.sqrt(squares) / sum(map(len, tasks))
    return errors


def make_eval_player(config: Config, chat: ChatFormat | None, *, slots: Slots, context: int | None) -> Player:
    """Return the player of an evaluation, which draws from random streams of its own."""
    settings = {
        name: EnvSettings(
            group_size=spec.attempts,
            sampling=make_sampling(config, max_tokens=spec.max_tokens, temperature=spec.temperature),
            timeout_s=spec.timeout_s or config.rollouts.timeout_s,
            max_retries=config.rollouts.max_retries,
            limits=Limits(spec.max_turns, context),
            coalesce=config.rollouts.coalesce,
        )
        for name, spec in config.eval.envs.items()
    }
    return Player(chat, settings, seed=config.seed, slots=slots, purpose="eval")


def load_eval_tasks(
    specs: Mapping[str, EvalEnvConfig],
    *,
    seed: int,
    field: str = "eval.envs",
    note: Callable[[str], None] = lambda message: None,
    origins: TaskManifest | None = None,
) -> Mapping[str, Sequence[Env]]:
    """Return the tasks of an evaluation: the first of each environment's own order.

    Args:
        specs: sections of the environments.
        seed: seed of the run.
        field: the field that holds them, for messages.
        note: receives lines for the user.
        origins: record of what the tasks were made of when the run began.

    Raises:
        ConfigError: an environment cannot be loaded, or has no use for a limit of turns.
    """
    tasks, origins = dict[str, Sequence[Env]](), origins or TaskManifest()
    for name, spec in specs.items():
        where = f"{field}.{name}"
        made = load_envs(name, spec, field=where, seed=seed, note=note, recorded=partial(origins.pin, where))
        if is_single_turn(made):
            refuse_turn_limit(spec, field=where)
        if isinstance(made, Sequence):
            tasks[name] = made[: spec.tasks]
        else:
            source = as_source(made, seed=0)
            drawn = (source.next() for _ in range(spec.tasks))
            tasks[name] = [env for env in drawn if env is not None]
    return tasks
