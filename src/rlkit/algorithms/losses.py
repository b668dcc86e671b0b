"""Losses by name, with their settings; the service or this machine computes them.

Every loss is a sum over tokens; normalisation is applied to the advantages beforehand (`shaping`). Below, p is the
trained model's probability of a token, q the sampler's, and A the advantage. Loading a configuration imports this
module, so torch is imported in functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol, cast

import numpy as np
from pydantic import Field

from rlkit._util.sections import NamedSection
from rlkit.algorithms.reward_scale import Values
from rlkit.errors import UsageError
from rlkit.types import Bools, Datum

if TYPE_CHECKING:
    from torch import Tensor

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
        """Return the loss and metrics to report.

        Args:
            logprobs: the trainer's log-probability of each target, [N] float32 for each datum; differentiate these.
        """
        ...


class Loss(NamedSection):
    """A loss that the service computes; its fields are its settings.

    `LOSSES` maps names to classes. The first paragraph of a class's docstring is shown in the configuration reference.
    """

    kind: ClassVar = "loss"
    passes: ClassVar[int] = 1
    """Number of forward passes that the service makes over each sequence."""
    needs_every_sequence: ClassVar[bool] = False
    """Train on sequences without an advantage too, because the loss may have a gradient on them."""
    has_sequence_ratio: ClassVar[bool] = False
    """The loss uses one ratio p/q per sequence, over its sampled tokens; requests must mark these tokens."""
    normalization_problem: ClassVar[str | None] = None
    """Reason why advantages cannot be normalised with this loss; None if they can."""
    service_name: ClassVar[str | None] = None
    """Name of the loss in the service's API, if it differs from `name`."""

    def service_loss(self) -> tuple[str, dict[str, float]]:
        """Return the name and the settings of the loss in the service's API."""
        return self.service_name or self.name, {}

    def clips(self, log_ratios: Values, advantages: Values) -> Bools | None:
        """Return the mask of clipped tokens of a sequence, [S]; None if the loss never clips.

        Args:
            log_ratios: log p − log q of the sampled tokens, [S].
            advantages: [S].
        """
        return None


class ClippedLoss(Loss):
    """A loss with bounds of the ratio p/q, clipped as in PPO; `clips` is reported as `optim/ratio/clipped`."""

    clip_low: float
    clip_high: float

    def service_loss(self) -> tuple[str, dict[str, float]]:  # noqa: D102  inherited
        bounds = {"clip_low_threshold": self.clip_low, "clip_high_threshold": self.clip_high}
        return self.service_name or self.name, bounds

    def clips(self, log_ratios: Values, advantages: Values) -> Bools:
        """Mask the tokens without a gradient: ratio above `clip_high` with A > 0, or below `clip_low` with A < 0."""
        low, high = self._outside(log_ratios)
        return (low & (advantages < 0)) | (high & (advantages > 0))

    def _outside(self, log_ratios: Values) -> tuple[Bools, Bools]:
        """Return the masks of ratios below the lower bound and above the upper bound."""
        with np.errstate(over="ignore"):  # infinity is above any bound
            ratios = np.exp(log_ratios)
        return ratios < self.clip_low, ratios > self.clip_high


class LocalLoss(Loss):
    """A loss that is differentiated on this machine, with a second pass over the batch.

    The service first returns log-probabilities, then receives the gradient with respect to them.
    """

    passes: ClassVar = 2
    needs_every_sequence: ClassVar = True

    def compute(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> LossResult:
        """Return the loss and metrics as a `LossFunction` does."""
        raise NotImplementedError


class ImportanceSampling(Loss):
    """−Σ (p/q)·A, the policy gradient corrected for the sampler's probabilities. The ratio has no bound; `cispo` adds a
    bound, for samplers with old weights.
    """

    name: ClassVar = "importance_sampling"


class PPO(ClippedLoss):
    """PPO's clipped surrogate, −Σ min((p/q)·A, clip(p/q)·A); clipped tokens have no gradient."""

    name: ClassVar = "ppo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Lower bound of the ratio p/q, not of its distance to 1; the service's parameter and default."""
    clip_high: Annotated[float, Field(ge=1)] = 1.2
    """Upper bound of the ratio p/q; the service's default."""


class CISPO(ClippedLoss):
    """−Σ clip(p/q)·A·log p with a constant ratio: truncated importance weights. Every token keeps a gradient."""

    name: ClassVar = "cispo"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lower bound of the weight p/q. The default, also the service's, truncates only large weights: these cause the
    variance."""
    clip_high: Annotated[float, Field(ge=1)] = 4.0
    """Upper bound of the weight p/q; the service's default. 1 caps every weight at its on-policy value."""

    def clips(self, log_ratios: Values, advantages: Values) -> Bools:
        """Mask the tokens whose weights are truncated."""
        low, high = self._outside(log_ratios)
        return low | high


class DRO(LocalLoss):
    """−Σ (A·log p − β/2·(log p − log q)²), with a quadratic penalty that keeps p close to q. Computed on this machine,
    with a second pass over the batch, because the service's `dro` also penalises tokens that were not sampled.

    Source: Richemond et al. 2024 (arXiv:2405.19107). Tokens that were not sampled have no q.
    """

    name: ClassVar = "dro"
    normalization_problem: ClassVar = (
        "dro is not linear in the advantage, so normalisation would change the meaning of beta; set normalize to none, "
        "or use another loss"
    )
    beta: Annotated[float, Field(gt=0)] = 0.05
    """Coefficient β of the penalty; the default of the service's documentation."""

    def compute(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> LossResult:  # noqa: D102  inherited
        import torch

        terms = list[torch.Tensor]()
        for datum, row in zip(data, logprobs, strict=True):
            sampled = torch.from_numpy(datum.mask)  # pyright: ignore[reportUnknownMemberType]  torch's own stub
            advantages, q = torch.tensor(datum.advantages)[sampled], torch.tensor(datum.logprobs)[sampled]
            logp = row[sampled]
            terms.append(-(logp * advantages - self.beta / 2 * (logp - q).square()).sum())
        return torch.stack(terms).sum(), {}


class CrossEntropy(Loss):
    """−Σ A·log p, with an advantage of 1 for each token to imitate: supervised learning, for `source`."""

    name: ClassVar = "cross_entropy"


class Distillation(LocalLoss):
    """`importance_sampling`, where the term of a sampled token and a teacher is averaged over the teacher's likeliest
    tokens, if the sampled token is one of them: the same expectation, with less variance for one teacher alone.
    Computed on this machine, with a second pass over the batch.

    The terms of the K tokens v are −Σ_v w·p(v)·(log p_teacher(v) − log p(v))·∇log p(v) / Σ_v p(v): the mean of the
    sampled token's term, given that it is one of these tokens (Rao and Blackwell). They have no correction for replies
    of older weights.
    """

    name: ClassVar = "distillation"
    needs_every_sequence: ClassVar = False
    top_tokens: Annotated[int, Field(ge=1, le=1024)] = 20
    """Number K of each teacher's likeliest tokens. Lower it if the service refuses so many."""

    def compute(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> LossResult:  # noqa: D102  inherited
        import torch

        terms = list[torch.Tensor]()
        for datum, row in zip(data, logprobs, strict=True):
            logp = row if datum.top is None else row[:, 0]
            advantages, q = torch.tensor(datum.advantages), torch.tensor(datum.logprobs)
            parts: list[Tensor] = [] if datum.top is None else [*map(torch.tensor, datum.top), row[:, 1:]]
            # the columns of each teacher
            columns = [list[torch.Tensor](part.split(self.top_tokens, 1)) for part in parts]  # pyright: ignore[reportUnknownArgumentType]  torch's own stub
            for tokens, wanted, weights, top in zip(*columns, strict=True):
                is_sampled = (tokens == torch.tensor(datum.targets)[:, None]) & (weights > 0)
                advantages = advantages - (is_sampled * weights * (wanted - q[:, None])).sum(1)
                p = top.detach().exp() * (weights > 0) * is_sampled.any(1, keepdim=True)
                mean = weights * p / p.sum(1, keepdim=True).clamp_min(1e-30) * (wanted - top.detach())
                terms.append(-(mean * (top - top.detach()).exp()).sum())
            terms.append(-((logp - q).exp() * advantages).sum())
        return torch.stack(terms).sum(), {}


class GSPO(PPO):
    """PPO's clipped surrogate with one ratio for a whole sequence, the geometric mean of its sampled tokens' p/q."""

    name: ClassVar = "gspo"
    has_sequence_ratio: ClassVar = True
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Lower bound of the sequence's ratio; the service's default. A mean over tokens varies little: GSPO's authors clip
    at 0.9997."""
    clip_high: Annotated[float, Field(ge=1)] = 1.2
    """Upper bound of the sequence's ratio; the service's default. GSPO's authors clip at 1.0004."""

    def clips(self, log_ratios: Values, advantages: Values) -> Bools:
        """Mask tokens by PPO's rule, with the sequence's mean log-ratio in place of each token's."""
        mean = np.full_like(log_ratios, log_ratios.mean()) if len(log_ratios) else log_ratios
        return super().clips(mean, advantages)


LOSSES: dict[str, type[Loss]] = {
    loss.name: loss for loss in (ImportanceSampling, PPO, CISPO, DRO, GSPO, CrossEntropy, Distillation)
}
"""Classes of the losses by name; add a class of your own to make its name known."""


class FunctionLoss(LocalLoss):
    """The user's own `LossFunction`."""

    name: ClassVar = "custom"
    function: Callable[..., object]

    def model_post_init(self, context: object) -> None:  # noqa: D102  inherited
        with suppress(ValueError):  # a built-in function may have no signature
            try:
                signature(self.function).bind((), ())
            except TypeError as error:
                raise UsageError(f"loss.function: it must take the data and the log-probabilities: {error}") from None

    def compute(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> LossResult:  # noqa: D102  inherited
        return cast("LossFunction", self.function)(data, logprobs)
