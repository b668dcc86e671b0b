"""The losses of the Tinker service by name, with their settings, and losses of the user's own.

All are sums over tokens; scaling is in the advantages.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, assert_never, cast

import numpy as np
from numpy.typing import NDArray

from rlkit._util.json_values import text_of
from rlkit.config.loading.objects import load_object
from rlkit.config.schema.objective import (
    CISPOLoss,
    CustomLoss,
    DROLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    LossConfig,
    PPOLoss,
)
from rlkit.errors import ConfigError, UsageError
from rlkit.types import Bools, Datum

if TYPE_CHECKING:
    from torch import Tensor


class LossFunction(Protocol):
    """A loss of your own, differentiated on this machine.

    ::

        def reinforce(data, logprobs):
            terms = [-(torch.tensor(d.advantages) * logp).sum() for d, logp in zip(data, logprobs, strict=True)]
            return torch.stack(terms).sum(), {}
    """

    def __call__(self, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
        """The loss, a scalar tensor, and metrics to report.

        Args:
            data: the batch.
            logprobs: for each datum, [N] float32, the trainer's log-probability of each target; differentiate these.
        """
        ...


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as the service takes it: its name and the numbers that set it; `function` for one of this machine."""

    name: str = "importance_sampling"
    settings: Mapping[str, float] = field(default_factory=dict[str, float])
    function: LossFunction | None = None

    @property
    def passes(self) -> int:
        """How often the service computes each sequence: one of this machine's is first asked for log-probabilities."""
        return 1 if self.function is None else 2

    @property
    def needs_every_sequence(self) -> bool:
        """Whether a sequence without advantage may still have a gradient."""
        return self.function is not None

    @property
    def by_sequence(self) -> bool:
        """Whether the ratio is one for a whole sequence, of the sampled tokens, which the service must be told."""
        return self.name == "gspo"

    def clips(self, log_ratios: NDArray[np.float64], advantages: NDArray[np.float64]) -> Bools | None:
        """Which sampled tokens of a sequence this loss clips, [S]; None for one that clips none.

        PPO and GSPO clip a token that has gone so far already in the direction of its advantage, and give it no
        gradient; CISPO clips its weight.

        Args:
            log_ratios: [S], log p(trainer) − log q(sampler).
            advantages: [S].
        """
        if "clip_high_threshold" not in self.settings:
            return None
        if self.by_sequence and len(log_ratios):
            log_ratios = np.full_like(log_ratios, log_ratios.mean())
        with np.errstate(over="ignore"):  # infinity is above any threshold
            ratios = np.exp(log_ratios)
        low, high = ratios < self.settings["clip_low_threshold"], ratios > self.settings["clip_high_threshold"]
        return low | high if self.name == "cispo" else (low & (advantages < 0)) | (high & (advantages > 0))


def loss(config: LossConfig) -> Loss:
    """The loss that a configuration asks for.

    Raises:
        ConfigError: there is no function at the path that it gives.
    """
    match config:
        case ImportanceSamplingLoss():
            return Loss("importance_sampling")
        case PPOLoss() | CISPOLoss() | GSPOLoss():
            return Loss(config.name, {"clip_low_threshold": config.clip_low, "clip_high_threshold": config.clip_high})
        case DROLoss():
            return Loss("dro", function=dro(config.beta))
        case CustomLoss():
            found = load_object(config.function, field="loss.function")
            if not callable(found):
                raise ConfigError(f"loss.function: {config.function} is not a function")
            return Loss("custom", function=cast("LossFunction", found))
        case _:
            assert_never(config)


def computed(
    function: LossFunction, data: Sequence[Datum], logprobs: Sequence[Tensor]
) -> tuple[Tensor, Mapping[str, float]]:
    """What a loss of this machine gives, checked.

    Args:
        function: the loss.
        data: the batch.
        logprobs: for each datum, [N] float32.

    Raises:
        UsageError: it raised, or gave something else than it must.
    """
    import torch

    try:
        found = cast("object", function(data, logprobs))
    except (Exception, SystemExit) as error:  # the user's own code; an exit would leave the SDK's thread without a word
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        raise UsageError(f"loss.function: {type(error).__name__}: {text_of(error)}{place}") from error
    pair = cast("tuple[object, ...]", found) if isinstance(found, tuple) else ()
    if len(pair) != 2:
        raise _wrong(cast("object", found))
    value, metrics = pair
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise UsageError("loss.function: the loss must be one number, a tensor that depends on the log-probabilities")
    if not value.isfinite():
        raise UsageError(f"loss.function: the loss is {value.item()}")
    if not isinstance(metrics, Mapping):
        raise _wrong(pair)
    reported = dict[str, float]()
    for name, number in cast("Mapping[str, float]", metrics).items():
        try:
            reported[name] = float(number)
        except (TypeError, ValueError, RuntimeError) as error:  # the last is a tensor's of several numbers
            raise UsageError(f"loss.function: the metric {name!r} is no number: {text_of(error)}") from error
    return value, reported


def _wrong(found: object) -> UsageError:
    if inspect.iscoroutine(found):
        found.close()
        given = "a coroutine, as it is an async function"
    else:
        given = "None" if found is None else f"a value of type {type(found).__name__}"
    return UsageError(f"loss.function: it returned {given}: it must return a pair, the loss and a mapping of metrics")


def dro(beta: float) -> LossFunction:
    """−Σ (A · log p − β/2 · (log p − log q)²) over the sampled tokens (Richemond et al. 2024, arXiv:2405.19107).

    The service's own `dro` sums over all positions. Where no token was sampled there is no q, and whatever number stood
    for it would be trained towards; so this one is computed here.
    """

    def objective(data: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
        import torch

        terms = list[torch.Tensor]()
        for datum, every in zip(data, logprobs, strict=True):
            sampled = torch.from_numpy(datum.mask)  # pyright: ignore[reportUnknownMemberType]  torch's own stub
            advantages, q = torch.tensor(datum.advantages)[sampled], torch.tensor(datum.logprobs)[sampled]
            logp = every[sampled]
            terms.append(-(logp * advantages - beta / 2 * (logp - q).square()).sum())
        return torch.stack(terms).sum(), {}

    return objective
