"""Building SDK requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import tinker
import torch
from tinker import types

from rlkit.engine.model.delta_net import DeltaNet
from rlkit.engine.model.matrices import PackedMatrix
from rlkit.engine.model.weights import Weights


def prompt(*tokens: int) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(tokens))


def rl_datum(tokens: Sequence[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """A prompt and a completion, with the advantage on the sampled tokens only."""
    whole = [*tokens, *sequence.tokens]
    before = len(tokens) - 1
    return types.Datum(
        model_input=tinker.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": whole[1:],
            "logprobs": [0.0] * before + list(sequence.logprobs or []),
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


def ce_datum(tokens: Sequence[int]) -> types.Datum:
    """Next-token prediction over a whole text."""
    return types.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)},
    )


def logprobs_of(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [np.array(record["logprobs"].data, dtype=np.float32) for record in output.loss_fn_outputs]


def as_double(weights: Weights) -> Weights:
    """A float64 copy, whose products are torch's."""

    def double(value: object) -> object:
        value = value.unpack() if isinstance(value, PackedMatrix) else value
        if isinstance(value, DeltaNet):
            return replace(value, **{f.name: double(getattr(value, f.name)) for f in fields(value)})
        return value.double() if isinstance(value, torch.Tensor) else value

    layers = tuple(replace(l, **{f.name: double(getattr(l, f.name)) for f in fields(l)}) for l in weights.layers)  # noqa: E741
    return replace(weights, layers=layers, **{n: double(getattr(weights, n)) for n in ("embedding", "norm", "output")})
