"""The learning rate of each step.

Invariant: it is a function of the step's number and of the configuration alone, so that a repeated step has the same
rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlkit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A learning rate that rises in equal parts over the warm-up, and falls until the end of the run.

    With W warm-up steps of N in all, step s (from 1) has s/(W + 1) of the peak while s ≤ W, and after that, with
    x = (s − W − 1) / (N − W) and f the final fraction,

        constant   1
        linear     1 − (1 − f) · x
        cosine     f + (1 − f) · (1 + cos πx) / 2     (Loshchilov and Hutter 2017, eq. 5, without restarts)

    So step W + 1 has the peak, and the step after the last would have f of it: no step is taken with a rate of 0.

    Args:
        warmup_steps: W.
        final_fraction: f, from 0 to below 1.
        steps: N, more than W.
    """

    peak: float
    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0
    steps: int = 1

    def at(self, step: int) -> float:
        """Return the rate of a step, 1 … N, and of all its substeps."""
        if step <= self.warmup_steps:
            return self.peak * step / (self.warmup_steps + 1)
        part = (step - self.warmup_steps - 1) / (self.steps - self.warmup_steps)
        match self.shape:
            case "constant":
                return self.peak
            case "linear":
                return self.peak * (1 - (1 - self.final_fraction) * part)
            case "cosine":
                return self.peak * (
                    self.final_fraction + (1 - self.final_fraction) * (1 + math.cos(math.pi * part)) / 2
                )


def advised_learning_rate(model: str) -> float:
    """Return the learning rate for LoRA that tinker-cookbook advises, `tinker_cookbook.hyperparam_utils.get_lr`.

    It follows from the model's family, which the name tells, and from its width, which the cookbook knows or reads from
    the model's configuration: in the directory `model`, in the cache of the hub, or on the hub.

    Raises:
        ConfigError: the cookbook has no advice for this model.
    """
    from tinker_cookbook.hyperparam_utils import get_lr

    folder = Path(model).expanduser()
    try:
        if folder.is_dir() and _family(model) != _family(folder.name):
            raise ValueError("the name of the folder does not say of which family it is")
        return float(get_lr(str(folder) if folder.is_dir() else model))
    except Exception as error:  # of the cookbook, of transformers or of the hub, whose kinds are many
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"optimizer.learning_rate: there is no advice for {model} ({reason}); set optimizer.learning_rate to a "
            "number"
        ) from error


def _family(name: str) -> str | None:
    """Return the family by which `get_lr` chooses."""
    return next((family for family in ("llama", "qwen") if family in name.lower()), None)
