"""The samples that are on their way: decoded together, a token a step.

Invariant: what a row draws depends on the weights, its tokens, its settings and its random numbers only, bit for bit.
Attention runs over a row's own positions or bucket, every matrix product over a multiple of 8 rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from rlkit.engine.decode.kv import KvBlock, bucket
from rlkit.engine.decode.prompts import Prefilled, top_tokens
from rlkit.engine.decode.requests import Row, Ticket
from rlkit.engine.decode.steps import Steps
from rlkit.engine.decode.token_sampling import draw
from rlkit.engine.model.weights import Weights


class Rows:
    """Rows on their way, with their keys and values; `weights` are made by `rlkit.engine.model.lora.serve`."""

    def __init__(self, weights: Weights, threads: int) -> None:
        self._weights = weights
        self._threads = threads
        self._steps = Steps(weights, threads)
        self._blocks: dict[int, KvBlock[Row]] = {}

    def __len__(self) -> int:
        return sum(len(block.rows) for block in self._blocks.values())

    def running(self) -> list[Row]:
        """The rows."""
        return [row for block in self._blocks.values() for row in block.rows]

    def start(self, rows: Sequence[tuple[Row, Prefilled]]) -> list[Ticket]:
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
            block.begin()
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
        tokens, logprobs = draw(logits, [row.ticket.request.settings for row in rows], uniforms, threads=self._threads)
        drawn = zip(rows, tokens.cpu().numpy(), logprobs.cpu().numpy(), strict=True)
        return [row.extend(int(token), float(logprob)) for row, token, logprob in drawn]


def _keep_top(rows: Sequence[Row], logits: Tensor) -> None:
    """Give the rows that asked for them the likeliest tokens of their `logits [n, V]`."""
    # One k at a time: where log-probabilities are equal, their order and the last of them depend on k.
    for k in {row.ticket.request.top for row in rows} - {0}:
        places = [place for place, row in enumerate(rows) if row.ticket.request.top == k]
        ids, logprobs = top_tokens(torch.log_softmax(logits[places], -1), k)
        for place, row_ids, row_logprobs in zip(places, ids, logprobs, strict=True):
            rows[place].keep_top(row_ids, row_logprobs)
