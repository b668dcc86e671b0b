"""Evaluation of a model, during training or standalone.

Invariant: evaluated episodes are never trained on, and use separate random streams.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlkit._util.loop_holds import loop_holds
from rlkit._util.priority_semaphore import Slots
from rlkit._util.redaction import redact
from rlkit._util.threads import in_thread, run_together
from rlkit.algorithms.datums import rooted_data
from rlkit.algorithms.references import Reference
from rlkit.chat.renderers import load_chat
from rlkit.config.loading.objects import load_envs
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.schema import Config
from rlkit.config.schema.envs import EnvConfig, EvalEnvConfig, refuse_turn_limit
from rlkit.env import Env, Task
from rlkit.errors import ConfigError
from rlkit.evaluation.openai_endpoint import Endpoint, connect_endpoint
from rlkit.evaluation.scores import compute_score_metrics
from rlkit.metrics.env_reports import make_failure_reporter, make_hold_reporter
from rlkit.metrics.metrics import group_metrics, mean_by_token, teacher_keys
from rlkit.policy import NoSampler, Sampler
from rlkit.rollout.opponents import Opponents
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner, RolloutRunner
from rlkit.rollout.settings import make_shared_settings
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.store.history import upsert_attempt
from rlkit.tasks.from_config import is_single_turn
from rlkit.tasks.provenance import TaskManifest
from rlkit.tinker_client.connect import choose_service, connect
from rlkit.trackers import Progress
from rlkit.types import Episode, Group
from rlkit.workers.from_config import open_runner

type EvaluatedTask = tuple[Group, Sequence[Episode]]
"""Group of an evaluated task, and all its attempts, including failed episodes that were retried."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Periodic evaluation of fixed tasks."""

    tasks: Mapping[str, Sequence[Env]]  # tasks by name of the environment
    player: Player
    every: int  # steps between evaluations; 0 to evaluate only before the first step and after the last
    # References by environment; the divergence from teachers is measured.
    references: Mapping[str, Sequence[Reference]] = field(default_factory=dict[str, "Sequence[Reference]"])

    def is_due(self, step: int, *, last: int) -> bool:
        """Return whether to evaluate the weights of a step."""
        return bool(self.tasks) and (step in (0, last) or bool(self.every and step % self.every == 0))

    async def play(self, sampler: Sampler, *, rank: int = 0) -> Sequence[EvaluatedTask]:
        """Play every task with these weights; `rank` is the rank in the queue for slots."""
        self.player.counts.finished = self.player.counts.failed = 0
        tasks = [Task(draw, name, env) for name, envs in self.tasks.items() for draw, env in enumerate(envs)]
        attempts = defaultdict[tuple[str, int], list[Episode]](list)

        def record(task: Task, episode: Episode) -> None:
            upsert_attempt(attempts[task.name, task.draw], episode)
            self.player.record(task, episode)

        player = replace(self.player, record=record)
        groups = await run_together(player.play(task, lambda: sampler, rank=rank) for task in tasks)
        return [(group, attempts[group.env, group.draw]) for group in groups]

    async def measure_divergence(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return `eval/<env>/teacher/kl`, the mean log-ratio to the teachers, and that to each; raise ServiceError.

        It is an estimate of the divergence only where replies are samples of the policy's own distribution.
        """
        drifts = defaultdict[str, list[NDArray[np.float64]]](list)
        for name, settings in self.player.settings.items():
            teachers = [reference for reference in self.references.get(name, ()) if reference.is_teacher]
            if not teachers or settings.sampling.temperature != 1:
                continue
            episodes = [episode for group in groups if group.env == name for episode in group.episodes]
            sequences = [pair for episode in episodes for pair in rooted_data(episode)]
            for teacher in teachers:
                answers = await replace(teacher, top_tokens=0).drifts(sequences)
                for key in teacher_keys(f"eval/{name}", teacher):
                    drifts[key] += [drift.ratios for drift in answers]
        return mean_by_token(drifts)


async def compute_eval_metrics(groups: Sequence[Group]) -> Mapping[str, float]:
    """Return the metrics of an evaluation, under `eval/…`."""
    # Metrics of outcomes come first, so that they cannot overwrite others.
    return await in_thread(lambda: group_metrics(groups, prefix="eval") | compute_score_metrics(groups, prefix="eval"))


@stop_leftover_tasks()
async def evaluate(
    config: ResolvedConfig | Config,
    *,
    checkpoint: str | None = None,
    endpoint: Endpoint | None = None,
    note: Callable[[str], None] = lambda message: None,
    on_progress: Callable[[Callable[[], Progress]], None] = lambda snapshot: None,
    on_groups: Callable[[Sequence[Group]], None] = lambda groups: None,
) -> Mapping[str, float]:
    """Evaluate a model in the environments of `eval.envs`, or of `envs` if there are none.

    Args:
        checkpoint: `tinker://` path of sampler weights; None for the base model.
        endpoint: address of a model to evaluate in place of the Tinker service's model.
        note: receives messages for the user.
        on_progress: receives a function that returns the current progress.
        on_groups: receives the groups with their rewards.

    Returns:
        Metrics under `eval/<env>/…` and `eval/all/…`.

    Raises:
        ConfigError: an environment cannot be loaded.
        ServiceError: the service or the endpoint failed after retries.
    """
    config = config.config if isinstance(config, ResolvedConfig) else config
    field = "eval.envs" if config.eval.envs else "envs"
    trained = config.reinforced_envs
    specs = config.eval.envs or {name: _evaluate_as_trained(name, spec) for name, spec in trained.items()}
    if not specs:
        raise ConfigError("eval.envs: there is no environment to evaluate, because all have conversations; add one")
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"envs": specs})})
    tasks = load_eval_tasks(specs, seed=config.seed, field=field, note=note)
    slots = Slots(config.rollouts.max_concurrent)
    if endpoint is not None:
        async with connect_endpoint(endpoint, timeout_s=config.service.timeout_s) as make_policy:
            player = make_eval_player(config, LocalRunner(None, make_policy), slots=slots, context=None)
            return await _measure(player, tasks, NoSampler(), note=note, on_progress=on_progress, on_groups=on_groups)
    choice = choose_service(config.service)
    chat = await in_thread(lambda: load_chat(config, engine=choice.kind == "engine", note=note))
    watch = ServiceWatch(note, config.service.timeout_s, seed=config.seed)
    connection = connect(config.service, choice=choice, note=note, warn=watch.remember_warning)
    async with watch.watch_silence(), connection as service:
        load = partial(service.sampler, model=config.model, checkpoint=checkpoint)
        sampler = await watch.call(load, "preparing to sample", retry=True)
        context = await watch.call(lambda: service.context_tokens(config.model), "asking for the context", retry=True)
        patient = PatientSampler(sampler, watch, sampler.version)
        async with open_runner(config, LocalRunner(chat), {}, tasks) as runner:
            player = make_eval_player(config, runner, slots=slots, context=context)
            player = replace(player, opponents=Opponents(config, service, watch).find)
            return await _measure(player, tasks, patient, note=note, on_progress=on_progress, on_groups=on_groups)


def _evaluate_as_trained(name: str, spec: EnvConfig) -> EvalEnvConfig:
    fields = spec.model_dump(include={"args", "max_tokens", "max_turns", "timeout_s"})
    return EvalEnvConfig(env=spec.env or name, **fields)


async def _measure(
    player: Player,
    tasks: Mapping[str, Sequence[Env]],
    sampler: Sampler,
    *,
    note: Callable[[str], None],
    on_progress: Callable[[Callable[[], Progress]], None],
    on_groups: Callable[[Sequence[Group]], None],
) -> Mapping[str, float]:
    started = time.monotonic()
    on_progress(lambda: Progress(phase="evaluating", **asdict(player.counts), seconds=time.monotonic() - started))
    player = replace(player, record=make_failure_reporter(note, redact=redact))
    with loop_holds().watch(make_hold_reporter(tell=lambda finding: note(str(finding)))):
        evaluated = await Evaluation(tasks, player, every=0).play(sampler)
    for line in _describe_failures(evaluated):
        note(line)
    groups = [group for group, _ in evaluated]
    on_groups(groups)
    return await compute_eval_metrics(groups)


def _describe_failures(tasks: Sequence[EvaluatedTask]) -> list[str]:
    """Return a line for each environment with failures: the failed rollouts, the retries, and the first error."""
    errors, final = defaultdict[str, list[str]](list), Counter[str]()
    for group, attempts in tasks:
        errors[group.env] += [episode.error for episode in attempts if episode.error is not None]
        final[group.env] += sum(episode.error is not None for episode in group.episodes)
    return [
        f"{name}: {len(messages)} rollouts failed, {len(messages) - final[name]} of them were retried: {messages[0]}"
        for name, messages in errors.items()
        if messages
    ]


def make_eval_player(config: Config, runner: RolloutRunner, *, slots: Slots, context: int | None) -> Player:
    """Return the player of an evaluation, with separate random streams."""
    envs = config.eval.envs.items()
    settings = {name: make_shared_settings(config, env, env.attempts, context=context) for name, env in envs}
    return Player(runner, settings, seed=config.seed, slots=slots, purpose="eval")


def load_eval_tasks(
    specs: Mapping[str, EvalEnvConfig],
    *,
    seed: int,
    field: str = "eval.envs",
    note: Callable[[str], None] = lambda message: None,
    origins: TaskManifest | None = None,
) -> Mapping[str, Sequence[Env]]:
    """Return the tasks of an evaluation: the first tasks of each environment.

    Args:
        field: configuration field that holds the sections `specs`, for messages.
        note: receives messages for the user.
        origins: record of the tasks' provenance at the start of the run.

    Raises:
        ConfigError: an environment cannot be loaded, or its `max_turns` has no effect.
    """
    tasks, origins = dict[str, Sequence[Env]](), {} if origins is None else origins
    for name, spec in specs.items():
        where = f"{field}.{name}"
        envs = load_envs(name, spec, field=where, seed=seed, note=note, pin=partial(origins.setdefault, where))
        if is_single_turn(envs):
            refuse_turn_limit(spec, field=where)
        if isinstance(envs, Sequence):
            tasks[name] = envs[: spec.tasks]
        else:
            tasks[name] = [env for _ in range(spec.tasks) if (env := envs.next()) is not None]
    return tasks
