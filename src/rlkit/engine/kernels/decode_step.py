"""Decoding step through all layers and the output layer, in one compiled call per thread of a team.

Invariant: a row's result depends only on that row, bit for bit, and not on the number of threads.

The threads split every product by columns, so each weight is read by one thread, for all rows; reading weights limits
the speed of a step of a few dozen rows. They split attention by rows. Each thread repeats all operations in between,
because memory that another core has written is slow to read. The threads wait for each other five or six times per
layer, and return to Python only with the logits.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite have no types, and an intrinsic is called without its first argument)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import (
    carray,  # pyright: ignore[reportPrivateImportUsage]  documented as numba's
    njit,
    types,
)
from numba.extending import intrinsic

from rlkit.engine.kernels.cpu_kernels import Floats, Integers, multiply_packed, rms_norm, rotate, swiglu
from rlkit.engine.kernels.decode_attention import attend
from rlkit.engine.kernels.jit_cache import jit_kernel
from rlkit.engine.kernels.llvm import COLUMNS, PANEL_ROW_BYTES
from rlkit.engine.kernels.threads import wait_at_barrier

ADDRESSES = ("attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "mlp_norm", "gate_up", "down")
"""Names of a layer's weights, in the order of `Model.layers`. Matrices are packed."""
(_ATTENTION_NORM, _QKV, _QKV_BIAS, _Q_NORM, _K_NORM, _O, _O_BIAS, _MLP_NORM, _GATE_UP, _DOWN) = range(len(ADDRESSES))


class Model(NamedTuple):
    """The weights of a model of L layers, for compiled code."""

    layers: Integers  # [L, 10] addresses, in the order of `ADDRESSES`; 0 for a weight that the layer lacks
    rotary: Any  # [L], True if a layer rotates its queries and keys
    norm: Floats  # [E], the final norm
    head: Floats  # the output layer, packed
    eps: np.float32  # of the norms


class Step(NamedTuple):
    """Memory shared by the threads of a step over N rows; the last rows may be padding."""

    counter: Integers  # [8]; the first is the barrier's counter
    x: Floats  # [N, E], the embeddings
    streams: Floats  # [M, N, E], the residual stream of each of M threads
    normed: Floats  # [M, N, E], the residual stream after a norm
    qkv: Floats  # [N, H + 2K, D], queries, keys and values
    mixed: Floats  # [N, H · D], attention's output; zero in padding rows
    residual_update: Floats  # [N, E], the term to add to the residual stream
    gate_up_out: Floats  # [N, 2I], gate and up
    mlp_inner: Floats  # [N, I], gate times up
    logits: Floats  # [N, V], the result
    rope: Floats  # [2, N, D], cosines and sines
    caches: Integers  # [B, L, 2], addresses of the keys and values [·, K, T, D] of each of B blocks
    tokens: Integers  # [B], their T
    rows: Integers  # [n, 3], block, place in the block and new position of each row without padding
    shares: Integers  # [M + 1], edges of each thread's rows in attention
    scores: Floats  # [M, at least the largest T], scratch memory of attention


@intrinsic
def _pointer(_context: Any, _address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.intp), emit


@jit_kernel()
def decode(model: Model, step: Step, members: int, member: int) -> None:
    """Run the part of thread `member`; all `members` parts must run concurrently, each on its own thread."""
    x, normed, width = step.streams[member], step.normed[member], step.x.shape[1]
    qkv = step.qkv.reshape(len(x), step.qkv.shape[1] * step.qkv.shape[2])
    q_first, q_last = _split(_count_panels(qkv.shape[1]), member, members)
    e_first, e_last = _split(_count_panels(width), member, members)
    g_first, _ = _split(_count_panels(step.mlp_inner.shape[1]), member, members)
    h_first, h_last = _split(len(model.head), member, members)
    counter, arrivals = step.counter.ctypes.data, 0
    # One residual stream per thread: memory that another core changes is slow to read and write.
    x[:] = step.x
    for index in range(len(model.layers)):
        layer = model.layers[index]
        rms_norm(x, _vector(layer[_ATTENTION_NORM], width), model.eps, normed)
        o = _panels(layer[_O], step.mixed.shape[1], width)
        multiply_packed(normed, _panels(layer[_QKV], width, qkv.shape[1]), qkv, q_first, q_last, _address(o, e_first))
        arrivals = wait_at_barrier(counter, arrivals + members)
        _attend_rows(model, step, index, member)
        arrivals = wait_at_barrier(counter, arrivals + members)
        gate_up = _panels(layer[_GATE_UP], width, 2 * step.mlp_inner.shape[1])
        multiply_packed(step.mixed, o, step.residual_update, e_first, e_last, _address(gate_up, g_first))
        arrivals = wait_at_barrier(counter, arrivals + members)
        bias = _vector(layer[_O_BIAS], width)
        for i in range(len(x)):
            _add(step.residual_update[i], x[i])
            _add(bias, x[i])
        next_address = _address(model.head, h_first)
        if index + 1 < len(model.layers):
            next_address = _address(_panels(model.layers[index + 1, _QKV], width, qkv.shape[1]), q_first)
        arrivals = _feed_forward(model, step, index, members, member, arrivals, next_address)
        for i in range(len(x)):
            _add(step.residual_update[i], x[i])
    rms_norm(x, model.norm, model.eps, normed)
    multiply_packed(normed, model.head, step.logits, h_first, h_last, model.head.ctypes.data)


@njit(inline="always")
def _feed_forward(  # noqa: PLR0917  compiled
    model: Model, step: Step, index: int, members: int, member: int, arrivals: int, next_address: int
) -> int:
    """Compute the feed-forward's term; return the updated count of arrivals at the barrier."""
    layer, counter = model.layers[index], step.counter.ctypes.data
    normed, gate_up_out, mlp_inner = step.normed[member], step.gate_up_out, step.mlp_inner
    width, inner = normed.shape[1], mlp_inner.shape[1]
    gate_up, down = _panels(layer[_GATE_UP], width, 2 * inner), _panels(layer[_DOWN], inner, width)
    i_first, i_last = _split(_count_panels(inner), member, members)
    e_first, e_last = _split(len(down), member, members)
    next_panel = _address(down, e_first)
    rms_norm(step.streams[member], _vector(layer[_MLP_NORM], width), model.eps, normed)
    if inner % COLUMNS:
        first, last = _split(len(gate_up), member, members)
        multiply_packed(normed, gate_up, gate_up_out, first, last, next_panel)
        arrivals = wait_at_barrier(counter, arrivals + members)
    else:
        # A thread computes the same columns of gate and up, so it need not wait.
        half = len(gate_up) // 2
        multiply_packed(normed, gate_up, gate_up_out, i_first, i_last, _address(gate_up, half + i_first))
        multiply_packed(normed, gate_up, gate_up_out, half + i_first, half + i_last, next_panel)
    swiglu(gate_up_out, mlp_inner, i_first * COLUMNS, min(i_last * COLUMNS, inner))
    arrivals = wait_at_barrier(counter, arrivals + members)
    multiply_packed(mlp_inner, down, step.residual_update, e_first, e_last, next_address)
    return wait_at_barrier(counter, arrivals + members)


@njit(inline="always")
def _add(source: Floats, target: Floats) -> None:
    for j in range(len(source)):
        target[j] += source[j]


@njit(inline="always")
def _vector(address: int, count: int) -> Floats:
    """Return the vector at an address; empty at address 0."""
    return carray(_pointer(address), (count if address else 0,))


@njit(inline="always")
def _panels(address: int, inner: int, columns: int) -> Floats:
    """Return the packed matrix at an address."""
    return carray(_pointer(address), (_count_panels(columns), inner, COLUMNS))


@njit(inline="always")
def _count_panels(columns: int) -> int:
    return -(-columns // COLUMNS)


@njit(inline="always")
def _address(panels: Floats, index: int) -> int:
    return panels.ctypes.data + index * panels.shape[1] * PANEL_ROW_BYTES


@njit(inline="always")
def _split(count: int, member: int, members: int) -> tuple[int, int]:
    """Return the first index of a member's part and the index after its last."""
    return count * member // members, count * (member + 1) // members


@njit(inline="always")
def _attend_rows(model: Model, step: Step, index: int, member: int) -> None:
    """Add biases, norms and rotation to this thread's rows, and attend."""
    layer = model.layers[index]
    all_heads, size = step.qkv.shape[1:]
    heads = step.mixed.shape[1] // size
    kv_heads = (all_heads - heads) // 2
    bias = _vector(layer[_QKV_BIAS], all_heads * size)
    q_norm, k_norm = _vector(layer[_Q_NORM], size), _vector(layer[_K_NORM], size)
    for i in range(step.shares[member], step.shares[member + 1]):
        row = step.qkv[i]
        flat = row.reshape(all_heads * size)
        _add(bias, flat)
        if len(q_norm):
            q, k = row[:heads], row[heads : heads + kv_heads]
            rms_norm(q, q_norm, model.eps, q)
            rms_norm(k, k_norm, model.eps, k)
        if model.rotary[index]:
            rope_row = step.rope[:, i : i + 1]
            rotate(step.qkv[i : i + 1], heads + kv_heads, rope_row[0], rope_row[1], np.float32(1))
        block, place, last = step.rows[i]
        tokens = step.tokens[block]
        offset = 4 * place * kv_heads * tokens * size
        shape = (kv_heads, tokens, size)
        keys = carray(_pointer(step.caches[block, index, 0] + offset), shape)
        values = carray(_pointer(step.caches[block, index, 1] + offset), shape)
        attend(row, keys, values, last, step.scores[member], step.mixed[i])
