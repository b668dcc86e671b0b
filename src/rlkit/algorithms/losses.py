"""The losses of a run by name, with their settings; the Tinker service or this machine computes them.

All are sums over tokens; scaling is in the advantages. Below, p is the trained model's probability of a token, q the
sampler's, and A the advantage. Reading a configuration imports this module, so it loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol, cast

import numpy as np
from pydantic import Field

from rlkit._util.sections import NamedSection
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.algorithms.reward_scale import Values
    from rlkit.types import Bools, Datum

type LossResult = tuple[Tensor, Mapping[str, float]]
"""A loss, as a scalar tensor, and metrics to report."""


class LossFunction(Protocol):
    """A loss of your own, differentiated on this machine.

    ::

        def reinforce(data, logprobs):
            terms = [-(torch.tensor(d.advantages) * logp).sum() for d, logp in zip(data, logprobs, strict=True)]
            return torch.stack(terms).sum(), {}
    """

    def __call__(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> LossResult:
        """Return the loss, a scalar tensor, and metrics to report.

        Args:
            logprobs: for each datum, [N] float32, the trainer's log-probability of each target; differentiate these.
        """
        ...


class Loss(NamedSection):
    """A loss that the service computes: its settings are its fields, its formula is in its docstring.

    The first paragraph of the docstring is the reference of the configuration, which finds the class by its name in
    `LOSSES`.
    """

    kind: ClassVar = "loss"
    passes: ClassVar[int] = 1
    """Passes of the service over each sequence."""
    needs_every_sequence: ClassVar[bool] = False
    """A sequence without advantage may still have a gradient."""
    by_sequence: ClassVar[bool] = False
    """One ratio holds for a whole sequence, over its sampled tokens, which the service must know."""
    normalize_problem: ClassVar[str | None] = None
    """The reason why advantages may not be normalised; None if they may."""
    service_name: ClassVar[str | None] = None
    """The service's name of the loss, if it is another."""
    clips_tokens: ClassVar[bool] = False
    """`clips` tells which, for the metric `optim/ratio/clipped`."""

    def service_loss(self) -> tuple[str, dict[str, float]]:
        """Return the service's name of the loss and its settings there."""
        return self.service_name or self.name, {}

    def clips(self, log_ratios: Values, advantages: Values) -> Bools | None:
        """Return which sampled tokens of a sequence the loss clips, [S]; None if it never clips.

        Args:
            log_ratios: [S], log p(trainer) − log q(sampler).
            advantages: [S].
        """
        return None


class ClippedLoss(Loss):
    """A loss with bounds of the ratio p/q; `clips` is the rule of PPO."""

    clips_tokens: ClassVar = True
    clip_low: float
    clip_high: float

    def service_loss(self) -> tuple[str, dict[str, float]]:  # noqa: D102  inherited
        bounds = {"clip_low_threshold": self.clip_low, "clip_high_threshold": self.clip_high}
        return self.service_name or self.name, bounds

    def clips(self, log_ratios: Values, advantages: Values) -> Bools:
        """Return which ratios are past the bound in the direction of their advantage, and so have no gradient."""
        low, high = self._outside(log_ratios)
        return (low & (advantages < 0)) | (high & (advantages > 0))

    def _outside(self, log_ratios: Values) -> tuple[Bools, Bools]:
        """Return which ratios are below the lower bound, and which above the upper one."""
        with np.errstate(over="ignore"):  # infinity is above any bound
            ratios = np.exp(log_ratios)
        return ratios < self.clip_low, ratios > self.clip_high


class LocalLoss(Loss):
    """A loss that is differentiated on this machine, with a second pass over the batch.

    The service first returns log-probabilities, and then takes the gradient with respect to them.
    """

    passes: ClassVar = 2
    needs_every_sequence: ClassVar = True

    def compute(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> LossResult:
        """Return the loss and metrics as a `LossFunction` does."""
        raise NotImplementedError


class ImportanceSampling(Loss):
    """−Σ (p/q)·A, the policy gradient corrected for the sampler's probabilities. The ratio is not bounded: with an old
    sampler, `cispo` is the same with a bound.
    """

    name: ClassVar = "importance_sampling"


class PPO(ClippedLoss):
    """PPO's clipped surrogate, −Σ min((p/q)·A, clip(p/q)·A): a token past the bounds has no gradient any more."""

    name: ClassVar = "ppo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Lower bound of the ratio p/q itself, as the Tinker service takes it and has it by default."""
    clip_high: Annotated[float, Field(ge=1)] = 1.2
    """Upper bound of the ratio p/q, by default the service's own."""


class CISPO(ClippedLoss):
    """−Σ clip(p/q)·A·log p with the ratio held constant: truncated importance weights. Every token keeps a gradient."""

    name: ClassVar = "cispo"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lower bound of the weight p/q. At 0, the service's own, only large weights are cut, which are what adds noise."""
    clip_high: Annotated[float, Field(ge=1)] = 4.0
    """Upper bound of the weight p/q, by default the service's own; 1 gives no token more than its on-policy weight."""

    def clips(self, log_ratios: Values, advantages: Values) -> Bools:
        """Return which weights are cut."""
        low, high = self._outside(log_ratios)
        return low | high


class DRO(LocalLoss):
    """−Σ (A·log p − β/2·(log p − log q)²), which draws the policy towards the sampler's. Computed on this machine, with
    a second pass over the batch: the service's own would draw the tokens that were not sampled, too.

    Source: Richemond et al. 2024 (arXiv:2405.19107). Where no token was sampled there is no q, and any number in
    its place would be trained towards.
    """

    name: ClassVar = "dro"
    normalize_problem: ClassVar = (
        "dro is not linear in the advantage, so that dividing it would change what beta means; set normalize to none, "
        "or use another loss"
    )
    beta: Annotated[float, Field(gt=0)] = 0.05
    """Strength of the pull, by default as in the service's documentation."""

    def compute(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> LossResult:  # noqa: D102  inherited
        import torch

        terms = list[torch.Tensor]()
        for datum, row in zip(data, logprobs, strict=True):
            sampled = torch.from_numpy(datum.mask)  # pyright: ignore[reportUnknownMemberType]  torch's own stub
            advantages, q = torch.tensor(datum.advantages)[sampled], torch.tensor(datum.logprobs)[sampled]
            logp = row[sampled]
            terms.append(-(logp * advantages - self.beta / 2 * (logp - q).square()).sum())
        return torch.stack(terms).sum(), {}


class GSPO(PPO):
    """PPO's clipped surrogate with one ratio for a whole sequence, the geometric mean of its sampled tokens' p/q."""

    name: ClassVar = "gspo"
    by_sequence: ClassVar = True
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Lower bound of the sequence's ratio, by default that of the service. A mean over tokens moves little: GSPO's
    authors clip at 0.9997."""
    clip_high: Annotated[float, Field(ge=1)] = 1.2
    """Upper bound of the sequence's ratio, by default that of the service; GSPO's authors clip at 1.0004."""

    def clips(self, log_ratios: Values, advantages: Values) -> Bools:
        """Return which tokens have an advantage in whose direction the ratio of the sequence is past the bound."""
        mean = np.full_like(log_ratios, log_ratios.mean()) if len(log_ratios) else log_ratios
        return super().clips(mean, advantages)


LOSSES: dict[str, type[Loss]] = {loss.name: loss for loss in (ImportanceSampling, PPO, CISPO, DRO, GSPO)}
"""Losses that a configuration's `loss` names; add a class of your own to make its name known."""


class FunctionLoss(LocalLoss):
    """The user's own `LossFunction`."""

    name: ClassVar = "custom"
    function: Callable[..., object]

    def compute(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> LossResult:  # noqa: D102  inherited
        return cast("LossFunction", self.function)(data, logprobs)


def compute_loss(loss: LocalLoss, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Return the value and the metrics of a local loss, checked; raise UsageError if it fails or returns others."""
    import torch

    from rlkit.algorithms.user_code import describe_error, describe_value, safe_str

    def fault(problem: str) -> UsageError:
        return UsageError(f"{'loss.function' if loss.name == 'custom' else f'the loss {loss.name}'}: {problem}")

    try:
        result = cast("object", loss.compute(data, logprobs))
    except (Exception, SystemExit) as error:  # the user's own code; an exit would leave the SDK's thread without a word
        raise fault(describe_error(error)) from error
    pair = cast("tuple[object, ...]", result) if isinstance(result, tuple) else ()
    value, metrics = pair if len(pair) == 2 else (None, None)
    if not isinstance(metrics, Mapping):
        answer = describe_value(cast("object", result))
        raise fault(f"it returned {answer}: it must return a pair, the loss and a mapping of metrics")
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise fault("the loss must be one number, a tensor that depends on the log-probabilities")
    if not value.isfinite():
        raise fault(f"the loss is {value.item()}")
    reported = dict[str, float]()
    for name, number in cast("Mapping[str, float]", metrics).items():
        try:
            reported[name] = float(number)
        except (TypeError, ValueError, RuntimeError) as error:  # the last is a tensor's of several numbers
            raise fault(f"the metric {name!r} is no number: {safe_str(error)}") from error
    return value, reported
