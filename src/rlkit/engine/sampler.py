"""Continuous batching: all requests to one set of weights are decoded together, a token a step.

Invariant: the tokens and log-probabilities of a sample depend on the weights, the prompt, the settings, the seed and
the sample's index only, bit for bit; never on what else is in the batch or when it arrived. Every matrix product runs
over a multiple of 8 rows, attention runs over a row's own bucket, and each sample has a generator of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rlkit.engine.config import ModelConfig
from rlkit.engine.draw import DrawSettings, draw
from rlkit.engine.kv import KvBlock, bucket, kv_bytes
from rlkit.engine.lora import LayerAdapter
from rlkit.engine.model import ROWS, mlp, project_qkv, rms_norm, rope_at, trunk
from rlkit.engine.stops import StopRule
from rlkit.engine.weights import Weights
from rlkit.errors import UsageError

_PREFILL_TOKENS = 512
_HEAD_ROWS = 64
_ROWS_MAX = 128
_KV_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """What to sample.

    Args:
        prompt: [P] int64, not empty.
        max_tokens: None for what the context window leaves.
        prompt_logprobs: how many tokens at the end of the prompt to score; 0 for none.
    """

    prompt: NDArray[np.int64]
    samples: int
    max_tokens: int | None
    seed: int
    settings: DrawSettings
    stop: StopRule
    prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion: `tokens [C] int32`, the stop token or string included, `logprobs [C] float32`."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stopped: bool


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """The answer to a request; `prompt_logprobs [P] float32` is NaN where nothing was asked for."""

    samples: tuple[Sample, ...]
    prompt_logprobs: NDArray[np.float32] | None


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request on its way."""

    request: SampleRequest
    done: Callable[[SampleResult], None]
    limit: int
    samples: list[Sample | None]
    prompt_logprobs: NDArray[np.float32] | None = None


@dataclass(eq=False, slots=True)
class _Row:
    """One sample on its way."""

    ticket: _Ticket
    index: int
    random: np.random.Generator
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True, eq=False)
class _Prefilled:
    """A prompt's last logits [V], and its keys and values [layers, K, P, D]."""

    logits: Tensor
    keys: Tensor
    values: Tensor


class Decoder:
    """Decodes requests to one set of (merged) weights.

    Call `submit` whenever a request comes and `step` while `busy`.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._waiting: deque[_Row] = deque()
        self._blocks: dict[int, KvBlock[_Row]] = {}

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._weights.config

    @property
    def busy(self) -> bool:
        """Whether there is something to decode."""
        return bool(self._waiting) or any(block.rows for block in self._blocks.values())

    def submit(self, request: SampleRequest, done: Callable[[SampleResult], None]) -> None:
        """Queue a request; `done` is called from `step` with its result.

        Raises:
            UsageError: the request cannot be answered.
        """
        ticket = _Ticket(request, done, _check(request, self._weights), [None] * request.samples)
        for index in range(request.samples):
            key = np.array([request.seed % 2**64, index], dtype=np.uint64)
            self._waiting.append(_Row(ticket, index, np.random.Generator(np.random.Philox(key=key))))

    def step(self) -> None:
        """Admit what fits, then decode one token of every row."""
        with torch.inference_mode():
            self._admit()
            if any(block.rows for block in self._blocks.values()):
                self._decode()
            self._blocks = {tokens: block for tokens, block in self._blocks.items() if block.rows}

    def _admit(self) -> None:
        """Prefill waiting samples while rows and memory last; equal prompts are computed once."""
        running = [row for block in self._blocks.values() for row in block.rows]
        used = sum(self._bytes(row) for row in running)
        admitted: list[_Row] = []
        while self._waiting and len(running) + len(admitted) < _ROWS_MAX:
            used += self._bytes(self._waiting[0])
            if used > _KV_BYTES_MAX and (running or admitted):
                break
            admitted.append(self._waiting.popleft())
        by_prompt: dict[bytes, list[_Row]] = {}
        for row in admitted:
            by_prompt.setdefault(row.ticket.request.prompt.tobytes(), []).append(row)
        groups: list[list[_Row]] = []
        tokens = 0
        for same in by_prompt.values():
            length = len(same[0].ticket.request.prompt)
            if groups and tokens + length > _PREFILL_TOKENS:
                self._start(groups)
                groups, tokens = [], 0
            groups.append(same)
            tokens += length
        if groups:
            self._start(groups)

    def _bytes(self, row: _Row) -> int:
        """The cache that a row may come to need."""
        return kv_bytes(self._weights.config, len(row.ticket.request.prompt) + row.ticket.limit)

    def _start(self, groups: Sequence[list[_Row]]) -> None:
        """Prefill one prompt for each group, and draw the first token of every row."""
        prompts = [group[0].ticket.request.prompt for group in groups]
        scored = [next((r.ticket for r in g if r.ticket.request.prompt_logprobs), None) for g in groups]
        filled, hidden = self._prefill(prompts)
        start = 0
        for group, prompt, ticket in zip(groups, prompts, scored, strict=True):
            if ticket is not None:
                logprobs = self._score(hidden[start : start + len(prompt)], prompt)
                for row in group:
                    row.ticket.prompt_logprobs = _last(logprobs, row.ticket.request.prompt_logprobs)
            start += len(prompt)
        rows = [row for group in groups for row in group]
        logits = torch.cat([f.logits.expand(len(g), -1) for f, g in zip(filled, groups, strict=True)])
        alive = self._draw(rows, logits)
        prefilled = [f for f, g in zip(filled, groups, strict=True) for _ in g]
        staying = [(r, f) for r, f, goes_on in zip(rows, prefilled, alive, strict=True) if goes_on]
        sizes = Counter(bucket(source.keys.shape[2] + 1) for _, source in staying)
        for size, count in sizes.items():
            self._block(size).reserve(count)
        for row, source in staying:
            self._block(source.keys.shape[2] + 1).add(row, source.keys, source.values)

    def _prefill(self, prompts: Sequence[NDArray[np.int64]]) -> tuple[list[_Prefilled], Tensor]:
        config = self._weights.config
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.from_numpy(np.concatenate(prompts))
        tokens = functional.pad(tokens, (0, -len(tokens) % ROWS))
        keys = torch.empty(config.layers, len(tokens), config.kv_heads, config.head_dim)
        values = torch.empty_like(keys)

        def keep(layer: int, layer_keys: Tensor, layer_values: Tensor) -> None:
            keys[layer], values[layer] = layer_keys, layer_values

        hidden = trunk(self._weights, tokens, lengths, isolate=True, keep=keep)
        ends = np.cumsum(lengths)
        logits = self._logits(hidden[torch.from_numpy(ends - 1)])
        filled = [
            _Prefilled(logits[i], keys[:, end - n : end].transpose(1, 2), values[:, end - n : end].transpose(1, 2))
            for i, (end, n) in enumerate(zip(ends.tolist(), lengths, strict=True))
        ]
        return filled, hidden

    def _decode(self) -> None:
        """Run every row's last token through the model and draw the next."""
        config = self._weights.config
        blocks = self._regroup()
        rows = [row for block in blocks for row in block.rows]
        masks = [block.begin() for block in blocks]
        padding = -len(rows) % ROWS
        positions = torch.tensor([length - 1 for block in blocks for length in block.lengths] + [0] * padding)
        x = self._weights.embedding[torch.tensor([row.tokens[-1] for row in rows] + [0] * padding)]
        rope = rope_at(config, positions)
        ends = np.cumsum([len(block.rows) for block in blocks]).tolist()
        spans = [slice(end - len(block.rows), end) for block, end in zip(blocks, ends, strict=True)]
        mixed = torch.zeros(len(x), config.heads * config.head_dim)
        for index, layer in enumerate(self._weights.layers):
            qk, v = project_qkv(config, layer, x, rope)
            for block, span, mask in zip(blocks, spans, masks, strict=True):
                mixed[span] = block.attend(index, qk[span], v[span], mask)
            x = x + mixed @ layer.o
            x = x + mlp(config, layer, x, LayerAdapter.none())
        logits = self._logits(rms_norm(x, self._weights.norm, config.norm_eps))[: len(rows)]
        alive = self._draw(rows, logits)
        for block, span in zip(blocks, spans, strict=True):
            for index in reversed(range(len(block.rows))):
                if not alive[span.start + index]:
                    block.drop(index)

    def _regroup(self) -> list[KvBlock[_Row]]:
        """Move rows that have filled their bucket to the next one; the blocks that hold rows."""
        for block in list(self._blocks.values()):
            full = [index for index, length in enumerate(block.lengths) if length == block.tokens]
            if full:
                larger = self._block(block.tokens + 1)
                larger.reserve(len(full))
                for index in reversed(full):  # from the end: dropping a row moves the last one
                    larger.add(block.rows[index], *block.read(index))
                    block.drop(index)
        return [block for block in self._blocks.values() if block.rows]

    def _block(self, tokens: int) -> KvBlock[_Row]:
        size = bucket(tokens)
        if size not in self._blocks:
            self._blocks[size] = KvBlock(self._weights.config, size)
        return self._blocks[size]

    def _draw(self, rows: Sequence[_Row], logits: Tensor) -> list[bool]:
        """Draw a token for each row of `logits [n, V]`, which it overwrites; False for rows that are finished by it."""
        uniforms = torch.tensor([row.random.random() for row in rows], dtype=torch.float64)
        tokens, logprobs = draw(logits, [row.ticket.request.settings for row in rows], uniforms)
        drawn = zip(rows, tokens.numpy(), logprobs.numpy(), strict=True)
        return [self._extend(row, int(token), float(logprob)) for row, token, logprob in drawn]

    @staticmethod
    def _extend(row: _Row, token: int, logprob: float) -> bool:
        row.tokens.append(token)
        row.logprobs.append(logprob)
        ticket = row.ticket
        stopped = ticket.request.stop.ends(row.tokens)
        if not stopped and len(row.tokens) < ticket.limit:
            return True
        ticket.samples[row.index] = Sample(np.array(row.tokens, np.int32), np.array(row.logprobs, np.float32), stopped)
        samples = tuple(sample for sample in ticket.samples if sample is not None)
        if len(samples) == len(ticket.samples):
            ticket.done(SampleResult(samples, ticket.prompt_logprobs))
        return False

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of `hidden [n, E]`, computed over a multiple of 8 rows."""
        return (functional.pad(hidden, (0, 0, 0, -len(hidden) % ROWS)) @ self._weights.head.t())[: len(hidden)]

    def _score(self, hidden: Tensor, prompt: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log-probability of each prompt token given those before it, NaN for the first."""
        scores = torch.full((len(prompt),), torch.nan)
        for start in range(0, len(prompt) - 1, _HEAD_ROWS):
            end = min(start + _HEAD_ROWS, len(prompt) - 1)
            logprobs = torch.log_softmax(self._logits(hidden[start:end]), -1)
            targets = torch.from_numpy(prompt[start + 1 : end + 1])
            scores[start + 1 : end + 1] = logprobs.gather(1, targets[:, None])[:, 0]
        return scores.numpy()


def _check(request: SampleRequest, weights: Weights) -> int:
    """The largest number of tokens to sample."""
    window, vocab = weights.config.max_positions, weights.config.vocab_size
    if not len(request.prompt):
        raise UsageError("sample: the prompt is empty")
    if request.prompt.min() < 0 or request.prompt.max() >= vocab:
        raise UsageError(f"sample: the prompt holds a token outside 0 … {vocab - 1}")
    limit = window - len(request.prompt) if request.max_tokens is None else request.max_tokens
    if limit < 1 or len(request.prompt) + limit > window:
        raise UsageError(
            f"sample: {len(request.prompt)} prompt tokens and max_tokens {limit} do not fit the context of {window}"
        )
    return limit


def _last(logprobs: NDArray[np.float32], count: int) -> NDArray[np.float32] | None:
    if not count:
        return None
    kept = logprobs.copy()
    kept[: max(len(kept) - count, 0)] = np.nan
    return kept
