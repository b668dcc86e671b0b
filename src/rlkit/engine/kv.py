"""The key/value cache of the sequences that are being decoded.

Invariant: a row attends over its own bucket, which depends on its own length only, so that its numbers never depend on
how long its neighbours are. Unused positions are finite and masked, and so contribute exactly nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlkit.engine.config import ModelConfig

_SHORT_STEP_TOKENS = 32
_LONG_STEP_TOKENS = 256
_SHORT_TOKENS = 256


def bucket(tokens: int) -> int:
    """Positions set aside for a sequence of `tokens`: a multiple of 32 up to 256, then of 256."""
    step = _SHORT_STEP_TOKENS if tokens <= _SHORT_TOKENS else _LONG_STEP_TOKENS
    return -(-tokens // step) * step


def kv_bytes(config: ModelConfig, tokens: int) -> int:
    """Memory that a sequence of `tokens` takes up in float32."""
    return 2 * 4 * config.layers * config.kv_heads * config.head_dim * bucket(tokens)


class KvBlock[Row]:
    """All rows of one bucket: keys and values [layers, capacity, K, bucket, D].

    `rows[i]` is what the caller keeps for row i; dropping a row moves the last one into its place.

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
        self._keys = self._zeros(0)
        self._values = self._zeros(0)

    def reserve(self, count: int) -> None:
        """Make room for `count` more rows."""
        extra = len(self.rows) + count - self._keys.shape[1]
        if extra > 0:
            self._keys = torch.cat([self._keys, self._zeros(extra)], 1)
            self._values = torch.cat([self._values, self._zeros(extra)], 1)

    def add(self, row: Row, keys: Tensor, values: Tensor) -> None:
        """Append a row with the first n positions filled: keys and values [layers, K, n, D]."""
        index, length = len(self.rows), keys.shape[2]
        self.reserve(1)
        self._keys[:, index, :, :length] = keys
        self._values[:, index, :, :length] = values
        self.rows.append(row)
        self.lengths.append(length)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """The keys and values [layers, K, n, D] of a row."""
        length = self.lengths[index]
        return self._keys[:, index, :, :length], self._values[:, index, :, :length]

    def drop(self, index: int) -> None:
        """Forget a row."""
        last = len(self.rows) - 1
        if index != last:
            length = self.lengths[last]
            self._keys[:, index, :, :length] = self._keys[:, last, :, :length]
            self._values[:, index, :, :length] = self._values[:, last, :, :length]
            self.rows[index], self.lengths[index] = self.rows[last], self.lengths[last]
        self.rows.pop()
        self.lengths.pop()

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
        keys = self._keys[layer]
        keys[self._row_index, :, self._last] = qk[:, self._heads :]
        self._values[layer][self._row_index, :, self._last] = values
        q = qk[:, : self._heads].reshape(rows, kv_heads, self._heads // kv_heads, -1) * qk.shape[-1] ** -0.5
        # A batched product gives a row the same bits in every batch; the fused attention kernel does not.
        scores = torch.matmul(q, keys[:rows].transpose(-1, -2)) + mask[:, None, None]
        mixed = torch.matmul(functional.softmax(scores, -1), self._values[layer][:rows])
        return mixed.reshape(rows, -1)

    def _zeros(self, rows: int) -> Tensor:
        config = self._config
        shape = (config.layers, rows, config.kv_heads, self.tokens, config.head_dim)
        if self._like.device.type != "cpu":
            return self._like.new_zeros(shape)
        # numpy leaves it to the system to clear memory, a page when it is first used; torch would fill all of it.
        return torch.from_numpy(np.zeros(shape, np.float32)).to(self._like.dtype)
