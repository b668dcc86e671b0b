"""The losses of the Tinker service by name, with their settings, and losses of the user's own.

All are sums over tokens; scaling is in the advantages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, assert_never, cast

from rlkit.config.objects import load_object
from rlkit.config.schema import CustomLoss, ImportanceSamplingLoss, LossConfig, PPOLoss
from rlkit.errors import ConfigError
from rlkit.types import Datum

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
    """A loss as the service takes it: its name and the numbers that set it; `function` for one of the user's own."""

    name: str = "importance_sampling"
    settings: Mapping[str, float] = field(default_factory=dict[str, float])
    function: LossFunction | None = None

    @property
    def needs_every_sequence(self) -> bool:
        """Whether a sequence without advantage may still have a gradient."""
        return self.function is not None


def loss(config: LossConfig) -> Loss:
    """The loss that a configuration asks for.

    Raises:
        ConfigError: there is no function at the path that it gives.
    """
    match config:
        case ImportanceSamplingLoss():
            return Loss("importance_sampling")
        case PPOLoss():
            return Loss("ppo", {"clip_low_threshold": config.clip_low, "clip_high_threshold": config.clip_high})
        case CustomLoss():
            found = load_object(config.function, field="loss.function")
            if not callable(found):
                raise ConfigError(f"loss.function: {config.function} is not a function")
            return Loss("custom", function=cast("LossFunction", found))
        case _:
            assert_never(config)
