"""Pack training sequences into micro-batches that compute common prefixes once.

Invariant: every position of every example is in exactly one micro-batch, together with all positions before it; the
packing depends only on the examples.

The rollouts of a group start with the same prompt, whose rows are computed once for all of them. In a packed batch, the
prefix and its continuations are spans, and a row of the output layer can have several targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkit.engine.model.attention import Span

_SHARED_TOKENS_MIN = 8
# Every sequence gets a copy of its prefix's keys and values, which is small compared to the activations. All copies of
# a micro-batch have at most this many times its rows.
_COPIES_MAX = 16


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A training sequence: `tokens [N] int64`, `targets [N] or [N, K] int64`, loss inputs of that shape by name."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Packed `tokens [R]`, their layout in `spans`, and the row of each token of each example, by its index."""

    tokens: NDArray[np.int64]
    spans: tuple[Span, ...]
    examples: Mapping[int, NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class _PrefixGroup:
    """Examples that begin with the same `shared` tokens."""

    shared: int
    indices: tuple[int, ...]

    def row_count(self, lengths: Sequence[int]) -> int:
        return self.shared + sum(lengths[i] - self.shared for i in self.indices)


def micro_batches(sequences: Sequence[NDArray[np.int64]], rows_max: int, shares: int = 1) -> list[list[MicroBatch]]:
    """Pack non-empty sequences into micro-batches of about `rows_max` rows, divided into `shares` of equal size."""
    lengths = [len(sequence) for sequence in sequences]
    groups = [part for group in _prefix_groups(sequences) for part in _split(group, lengths, rows_max)]
    groups.sort(key=lambda group: (group.row_count(lengths), group.indices))
    row_counts = [group.row_count(lengths) for group in groups]
    # As few micro-batches per share as possible, all of about the same size.
    count = max(-(-sum(row_counts) // (shares * rows_max)), 1) * shares
    batches = [
        _pack(sequences, chunk)
        for chunk in _chunk(groups, row_counts, sum(row_counts) / count, rows_max + rows_max // 8)
    ]
    by_share: list[list[MicroBatch]] = [[] for _ in range(shares)]
    for batch in sorted(batches, key=lambda batch: -len(batch.tokens)):
        min(by_share, key=lambda share: sum(len(other.tokens) for other in share)).append(batch)
    return by_share


def _prefix_groups(sequences: Sequence[NDArray[np.int64]]) -> Iterator[_PrefixGroup]:
    """Group sequences that are adjacent in lexicographic order, as long as sharing a prefix saves rows."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">i8").tobytes())
    indices: list[int] = []
    shared = 0
    for index in order:
        if indices:
            # The prefix is shorter than each sequence: every example keeps at least one row of its own.
            limit = min(len(sequences[index]) - 1, shared if len(indices) > 1 else len(sequences[indices[0]]) - 1)
            common = _common_prefix_length(sequences[indices[-1]], sequences[index], limit)
            if common >= _SHARED_TOKENS_MIN and len(indices) * common >= (len(indices) - 1) * shared:
                indices.append(index)
                shared = common
                continue
            yield _PrefixGroup(shared, tuple(indices))
        indices, shared = [index], 0
    if indices:
        yield _PrefixGroup(shared, tuple(indices))


def _common_prefix_length(a: NDArray[np.int64], b: NDArray[np.int64], limit: int) -> int:
    """Return the number of tokens, at most `limit`, of the longest common prefix."""
    differences = np.flatnonzero(a[:limit] != b[:limit])
    return int(differences[0]) if len(differences) else max(limit, 0)


def _split(group: _PrefixGroup, lengths: Sequence[int], rows_max: int) -> Iterator[_PrefixGroup]:
    """Split a group into parts of about equal size that fit a micro-batch.

    With a long prefix, parts may be larger, because each part recomputes the prefix.
    """
    rows_max = max(rows_max, 2 * group.shared)
    indices = sorted(group.indices, key=lambda i: lengths[i])
    tails = [lengths[index] - group.shared for index in indices]
    limit = rows_max - group.shared
    even = sum(tails) / max(-(-sum(tails) // max(limit, 1)), 1)
    copies_max = _COPIES_MAX * rows_max // group.shared if group.shared else None
    for part in _chunk(indices, tails, even, limit, copies_max):
        yield _PrefixGroup(group.shared, tuple(part))


def _chunk[T](
    items: Sequence[T], sizes: Sequence[int], even: float, limit: int, count_max: int | None = None
) -> Iterator[list[T]]:
    """Join consecutive items to chunks of about `even`, at most `limit` (one item may be larger) and `count_max`."""
    chunk: list[T] = []
    total = done = count = 0
    for item, size in zip(items, sizes, strict=True):
        # End the chunk with or without the item, whichever total is closer to a multiple of `even`.
        is_full = total + size > limit or len(chunk) == count_max
        if chunk and (is_full or done + total + size / 2 > (count + 1) * even):
            yield chunk
            done, count = done + total, count + 1
            chunk, total = [], 0
        chunk.append(item)
        total += size
    if chunk:
        yield chunk


def _pack(sequences: Sequence[NDArray[np.int64]], groups: Sequence[_PrefixGroup]) -> MicroBatch:
    """Lay out all prefixes first, so that prefixes of equal length are adjacent, and then the continuations."""
    tokens: list[NDArray[np.int64]] = []
    spans: list[Span] = []
    prefixes: list[Span | None] = []
    start = 0
    for group in groups:
        prefixes.append(Span(start, group.shared) if group.shared else None)
        if group.shared:
            tokens.append(sequences[group.indices[0]][: group.shared])
            spans.append(Span(start, group.shared))
            start += group.shared
    examples: dict[int, NDArray[np.int64]] = {}
    for group, prefix in zip(groups, prefixes, strict=True):
        prefix_rows = np.arange(prefix.start, prefix.start + prefix.length) if prefix else np.arange(0)
        for index in group.indices:
            tail = sequences[index][group.shared :]
            tokens.append(tail)
            spans.append(Span(start, len(tail), prefix))
            examples[index] = np.concatenate([prefix_rows, np.arange(start, start + len(tail))])
            start += len(tail)
    return MicroBatch(np.concatenate(tokens), tuple(spans), examples)
