"""The samples that are being decoded together, a token a step, and the decoding step itself.

Invariant: the tokens and log-probabilities of a row depend on the weights, its tokens, its settings and its random
numbers only, bit for bit (in float32 on the CPU), and not on how many threads share a step. Attention runs over a row's
own positions or bucket, every matrix product over a multiple of `ROWS` rows.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkit.engine.decode.kv_cache import KvBlock, bucket, make_zeros
from rlkit.engine.decode.prompts import PrefilledPrompt, top_tokens
from rlkit.engine.decode.requests import Row, Ticket
from rlkit.engine.decode.token_sampling import draw_tokens
from rlkit.engine.kernels import decode_step
from rlkit.engine.kernels.llvm import COLUMNS
from rlkit.engine.kernels.threads import OPEN_BARRIER, run_team
from rlkit.engine.model.lora import NO_ADAPTER
from rlkit.engine.model.ops import ROWS, PackedMatrix, Rope, apply_rope, matmul, rms_norm
from rlkit.engine.model.transformer import add_attention, compute_rope, mlp, project_qkv
from rlkit.engine.model.weights import Weights

# Numbers in a line of the cache.
_LINE = 16


class RunningBatch:
    """Rows on their way, with their keys and values; `weights` are made by `rlkit.engine.model.lora.serve`."""

    def __init__(self, weights: Weights, threads: int) -> None:
        self._weights = weights
        self._threads = threads
        self._steps = StepRunner(weights, threads)
        self._blocks: dict[int, KvBlock[Row]] = {}

    def __len__(self) -> int:
        return sum(len(block.rows) for block in self._blocks.values())

    @property
    def rows(self) -> list[Row]:
        """The rows."""
        return [row for block in self._blocks.values() for row in block.rows]

    def start(self, rows: Sequence[tuple[Row, PrefilledPrompt]]) -> list[Ticket]:
        """Draw the first token of new rows and keep those that go on; the tickets of those that do not."""
        if not rows:
            return []
        logits = torch.stack([prefilled.logits for _, prefilled in rows])
        alive = self._draw([row for row, _ in rows], logits)
        staying = [pair for pair, goes_on in zip(rows, alive, strict=True) if goes_on]
        for size, count in Counter(bucket(prefilled.keys.shape[2] + 1) for _, prefilled in staying).items():
            self._block(size).reserve(count)
        for prefilled, pairs in groupby(staying, key=lambda pair: pair[1]):
            alike = [row for row, _ in pairs]
            self._block(prefilled.keys.shape[2] + 1).add(alike, prefilled.keys, prefilled.values)
        return [row.ticket for (row, _), goes_on in zip(rows, alive, strict=True) if not goes_on]

    def decode(self) -> list[Ticket]:
        """Run every row's last token through the model and draw the next; the tickets of rows finished by it."""
        blocks = self._regroup()
        rows = [row for block in blocks for row in block.rows]
        if not rows:
            return []
        for block in blocks:
            block.start_step()
        logits = self._steps.run([row.tokens[-1] for row in rows], blocks)
        alive = self._draw(rows, logits)
        start = 0
        for block in blocks:
            end = start + len(block.rows)
            finished = [index for index, goes_on in enumerate(alive[start:end]) if not goes_on]
            start = end
            if finished:
                block.remove(finished)
        self._forget_empty()
        return [row.ticket for row, goes_on in zip(rows, alive, strict=True) if not goes_on]

    def drop(self, unwanted: Callable[[Row], bool]) -> None:
        """Forget some rows."""
        for block in self._blocks.values():
            given_up = [index for index, row in enumerate(block.rows) if unwanted(row)]
            if given_up:
                block.remove(given_up)
        self._forget_empty()

    def _regroup(self) -> list[KvBlock[Row]]:
        """Move rows that have filled their bucket to the next one; the blocks that hold rows."""
        for block in list(self._blocks.values()):
            full = [index for index, length in enumerate(block.lengths) if length == block.tokens]
            if full:
                block.remove(full, into=self._block(block.tokens + 1))
        self._forget_empty()
        return list(self._blocks.values())

    def _block(self, tokens: int) -> KvBlock[Row]:
        size = bucket(tokens)
        if size not in self._blocks:
            self._blocks[size] = KvBlock(self._weights.config, size, self._weights.embedding, self._threads)
        return self._blocks[size]

    def _forget_empty(self) -> None:
        self._blocks = {tokens: block for tokens, block in self._blocks.items() if block.rows}
        if not self._blocks:
            self._steps.rest()

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> list[bool]:
        """Draw a token for each row of `logits [n, V]`; whether each row goes on."""
        _keep_top(rows, logits)
        uniforms = torch.tensor([row.random.random() for row in rows], dtype=torch.float64, device=logits.device)
        settings = [row.ticket.request.settings for row in rows]
        tokens, logprobs = draw_tokens(logits, settings, uniforms, threads=self._threads)
        draws = zip(rows, tokens.cpu().numpy(), logprobs.cpu().numpy(), strict=True)
        return [row.extend(int(token), float(logprob)) for row, token, logprob in draws]


def _keep_top(rows: Sequence[Row], logits: Tensor) -> None:
    """Give the rows that asked for them the likeliest tokens of their `logits [n, V]`."""
    # One k at a time: where log-probabilities are equal, their order and the last of them depend on k.
    for k in {row.ticket.request.top for row in rows} - {0}:
        places = [place for place, row in enumerate(rows) if row.ticket.request.top == k]
        ids, logprobs = top_tokens(torch.log_softmax(logits[places], -1), k)
        for place, row_ids, row_logprobs in zip(places, ids, logprobs, strict=True):
            rows[place].keep_top(row_ids, row_logprobs)


class StepRunner:
    """Decoding steps by `weights`, which are made for sampling, on so many threads."""

    def __init__(self, weights: Weights, threads: int) -> None:
        self._weights = weights
        self._model = _model(weights)
        # Where a product has fewer panels than there are threads, some would only wait.
        self._threads = min(threads, -(-weights.config.hidden_size // COLUMNS))
        self._room = make_zeros(0)

    def run[Row](self, tokens: Sequence[int], blocks: Sequence[KvBlock[Row]]) -> Tensor:
        """Logits [n, V] float32 after `tokens`, the newest of the rows of `blocks`, in their order.

        They are overwritten by the next call.
        """
        padding = [0] * (-len(tokens) % ROWS)
        embedding, config = self._weights.embedding, self._weights.config
        x = embedding[torch.tensor([*tokens, *padding], device=embedding.device)]
        where = [length - 1 for block in blocks for length in block.lengths]
        rope = compute_rope(config, torch.tensor(where + padding), x)
        if self._model is None:
            logits = matmul(self._layer_by_layer(x, rope, blocks), self._weights.output)
        else:
            logits = self._compiled(self._model, x, rope, where, blocks)
        return logits[: len(tokens)].float()

    def rest(self) -> None:
        """Give back the memory that is kept from step to step."""
        self._room = make_zeros(0)

    def _layer_by_layer[Row](self, x: Tensor, rope: Rope, blocks: Sequence[KvBlock[Row]]) -> Tensor:
        """Hidden states after the final norm, [N, E], of embeddings `x [N, E]`."""
        weights, config = self._weights, self._weights.config
        mixed = x.new_zeros(len(x), config.heads * config.head_dim)
        edges = [0, *accumulate(len(block.rows) for block in blocks)]
        for index, layer in enumerate(weights.layers):
            qkv = project_qkv(config, layer, x)
            if layer.rotary:
                qkv = apply_rope(qkv, config.heads + config.kv_heads, rope)
            for block, start, end in zip(blocks, edges, edges[1:], strict=False):
                block.attend(index, qkv[start:end], mixed[start:end])
            x = add_attention(layer, x, mixed, NO_ADAPTER)
            x = x + mlp(config, layer, x, NO_ADAPTER)
        return rms_norm(x, weights.norm, config.norm_eps)

    def _compiled[Row](
        self, model: decode_step.Model, x: Tensor, rope: Rope, where: Sequence[int], blocks: Sequence[KvBlock[Row]]
    ) -> Tensor:
        """Logits [N, V] of embeddings `x [N, E]`."""
        config, count, members = self._weights.config, len(x), self._threads
        heads, inner = config.heads + 2 * config.kv_heads, config.intermediate_size
        longest = max(block.tokens for block in blocks)
        streams, normed, qkv, mixed, added, both, gated, logits, scores = self._rooms(
            (members, *x.shape),
            (members, *x.shape),
            (count, heads, config.head_dim),
            (count, config.heads * config.head_dim),
            x.shape,
            (count, 2 * inner),
            (count, inner),
            (count, config.vocab_size),
            (members, longest + _LINE),
        )
        mixed[len(where) :] = 0
        rows = [(index, place) for index, block in enumerate(blocks) for place in range(len(block.rows))]
        step = decode_step.Step(
            counter=np.zeros(8, np.int64),
            x=x.numpy(),
            streams=streams,
            normed=normed,
            qkv=qkv,
            mixed=mixed,
            added=added,
            both=both,
            gated=gated,
            logits=logits,
            rope=torch.stack(rope)[:, :, 0].numpy(),
            caches=np.stack([block.addresses() for block in blocks]),
            tokens=np.array([block.tokens for block in blocks]),
            rows=np.array([(*row, last) for row, last in zip(rows, where, strict=True)]),
            shares=_even_shares(where, members),
            scores=scores,
        )

        def on_failure() -> None:
            step.counter[0] = OPEN_BARRIER

        run_team(partial(decode_step.decode, model, step, members), members, on_failure=on_failure)
        return torch.from_numpy(logits)

    def _rooms(self, *shapes: tuple[int, ...]) -> list[NDArray[np.float32]]:
        """Arrays for a step, in the same memory as those of the one before, each in cache lines of its own."""
        sizes = [-(-math.prod(shape) // _LINE) * _LINE for shape in shapes]
        if len(self._room) < sum(sizes):
            room = make_zeros(sum(sizes) + _LINE)
            self._room = room[-room.ctypes.data // 4 % _LINE :]
        starts = accumulate(sizes, initial=0)
        return [
            self._room[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(starts, shapes, strict=False)
        ]


def _even_shares(where: Sequence[int], members: int) -> NDArray[np.int64]:
    """Where the rows of each of `members` begin and end, [members + 1], so that each attends to about as much."""
    done = list(accumulate(1 + last for last in where))
    edges = [bisect(done, done[-1] * member / members) for member in range(1, members)]
    return np.array([0, *edges, len(where)])


def _model(weights: Weights) -> decode_step.Model | None:
    """The weights for compiled code, if they are packed for it."""
    if not isinstance(weights.output, PackedMatrix):
        return None
    return decode_step.Model(
        layers=np.array([[_address(getattr(layer, n)) for n in decode_step.ADDRESSES] for layer in weights.layers]),
        rotary=np.array([layer.rotary for layer in weights.layers]),
        norm=weights.norm.numpy(),
        head=weights.output.panels,
        eps=np.float32(weights.config.norm_eps),
    )


def _address(part: Tensor | PackedMatrix | None) -> int:
    if part is None:
        return 0
    numbers = part.panels if isinstance(part, PackedMatrix) else part.numpy()
    # What is computed with addresses must lie as it is taken to lie.
    if numbers.dtype != np.float32 or not numbers.flags.c_contiguous:
        raise ValueError(f"a weight is {numbers.dtype} with strides {numbers.strides}, not contiguous float32")
    return numbers.ctypes.data
