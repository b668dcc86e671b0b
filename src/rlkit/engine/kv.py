"""The key/value cache of the sequences that are being decoded.

Invariant: a row attends over its own bucket, which depends on its own length only, so that its numbers never depend on
how long its neighbours are. Unused positions are finite and masked, and so contribute exactly nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlkit.engine.config import ModelConfig

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
        self._heads = config.heads
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

    def begin(self) -> Tensor:
        """Make room for one more position in every row, and return the additive mask [n, bucket] of this step."""
        self.lengths = [length + 1 for length in self.lengths]
        device = self._like.device
        self._last = torch.tensor(self.lengths, device=device) - 1
        self._row_index = torch.arange(len(self.rows), device=device)
        hidden = torch.arange(self.tokens, device=device) > self._last[:, None]
        return self._like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def attend(self, layer: int, qk: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Write this step's position and attend: qk [n, H + K, D] and values [n, K, D] to [n, H · D]."""
        rows, kv_heads = len(self.rows), values.shape[1]
        own_keys, own_values = self._tensors[2 * layer : 2 * layer + 2]
        own_keys[self._row_index, :, self._last] = qk[:, self._heads :]
        own_values[self._row_index, :, self._last] = values
        q = qk[:, : self._heads].reshape(rows, kv_heads, self._heads // kv_heads, -1) * qk.shape[-1] ** -0.5
        # A batched product gives a row the same bits in every batch; the fused attention kernel does not.
        scores = torch.matmul(q, own_keys[:rows].transpose(-1, -2)) + mask[:, None, None]
        mixed = torch.matmul(functional.softmax(scores, -1), own_values[:rows])
        return mixed.reshape(rows, -1)

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
