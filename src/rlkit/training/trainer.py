"""`RLTrainer`: build a run from its configuration, and run the training loop.

Invariant: errors in the configuration are found before the first request to the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlkit._util import files
from rlkit._util.activity import Activity, use_activity
from rlkit._util.gc_tuning import rare_garbage_collection
from rlkit._util.loop_holds import loop_holds
from rlkit._util.paths import ARTEFACTS, runs_dir
from rlkit._util.priority_semaphore import Slots
from rlkit._util.threads import in_thread
from rlkit.algorithms.advantages import AnyEstimator
from rlkit.algorithms.losses import FunctionLoss, LossFunction
from rlkit.chat.format import ChatFormat
from rlkit.chat.renderers import load_chat
from rlkit.config.loading.objects import load_estimators, load_function, load_loss
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.loading.run_config import choose_run_directory
from rlkit.config.schema import Config
from rlkit.cost.budget import Budget
from rlkit.cost.estimate import load_estimate
from rlkit.cost.usage import Price, price_of
from rlkit.errors import RlkitError, UsageError, did_you_mean
from rlkit.evaluation.evaluate import Evaluation, load_eval_tasks, make_eval_player
from rlkit.metrics.env_reports import make_failure_reporter, make_hold_reporter
from rlkit.rollout.opponents import Opponents
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner, RolloutRunner
from rlkit.rollout.settings import make_env_settings
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.service import Service
from rlkit.service.watch import ServiceWatch
from rlkit.serving.references import References, load_references
from rlkit.store import RunStore
from rlkit.store.history import History
from rlkit.tasks.from_config import load_tasks, make_mixture, resolve_steps, task_contents
from rlkit.tasks.provenance import read_manifest, write_manifest
from rlkit.tasks.sources import Tasks
from rlkit.tinker_client.connect import ServiceChoice, choose_service, connect, name_service
from rlkit.tinker_client.support import check_support
from rlkit.token_records.pictures import copy_view_scripts
from rlkit.trackers import Broadcast, RunInfo, RunResult, Tracker
from rlkit.trackers.from_config import make_trackers
from rlkit.training import StopSignal, Trainer
from rlkit.training.checkpoints import CheckpointSaver
from rlkit.training.conversations import check_conversations
from rlkit.training.from_config import make_learning_rate, make_model_selection, make_preparation, make_step_recipe
from rlkit.training.groups import Groups
from rlkit.training.learner import PolicyLearner
from rlkit.training.resume import interrupted_groups, load_weights, redraw_tasks
from rlkit.training.run import Run
from rlkit.workers.from_config import open_runner

_LAST_SAVE_S = 120.0  # time to save the weights of a run that failed


class RLTrainer(Trainer):
    """Trainer of the run that a configuration describes.

    ::

        config = rlkit.load_config([Path("config.yaml")])
        result = await rlkit.RLTrainer(config).train()

    Args:
        config: the result of `load_config`, or a `Config`.
        envs: tasks made in Python, by names of the configuration's `envs`; other environments are loaded.
        estimators: estimators made in Python, by the same names.
        loss: loss function that replaces the configured loss.
        trackers: trackers in addition to the configured trackers.
        stop: signal to finish the step, save the weights and end.
        directory: directory of the run; by default the configured name in the folder of runs.
        resume: resume the run in the directory.
        service: connection that replaces the configured service; `train` enters and leaves it.
        chat: chat format; by default the model's.

    Raises:
        ConfigError: an environment or estimator cannot be loaded, or no learning rate is known for the model.
    """

    def __init__(
        self,
        config: ResolvedConfig | Config,
        *,
        envs: Mapping[str, Tasks] | None = None,
        estimators: Mapping[str, AnyEstimator] | None = None,
        loss: LossFunction | None = None,
        trackers: Sequence[Tracker] = (),
        stop: StopSignal | None = None,
        directory: Path | None = None,
        resume: bool = False,
        service: AbstractAsyncContextManager[Service] | None = None,
        chat: ChatFormat | None = None,
    ) -> None:
        self._resolved = config if isinstance(config, ResolvedConfig) else ResolvedConfig.from_python(config)
        self._config = config = self._resolved.config
        self._trackers = Broadcast([*trackers, *make_trackers(config.track)])
        self._stop = stop or StopSignal()
        # Before an environment is loaded, because it may change the working directory.
        self.directory = None if directory is None else directory.absolute()  # of a new run, known once it begins
        self._runs_dir = runs_dir()
        self._resume = resume
        self._activity = Activity()
        self._service = service
        self._chat = chat
        python_envs = envs or {}
        for name in [*python_envs, *(estimators or {})]:
            if name not in config.envs:
                raise UsageError(f"the configuration has no environment {name!r}.{did_you_mean(name, config.envs)}")
        # A new run has no manifest to read, and no directory before `train` is called: its name contains the time.
        self._manifest = read_manifest(self.directory or choose_run_directory(config, self._runs_dir)) if resume else {}
        note, manifest = self._trackers.on_note, self._manifest
        self._eval_tasks = load_eval_tasks(config.eval.envs, seed=config.seed, note=note, origins=manifest)
        tasks = load_tasks(config, python_envs, evaluated=task_contents(self._eval_tasks), note=note, manifest=manifest)
        self._config = config = resolve_steps(config, tasks, note=note)
        self._tasks = tasks
        self._sources = make_mixture(config, tasks)
        self._estimators = load_estimators(config, estimators or {})
        self._loss = load_loss(config.loss) if loss is None else FunctionLoss(function=loss)
        self._rate = make_learning_rate(config)
        for field, teacher in (item for env in config.envs for item in config.find_teachers(env).items()):
            if teacher.prompt is not None:
                load_function(teacher.prompt, field=f"{field}.prompt", of="messages")

    @stop_leftover_tasks()
    async def train(self) -> RunResult:
        """Train to the end, or until a stop is requested; record the outcome in the directory and the trackers.

        Raises:
            UsageError: the run's directory already holds a run, or the service does not support the configuration.
            ServiceError: the service failed after retries.
            RunFailed: too many rollouts failed, or the disk is full.
        """
        async with self._open() as (run, learner, groups):
            await learner.replay()  # recorded steps that no checkpoint contains: gradients without sampling
            async for step in learner.submit(groups.steps(after=run.step)):  # play its groups, request gradients
                recorded = groups.commit(step)  # written to the disk while the service computes
                trained = await learner.train(step)  # gradients, optimiser step, new sampler
                await recorded  # a crash must not lose a step whose weights are sampled from
                groups.publish(trained.sampler)  # all later turns sample from the new weights
                await run.report(step, trained)  # metrics, evaluation, checkpoint, trackers
        return run.result

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[tuple[Run, PolicyLearner, Groups]]:
        """Open the run's directory and the service; record the outcome in the directory and the trackers."""
        config = self._config
        choice = choose_service(config.service) if self._service is None else ServiceChoice("url", None, "from Python")
        price = price_of(config, choice.kind)
        self.directory = directory = self.directory or choose_run_directory(config, self._runs_dir)
        with (
            rare_garbage_collection(),
            use_activity(self._activity),
            RunStore(directory, resolved=self._resolved, resume=self._resume) as store,
        ):
            result = None
            report_hold = make_hold_reporter(
                get_step=lambda: store.step + 1,
                tell=lambda finding: self._trackers.on_note(f"step {finding.first}: {finding}"),
                record=store.metadata.record_findings,
            )
            try:
                with loop_holds().watch(report_hold):
                    async with self._connect(store, choice, price) as (run, learner, groups):
                        yield run, learner, groups
                    result = run.result
                with files.report_write_errors(directory):
                    store.metadata.set_status(result.status, reason=result.reason)
            except (Exception, asyncio.CancelledError) as error:
                store.metadata.record_error(error)
                if isinstance(error, Exception):
                    self._trackers.on_note(f"the cause and its fix: rlkit doctor {directory}")
                raise
            finally:
                await store.close()
                self._trackers.on_finish(result)

    @asynccontextmanager
    async def _connect(
        self, store: RunStore, choice: ServiceChoice, price: Price | None
    ) -> AsyncGenerator[tuple[Run, PolicyLearner, Groups]]:
        """Connect to the service and build the run; save the weights at its end."""
        config, note, is_engine = self._config, self._trackers.on_note, choice.kind == "engine"
        chat = self._chat or await in_thread(lambda: load_chat(config, engine=is_engine, note=self._trackers.on_status))
        history = await self._open_journal(store, chat)
        activity = self._activity
        watch = ServiceWatch(
            note, config.service.timeout_s, seed=config.seed, is_computing=lambda: is_engine and bool(activity.counts)
        )
        connection = self._service or connect(config.service, choice=choice, note=note, warn=watch.remember_warning)
        opening = open_runner(config, LocalRunner(chat), self._tasks, self._eval_tasks)
        async with watch.watch_silence(), opening as runner, connection as service:
            clock = asyncio.get_running_loop().time
            budget = Budget(config, store.directory, price=price, used=lambda: service.usage, clock=clock, note=note)
            references = await load_references(config, service, watch, chat, price=price)
            self._trackers.on_status(f"starting a training session for {config.model}")
            run, learner, groups = await self._build(
                store, service, references, chat, watch=watch, budget=budget, history=history, runner=runner
            )
            budget.pending_usage = lambda: groups.pending_usage + learner.pending_usage
            info = RunInfo(
                name=store.directory.name,
                directory=store.directory,
                model=config.model,
                envs=tuple(config.envs),
                service=name_service(choice),
                progress=run.progress,
                earlier=tuple(store.read_metrics()),
            )
            self._trackers.on_start(info)
            if history.step:
                note(f"resuming after step {history.step}")
            del history  # free its episodes
            self._stop.watch()
            async with _save_and_close(run, learner, groups):
                yield run, learner, groups

    async def _open_journal(self, store: RunStore, chat: ChatFormat) -> History:
        """Open the run's journal; return the history of an interrupted run, with its waiting tasks."""
        await in_thread(self._sources.set_folder, store.directory / ARTEFACTS)  # before draws are repeated
        redraw = partial(redraw_tasks, sources=self._sources)
        history = store.open(self._sources.state_dict(), piece=chat.piece, replay=redraw)
        with files.report_write_errors(store.directory):
            await in_thread(write_manifest, store.directory, self._manifest)
            await in_thread(copy_view_scripts, {**self._eval_tasks, **self._tasks}, store.directory / ARTEFACTS)
        for path in dict.fromkeys(history.damaged):
            self._trackers.on_note(f"{path} is damaged; lost rollouts are repeated, if necessary with other tasks")
        return history

    async def _build(
        self,
        store: RunStore,
        service: Service,
        references: References,
        chat: ChatFormat,
        *,
        watch: ServiceWatch,
        budget: Budget,
        history: History,
        runner: RolloutRunner,
    ) -> tuple[Run, PolicyLearner, Groups]:
        """Build the parts of a run."""
        config, trackers, note = self._config, self._trackers, self._trackers.on_note
        load = partial(load_weights, config=config, service=service, store=store, note=note)
        measured = store.find_last_measured_step(history.step)  # steps without metrics are replayed for them
        weights, step = await watch.call(lambda: load(measured), "starting a training session", retry=True)
        # The service knows the exact context only once the model is loaded.
        context = await watch.call(lambda: service.context_tokens(config.model), "asking for the context", retry=True)
        await watch.call(lambda: check_support(config, service, weights, self._loss), "trying the service", retry=True)
        settings = make_env_settings(config, context=context)
        await check_conversations(config, self._tasks, runner, settings, chat, note=note)
        preparation = make_preparation(config, self._estimators, self._loss, references=references)
        recipe = make_step_recipe(config, self._loss, self._rate, preparation, is_repeatable=service.is_repeatable)
        slots = Slots(
            config.rollouts.max_concurrent,
            find_close_reason=lambda: budget.reached_limit,
            clock=asyncio.get_running_loop().time,
            on_close=lambda reason: note(f"{reason}; ending the run"),
        )
        selection = make_model_selection(config, store.read_metrics())
        saver = CheckpointSaver(config.checkpoint, store, trackers, watch, selection=selection, delete=service.delete)
        opponents = Opponents(config, service, watch, saver.find_saved).find
        groups = Groups(
            self._sources,
            Player(runner, settings, seed=config.seed, slots=slots, opponents=opponents),
            recipe,
            store=store,
            trackers=trackers,
            budget=budget,
            history=history,
            interrupted=interrupted_groups(history, config, retry_failed=store.metadata.retry_failed),
        )
        report_failure = make_failure_reporter(note, redact=store.metadata.redact, prefix="the evaluation of ")
        player = make_eval_player(config, runner, slots=slots, context=context)
        player = replace(player, record=report_failure, opponents=opponents)
        run = Run(
            step=history.step,
            groups=groups,
            evaluation=Evaluation(self._eval_tasks, player, config.eval.every, references),
            checkpoints=saver,
            stop=self._stop,
            activity=self._activity,
            estimate=await in_thread(load_estimate, config),
        )
        learner = PolicyLearner(run, groups, recipe=recipe, watch=watch, load_weights=load, learner=weights, step=step)
        return run, learner, groups


@asynccontextmanager
async def _save_and_close(run: Run, learner: PolicyLearner, groups: Groups) -> AsyncGenerator[None]:
    """At the end of the block, save the weights of the last step and close all parts of the run."""
    try:
        try:
            try:
                yield
            finally:
                await learner.stop_submitting()
                await groups.supply.close()  # no rollout costs money while the weights are saved
        except Exception as error:
            run.store.metadata.record_error(error)  # now, because the save may be interrupted
            with suppress(RlkitError, OSError, TimeoutError):  # the cause matters more than a failed save
                if run.first_step < run.step == learner.step:  # not within a recovery
                    run.phase = "saving"
                    async with asyncio.timeout(_LAST_SAVE_S):
                        await learner.save()
            raise
        run.phase = "saving"
        await learner.save()
        await run.finish()
    except asyncio.CancelledError as error:
        run.store.metadata.record_error(error)  # now, because closing the service may take longer than is left
        raise
    finally:
        learner.cancel_requests()
        with suppress(RlkitError):  # only the usage of an unfinished step is lost
            groups.budget.write()
        await run.close()
