"""A completion out of parts that were sampled and parts that were forced.

Invariant: a token that was not sampled has no log-probability, and is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from rlkit.types import Bools, Completion, Floats, Tokens

type Piece = tuple[Tokens, Floats, Bools]
"""Tokens, their log-probabilities, and whether they were sampled: [C] each."""


def forced_piece(tokens: Tokens) -> Piece:
    """Tokens that the model did not choose."""
    return tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.bool_)


def sampled_piece(completion: Completion) -> Piece:
    """What the model sampled."""
    count = len(completion.tokens)
    return completion.tokens, completion.logprobs, _ones(count.bit_length())[:count]


@cache
def _ones(bits: int) -> Bools:
    """Up to 2^bits − 1 of them, for all completions: nearly every token is sampled."""
    ones = np.ones(1 << bits, np.bool_)
    ones.flags.writeable = False
    return ones


def joined(pieces: Sequence[Piece]) -> Piece:
    """One after another."""
    if len(pieces) == 1:
        return pieces[0]
    tokens = np.concatenate([piece[0] for piece in pieces])
    logprobs = np.concatenate([piece[1] for piece in pieces])
    return tokens, logprobs, np.concatenate([piece[2] for piece in pieces])
