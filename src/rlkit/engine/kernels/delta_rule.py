"""Gated delta rule, compiled for this processor.

Invariant: a sequence's result depends only on its own tokens and state, bit for bit, and not on how many of its tokens
a call computes.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false
# (numba has no types)

from __future__ import annotations

import numpy as np
from numba import njit  # pyright: ignore[reportPrivateImportUsage]  documented as numba's

from rlkit.engine.kernels.cpu_kernels import Floats, exponential
from rlkit.engine.kernels.jit_cache import jit_kernel

NORM_EPS = 1e-6  # added to the square of a query's or key's length
_ONE = np.float32(1)
_LINEAR_FROM = np.float32(20)  # torch's softplus is the identity above this number


@jit_kernel()
def apply_delta_rule(  # noqa: PLR0917  compiled
    x: Floats,
    gates: Floats,
    memory: Floats,
    conv: Floats,
    decay: Floats,
    bias: Floats,
    first: int,
    last: int,
    out: Floats,
) -> None:
    """Write the outputs of n tokens, of the value heads of the key heads from `first` to `last`, exclusive.

    Args:
        x: [kernel - 1 + n, C], queries, keys and values before the convolution, with those of the last tokens before.
        gates: [n, 2H], projections for the strength of writing and for the decay.
        memory: [H, K, V], the state before the tokens, replaced by that after them.
        conv: [kernel, C].
        decay: [H], as `bias`; see `DeltaNet`.
        out: [n, H · V].
    """
    heads, key_dim, value_dim = memory.shape
    values = conv.shape[1] - heads * value_dim  # the first channel of the values
    group = heads // (values // (2 * key_dim))
    q, k = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32)
    v, scale = np.empty(value_dim, np.float32), _ONE / np.sqrt(np.float32(key_dim))
    for key_head in range(first, last):  # the memory of a few heads stays in the cache
        for t in range(len(out)):
            _convolve(x[t:], conv, key_head * key_dim, q)
            _convolve(x[t:], conv, values // 2 + key_head * key_dim, k)
            _normalise(q, scale)
            _normalise(k, _ONE)
            for h in range(key_head * group, (key_head + 1) * group):
                _convolve(x[t:], conv, values + h * value_dim, v)
                step = gates[t, heads + h] + bias[h]
                softplus = step if step > _LINEAR_FROM else np.float32(np.log1p(exponential(step)))
                strength = _ONE / (_ONE + exponential(-gates[t, h]))
                result = out[t, h * value_dim : (h + 1) * value_dim]
                _update(memory[h], q, k, v, exponential(decay[h] * softplus), strength, result)


@njit(inline="always")
def _convolve(x: Floats, conv: Floats, first: int, out: Floats) -> None:
    """Write SiLU of the convolution of the first rows, of the channels from `first`."""
    out[:] = 0
    for i in range(len(conv)):
        part, weights = x[i, first : first + len(out)], conv[i, first : first + len(out)]
        for j in range(len(out)):
            out[j] += part[j] * weights[j]
    for j in range(len(out)):
        out[j] /= _ONE + exponential(-out[j])


@njit(inline="always")
def _normalise(x: Floats, scale: np.float32) -> None:
    squares = np.float32(NORM_EPS)
    for j in range(len(x)):
        squares += x[j] * x[j]
    x *= scale / np.sqrt(squares)


@njit(inline="always")
def _update(  # noqa: PLR0917  compiled
    memory: Floats, q: Floats, k: Floats, v: Floats, keep: np.float32, strength: np.float32, out: Floats
) -> None:
    """Decay `memory [K, V]`, move its value at key k towards v, and write its value at q."""
    out[:] = 0
    for i in range(len(k)):
        row = memory[i]
        for j in range(len(out)):
            row[j] *= keep
            out[j] += k[i] * row[j]
    for j in range(len(out)):
        v[j] = strength * (v[j] - out[j])
    out[:] = 0
    for i in range(len(k)):
        row = memory[i]
        for j in range(len(out)):
            row[j] += k[i] * v[j]
            out[j] += q[i] * row[j]
