"""From a configuration to a finished run: the parts are built here, and handed to the loop.

Invariant: everything that can be wrong with a configuration is found before the service is asked for anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from rlkit._util.activity import Activity, activity_of_run
from rlkit._util.gc_tuning import rare_collections
from rlkit._util.loop_holds import loop_holds
from rlkit._util.paths import ARTEFACTS, runs_dir
from rlkit._util.priority_semaphore import Slots
from rlkit._util.seeds import derive
from rlkit._util.threads import in_thread
from rlkit.algorithms.advantages import Estimator, choose_estimators
from rlkit.algorithms.datums import sequence_lengths
from rlkit.algorithms.losses import loss
from rlkit.algorithms.lr_schedule import learning_rate
from rlkit.algorithms.records import Played
from rlkit.chat.format import ChatFormat
from rlkit.chat.load import load_chat
from rlkit.config import Resolved
from rlkit.config.schema import Config
from rlkit.cost.budget import Budget, Limits
from rlkit.cost.estimate import kept
from rlkit.cost.prices import Price, price_of
from rlkit.cost.usage import Usage
from rlkit.env import Task
from rlkit.errors import RolloutsFailed, UsageError, did_you_mean
from rlkit.evaluation.evaluate import Evaluation, eval_player, eval_tasks
from rlkit.rollout.failure_notes import FailureNotes
from rlkit.rollout.player import Earlier, Player
from rlkit.rollout.settings import env_settings
from rlkit.rollout.task_guard import leftovers_ended
from rlkit.service import Learner, Service
from rlkit.service.connect import ServiceChoice, choose, connect, describe
from rlkit.service.watch import Watch
from rlkit.store import RunStore
from rlkit.store.blocking_findings import BlockingFindings
from rlkit.store.history import History
from rlkit.store.journal import unwritable
from rlkit.tasks.decontamination import contents
from rlkit.tasks.epochs import with_steps
from rlkit.tasks.from_config import run_tasks, task_source
from rlkit.tasks.provenance import Origins
from rlkit.tasks.sources import Mixture, Tasks
from rlkit.trackers import Broadcast, RunInfo, RunResult, Tracker
from rlkit.trackers.following import following
from rlkit.training.checkpoints import Saver
from rlkit.training.from_config import kl_reference, pace, preparation, selection, streaming
from rlkit.training.loop import Loop, Trainer
from rlkit.training.parts import Parts
from rlkit.training.resume import drawn_again, earlier, restored
from rlkit.training.schedule import Supply
from rlkit.training.step import Recipe
from rlkit.training.stop import StopSignal
from rlkit.types import Episode, Json

_KEEP_USED_S = 10.0
"""How often what was used is written down in the middle of a step; a kill loses the count of what came after."""


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
        directory: of the run; by default the named one among `rlkit._util.paths.runs_dir()`.
        resume: go on with the run that the directory holds.
        service: a connection to use instead of the configured one; entered and left by `train`.
        chat: the model's format; by default its own.

    Raises:
        ConfigError: an environment or estimator cannot be loaded, or no learning rate is known for the model.
    """

    def __init__(
        self,
        resolved: Resolved | Config,
        *,
        envs: Mapping[str, Tasks] | None = None,
        estimators: Mapping[str, Estimator] | None = None,
        trackers: Sequence[Tracker] = (),
        stop: StopSignal | None = None,
        directory: Path | None = None,
        resume: bool = False,
        service: AbstractAsyncContextManager[Service] | None = None,
        chat: ChatFormat | None = None,
    ) -> None:
        self._resolved = resolved if isinstance(resolved, Resolved) else Resolved.from_python(resolved)
        self._config = config = self._resolved.config
        self._trackers = Broadcast([*trackers, *following(config.track)])
        self._stop = stop or StopSignal()
        # Now, before an environment that is loaded can change the working directory.
        self._given_directory = None if directory is None else directory.absolute()
        self._runs_dir = runs_dir()
        self._resume = resume
        self._activity = Activity()
        self._service = service
        self._chat = chat
        given = envs or {}
        for name in [*given, *(estimators or {})]:
            if name not in config.envs:
                raise UsageError(f"the configuration has no environment {name!r}.{did_you_mean(name, config.envs)}")
        self._origins = Origins(self._begun())
        note, origins = self._trackers.note, self._origins
        self._eval_tasks = eval_tasks(config.eval.envs, seed=config.seed, note=note, origins=origins)
        tasks = run_tasks(config, given, tested=contents(self._eval_tasks), note=note, origins=origins)
        self._config = config = with_steps(config, tasks, note=note)
        sources = {
            name: task_source(
                tasks[name],
                spec.curriculum,
                field=f"envs.{name}.curriculum",
                seed=derive(config.seed, "tasks", name),
                epochs=config.epochs,
            )
            for name, spec in config.envs.items()
        }
        weights = {name: spec.weight for name, spec in config.envs.items()} if config.epochs is None else None
        self._tasks = Mixture(sources, weights=weights, seed=config.seed)
        self._estimators = choose_estimators(config, estimators or {})
        self._loss = loss(config.loss)
        self._rate = learning_rate(config)

    def _begun(self) -> Path | None:
        """The directory of the run that this goes on with; None for a new one."""
        if not self._resume:
            return None
        return self._given_directory or _directory(self._config, self._runs_dir)

    @leftovers_ended()
    async def train(self) -> RunResult:
        """Train to the end, or until asked to stop; the directory and the trackers know how it ended.

        Raises:
            UsageError: the run's directory holds a run already, or the service refuses what the configuration asks for.
            ServiceError: the service failed after retries.
            RunFailed: too many rollouts failed, or the disk is full.
        """
        choice = choose(self._config.service)
        if self._service is not None:
            choice = ServiceChoice("url", None, "it was given")
        price = price_of(self._config, choice.kind)
        directory = self._given_directory or _directory(self._config, self._runs_dir)
        with rare_collections(), RunStore(directory, resolved=self._resolved, resume=self._resume) as store:
            ended: RunResult | None = None
            try:
                expected = await in_thread(kept, self._config)
                with loop_holds().watched(self._blocking(store).add), activity_of_run(self._activity):
                    ended = replace(await self._run(store, choice, price), estimate=expected)
                store.about.set_status(ended.status, reason=ended.reason)
                return ended
            except asyncio.CancelledError:
                with suppress(OSError):
                    store.about.set_status("interrupted")
                raise
            except Exception as error:
                with suppress(OSError):  # a full disk must not hide why the run failed
                    store.about.set_failed(error, retry=isinstance(error, RolloutsFailed))
                raise
            finally:
                await store.close()
                self._trackers.finished(ended)

    def _blocking(self, store: RunStore) -> BlockingFindings:
        """The findings about what holds the event loop, told and kept in the run's folder."""
        return BlockingFindings(
            step=lambda: store.step + 1,
            tell=lambda finding: self._trackers.note(f"step {finding.first}: {finding}"),
            keep=store.about.keep_findings,
        )

    async def _run(self, store: RunStore, choice: ServiceChoice, price: Price | None) -> RunResult:
        config = self._config
        engine, note = choice.kind == "engine", self._trackers.note
        chat = self._chat or await in_thread(lambda: load_chat(config, engine=engine, note=note))
        await in_thread(self._tasks.keep_in, store.directory / ARTEFACTS)  # before tasks are drawn again
        waiting = list[Task]()
        history = store.open(
            self._tasks.state_dict(),
            decode=chat.decode,
            replay=lambda history: waiting.extend(drawn_again(history, self._tasks)),
        )
        try:
            await in_thread(self._origins.write, store.directory)
        except OSError as error:
            raise unwritable(store.directory, error) from error
        watch = Watch(
            self._trackers.note,
            config.service.timeout_s,
            seed=config.seed,
            is_computing=lambda: choice.kind == "engine" and bool(self._activity.counts),
        )
        opened = self._service or connect(config.service, choice=choice, note=self._trackers.note)
        async with watch.looking(), opened as service:
            loop = await self._loop(store, chat, service, price=price, watch=watch, history=history, waiting=waiting)
            info = RunInfo(
                name=store.directory.name,
                directory=store.directory,
                model=config.model,
                envs=tuple(config.envs),
                service=describe(choice),
                progress=loop.progress,
            )
            self._trackers.started(info)
            if history.step:
                self._trackers.note(f"going on after step {history.step}")
            del history  # it holds every episode of the journal
            self._stop.watch()
            try:
                return await loop.run()
            except asyncio.CancelledError:
                with suppress(OSError):
                    store.about.set_status("interrupted")  # at once: leaving the service may outlast our time
                raise

    async def _loop(
        self,
        store: RunStore,
        chat: ChatFormat,
        service: Service,
        *,
        price: Price | None,
        watch: Watch,
        history: History,
        waiting: Sequence[Task],
    ) -> Loop:
        config = self._config

        async def restore(upto: int) -> tuple[Learner, int]:
            return await restored(config, service, store.checkpoints(), upto, self._trackers.note)

        # A step whose numbers were not written down is taken again for their sake.
        measured = store.measured(history.step)
        self._trackers.note(f"starting a training session for {config.model}")
        weights = await watch.call(lambda: restore(measured), "starting a training session", retry=True)
        # Known for sure once the model is loaded.
        context = await watch.call(lambda: service.context_tokens(config.model), "asking for the context", retry=True)
        clock = asyncio.get_running_loop().time
        budget = Budget(
            Limits(config.budget_usd, config.budget_tokens, config.max_hours),
            price=price,
            used=lambda: service.usage,
            pending=lambda: sum(unprepared.values(), Usage(trained_tokens=loop.untrained * self._loss.passes)),
            clock=clock,
            before=_used(store, self._trackers.note),
        )
        slots = Slots(config.rollouts.max_live, closed=lambda: budget.reached, clock=clock)
        settings = env_settings(config, context=context)
        reference = await kl_reference(config, service, watch)
        prepared = preparation(config, self._estimators, self._loss, reference=reference)
        needed = partial(_needed, scored=reference is not None, passes=self._loss.passes)
        recipe = Recipe(
            self._loss,
            config.optimizer,
            self._rate,
            config.batch.groups,
            config.batch.substeps,
            streaming=streaming(config, repeatable=service.repeatable),
            together=prepared.together if prepared.whole_steps else None,
        )
        unprepared = defaultdict[int, Usage](Usage)  # by draw: what its episodes will take once its group is complete

        note, redacted = self._trackers.note, store.about.redacted
        failures = FailureNotes(note, redacted=redacted)
        eval_failures = FailureNotes(note, redacted=redacted, where="the evaluation of ")

        def scored(task: Task, episode: Episode) -> None:
            store.record_episode(task, episode)
            failures.add(task, episode)

        def record(task: Task, episode: Episode) -> None:
            scored(task, episode)
            unprepared[task.draw] += needed(episode)

        player = Player(chat, settings, seed=config.seed, slots=slots, record=record, scored=scored)
        evaluating = replace(eval_player(config, chat, slots=slots, context=context), record=eval_failures.add)
        known = {
            draw: earlier(history, draw, config, forgive=store.about.retries_failed) for draw in history.outstanding
        }
        for draw_number, one in known.items():
            unprepared[draw_number] = sum(map(needed, one.episodes.values()), Usage())
        for path in dict.fromkeys(history.damaged):
            self._trackers.note(f"{path} is damaged; what it cannot give back is played again, or others instead")

        kept_s = budget.seconds

        async def keep_used() -> None:
            nonlocal kept_s
            if budget.seconds - kept_s >= _KEEP_USED_S:
                kept_s = budget.seconds
                await in_thread(store.keep_used, budget.state_dict())

        async def play(task: Task) -> Played:
            group = await player.play(task, lambda: loop.newest, earlier=known.pop(task.draw, Earlier()))
            if recipe.at_once:  # otherwise the loop waits for the disk, once for all groups of a step
                await store.sync()
            await keep_used()
            enough = int(group.valid.sum()) >= settings[task.name].min_valid
            played = Played(await prepared.prepare(group), enough)
            unprepared.pop(task.draw, None)
            return played

        def draw() -> Task | None:
            tasks = self._tasks.draw(1)
            if not tasks:
                return None
            store.record_draw(tasks[0])
            return tasks[0]

        ranking = selection(config, store.metrics)
        parts = Parts(
            restore=restore,
            supply=Supply(
                pace(config, streaming=recipe.streaming),
                draw=draw,
                play=play,
                done=history.step,
                waiting=waiting,
                dry=lambda: self._tasks.exhausted,
            ),
            tasks=self._tasks,
            player=player,
            preparation=prepared,
            recipe=recipe,
            min_valid={name: one.min_valid for name, one in settings.items()},
            evaluation=Evaluation(self._eval_tasks, evaluating, config.eval.every),
            saver=Saver(config.checkpoint, store, self._trackers, watch, selection=ranking, delete=service.delete),
            selection=ranking,
            steps=config.step_count,
            store=store,
            trackers=self._trackers,
            watch=watch,
            stop=self._stop,
            slots=slots,
            budget=budget,
            activity=self._activity,
            of_tasks=history.of_tasks,
        )
        loop = Loop(parts, step=history.step, weights=weights)
        return loop


def _needed(episode: Episode, *, scored: bool, passes: int) -> Usage:
    """What training on an episode that was played takes.

    Args:
        episode: the last one at its place.
        scored: its sequences are shown to a reference, which samples a token behind each.
        passes: how often each is computed for the loss.
    """
    if episode.reward is None:
        return Usage()
    lengths = sequence_lengths(episode)
    asked = lengths if scored else []
    trained = (sum(lengths) - len(lengths)) * passes
    return Usage(prefill_tokens=sum(asked), sampled_tokens=len(asked), trained_tokens=trained)


def _used(store: RunStore, note: Callable[[str], None]) -> Mapping[str, Json]:
    try:
        return store.used
    except UsageError as error:  # it holds counters only: no reason not to go on
        note(f"{error}; what was used before is not counted, and a budget counts from here")
        return {}


def named_directory(config: Config) -> Path:
    """The folder of the run that a configuration names.

    Raises:
        UsageError: it names none.
    """
    if config.name is None:
        raise UsageError("name: which run to resume is said by its name (--name)")
    return runs_dir() / config.name


def _directory(config: Config, runs: Path) -> Path:
    """The named run's folder, or a new one named after the environments and the time."""
    if config.name is not None:
        return runs / config.name
    stem = f"{'+'.join(config.envs)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(runs / name for name in names if not (runs / name).exists())
