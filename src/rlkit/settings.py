"""What a configuration means for the parts of a run.

Invariant: a part gets its own small settings and never the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlkit.advantages import Estimator
from rlkit.batch import Preparation
from rlkit.chat import ChatFormat
from rlkit.config import load_envs
from rlkit.config.curriculum import CurriculumConfig, FilterCurriculum, TargetCurriculum
from rlkit.config.schema import Config, EnvConfig
from rlkit.config.turns import refuse_discount, refuse_limit
from rlkit.curriculum import FilterSource, SolveRates, TargetSource, distinct_ids
from rlkit.env import Env, SingleTurnEnv, TaskSource
from rlkit.epochs import countable
from rlkit.errors import MissingError, UsageError
from rlkit.kl import KLPenalty, Score
from rlkit.losses import Loss
from rlkit.origins import Origins
from rlkit.overlap import kept_apart
from rlkit.policy import Limits
from rlkit.rollouts import EnvSettings
from rlkit.schedule import Pace
from rlkit.selection import Aim, Selection
from rlkit.service import Service, ServiceChoice
from rlkit.service.watch import Watch
from rlkit.shaping import LengthPenalty, Normalization
from rlkit.sources import SequenceSource, Tasks, as_source, is_source, listed
from rlkit.types import BudgetForcing, Floats, Prompt, Sampling
from rlkit.update import Streaming


def pace(config: Config, *, streaming: Streaming | None = None) -> Pace:
    """Return how much a run plays ahead.

    Args:
        config: of the run.
        streaming: from the function of that name.
    """
    ahead = config.schedule.mode == "async"
    return Pace(
        groups=config.batch.groups,
        steps=config.step_count,
        max_staleness=config.schedule.max_staleness if ahead else 0,
        in_order=config.schedule.staleness == "strict" if ahead else streaming != "ready_groups",
        replace=config.batch.replace_uninformative,
        replaced_max=config.batch.max_replaced or 4 * config.batch.groups,
    )


def streaming(config: Config, *, repeatable: bool) -> Streaming | None:
    """Return how the gradients of a step are divided that are requested while its groups are in play; None: not at all.

    The requests to a service that repeats its numbers do not depend on timing. With another service that would gain
    nothing, and would cost most of the time that the schedule saves: a step would wait for its slowest group before it
    computes the gradients of the groups drawn later.

    Args:
        config: of the run.
        repeatable: the service gives the same answers to the same requests.
    """
    if config.schedule.mode != "stream":
        return None
    return "each_group" if repeatable else "ready_groups"


def run_tasks(
    config: Config,
    given: Mapping[str, Tasks],
    *,
    tested: Mapping[str, str],
    note: Callable[[str], None],
    origins: Origins,
) -> dict[str, Tasks]:
    """The tasks of each environment of a run; those of a collection may be used again and again.

    Tasks of a collection that are evaluated are left out; a source of the user's own gives what it gives.

    Args:
        config: of the run.
        given: made in Python, by name; the others are loaded as the configuration says.
        tested: what is evaluated, from `contents`.
        note: told what a person should know of the tasks.
        origins: of the run: what the tasks were made of when it began.

    Raises:
        ConfigError: an environment cannot be loaded, or something is set that its tasks have no use for.
        UsageError: all tasks of an environment are evaluated.
    """
    found = dict[str, Tasks]()
    for name, spec in config.envs.items():
        field = f"envs.{name}"
        if name in given:
            made = given[name]
        else:
            made = load_envs(name, spec, field=field, seed=config.seed, note=note, recorded=origins.recorded(field))
        found[name] = made if is_source(made) else _not_tested(listed(made), tested, field=field, note=note)
    single = [name for name, tasks in found.items() if single_turn(tasks)]
    for name in single:
        refuse_limit(config.envs[name], field=f"envs.{name}")
    refuse_discount(config, set(single))
    return found


def _not_tested(
    envs: Sequence[Env], tested: Mapping[str, str], *, field: str, note: Callable[[str], None]
) -> Sequence[Env]:
    kept = kept_apart(envs, tested, field=field) if tested else envs
    if len(kept) < len(envs):
        note(f"{field}: {len(envs) - len(kept)} tasks are evaluated, and not trained on")
    return kept


def single_turn(tasks: Tasks) -> bool:
    """Whether it is known that each task has a single turn; of a source of the user's own it is not."""
    if is_source(tasks):
        return False
    return all(isinstance(env, SingleTurnEnv) and type(env).rollout is SingleTurnEnv.rollout for env in listed(tasks))


def task_source(
    tasks: Tasks, section: CurriculumConfig | None, *, field: str, seed: int, epochs: int | None = None
) -> TaskSource:
    """What decides which task of an environment comes next.

    Args:
        tasks: of the environment.
        section: its curriculum.
        field: the field that holds it, for messages.
        seed: of the draws.
        epochs: times that each task is drawn; None for ever. A curriculum leaves it out.

    Raises:
        UsageError: these are no tasks, or a curriculum has no use for them.
    """
    if epochs is not None:
        return SequenceSource(countable(tasks, field=field.rpartition(".")[0]), seed=seed, epochs=epochs)
    if section is None:
        return as_source(tasks, seed=seed)
    if is_source(tasks) and not isinstance(tasks, Sequence):
        raise UsageError(
            f"{field}: has no effect: a {type(tasks).__name__} is a task source, which has no list of tasks and "
            "chooses by itself; leave the curriculum out, or give a collection of tasks"
        )
    envs = listed(tasks)
    if len(envs) < 2:
        raise UsageError(f"{field}: has no effect: it chooses between tasks, and needs two at least, not {len(envs)}")
    try:
        rates = SolveRates(distinct_ids(envs), solved=section.solved, newest=section.newest)
    except UsageError as error:
        raise UsageError(f"{field}: {error}") from None
    match section:
        case FilterCurriculum(low=low, high=high, min_groups=least, recheck=epochs):
            return FilterSource(envs, rates, low=low, high=high, min_groups=least, recheck=epochs, seed=seed)
        case TargetCurriculum(target=target, sharpness=sharpness, explore=explore):
            return TargetSource(envs, rates, target=target, sharpness=sharpness, explore=explore, seed=seed)


def preparation(
    config: Config, estimators: Mapping[str, Estimator], loss: Loss, *, reference: Score | None
) -> Preparation:
    """How groups become training sequences.

    Args:
        config: the run's.
        estimators: by environment.
        loss: of the run.
        reference: of the KL penalty, where there is one.
    """
    batch, length, kl = config.batch, config.length_penalty, config.kl_penalty
    penalties = {
        name: LengthPenalty(length.coefficient, length.from_tokens, config.full_penalty_tokens(name))
        for name in (config.envs if length.coefficient else ())
    }
    normalization = None
    if batch.normalize != "none":
        tokens = batch.normalize_tokens or config.sampling.max_tokens
        normalization = Normalization(batch.normalize, batch.groups / batch.substeps, tokens)
    return Preparation(
        estimators,
        loss.needs_every_sequence,
        batch.max_tokens,
        batch.too_long,
        length_penalty=penalties,
        clip=batch.clip_advantages,
        kl_penalty=None if reference is None else KLPenalty(reference, kl.coefficient, kl.discount),
        normalization=normalization,
    )


async def kl_reference(config: Config, service: Service, watch: Watch) -> Score | None:
    """The reference of the KL penalty, watched over and retried; None without a penalty.

    Raises:
        UsageError: the service has no such checkpoint.
        ServiceError: the service failed after retries.
    """
    if not config.kl_penalty.coefficient:
        return None
    path = None if config.kl_penalty.reference == "base" else config.kl_penalty.reference
    scorer = await watch.call(
        lambda: service.scorer(model=config.model, checkpoint=path), "loading the reference", retry=True
    )

    async def score(prompt: Prompt, last: int) -> Floats:
        return await watch.call(lambda: scorer.logprobs(prompt, last=last), "asking the reference", retry=True)

    return score


def selection(config: Config, measured: Sequence[tuple[int, Mapping[str, float]]]) -> Selection:
    """Which weights are the best, after these steps."""
    best = config.best
    aim = Aim(config.best_metric, best.lower, best.patience, best.min_gain, best.goal)
    made = Selection(aim, config.checkpoint.keep_last, config.checkpoint.keep_best)
    for step, metrics in measured:
        made.tell(step, metrics)
    return made


def describe(choice: ServiceChoice) -> str:
    """The chosen service as a phrase for people."""
    match choice.kind:
        case "hosted":
            return f"the hosted Tinker service ({choice.reason})"
        case "url":
            return f"the Tinker service at {choice.base_url} ({choice.reason})"
        case "engine":
            return f"the embedded engine ({choice.reason})"


def load_chat(config: Config, choice: ServiceChoice, note: Callable[[str], None], *, fetch: bool = True) -> ChatFormat:
    """Return the chat format of the configured model; with the embedded engine, make the model itself ready first.

    Args:
        config: of the run.
        choice: the service that the run uses.
        note: receives what is being fetched or converted.
        fetch: download weights that the embedded engine needs and that are not on this machine.

    Raises:
        UsageError: the configuration names a folder that has no tokenizer.
        MissingError: the model or its tokenizer cannot be had.
    """
    from rlkit.renderers import CHAT_TEMPLATE, chat_format
    from rlkit.tokenizers import has_weights, load_tokenizer

    engine = choice.kind == "engine"
    try:
        tokenizer = load_tokenizer(
            config.model,
            with_weights=engine and (fetch or has_weights(config.model, note)),
            note=note,
            tokenizer=config.chat.tokenizer,
            template=config.chat.renderer == CHAT_TEMPLATE,
        )
    except MissingError as error:
        if not (engine and fetch):
            raise
        raise MissingError(
            f"{error}. Without TINKER_API_KEY the embedded engine runs the model, and needs its weights"
        ) from error
    return chat_format(config.model, tokenizer, renderer=config.chat.renderer)


def env_settings(config: Config, *, context: int | None) -> Mapping[str, EnvSettings]:
    """How each environment is played: its own settings over those of the run."""
    return {
        name: EnvSettings(
            group_size=(size := spec.group_size or config.batch.group_size),
            sampling=sampling(config, max_tokens=spec.max_tokens, temperature=spec.temperature),
            timeout_s=spec.timeout_s or config.rollouts.timeout_s,
            max_retries=config.rollouts.max_retries if spec.max_retries is None else spec.max_retries,
            limits=Limits(spec.max_turns, context),
            min_valid=_required_valid(spec, size=size, default=config.rollouts.min_valid),
            coalesce=config.rollouts.coalesce,
            newest_weights=spec.newest_weights,
        )
        for name, spec in config.envs.items()
    }


def _required_valid(spec: EnvConfig, *, size: int, default: int) -> int:
    """Return the episodes with a reward that a group of `size` must have."""
    if spec.max_failing_rollouts is not None:
        return size - spec.max_failing_rollouts
    return min(size, spec.min_valid or default)


def sampling(config: Config, *, max_tokens: int | None, temperature: float | None) -> Sampling:
    """How completions are drawn: an environment's own limits over the run's settings."""
    run = config.sampling
    forcing = run.budget_forcing
    return Sampling(
        max_tokens=max_tokens or run.max_tokens,
        temperature=run.temperature if temperature is None else temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        stop=None if run.stop is None else tuple(run.stop),
        forcing=None if forcing is None else BudgetForcing(forcing.phrase, forcing.context_window_tokens),
    )
