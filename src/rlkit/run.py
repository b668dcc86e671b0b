"""From a configuration to a finished run: the parts are built here, and handed to the loop.

Invariant: everything that can be wrong with a configuration is found before the service is asked for anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from rlkit.advantages import AdvantageEstimator, estimator
from rlkit.chat import ChatFormat
from rlkit.config import Resolved, load_envs
from rlkit.config.schema import Config, EvalEnvConfig
from rlkit.env import Env, TaskSource
from rlkit.errors import UsageError, did_you_mean
from rlkit.losses import loss
from rlkit.paths import runs_dir
from rlkit.policy import Limits
from rlkit.rollouts import EnvSettings, Player
from rlkit.schedule import Synchronous
from rlkit.seeds import derive
from rlkit.service import ServiceChoice, choose, connect
from rlkit.sources import Mixture, as_source
from rlkit.store import RunStore
from rlkit.trackers import Broadcast, Progress, RunInfo, RunResult, Tracker
from rlkit.trainer import Evaluation, Loop, StopSignal, Trainer
from rlkit.types import Sampling

type Tasks = TaskSource | Iterable[Env]


class RLTrainer(Trainer):
    """Trains what a configuration describes.

    ::

        resolved = rlkit.load_config([Path("config.yaml")])
        result = await rlkit.RLTrainer(resolved).train()

    Args:
        resolved: the configuration; a bare `Config` will do.
        envs: tasks made in Python, by the names that the configuration's `envs` has; the others are loaded as it says.
        estimators: likewise, instead of the configured one.
        trackers: told of the run.
        stop: asks the run to finish its step, save and end.

    Raises:
        ConfigError: an environment or estimator cannot be loaded.
    """

    def __init__(
        self,
        resolved: Resolved | Config,
        *,
        envs: Mapping[str, Tasks] | None = None,
        estimators: Mapping[str, AdvantageEstimator] | None = None,
        trackers: Sequence[Tracker] = (),
        stop: StopSignal | None = None,
    ) -> None:
        self._resolved = resolved if isinstance(resolved, Resolved) else Resolved.from_python(resolved)
        self._config = config = self._resolved.config
        self._trackers = Broadcast(trackers)
        self._stop = stop or StopSignal()
        given = envs or {}
        for name in [*given, *(estimators or {})]:
            if name not in config.envs:
                raise UsageError(f"the configuration has no environment {name!r}.{did_you_mean(name, config.envs)}")
        sources = {
            name: as_source(
                given[name] if name in given else load_envs(name, spec, field=f"envs.{name}", seed=config.seed),
                seed=derive(config.seed, "tasks", name),
            )
            for name, spec in config.envs.items()
        }
        weights = {name: spec.weight for name, spec in config.envs.items()}
        self._tasks = Mixture(sources, weights=weights, seed=config.seed)
        configured = estimator(config.advantage)
        self._estimators = {name: (estimators or {}).get(name, configured) for name in config.envs}
        self._loss = loss(config.loss)
        self._eval_tasks = eval_tasks(config.eval.envs, seed=config.seed)

    async def train(self) -> RunResult:
        """Train to the end, or until asked to stop; the directory and the trackers know how it ended.

        Raises:
            UsageError: the run's directory holds a run already, or the service refuses what the configuration asks for.
            ServiceError: the service failed after retries.
            RunFailed: no rollout of a step could be used.
        """
        config = self._config
        with RunStore(_directory(config), resolved=self._resolved) as store:
            ended: RunResult | None = None
            try:
                ended = await self._run(store)
                store.set_status(ended.status)
                return ended
            except asyncio.CancelledError:
                store.set_status("interrupted")
                raise
            except Exception as error:
                with suppress(OSError):  # a full disk must not hide why the run failed
                    store.set_status("failed", error=f"{type(error).__name__}: {error}")
                raise
            finally:
                self._trackers.finished(ended)

    async def _run(self, store: RunStore) -> RunResult:
        config, choice = self._config, choose(self._config.service)
        chat = await asyncio.to_thread(load_chat, config, choice, self._trackers.note)
        async with connect(config.service, choice=choice) as service:
            learner = await service.learner(
                model=config.model,
                lora=config.lora,
                seed=derive(config.seed, "adapter"),
                checkpoint=config.load_checkpoint,
            )
            context = await service.context_tokens(config.model)
            player = Player(
                chat, env_settings(config, context=context), seed=config.seed, max_live=config.rollouts.max_live
            )
            evaluation = Evaluation(self._eval_tasks, eval_player(config, chat, context=context), config.eval.every)
            loop = Loop(
                learner=learner,
                schedule=Synchronous(tasks=self._tasks, player=player, groups_per_step=config.batch.groups),
                player=player,
                estimators=self._estimators,
                loss=self._loss,
                optimizer=config.optimizer,
                steps=config.steps,
                evaluation=evaluation,
                checkpoints=config.checkpoint,
                store=store,
                trackers=self._trackers,
                stop=self._stop,
            )
            info = RunInfo(
                name=store.directory.name,
                directory=store.directory,
                model=config.model,
                envs=tuple(config.envs),
                service=describe(choice),
                progress=loop.progress,
            )
            self._trackers.started(info)
            try:
                return await loop.run()
            except asyncio.CancelledError:
                store.set_status("interrupted")  # at once: leaving the service may outlast our time
                raise


async def evaluate(
    resolved: Resolved | Config,
    *,
    checkpoint: str | None = None,
    note: Callable[[str], None] = lambda message: None,
    progress: Callable[[Callable[[], Progress]], None] = lambda snapshot: None,
) -> Mapping[str, float]:
    """Measure a model: the environments of `eval.envs`, or those of training played as an evaluation plays them.

    Args:
        resolved: the configuration.
        checkpoint: a `tinker://` path of sampler weights; None for the base model.
        note: told what a person should read.
        progress: given a function that says how far it is.

    Returns:
        Metrics under `eval/<env>/…` and `eval/all/…`.

    Raises:
        ConfigError: an environment cannot be loaded.
        ServiceError: the service failed after retries.
    """
    config = resolved.config if isinstance(resolved, Resolved) else resolved
    specs = config.eval.envs or {
        name: EvalEnvConfig(env=spec.env or name, args=spec.args, max_tokens=spec.max_tokens, max_turns=spec.max_turns)
        for name, spec in config.envs.items()
    }
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"envs": specs})})
    tasks = eval_tasks(specs, seed=config.seed)
    choice = choose(config.service)
    chat = await asyncio.to_thread(load_chat, config, choice, note)
    started = time.monotonic()
    async with connect(config.service, choice=choice) as service:
        sampler = await service.sampler(model=config.model, checkpoint=checkpoint)
        player = eval_player(config, chat, context=await service.context_tokens(config.model))

        def snapshot() -> Progress:
            counts = player.counts
            seconds = time.monotonic() - started
            return Progress(
                phase="evaluating",
                queued=counts.queued,
                live=counts.live,
                done=counts.done,
                failed=counts.failed,
                tokens=counts.tokens,
                seconds=seconds,
            )

        progress(snapshot)
        return await Evaluation(tasks, player, every=0).run(sampler)


def describe(choice: ServiceChoice) -> str:
    """The chosen service as a phrase for people."""
    match choice.kind:
        case "hosted":
            return f"the hosted Tinker service ({choice.reason})"
        case "url":
            return f"the Tinker service at {choice.base_url} ({choice.reason})"
        case "engine":
            return f"the embedded engine ({choice.reason})"


def load_chat(config: Config, choice: ServiceChoice, note: Callable[[str], None]) -> ChatFormat:
    """The chat format of the configured model; with the embedded engine, the model itself is made ready first."""
    from rlkit.renderers import chat_format
    from rlkit.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(config.model, with_weights=choice.kind == "engine", note=note)
    return chat_format(config.model, tokenizer, renderer=config.chat.renderer)


def env_settings(config: Config, *, context: int | None) -> Mapping[str, EnvSettings]:
    """How each environment is played: its own settings over those of the run."""
    return {
        name: EnvSettings(
            group_size=spec.group_size or config.batch.group_size,
            sampling=_sampling(config, max_tokens=spec.max_tokens, temperature=spec.temperature),
            timeout_s=spec.timeout_s or config.rollouts.timeout_s,
            max_failing_rollouts=(
                config.rollouts.max_failing_rollouts if spec.max_failing_rollouts is None else spec.max_failing_rollouts
            ),
            limits=Limits(spec.max_turns, context),
        )
        for name, spec in config.envs.items()
    }


def eval_player(config: Config, chat: ChatFormat, *, context: int | None) -> Player:
    """The player of an evaluation, which draws from random streams of its own."""
    settings = {
        name: EnvSettings(
            group_size=spec.attempts,
            sampling=_sampling(config, max_tokens=spec.max_tokens, temperature=spec.temperature),
            timeout_s=config.rollouts.timeout_s,
            max_failing_rollouts=config.rollouts.max_failing_rollouts,
            limits=Limits(spec.max_turns, context),
        )
        for name, spec in config.eval.envs.items()
    }
    return Player(chat, settings, seed=config.seed, max_live=config.rollouts.max_live, purpose="eval")


def eval_tasks(specs: Mapping[str, EvalEnvConfig], *, seed: int) -> Mapping[str, Sequence[Env]]:
    """The tasks of an evaluation: the first of each environment's own order."""
    return {
        name: _first(load_envs(name, spec, field=f"eval.envs.{name}", seed=seed), spec.tasks)
        for name, spec in specs.items()
    }


def _first(tasks: Tasks, most: int) -> Sequence[Env]:
    if isinstance(tasks, Sequence):
        return tasks[:most]
    source = as_source(tasks, seed=0)
    drawn = (source.next() for _ in range(most))
    return [env for env in drawn if env is not None]


def _sampling(config: Config, *, max_tokens: int | None, temperature: float | None) -> Sampling:
    run = config.sampling
    return Sampling(
        max_tokens=max_tokens or run.max_tokens,
        temperature=run.temperature if temperature is None else temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        stop=None if run.stop is None else tuple(run.stop),
    )


def _directory(config: Config) -> Path:
    """The named run's folder, or a new one named after the environments and the time."""
    if config.name is not None:
        return runs_dir() / config.name
    stem = f"{'+'.join(config.envs)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(runs_dir() / name for name in names if not (runs_dir() / name).exists())
