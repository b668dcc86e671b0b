"""Losses that this machine computes, as callbacks of the SDK.

Invariant: whatever a user's loss does, the SDK receives one finite number with a gradient, and numbers as metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from rlkit._util.frames import describe_error
from rlkit._util.json_values import describe_type, safe_str
from rlkit.algorithms.losses import LocalLoss
from rlkit.errors import UsageError
from rlkit.types import Datum

if TYPE_CHECKING:
    from torch import Tensor


def compute_loss(loss: LocalLoss, data: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Return the value and the metrics of a local loss; raise UsageError if it fails or they are invalid."""
    import torch

    def fault(problem: str) -> UsageError:
        return UsageError(f"{'loss.function' if loss.name == 'custom' else f'the loss {loss.name}'}: {problem}")

    try:
        result = cast("object", loss.compute(data, logprobs))
    except (Exception, SystemExit) as error:  # the user's own code; SystemExit would silently end the SDK's thread
        raise fault(describe_error(error)) from error
    pair = cast("tuple[object, ...]", result) if isinstance(result, tuple) else ()
    value, metrics = pair if len(pair) == 2 else (None, None)
    if not isinstance(metrics, Mapping):
        answer = describe_type(cast("object", result))
        raise fault(f"it returned {answer}: it must return a pair, the loss and a mapping of metrics")
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise fault("the loss must be one number, a tensor that depends on the log-probabilities")
    if not value.isfinite():
        raise fault(f"the loss is {value.item()}")
    reported = dict[str, float]()
    for name, number in cast("Mapping[str, float]", metrics).items():
        try:
            reported[name] = float(number)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
            raise fault(f"the metric {name!r} is not a number: {safe_str(error)}") from error
    return value, reported
