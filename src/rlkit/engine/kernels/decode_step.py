"""Decoding step through all layers and the output layer, in one compiled call per thread of a team.

Invariant: a row's result depends only on that row, bit for bit, and not on the number of threads.

The threads split every product by columns, so each weight is read by one thread, for all rows; reading weights limits
the speed of a step of a few dozen rows. They split attention by rows. Each thread repeats all operations in between,
because memory that another core has written is slow to read. The threads wait for each other five or six times per
layer, and once more for each low-rank term, and return to Python only with the logits.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportCallIssue=false
# (numba and llvmlite have no types, and an intrinsic is called without its first argument)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]  documented as numba's

from rlkit.engine.kernels.cpu_kernels import (
    KIND,
    PANELS,
    RANK,
    Floats,
    Integers,
    floats_at,
    glu,
    multiply_packed,
    rms_norm,
    rotate,
    row_size,
)
from rlkit.engine.kernels.decode_attention import attend
from rlkit.engine.kernels.jit_cache import jit_kernel
from rlkit.engine.kernels.llvm import COLUMNS
from rlkit.engine.kernels.threads import wait_at_barrier

VECTORS = (
    "attention_norm",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "o_bias",
    "attention_out_norm",
    "mlp_norm",
    "mlp_out_norm",
)
"""Names of a layer's vectors, in the order of `Model.vectors`."""
(_ATTENTION_NORM, _QKV_BIAS, _Q_NORM, _K_NORM, _O_BIAS, _ATTENTION_OUT_NORM, _MLP_NORM, _MLP_OUT_NORM) = range(
    len(VECTORS)
)
MATRICES = ("qkv", "o", "gate_up", "down")
"""Names of a layer's matrices, in the order of `Model.matrices`."""
(_QKV, _O, _GATE_UP, _DOWN) = range(len(MATRICES))


class Model(NamedTuple):
    """The weights of a model of L layers, for compiled code.

    A matrix is a pair of `MATRIX_FIELDS`: the matrix, and the left factor of its low-rank term or zeros.
    """

    vectors: Integers  # [L, 8] addresses, in the order of `VECTORS`; 0 for a vector that the layer lacks
    matrices: Integers  # [L, 4, 2, fields], in the order of `MATRICES`
    attention: Integers  # [L, 2], the index in `Step.ropes` and the window of each layer
    norm: Floats  # [E], the final norm
    head: Integers  # [2, fields], the output layer
    eps: np.float32  # of the norms
    is_gelu: bool  # the activation of the feed-forward is GELU, not SiLU


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
    ropes: Floats  # [kinds, 2, N, D], cosines and sines
    caches: Integers  # [B, L, 2], addresses of the keys and values [·, K, T, D] of each of B blocks
    tokens: Integers  # [B], their T
    rows: Integers  # [n, 3], block, place in the block and new position of each row without padding
    shares: Integers  # [M + 1], edges of each thread's rows in attention
    low_rank: Floats  # [at least N times the largest rank of a low-rank term], its intermediate result
    scores: Floats  # [M, at least the largest T], scratch memory of attention


@jit_kernel()
def decode(model: Model, step: Step, members: int, member: int) -> None:
    """Run the part of thread `member`; all `members` parts must run concurrently, each on its own thread."""
    x, normed, width = step.streams[member], step.normed[member], step.x.shape[1]
    qkv = step.qkv.reshape(len(x), step.qkv.shape[1] * step.qkv.shape[2])
    q_first, q_last = _split(qkv.shape[1], member, members)
    e_first, e_last = _split(width, member, members)
    g_first, _ = _split(step.mlp_inner.shape[1], member, members)
    h_first, h_last = _split(step.logits.shape[1], member, members)
    counter, arrivals = step.counter.ctypes.data, 0
    # One residual stream per thread: memory that another core changes is slow to read and write.
    x[:] = step.x
    for index in range(len(model.matrices)):
        vectors, matrices = model.vectors[index], model.matrices[index]
        rms_norm(x, _vector(vectors[_ATTENTION_NORM], width), model.eps, normed)
        low, arrivals = _multiply_low_rank(normed, matrices[_QKV], step, members, member, arrivals, q_first)
        o, inner = matrices[_O], step.mixed.shape[1]
        multiply_packed(normed, matrices[_QKV, 0], low, qkv, q_first, q_last, _address(o, inner, e_first))
        arrivals = wait_at_barrier(counter, arrivals + members)
        _attend_rows(model, step, index, member)
        arrivals = wait_at_barrier(counter, arrivals + members)
        low, arrivals = _multiply_low_rank(step.mixed, o, step, members, member, arrivals, e_first)
        gate_up_address = _address(matrices[_GATE_UP], width, g_first)
        multiply_packed(step.mixed, o[0], low, step.residual_update, e_first, e_last, gate_up_address)
        arrivals = wait_at_barrier(counter, arrivals + members)
        _add_update(step, member, vectors[_ATTENTION_OUT_NORM], model.eps)
        bias = _vector(vectors[_O_BIAS], width)
        for i in range(len(x)):
            _add(bias, x[i])
        next_address = _address(model.head, width, h_first)
        if index + 1 < len(model.matrices):
            next_address = _address(model.matrices[index + 1, _QKV], width, q_first)
        arrivals = _feed_forward(model, step, index, members, member, arrivals, next_address)
        _add_update(step, member, vectors[_MLP_OUT_NORM], model.eps)
    rms_norm(x, model.norm, model.eps, normed)
    low, arrivals = _multiply_low_rank(normed, model.head, step, members, member, arrivals, h_first)
    multiply_packed(normed, model.head[0], low, step.logits, h_first, h_last, model.head[0, PANELS])


@njit(inline="always")
def _multiply_low_rank(  # noqa: PLR0917  compiled
    x: Floats, matrix: Integers, step: Step, members: int, member: int, arrivals: int, next_panel: int
) -> tuple[Floats, int]:
    """Compute the product with the left factor of a low-rank term, [N, rank]; return it and the count of arrivals."""
    rank = matrix[0, RANK]
    low = carray(floats_at(step.low_rank.ctypes.data), (len(x), rank))
    if rank:
        first, last = _split(rank, member, members)
        multiply_packed(x, matrix[1], low, low, first, last, _address(matrix, x.shape[1], next_panel))
        arrivals = wait_at_barrier(step.counter.ctypes.data, arrivals + members)
    return low, arrivals


@njit(inline="always")
def _feed_forward(  # noqa: PLR0917  compiled
    model: Model, step: Step, index: int, members: int, member: int, arrivals: int, next_address: int
) -> int:
    """Compute the feed-forward's term; return the updated count of arrivals at the barrier."""
    gate_up, down = model.matrices[index, _GATE_UP], model.matrices[index, _DOWN]
    counter, normed = step.counter.ctypes.data, step.normed[member]
    gate_up_out, mlp_inner = step.gate_up_out, step.mlp_inner
    width, inner = normed.shape[1], mlp_inner.shape[1]
    i_first, i_last = _split(inner, member, members)
    e_first, e_last = _split(width, member, members)
    next_panel = _address(down, inner, e_first)
    rms_norm(step.streams[member], _vector(model.vectors[index, _MLP_NORM], width), model.eps, normed)
    low, arrivals = _multiply_low_rank(normed, gate_up, step, members, member, arrivals, i_first)
    if inner % COLUMNS:
        first, last = _split(2 * inner, member, members)
        multiply_packed(normed, gate_up[0], low, gate_up_out, first, last, next_panel)
        arrivals = wait_at_barrier(counter, arrivals + members)
    else:
        # A thread computes the same columns of gate and up, so it need not wait.
        half = inner // COLUMNS
        up_address = _address(gate_up, width, half + i_first)
        multiply_packed(normed, gate_up[0], low, gate_up_out, i_first, i_last, up_address)
        multiply_packed(normed, gate_up[0], low, gate_up_out, half + i_first, half + i_last, next_panel)
    glu(gate_up_out, mlp_inner, i_first * COLUMNS, min(i_last * COLUMNS, inner), model.is_gelu)
    arrivals = wait_at_barrier(counter, arrivals + members)
    low, arrivals = _multiply_low_rank(mlp_inner, down, step, members, member, arrivals, e_first)
    multiply_packed(mlp_inner, down[0], low, step.residual_update, e_first, e_last, next_address)
    return wait_at_barrier(counter, arrivals + members)


@njit(inline="always")
def _add_update(step: Step, member: int, norm: int, eps: np.float32) -> None:
    """Add `residual_update` to this thread's residual stream, after a norm, if its address is not 0."""
    x, update = step.streams[member], step.residual_update
    if norm:
        rms_norm(update, _vector(norm, x.shape[1]), eps, step.normed[member])
        update = step.normed[member]
    for i in range(len(x)):
        _add(update[i], x[i])


@njit(inline="always")
def _add(source: Floats, target: Floats) -> None:
    for j in range(len(source)):
        target[j] += source[j]


@njit(inline="always")
def _vector(address: int, count: int) -> Floats:
    """Return the vector at an address; empty at address 0."""
    return carray(floats_at(address), (count if address else 0,))


@njit(inline="always")
def _address(matrix: Integers, inner: int, panel: int) -> int:
    """Return the address of a panel of a matrix of `inner` rows."""
    return matrix[0, PANELS] + panel * inner * row_size(matrix[0, KIND])


@njit(inline="always")
def _split(columns: int, member: int, members: int) -> tuple[int, int]:
    """Return the first panel of a member's part of a matrix and the panel after its last."""
    count = -(-columns // COLUMNS)
    return count * member // members, count * (member + 1) // members


@njit(inline="always")
def _attend_rows(model: Model, step: Step, index: int, member: int) -> None:
    """Add biases, norms and rotation to this thread's rows, and attend."""
    vectors = model.vectors[index]
    all_heads, size = step.qkv.shape[1:]
    heads = step.mixed.shape[1] // size
    kv_heads = (all_heads - heads) // 2
    bias = _vector(vectors[_QKV_BIAS], all_heads * size)
    q_norm, k_norm = _vector(vectors[_Q_NORM], size), _vector(vectors[_K_NORM], size)
    for i in range(step.shares[member], step.shares[member + 1]):
        row = step.qkv[i]
        flat = row.reshape(all_heads * size)
        _add(bias, flat)
        if len(q_norm):
            q, k = row[:heads], row[heads : heads + kv_heads]
            rms_norm(q, q_norm, model.eps, q)
            rms_norm(k, k_norm, model.eps, k)
        rope_row = step.ropes[model.attention[index, 0], :, i : i + 1]
        rotate(step.qkv[i : i + 1], heads + kv_heads, rope_row[0], rope_row[1], np.float32(1))
        block, place, last = step.rows[i]
        tokens = step.tokens[block]
        offset = 4 * place * kv_heads * tokens * size
        shape: Any = (kv_heads, tokens, size)
        keys = carray(floats_at(step.caches[block, index, 0] + offset), shape)
        values = carray(floats_at(step.caches[block, index, 1] + offset), shape)
        attend(row, keys, values, last, model.attention[index, 1], step.scores[member], step.mixed[i])
