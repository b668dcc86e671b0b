"""Settings of the parts of a run, made from its configuration.

Invariant: each part gets only its own settings, never the whole configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlkit.algorithms.datums import Preparation
from rlkit.algorithms.estimator import Estimator
from rlkit.algorithms.losses import Loss
from rlkit.algorithms.lr_schedule import LearningRate, advised_learning_rate
from rlkit.algorithms.shaping import LengthPenalty, Normalization
from rlkit.config.schema import Config
from rlkit.serving.references import References
from rlkit.training.model_selection import ModelSelection
from rlkit.training.schedule import SupplyLimits
from rlkit.training.step import StepRecipe


def make_step_recipe(
    config: Config, loss: Loss, rate: LearningRate, preparation: Preparation, *, is_repeatable: bool
) -> StepRecipe:
    """Return the settings of the steps of a run; `is_repeatable`: equal requests to the service get equal answers."""
    batch, schedule = config.batch, config.schedule
    in_order = schedule.is_in_draw_order(is_repeatable=is_repeatable)
    limits = SupplyLimits(batch.groups, config.step_count, schedule.steps_ahead, in_order, batch.replaced_groups_limit)
    streaming = schedule.streaming(is_repeatable=is_repeatable)
    supervised = frozenset(config.envs.keys() - config.reinforced_envs.keys())
    return StepRecipe(preparation, loss, config.optimizer, rate, limits, batch.substeps, streaming, supervised)


def make_preparation(
    config: Config, estimators: Mapping[str, Estimator], loss: Loss, *, references: References
) -> Preparation:
    """Return the settings that turn groups into training sequences."""
    batch, length = config.batch, config.length_penalty
    penalties = {
        name: LengthPenalty(length.coefficient, length.from_tokens, config.full_penalty_tokens(name))
        for name in (config.reinforced_envs if length.coefficient else ())
    }
    clip = {} if batch.clip_advantages is None else dict.fromkeys(config.reinforced_envs, batch.clip_advantages)
    normalization = None
    if batch.normalize != "none":
        tokens = batch.normalize_tokens or config.sampling.max_tokens
        normalization = Normalization(batch.normalize, batch.groups / batch.substeps, tokens)
    return Preparation(
        estimators,
        loss.needs_every_sequence,
        batch.max_tokens,
        batch.overlong,
        length_penalty=penalties,
        clip=clip,
        references=references,
        normalization=normalization,
    )


def make_learning_rate(config: Config) -> LearningRate:
    """Return the learning rate of each step; `ConfigError` if it is `auto` and no rate is known for the model."""
    optimizer, warm_start = config.optimizer, config.warm_start
    peak = advised_learning_rate(config.model) if optimizer.learning_rate == "auto" else optimizer.learning_rate
    steps = config.step_count - config.warm_start_steps
    rate = LearningRate(peak, optimizer.schedule, optimizer.warmup_steps, optimizer.final_fraction, steps)
    if warm_start is None:
        return rate
    warmup_steps = min(optimizer.warmup_steps, warm_start.steps - 1)
    peak = warm_start.learning_rate or peak
    return replace(rate, earlier=replace(rate, peak=peak, warmup_steps=warmup_steps, steps=warm_start.steps))


def make_model_selection(config: Config, metrics: Sequence[tuple[int, Mapping[str, float]]]) -> ModelSelection:
    """Return the model selection of a run after steps with these metrics."""
    criterion = config.best.model_copy(update={"metric": config.best_metric})
    selection = ModelSelection(criterion, config.checkpoint.keep_last, config.checkpoint.keep_best)
    for step, step_metrics in metrics:
        selection.add(step, step_metrics)
    return selection
