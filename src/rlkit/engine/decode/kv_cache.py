"""Key/value cache of running sequences.

Invariant: with kernels a row attends over its own positions, and otherwise over its own bucket, which depends only on
its own length. Its results do not depend on the length of other rows. Unused positions of a bucket are finite and
masked, so they contribute exactly zero.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, batched, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rlkit.engine.kernels.decode_attention import attend
from rlkit.engine.kernels.threads import parallel_for
from rlkit.engine.model.config import ModelConfig
from rlkit.engine.model.delta_net import DeltaState
from rlkit.engine.model.ops import has_kernels, split_heads

_SHORT_STEP_TOKENS = 32
_LONG_STEP_TOKENS = 256
_SHORT_TOKENS = 256
# A block grows by 1/8 more than needed, and shrinks when more than 1/5 of it is empty.
_SPARE_DIVISOR, _UNUSED_DIVISOR = 8, 4
# Number of memory chunks for all layers; each is large enough for the system's large pages.
_CHUNKS = 16
# Large arrays use large pages: a page fault for every 4 kB of new memory takes as long as computing with it.
_LARGE_BYTES = 4 << 20


def make_zeros(count: int) -> NDArray[np.float32]:
    """Return `count` zeros, in the system's large pages if possible."""
    size = 4 * count
    if size < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(count, np.float32)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the system has no large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.float32)


def bucket_size(tokens: int) -> int:
    """Return the positions reserved for a sequence of `tokens`: a multiple of 32 up to 256, then of 256."""
    step = _SHORT_STEP_TOKENS if tokens <= _SHORT_TOKENS else _LONG_STEP_TOKENS
    return -(-tokens // step) * step


def kv_bytes(config: ModelConfig, tokens: int, item_bytes: int) -> int:
    """Return the memory of a sequence of `tokens`, in numbers of `item_bytes` each, with the states of delta nets."""
    state_bytes = 4 * len(config.delta.layers) * config.delta.state_size if config.delta else 0
    return 2 * item_bytes * config.kv_layers * config.kv_heads * config.head_dim * bucket_size(tokens) + state_bytes


class KvBlock[Row]:
    """The rows of one bucket: for each layer, keys and values [capacity, K, bucket, D].

    `rows[i]` is the caller's record of row i; removing a row changes the indices of others. The capacity is slightly
    larger than needed. Memory grows, shrinks or moves a few layers at a time, because two copies may not fit.

    Args:
        template: tensor with the device and type of keys and values.
        threads: number of threads that move keys and values.
    """

    def __init__(self, config: ModelConfig, tokens: int, template: Tensor, threads: int = 1) -> None:
        self.tokens = tokens
        self.rows: list[Row] = []
        self.lengths: list[int] = []
        self.states: list[list[DeltaState]] = []  # of each row, in the layers with a delta net
        self._config = config
        self._threads = threads
        self._template = template
        # Keys and values of some layers each, [layers, 2, capacity, K, bucket, D].
        per_chunk = -(-config.kv_layers // _CHUNKS)
        self._chunks = [self._zeros(len(layers), 0) for layers in batched(range(config.kv_layers), per_chunk)]

    @property
    def capacity(self) -> int:
        """Number of rows that fit."""
        return self._chunks[0].shape[2]

    def reserve(self, count: int) -> None:
        """Make room for `count` more rows."""
        capacity = self._capacity_with(count)

        def resize(index: int) -> None:
            self._chunks[index] = self._resize(self._chunks[index], capacity)

        self._for_each_chunk(resize)

    def append(self, rows: Sequence[Row], pages: Sequence[Tensor], states: Sequence[DeltaState] = ()) -> None:
        """Append rows with the same first positions: keys and values in pages, [layers, ·, 2K, D] each, and states.

        The first row takes over the states, which are not used otherwise any more; the others get copies.
        """
        self.reserve(len(rows))
        new = slice(len(self.rows), len(self.rows) + len(rows))
        layers, kv_heads = len(self._chunks[0]), self._config.kv_heads
        edges = [0, *accumulate(page.shape[1] for page in pages)]

        def fill(index: int) -> None:
            for page, (start, end) in zip(pages, pairwise(edges), strict=True):
                part = page[index * layers : (index + 1) * layers]
                source = part.view(*part.shape[:2], 2, kv_heads, -1)
                self._chunks[index][:, :, new, :, start:end] = source.permute(0, 2, 3, 1, 4)[:, :, None]

        self._for_each_chunk(fill)
        self.rows += rows
        self.lengths += [edges[-1]] * len(rows)
        copies = [[state.copy() for state in states] for _ in rows[1:]]
        self.states += [[*states], *copies]

    def remove(self, indices: Sequence[int], *, into: KvBlock[Row] | None = None) -> None:
        """Drop rows, or move them into a block with an equal or longer bucket."""
        remaining, removed = len(self.rows) - len(indices), set(indices)
        holes = [index for index in indices if index < remaining]
        moved = [index for index in range(remaining, len(self.rows)) if index not in removed]
        capacity = self.capacity if self.capacity <= remaining + remaining // _UNUSED_DIVISOR else remaining
        targets, sources = (torch.tensor(places, device=self._template.device) for places in (holes, moved))
        # Runs of consecutive indices: each is copied without temporary memory.
        runs = np.split(np.array(indices), np.flatnonzero(np.diff(indices) > 1) + 1)
        larger_capacity = 0 if into is None else into._capacity_with(len(indices))

        def move(index: int) -> None:
            chunk = self._chunks[index]
            if into is not None:
                larger_chunk = into._resize(into._chunks[index], larger_capacity)
                place = len(into.rows)
                for run in runs:
                    larger_chunk[:, :, place : place + len(run), :, : self.tokens] = chunk[:, :, run[0] : run[-1] + 1]
                    place += len(run)
                into._chunks[index] = larger_chunk
            if holes:
                chunk[:, :, targets] = chunk[:, :, sources]
            self._chunks[index] = self._resize(chunk, capacity)

        self._for_each_chunk(move)
        if into is not None:
            into.rows += [self.rows[index] for index in indices]
            into.lengths += [self.lengths[index] for index in indices]
            into.states += [self.states[index] for index in indices]
        for hole, filler in zip(holes, moved, strict=True):
            self.rows[hole], self.lengths[hole] = self.rows[filler], self.lengths[filler]
            self.states[hole] = self.states[filler]
        del self.rows[remaining:], self.lengths[remaining:], self.states[remaining:]

    def start_step(self) -> None:
        """Make room for one more position in every row."""
        self.lengths = [length + 1 for length in self.lengths]
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}

    def addresses(self) -> NDArray[np.int64]:
        """Return the addresses of the keys and values of each layer, [layers, 2]."""
        return np.array([[tensor.data_ptr() for tensor in layer] for chunk in self._chunks for layer in chunk])

    def attend(self, layer: int, rows: Tensor, window: int, out: Tensor) -> None:
        """Write this step's position and attend: queries, keys and values [n, H + 2K, D] to `out [n, H · D]`."""
        chunk, index = divmod(layer, len(self._chunks[0]))
        keys, values = self._chunks[chunk][index]
        if has_kernels(rows):
            scores = np.empty(self.tokens, np.float32)
            arrays = (tensor.numpy() for tensor in (rows, keys, values, out))
            for row, k, v, mixed, length in zip(*arrays, self.lengths, strict=False):  # the capacity may be larger
                attend(row, k, v, length - 1, window, scores, mixed)
            return
        q, k, v = split_heads(rows, keys.shape[1])
        last, mask = self._step_mask(window)
        places = torch.arange(len(rows), device=rows.device)
        keys[places, :, last], values[places, :, last] = k, v
        grouped = q.reshape(len(rows), keys.shape[1], -1, q.shape[-1]) * q.shape[-1] ** -0.5
        scores = torch.matmul(grouped, keys[: len(rows)].transpose(-1, -2)) + mask[:, None, None]
        out.view(grouped.shape)[:] = torch.matmul(functional.softmax(scores, -1), values[: len(rows)])

    def _for_each_chunk(self, task: Callable[[int], None]) -> None:
        @torch.inference_mode(torch.is_inference_mode_enabled())
        def run_chunks(first: int, last: int) -> None:
            for index in range(first, last):
                task(index)

        parallel_for(run_chunks, len(self._chunks), min_per_thread=1, threads=self._threads)

    def _step_mask(self, window: int) -> tuple[Tensor, Tensor]:
        """Return the new position of each row, [n], and the mask of its scores, [n, bucket]: −∞ at hidden positions.

        All layers with this window share them; the first computes them.
        """
        if window not in self._masks:
            last = torch.tensor(self.lengths, device=self._template.device) - 1
            places = torch.arange(self.tokens, device=last.device)
            hidden = (places > last[:, None]) | (places <= last[:, None] - window)
            self._masks[window] = last, self._template.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self._masks[window]

    def _capacity_with(self, count: int) -> int:
        """Return the capacity for `count` more rows: the present capacity, or slightly more than needed."""
        needed = len(self.rows) + count
        return self.capacity if needed <= self.capacity else needed + needed // _SPARE_DIVISOR

    def _resize(self, chunk: Tensor, capacity: int) -> Tensor:
        if chunk.shape[2] == capacity:
            return chunk
        common = min(chunk.shape[2], capacity)
        new_chunk = self._zeros(len(chunk), capacity)
        new_chunk[:, :, :common] = chunk[:, :, :common]
        return new_chunk

    def _zeros(self, layers: int, rows: int) -> Tensor:
        shape = (layers, 2, rows, self._config.kv_heads, self.tokens, self._config.head_dim)
        if self._template.device.type != "cpu":
            return self._template.new_zeros(shape)
        return torch.from_numpy(make_zeros(math.prod(shape)).reshape(shape)).to(self._template.dtype)
