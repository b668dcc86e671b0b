"""Training sequences packed into micro-batches that share what the sequences have in common.

Invariant: every position of every example is in exactly one micro-batch, with all that comes before it; which examples
stand together depends on the examples only.

The samples of a group begin with one prompt. Its rows are computed once for all of them: the model sees a prefix and
what follows it, each a span, and the output layer sees one row with several targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkit.engine.model.attention import Span

_SHARED_TOKENS_MIN = 8
# Every sequence gets a copy of its prefix's keys and values: small beside a row's activations, but not for any number.
_COPIES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One training sequence: `tokens [N] int64`, `targets [N] or [N, K] int64`, loss inputs of that shape by name."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """An example in a micro-batch: its `index` in the request, and the row of each of its tokens."""

    index: int
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Packed `tokens [R]`, laid out as `spans`, and the examples that they belong to."""

    tokens: NDArray[np.int64]
    spans: tuple[Span, ...]
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """Examples that begin with the same `shared` tokens."""

    shared: int
    indices: tuple[int, ...]

    def size(self, lengths: Sequence[int]) -> int:
        return self.shared + sum(lengths[i] - self.shared for i in self.indices)


def micro_batches(sequences: Sequence[NDArray[np.int64]], most: int, shares: int = 1) -> list[list[MicroBatch]]:
    """Pack sequences, none empty, into micro-batches of about `most` rows (or one longer sequence), in even shares."""
    lengths = [len(sequence) for sequence in sequences]
    families = [part for family in _families(sequences) for part in _split(family, lengths, most)]
    families.sort(key=lambda family: (family.size(lengths), family.indices))
    sizes = [family.size(lengths) for family in families]
    # No more than there must be for each share, and all of about one size.
    count = max(-(-sum(sizes) // (shares * most)), 1) * shares
    batches = [_pack(sequences, chosen) for chosen in _fill(sizes, families, sum(sizes) / count, most + most // 8)]
    shared: list[list[MicroBatch]] = [[] for _ in range(shares)]
    for batch in sorted(batches, key=lambda batch: -len(batch.tokens)):
        min(shared, key=lambda batches: sum(len(other.tokens) for other in batches)).append(batch)
    return shared


def _families(sequences: Sequence[NDArray[np.int64]]) -> Iterator[_Family]:
    """Neighbours in lexicographic order, joined while sharing saves rows."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">i8").tobytes())
    members: list[int] = []
    shared = 0
    for index in order:
        if members:
            # A whole sequence cannot be a prefix: each example keeps at least one row of its own.
            limit = min(len(sequences[index]) - 1, shared if len(members) > 1 else len(sequences[members[0]]) - 1)
            common = _common(sequences[members[-1]], sequences[index], limit)
            if common >= _SHARED_TOKENS_MIN and len(members) * common >= (len(members) - 1) * shared:
                members.append(index)
                shared = common
                continue
            yield _Family(shared, tuple(members))
        members, shared = [index], 0
    if members:
        yield _Family(shared, tuple(members))


def _common(one: NDArray[np.int64], other: NDArray[np.int64], limit: int) -> int:
    """How many tokens, at most `limit`, both begin with."""
    different = np.flatnonzero(one[:limit] != other[:limit])
    return int(different[0]) if len(different) else max(limit, 0)


def _split(family: _Family, lengths: Sequence[int], most: int) -> Iterator[_Family]:
    """Parts of a family, of about one size, that fit a micro-batch.

    A long prefix is worth a larger one: each part computes it again.
    """
    most = max(most, 2 * family.shared)
    all_own = family.size(lengths) - family.shared
    even = all_own / max(-(-all_own // max(most - family.shared, 1)), 1)
    part: list[int] = []
    rows, done, count = family.shared, 0, 0
    for index in sorted(family.indices, key=lambda i: lengths[i]):
        own = lengths[index] - family.shared
        copied = (len(part) + 1) * family.shared
        reached = done + rows - family.shared + own / 2
        if part and (rows + own > most or copied > _COPIES * most or reached > (count + 1) * even):
            yield _Family(family.shared, tuple(part))
            done, count = done + rows - family.shared, count + 1
            part, rows = [], family.shared
        part.append(index)
        rows += own
    yield _Family(family.shared, tuple(part))


def _fill(sizes: Sequence[int], families: Sequence[_Family], even: float, limit: int) -> Iterator[list[_Family]]:
    """Neighbours together, about `even` rows, and no more than `limit` unless one alone has."""
    batch: list[_Family] = []
    rows = done = count = 0
    for size, family in zip(sizes, families, strict=True):
        # Whichever comes nearer to where this batch should end: with the family, or without it.
        if batch and (rows + size > limit or done + rows + size / 2 > (count + 1) * even):
            yield batch
            done, count = done + rows, count + 1
            batch, rows = [], 0
        batch.append(family)
        rows += size
    if batch:
        yield batch


def _pack(sequences: Sequence[NDArray[np.int64]], families: Sequence[_Family]) -> MicroBatch:
    """Prefixes first, so that those of one length stand together, and then what follows each of them."""
    tokens: list[NDArray[np.int64]] = []
    spans: list[Span] = []
    prefixes: list[Span | None] = []
    start = 0
    for family in families:
        prefixes.append(Span(start, family.shared) if family.shared else None)
        if family.shared:
            tokens.append(sequences[family.indices[0]][: family.shared])
            spans.append(Span(start, family.shared))
            start += family.shared
    members: list[Member] = []
    for family, prefix in zip(families, prefixes, strict=True):
        before = np.arange(prefix.start, prefix.start + prefix.length) if prefix else np.arange(0)
        for index in family.indices:
            own = sequences[index][family.shared :]
            tokens.append(own)
            spans.append(Span(start, len(own), prefix))
            members.append(Member(index, np.concatenate([before, np.arange(start, start + len(own))])))
            start += len(own)
    return MicroBatch(np.concatenate(tokens), tuple(spans), tuple(members))
