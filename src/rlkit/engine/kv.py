"""The key/value cache of the sequences that are being decoded.

Invariant: a row attends over its own positions, where there are kernels, and otherwise over its own bucket, which
depends on its own length only: its numbers never depend on how long its neighbours are. Unused positions of a bucket
are finite and masked, and so contribute exactly nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlkit.engine.config import ModelConfig
from rlkit.engine.ops import attend, has_kernels, split_heads

_SHORT_STEP_TOKENS = 32
_LONG_STEP_TOKENS = 256
_SHORT_TOKENS = 256
# A block grows by an eighth more than it must, and shrinks once a fifth of it is empty.
_SPARE_PART, _UNUSED_PART = 8, 4


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
    than the rows need, and what grows, shrinks or moves does so a layer at a time: there is no memory for two copies.

    Args:
        like: a tensor of the device and type that keys and values have.
    """

    def __init__(self, config: ModelConfig, tokens: int, like: Tensor) -> None:
        self.tokens = tokens
        self.rows: list[Row] = []
        self.lengths: list[int] = []
        self._config = config
        self._like = like
        self._tensors = [self._zeros(0) for _ in range(2 * config.layers)]  # keys and values of layer 0, of layer 1, …

    @property
    def capacity(self) -> int:
        """How many rows there is room for."""
        return len(self._tensors[0])

    def reserve(self, count: int) -> None:
        """Make room for `count` more rows."""
        capacity = self._capacity_with(count)
        for index, tensor in enumerate(self._tensors):
            self._tensors[index] = self._resized(tensor, capacity)

    def add(self, rows: Sequence[Row], keys: Tensor, values: Tensor) -> None:
        """Append rows that begin alike, with the first n positions filled: keys and values [layers, K, n, D]."""
        self.reserve(len(rows))
        length, new = keys.shape[2], slice(len(self.rows), len(self.rows) + len(rows))
        for index, tensor in enumerate(self._tensors):
            tensor[new, :, :length] = (values if index % 2 else keys)[index // 2]
        self.rows += rows
        self.lengths += [length] * len(rows)

    def remove(self, indices: Sequence[int], *, into: KvBlock[Row] | None = None) -> None:
        """Forget rows, or move them into a block of an equal or a longer bucket."""
        kept, gone = len(self.rows) - len(indices), set(indices)
        holes = [index for index in indices if index < kept]
        fillers = [index for index in range(kept, len(self.rows)) if index not in gone]
        capacity = self.capacity if self.capacity <= kept + kept // _UNUSED_PART else kept
        going, to, of = (torch.tensor(some, device=self._like.device) for some in (indices, holes, fillers))
        larger = 0 if into is None else into._capacity_with(len(indices))
        for index, mine in enumerate(self._tensors):
            if into is not None:
                theirs = into._resized(into._tensors[index], larger)
                theirs[len(into.rows) : len(into.rows) + len(indices), :, : self.tokens] = mine[going]
                into._tensors[index] = theirs
            if holes:
                mine[to] = mine[of]
            self._tensors[index] = self._resized(mine, capacity)
        if into is not None:
            into.rows += [self.rows[index] for index in indices]
            into.lengths += [self.lengths[index] for index in indices]
        for hole, filler in zip(holes, fillers, strict=True):
            self.rows[hole], self.lengths[hole] = self.rows[filler], self.lengths[filler]
        del self.rows[kept:], self.lengths[kept:]

    def begin(self) -> None:
        """Make room for one more position in every row."""
        self.lengths = [length + 1 for length in self.lengths]
        self._last = torch.tensor(self.lengths, device=self._like.device) - 1
        self._mask = None if has_kernels(self._like) else self._hidden()

    def attend(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """Write this step's position and attend: queries, keys and values [n, H + 2K, D] to `out [n, H · D]`."""
        keys, values = self._tensors[2 * layer : 2 * layer + 2]
        if self._mask is None:
            attend(rows, keys, values, self._last, out)
            return
        q, k, v = split_heads(rows, keys.shape[1])
        places = torch.arange(len(rows), device=rows.device)
        keys[places, :, self._last], values[places, :, self._last] = k, v
        grouped = q.reshape(len(rows), keys.shape[1], -1, q.shape[-1]) * q.shape[-1] ** -0.5
        scores = torch.matmul(grouped, keys[: len(rows)].transpose(-1, -2)) + self._mask[:, None, None]
        out.view(grouped.shape)[:] = torch.matmul(functional.softmax(scores, -1), values[: len(rows)])

    def _hidden(self) -> Tensor:
        """What is added to the scores of a step, [n, bucket]: −∞ where there is no position yet."""
        hidden = torch.arange(self.tokens, device=self._like.device) > self._last[:, None]
        return self._like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def _capacity_with(self, count: int) -> int:
        """The room that `count` more rows need: what there is, or somewhat more, so that it seldom grows."""
        needed = len(self.rows) + count
        return self.capacity if needed <= self.capacity else needed + needed // _SPARE_PART

    def _resized(self, tensor: Tensor, capacity: int) -> Tensor:
        if len(tensor) == capacity:
            return tensor
        kept = min(len(tensor), capacity)
        resized = self._zeros(capacity)
        resized[:kept] = tensor[:kept]
        return resized

    def _zeros(self, rows: int) -> Tensor:
        shape = (rows, self._config.kv_heads, self.tokens, self._config.head_dim)
        if self._like.device.type != "cpu":
            return self._like.new_zeros(shape)
        # numpy leaves it to the system to clear memory, a page when it is first used; torch would fill all of it.
        return torch.from_numpy(np.zeros(shape, np.float32)).to(self._like.dtype)
