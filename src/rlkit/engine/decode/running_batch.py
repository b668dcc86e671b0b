"""Batch of samples that are decoded together, one token per step, and the decoding step.

Invariant: in float32 on the CPU, the tokens and log-probabilities of a row depend only on the weights, its tokens, its
settings and its random numbers, bit for bit, and not on the number of threads. Attention runs over a row's own
positions or bucket, and every matrix product over a multiple of `ROWS` rows.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkit.engine.decode.kv_cache import KvBlock, bucket_size, make_zeros
from rlkit.engine.decode.prompts import PrefilledPrompt, top_tokens
from rlkit.engine.decode.requests import Row, Ticket
from rlkit.engine.decode.token_sampling import draw_tokens
from rlkit.engine.kernels import decode_step
from rlkit.engine.kernels.cpu_kernels import RANK
from rlkit.engine.kernels.llvm import COLUMNS
from rlkit.engine.kernels.threads import OPEN_BARRIER, run_team
from rlkit.engine.model.attention import lay_out
from rlkit.engine.model.matrices import Matrix, PackedMatrix, matmul
from rlkit.engine.model.ops import ROWS, Rope, apply_rope, has_kernels, rms_norm
from rlkit.engine.model.rotary import AttentionKind
from rlkit.engine.model.transformer import compute_rope, run_layer
from rlkit.engine.model.weights import Layer, Weights

# Float32 numbers in a cache line.
_CACHE_LINE = 16


class RunningBatch:
    """Running rows with their keys and values; `weights` come from `make_sampling_weights`.

    All methods run in inference mode: torch cannot change a tensor outside of it that was made in it.
    """

    def __init__(self, weights: Weights, threads: int) -> None:
        self._weights = weights
        self._threads = threads
        self._runner = StepRunner(weights, threads)
        self._blocks: dict[int, KvBlock[Row]] = {}

    def __len__(self) -> int:
        return sum(len(block.rows) for block in self._blocks.values())

    @property
    def rows(self) -> list[Row]:
        """The rows, in the order of their blocks."""
        return [row for block in self._blocks.values() for row in block.rows]

    @torch.inference_mode()
    def start(self, rows: Sequence[tuple[Row, PrefilledPrompt]]) -> list[Ticket]:
        """Draw the first token of new rows, keep unfinished rows, and return the tickets of finished rows."""
        if not rows:
            return []
        logits = torch.stack([prefilled.logits for _, prefilled in rows])
        finished = self._draw_next([row for row, _ in rows], logits)
        surviving = [(row, prefilled) for row, prefilled in rows if row not in finished]
        for bucket, count in Counter(bucket_size(row.length) for row, _ in surviving).items():
            self._block(bucket).reserve(count)
        for prefilled, pairs in groupby(surviving, key=lambda pair: pair[1]):
            group = [row for row, _ in pairs]
            self._block(group[0].length).append(group, prefilled.pages, prefilled.states)
        return [row.ticket for row in finished]

    @torch.inference_mode()
    def decode(self) -> list[Ticket]:
        """Run every row's last token through the model and draw the next token; return tickets of finished rows."""
        blocks = self._regroup()
        rows = [row for block in blocks for row in block.rows]
        if not rows:
            return []
        for block in blocks:
            block.start_step()
        logits = self._runner.run([row.tokens[-1] for row in rows], blocks)
        finished = self._draw_next(rows, logits)
        if finished:
            self.drop(finished.__contains__)
        return [row.ticket for row in finished]

    @torch.inference_mode()
    def drop(self, is_unwanted: Callable[[Row], bool]) -> None:
        """Drop the unwanted rows."""
        for block in self._blocks.values():
            indices = [index for index, row in enumerate(block.rows) if is_unwanted(row)]
            if indices:
                block.remove(indices)
        self._drop_empty_blocks()

    def _regroup(self) -> list[KvBlock[Row]]:
        """Move rows that have filled their bucket to the next one; return all blocks."""
        for block in list(self._blocks.values()):
            full_indices = [index for index, length in enumerate(block.lengths) if length == block.tokens]
            if full_indices:
                block.remove(full_indices, into=self._block(block.tokens + 1))
        self._drop_empty_blocks()
        return list(self._blocks.values())

    def _block(self, tokens: int) -> KvBlock[Row]:
        bucket = bucket_size(tokens)
        if bucket not in self._blocks:
            self._blocks[bucket] = KvBlock(self._weights.config, bucket, self._weights.norm, self._threads)
        return self._blocks[bucket]

    def _drop_empty_blocks(self) -> None:
        self._blocks = {tokens: block for tokens, block in self._blocks.items() if block.rows}
        if not self._blocks:
            self._runner.release_memory()

    def _draw_next(self, rows: Sequence[Row], logits: Tensor) -> dict[Row, None]:
        """Draw a token for each row of `logits [n, V]`; return the rows that this finishes, in order."""
        _record_top_tokens(rows, logits)
        uniforms = torch.tensor([row.random.random() for row in rows], dtype=torch.float64, device=logits.device)
        settings = [row.ticket.request.settings for row in rows]
        tokens, logprobs = draw_tokens(logits, settings, uniforms, threads=self._threads)
        draws = zip(rows, tokens.cpu().numpy(), logprobs.cpu().numpy(), strict=True)
        return {row: None for row, token, logprob in draws if not row.extend(int(token), float(logprob))}


def _record_top_tokens(rows: Sequence[Row], logits: Tensor) -> None:
    """Record the likeliest tokens of `logits [n, V]` in the rows that report them."""
    # One k at a time: the order of equal log-probabilities, and which of them is last, depends on k.
    for k in {row.ticket.request.top for row in rows} - {0}:
        indices = [index for index, row in enumerate(rows) if row.ticket.request.top == k]
        ids, logprobs = top_tokens(torch.log_softmax(logits[indices], -1), k)
        for index, row_ids, row_logprobs in zip(indices, ids, logprobs, strict=True):
            rows[index].record_top(row_ids, row_logprobs)


class StepRunner:
    """Runner of decoding steps, for `weights` made for sampling."""

    def __init__(self, weights: Weights, threads: int) -> None:
        self._weights = weights
        self._model = model = _compiled_model(weights)
        self._rank = 0 if model is None else int(max(model.matrices[..., 0, RANK].max(), model.head[0, RANK]))
        # Threads beyond the number of panels in a product would only wait.
        self._threads = min(threads, -(-weights.config.hidden_size // COLUMNS))
        self._scratch = make_zeros(0)

    def run[Row](self, tokens: Sequence[int], blocks: Sequence[KvBlock[Row]]) -> Tensor:
        """Return logits [n, V] float32 after `tokens`, the newest token of each row of `blocks`, in their order.

        The next call overwrites the logits.
        """
        padding = [0] * (-len(tokens) % ROWS if len(tokens) > 1 else 0)
        x = self._weights.embed(torch.tensor([*tokens, *padding], device=self._weights.norm.device))
        positions = [length - 1 for block in blocks for length in block.lengths]
        where = torch.tensor(positions + padding)
        ropes = {kind: compute_rope(kind, where, x) for kind in self._weights.attention_kinds}
        if self._model is None:
            logits = matmul(self._run_with_torch(x, ropes, blocks), self._weights.output)
        else:
            logits = self._run_compiled(self._model, x, [*ropes.values()], positions, blocks)
        return logits[: len(tokens)].float()

    def release_memory(self) -> None:
        """Release the memory that steps reuse."""
        self._scratch = make_zeros(0)

    def _run_with_torch[Row](
        self, x: Tensor, ropes: Mapping[AttentionKind, Rope], blocks: Sequence[KvBlock[Row]]
    ) -> Tensor:
        """Return hidden states after the final norm, [N, E], of embeddings `x [N, E]`."""
        weights, config = self._weights, self._weights.config
        edges = [0, *accumulate(len(block.rows) for block in blocks)]
        states = [by_layer for block in blocks for by_layer in block.states]
        spans, mixed = lay_out([1] * len(states)), x.new_zeros(len(x), config.heads * config.head_dim)

        def mix(layer: Layer, rows: Tensor) -> Tensor:
            if layer.delta is not None:
                return layer.delta(rows, spans, [by_layer[layer.slot] for by_layer in states])
            rows = apply_rope(rows, config.heads + config.kv_heads, ropes[layer.attention])
            for block, start, end in zip(blocks, edges, edges[1:], strict=False):
                block.attend(layer.slot, rows[start:end], layer.attention.window, mixed[start:end])
            return mixed

        for layer in weights.layers:
            x = run_layer(config, layer, x, mix=mix)
        return rms_norm(x, weights.norm, config.norm_eps)

    def _run_compiled[Row](
        self,
        model: decode_step.Model,
        x: Tensor,
        ropes: Sequence[Rope],
        positions: Sequence[int],
        blocks: Sequence[KvBlock[Row]],
    ) -> Tensor:
        """Return logits [N, V] of embeddings `x [N, E]`."""
        config, count, members = self._weights.config, len(x), self._threads
        heads, inner = config.heads + 2 * config.kv_heads, config.intermediate_size
        longest = max(block.tokens for block in blocks)
        arrays = self._scratch_arrays(
            streams=(members, *x.shape),
            normed=(members, *x.shape),
            qkv=(count, heads, config.head_dim),
            mixed=(count, config.heads * config.head_dim),
            residual_update=x.shape,
            gate_up_out=(count, 2 * inner),
            mlp_inner=(count, inner),
            logits=(count, config.vocab_size),
            low_rank=(count * self._rank,),
            scores=(members, longest + _CACHE_LINE),
        )
        arrays["mixed"][len(positions) :] = 0
        rows = [(index, place) for index, block in enumerate(blocks) for place in range(len(block.rows))]
        step = decode_step.Step(
            counter=np.zeros(8, np.int64),
            x=x.numpy(),
            ropes=torch.stack([torch.stack(rope)[:, :, 0] for rope in ropes]).numpy(),
            caches=np.stack([block.addresses() for block in blocks]),
            tokens=np.array([block.tokens for block in blocks]),
            rows=np.array([(*row, last) for row, last in zip(rows, positions, strict=True)]),
            shares=_balance_rows(positions, members),
            **arrays,
        )

        def on_failure() -> None:
            step.counter[0] = OPEN_BARRIER

        run_team(partial(decode_step.decode, model, step, members), members, on_failure=on_failure)
        return torch.from_numpy(step.logits)

    def _scratch_arrays(self, **shapes: tuple[int, ...]) -> dict[str, NDArray[np.float32]]:
        """Return arrays in memory that all steps reuse; no two share a cache line."""
        sizes = [-(-math.prod(shape) // _CACHE_LINE) * _CACHE_LINE for shape in shapes.values()]
        if len(self._scratch) < sum(sizes):
            scratch = make_zeros(sum(sizes) + _CACHE_LINE)
            self._scratch = scratch[-scratch.ctypes.data // 4 % _CACHE_LINE :]
        parts = np.split(self._scratch, np.cumsum(sizes))
        return {
            name: part[: math.prod(shape)].reshape(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=False)
        }


def _balance_rows(positions: Sequence[int], members: int) -> NDArray[np.int64]:
    """Return the edges of each member's rows, [members + 1], so that all attend to about as many positions."""
    cumulative = list(accumulate(1 + last for last in positions))
    edges = [bisect(cumulative, cumulative[-1] * member / members) for member in range(1, members)]
    return np.array([0, *edges, len(positions)])


def _compiled_model(weights: Weights) -> decode_step.Model | None:
    """Return the weights for compiled code, or None if they are not packed, or have experts or delta nets."""
    config = weights.config
    if not isinstance(weights.output, PackedMatrix) or not has_kernels(weights.norm) or config.experts or config.delta:
        return None
    layers, kinds = weights.layers, weights.attention_kinds
    return decode_step.Model(
        vectors=np.array([[_address(getattr(layer, name)) for name in decode_step.VECTORS] for layer in layers]),
        matrices=np.array([[_fields(getattr(layer, name)) for name in decode_step.MATRICES] for layer in layers]),
        attention=np.array([(kinds.index(layer.attention), layer.attention.window) for layer in layers]),
        norm=weights.norm.numpy(),
        head=_fields(weights.output),
        eps=np.float32(weights.config.norm_eps),
        is_gelu=weights.config.activation == "gelu",
    )


def _fields(matrix: Matrix) -> NDArray[np.int64]:
    assert isinstance(matrix, PackedMatrix)
    return matrix.field_pair()


def _address(vector: Tensor | None) -> int:
    if vector is None:
        return 0
    # The kernels use addresses and assume this layout.
    if vector.dtype != torch.float32 or not vector.is_contiguous():
        raise ValueError(f"a weight is {vector.dtype} with strides {vector.stride()}, not contiguous float32")
    return vector.data_ptr()
