"""The key/value cache of the sequences that are being decoded.

Invariant: a row attends over its own positions, where there are kernels, and otherwise over its own bucket, which
depends on its own length only: its numbers never depend on how long its neighbours are. Unused positions of a bucket
are finite and masked, and so contribute exactly nothing.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rlkit.engine.kernels.threads import parallel_for
from rlkit.engine.model.config import ModelConfig
from rlkit.engine.model.ops import split_heads

_SHORT_STEP_TOKENS = 32
_LONG_STEP_TOKENS = 256
_SHORT_TOKENS = 256
# A block grows by an eighth more than it must, and shrinks once a fifth of it is empty.
_SPARE_PART, _UNUSED_PART = 8, 4
# So many pieces of memory for all layers: large enough for the system's large pages, of which a thousandth are to be
# found and cleared.
_PARTS = 16
# New memory costs a page fault for every 4 kB, as long as computing with it does: what is large is asked for in large
# pages, and what is needed again and again is kept.
_LARGE_BYTES = 4 << 20


def make_zeros(count: int) -> NDArray[np.float32]:
    """So many zeros."""
    size = 4 * count
    if size < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(count, np.float32)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.float32)


def bucket(tokens: int) -> int:
    """Positions set aside for a sequence of `tokens`: a multiple of 32 up to 256, then of 256."""
    step = _SHORT_STEP_TOKENS if tokens <= _SHORT_TOKENS else _LONG_STEP_TOKENS
    return -(-tokens // step) * step


def kv_bytes(config: ModelConfig, tokens: int, item_bytes: int) -> int:
    """Memory that a sequence of `tokens` takes up in numbers of `item_bytes` each."""
    return 2 * item_bytes * config.layers * config.kv_heads * config.head_dim * bucket(tokens)


class KvBlock[Row]:
    """All rows of one bucket: for each layer, keys and values [capacity, K, bucket, D].

    `rows[i]` is what the caller keeps for row i; rows that leave change the places of others. The room is not much more
    than the rows need, and what grows, shrinks or moves does so a few layers at a time: there is no memory for two
    copies.

    Args:
        like: a tensor of the device and type that keys and values have.
        threads: how many share moving them.
    """

    def __init__(self, config: ModelConfig, tokens: int, like: Tensor, threads: int = 1) -> None:
        self.tokens = tokens
        self.rows: list[Row] = []
        self.lengths: list[int] = []
        self._config = config
        self._threads = threads
        self._like = like
        # Keys and values of some layers each, [layers, 2, capacity, K, bucket, D].
        self._parts = [self._zeros(len(layers), 0) for layers in self._layers()]

    @property
    def capacity(self) -> int:
        """How many rows there is room for."""
        return self._parts[0].shape[2]

    def reserve(self, count: int) -> None:
        """Make room for `count` more rows."""
        capacity = self._capacity_with(count)

        def resize(index: int) -> None:
            self._parts[index] = self._resized(self._parts[index], capacity)

        self._each(resize)

    def add(self, rows: Sequence[Row], keys: Tensor, values: Tensor) -> None:
        """Append rows that begin alike, with the first n positions filled: keys and values [layers, K, n, D]."""
        self.reserve(len(rows))
        length, new = keys.shape[2], slice(len(self.rows), len(self.rows) + len(rows))
        layers = self._layers()

        def fill(index: int) -> None:
            for which, filled in enumerate((keys, values)):
                own = filled[layers[index].start : layers[index].stop]
                self._parts[index][:, which, new, :, :length] = own[:, None]

        self._each(fill)
        self.rows += rows
        self.lengths += [length] * len(rows)

    def remove(self, indices: Sequence[int], *, into: KvBlock[Row] | None = None) -> None:
        """Forget rows, or move them into a block of an equal or a longer bucket."""
        kept, gone = len(self.rows) - len(indices), set(indices)
        holes = [index for index in indices if index < kept]
        fillers = [index for index in range(kept, len(self.rows)) if index not in gone]
        capacity = self.capacity if self.capacity <= kept + kept // _UNUSED_PART else kept
        to, of = (torch.tensor(some, device=self._like.device) for some in (holes, fillers))
        larger = 0 if into is None else into._capacity_with(len(indices))

        def move(index: int) -> None:
            mine = self._parts[index]
            if into is not None:
                theirs = into._resized(into._parts[index], larger)
                place = len(into.rows)
                for going in _runs(indices):
                    theirs[:, :, place : place + len(going), :, : self.tokens] = mine[:, :, going.start : going.stop]
                    place += len(going)
                into._parts[index] = theirs
            if holes:
                mine[:, :, to] = mine[:, :, of]
            self._parts[index] = self._resized(mine, capacity)

        self._each(move)
        if into is not None:
            into.rows += [self.rows[index] for index in indices]
            into.lengths += [self.lengths[index] for index in indices]
        for hole, filler in zip(holes, fillers, strict=True):
            self.rows[hole], self.lengths[hole] = self.rows[filler], self.lengths[filler]
        del self.rows[kept:], self.lengths[kept:]

    def start_step(self) -> None:
        """Make room for one more position in every row."""
        self.lengths = [length + 1 for length in self.lengths]
        self._step: tuple[Tensor, Tensor] | None = None

    def addresses(self) -> NDArray[np.int64]:
        """Where the keys and values of each layer are, [layers, 2]."""
        return np.array([[both.data_ptr() for both in layer] for part in self._parts for layer in part])

    def attend(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """Write this step's position and attend: queries, keys and values [n, H + 2K, D] to `out [n, H · D]`."""
        part, inside = divmod(layer, len(self._parts[0]))
        keys, values = self._parts[part][inside]
        q, k, v = split_heads(rows, keys.shape[1])
        last, mask = self._last_and_mask()
        places = torch.arange(len(rows), device=rows.device)
        keys[places, :, last], values[places, :, last] = k, v
        grouped = q.reshape(len(rows), keys.shape[1], -1, q.shape[-1]) * q.shape[-1] ** -0.5
        scores = torch.matmul(grouped, keys[: len(rows)].transpose(-1, -2)) + mask[:, None, None]
        out.view(grouped.shape)[:] = torch.matmul(functional.softmax(scores, -1), values[: len(rows)])

    def _each(self, task: Callable[[int], None]) -> None:
        @torch.inference_mode(torch.is_inference_mode_enabled())
        def part(first: int, last: int) -> None:
            for index in range(first, last):
                task(index)

        parallel_for(part, len(self._parts), min_per_thread=1, threads=self._threads)

    def _last_and_mask(self) -> tuple[Tensor, Tensor]:
        """The new position of each row, [n], and what is added to its scores, [n, bucket]: −∞ where there is none yet.

        They are the same for all layers, and found at the first.
        """
        if self._step is None:
            last = torch.tensor(self.lengths, device=self._like.device) - 1
            hidden = torch.arange(self.tokens, device=last.device) > last[:, None]
            self._step = last, self._like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self._step

    def _capacity_with(self, count: int) -> int:
        """The room that `count` more rows need: what there is, or somewhat more, so that it seldom grows."""
        needed = len(self.rows) + count
        return self.capacity if needed <= self.capacity else needed + needed // _SPARE_PART

    def _layers(self) -> list[range]:
        together = -(-self._config.layers // _PARTS)
        return [
            range(first, min(first + together, self._config.layers))
            for first in range(0, self._config.layers, together)
        ]

    def _resized(self, part: Tensor, capacity: int) -> Tensor:
        if part.shape[2] == capacity:
            return part
        kept = min(part.shape[2], capacity)
        resized = self._zeros(len(part), capacity)
        resized[:, :, :kept] = part[:, :, :kept]
        return resized

    def _zeros(self, layers: int, rows: int) -> Tensor:
        shape = (layers, 2, rows, self._config.kv_heads, self.tokens, self._config.head_dim)
        if self._like.device.type != "cpu":
            return self._like.new_zeros(shape)
        return torch.from_numpy(make_zeros(math.prod(shape)).reshape(shape)).to(self._like.dtype)


def _runs(indices: Sequence[int]) -> list[range]:
    """Runs of successive numbers, in order: copied as they are, they need no memory on the way."""
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
