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


def make_supply_limits(config: Config, *, is_repeatable: bool) -> SupplyLimits:
    """Return the limits on the groups of a run; `is_repeatable`: equal requests to the service get equal answers."""
    return SupplyLimits(
        groups=config.batch.groups,
        steps=config.step_count,
        max_staleness=config.schedule.steps_ahead,
        in_order=config.schedule.is_in_draw_order(is_repeatable=is_repeatable),
        max_replaced_groups=config.batch.replaced_groups_limit,
    )


def make_step_recipe(
    config: Config, loss: Loss, rate: LearningRate, preparation: Preparation, *, is_repeatable: bool
) -> StepRecipe:
    """Return the settings for the requests of a step; `is_repeatable` as in `make_supply_limits`."""
    return StepRecipe(
        preparation,
        loss,
        config.optimizer,
        rate,
        config.batch.groups,
        config.batch.substeps,
        streaming=config.schedule.streaming(is_repeatable=is_repeatable),
        supervised=frozenset(config.envs.keys() - config.reinforced_envs.keys()),
    )


def make_preparation(
    config: Config, estimators: Mapping[str, Estimator], loss: Loss, *, references: References
) -> Preparation:
    """Return the settings that turn groups into training sequences."""
    batch, length = config.batch, config.length_penalty
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
        batch.overlong,
        length_penalty=penalties,
        clip=batch.clip_advantages,
        references=references,
        normalization=normalization,
    )


def make_learning_rate(config: Config) -> LearningRate:
    """Return the learning rate of each step; `ConfigError` if it is `auto` and no rate is known for the model."""
    optimizer, warm_start = config.optimizer, config.warm_start
    peak = optimizer.learning_rate
    rate = LearningRate(
        peak=advised_learning_rate(config.model) if peak == "auto" else peak,
        shape=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        final_fraction=optimizer.final_fraction,
        steps=config.step_count - config.warm_start_steps,
    )
    if warm_start is None:
        return rate
    warmup_steps = min(optimizer.warmup_steps, warm_start.steps - 1)
    peak = warm_start.learning_rate or rate.peak
    return replace(rate, earlier=replace(rate, peak=peak, warmup_steps=warmup_steps, steps=warm_start.steps))


def make_model_selection(config: Config, metrics: Sequence[tuple[int, Mapping[str, float]]]) -> ModelSelection:
    """Return the model selection of a run after steps with these metrics."""
    criterion = config.best.model_copy(update={"metric": config.best_metric})
    selection = ModelSelection(criterion, config.checkpoint.keep_last, config.checkpoint.keep_best)
    for step, step_metrics in metrics:
        selection.add(step, step_metrics)
    return selection
