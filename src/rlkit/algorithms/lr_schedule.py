"""Learning rate of each step.

Invariant: the rate depends only on the configuration and the step's number, so a repeated step has the same rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rlkit._util.paths import expand_user
from rlkit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A learning rate with a linear warm-up, then a constant or decaying rate.

    With W warm-up steps of N in all, step s (from 1) has s/(W + 1) of the peak if s ≤ W, else, with
    x = (s − W − 1) / (N − W) and f the final fraction,

        constant   1
        linear     1 − (1 − f) · x
        cosine     f + (1 − f) · (1 + cos πx) / 2     (Loshchilov and Hutter 2017, eq. 5, without restarts)

    Step W + 1 has the peak rate. Step N + 1 would have the final fraction, so no step has a rate of 0.
    """

    peak: float
    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0  # f, from 0 to below 1
    steps: int = 1  # N > W
    earlier: LearningRate | None = None  # rate of the steps before these, which are counted from 1 after them

    def at(self, step: int) -> float:
        """Return the rate of a step, 1 … N, and its substeps."""
        if self.earlier is not None:
            if step <= self.earlier.steps:
                return self.earlier.at(step)
            step -= self.earlier.steps
        if step <= self.warmup_steps:
            return self.peak * step / (self.warmup_steps + 1)
        part = (step - self.warmup_steps - 1) / (self.steps - self.warmup_steps)
        match self.shape:
            case "constant":
                return self.peak
            case "linear":
                return self.peak * (1 - (1 - self.final_fraction) * part)
            case "cosine":
                final = self.final_fraction
                return self.peak * (final + (1 - final) * (1 + math.cos(math.pi * part)) / 2)


def advised_learning_rate(model: str) -> float:
    """Return the LoRA learning rate that `tinker_cookbook.hyperparam_utils.get_lr` recommends.

    It depends on the model's family, which is in the name, and on its width, which the cookbook reads from the model's
    configuration: in the directory `model`, in the hub's cache, or on the hub.

    Raises:
        ConfigError: the cookbook has no recommendation for this model.
    """
    from tinker_cookbook.hyperparam_utils import get_lr

    folder = expand_user(model)
    try:
        if folder.is_dir() and _family(model) != _family(folder.name):
            raise ValueError("the folder's name does not show the model's family")
        return float(get_lr(str(folder) if folder.is_dir() else model))
    except Exception as error:  # the cookbook, transformers and the hub raise many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = f"there is no advice for {model} ({reason}); set optimizer.learning_rate to a number"
        raise ConfigError(f"optimizer.learning_rate: {problem}") from error


def _family(name: str) -> str | None:
    """Return the family by which `get_lr` chooses."""
    return next((family for family in ("llama", "qwen") if family in name.lower()), None)
