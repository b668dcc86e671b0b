"""How sequences stand one behind the other in a packed batch.

Invariant: every token of a sequence is in exactly one span, and a span attends to itself, causally, and to all of its
prefix; so that sequences that begin alike share the rows of what they have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """A run of rows: a whole sequence, or what follows a `prefix` that others may follow too."""

    start: int
    length: int
    prefix: Span | None = None

    @property
    def rows(self) -> slice:
        """Its rows in the batch."""
        return slice(self.start, self.start + self.length)

    @property
    def position(self) -> int:
        """The position of its first token in the sequence."""
        return 0 if self.prefix is None else self.prefix.length


@dataclass(frozen=True, slots=True)
class Run:
    """Spans of one length behind one prefix, standing together: `count` times `length` rows from `start`."""

    start: int
    count: int
    length: int
    prefix: Span | None

    @property
    def rows(self) -> slice:
        """Its rows in the batch."""
        return slice(self.start, self.start + self.count * self.length)


def lay_out(lengths: Sequence[int]) -> list[Span]:
    """Whole sequences, one behind the other."""
    spans: list[Span] = []
    start = 0
    for length in lengths:
        spans.append(Span(start, length))
        start += length
    return spans


def positions(spans: Sequence[Span], rows: int) -> Tensor:
    """The position of each row in its sequence, [rows] int64; zero for rows of no span."""
    found = torch.zeros(rows, dtype=torch.int64)
    for span in spans:
        found[span.rows] = torch.arange(span.position, span.position + span.length)
    return found


def runs(spans: Sequence[Span]) -> Iterator[Run]:
    """Neighbours that can be attended in one call."""
    for (length, prefix), same in groupby(spans, key=lambda span: (span.length, span.prefix)):
        members = list(same)
        yield Run(members[0].start, len(members), length, prefix)
