"""Packing of training sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.engine.training.packing import micro_batches

PROMPT = np.arange(100, 140)


@st.composite
def sequences(draw: st.DrawFn) -> list[np.ndarray]:
    """Some that begin alike, some that do not, some equal."""
    sequences = [
        np.array(draw(st.lists(st.integers(0, 2), min_size=1, max_size=300))) for _ in range(draw(st.integers(0, 6)))
    ]
    for _ in range(draw(st.integers(0, 12))):
        answer = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
        sequences.append(np.concatenate([PROMPT[: draw(st.integers(0, 40))], answer]))
    return [*sequences, *sequences[:2]]


@given(sequences())
@settings(deadline=None)
def test_every_sequence_is_packed_with_its_whole_prefix(all_sequences: list[np.ndarray]) -> None:
    shares = micro_batches([sequence.astype(np.int64) for sequence in all_sequences], 256, 2)
    batches = [batch for share in shares for batch in share]
    members = [(batch, *member) for batch in batches for member in batch.examples.items()]
    assert sorted(index for _, index, _ in members) == list(range(len(all_sequences)))
    for batch, index, rows in members:
        np.testing.assert_array_equal(batch.tokens[rows], all_sequences[index])
        tail = next(span for span in batch.spans if span.start + span.length - 1 == rows[-1])
        prefix = range(tail.prefix.start, tail.prefix.start + tail.prefix.length) if tail.prefix else range(0)
        assert [*prefix, *range(tail.start, tail.start + tail.length)] == rows.tolist()
    for batch in batches:
        covered = [row for span in batch.spans for row in range(span.start, span.start + span.length)]
        assert covered == list(range(len(batch.tokens)))
        longest = max(len(all_sequences[index]) for index in batch.examples)
        assert len(batch.tokens) <= max(288, 3 * longest)


def test_a_prompt_is_packed_once_for_its_group() -> None:
    group = [np.concatenate([PROMPT, [i]]) for i in range(8)]
    (batches,) = micro_batches(group, 256)
    assert sum(len(batch.tokens) for batch in batches) == 40 + 8


def test_the_copies_of_a_prefix_are_bounded() -> None:
    prompt = np.arange(256)
    group = [np.concatenate([prompt, [1000 + i]]) for i in range(256)]
    (batches,) = micro_batches(group, 256)
    assert max(len(batch.examples) for batch in batches) <= 32


def test_a_large_group_is_split_into_equal_parts() -> None:
    group = [np.concatenate([np.arange(100), np.full(20, 200 + i)]) for i in range(64)]
    rows = [[len(batch.tokens) for batch in share] for share in micro_batches(group, 512, 2)]
    assert rows == [[420, 420], [420, 420]]


@given(st.lists(st.integers(1, 120), min_size=40, max_size=90), st.integers(1, 3))
@settings(deadline=None)
def test_shares_have_about_the_same_number_of_rows(lengths: list[int], shares: int) -> None:
    alone = [np.arange(1000 * i, 1000 * i + length) for i, length in enumerate(lengths)]
    rows = [sum(len(batch.tokens) for batch in share) for share in micro_batches(alone, 256, shares)]
    assert sum(rows) == sum(lengths)
    assert max(rows) - min(rows) <= 288
    counts = [len(share) for share in micro_batches(alone, 256, shares)]
    assert sum(counts) <= 1.5 * sum(lengths) / 256 + 2 * shares
