"""Keys and values of prompts, and states of delta nets, kept by token prefix for one set of weights.

Invariant: a page depends only on the tokens up to its end, and is computed by prefill, whose bits do not depend on the
part of a prompt that is kept; so do states. Every page is kept with all pages before it, and states with all pages
before them.

Keys and values that decoding computes have other bits, so a reply is computed again in the prompt of the next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlkit.engine.model.delta_net import CHUNK_TOKENS, DeltaState

PAGE_TOKENS = 32
"""Positions of a page; a shorter rest of a prompt is computed again."""

# States are kept between chunks, so that torch computes the same chunks after them as in the whole prompt.
_STATE_PAGES = CHUNK_TOKENS // PAGE_TOKENS
_STATES = b"states"  # suffix of a page's key, for the states after the page


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The kept part of a prompt, and what to keep of the rest."""

    pages: Sequence[Tensor] = ()  # of the first positions
    states: Sequence[DeltaState] = ()  # after the last page, not to be changed; empty before the first page
    missing: Sequence[bytes] = ()  # keys of the other pages
    state_places: set[int] = field(default_factory=set[int])  # numbers of pages after which to keep states


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    tensors: Sequence[Tensor]  # the keys and values of a page, or the states after a page
    owners: set[str]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class PrefixCache:
    """Pages of keys and values [layers, 32, 2K, D], and states between pages, by all tokens up to their end.

    Args:
        has_states: True for a model with delta nets, which needs their states to continue a prompt.
    """

    def __init__(self, *, has_states: bool) -> None:
        # From the least to the most recently used; an entry is used before the pages in front of it. Only the states
        # where a prompt begins or which it computes are used, so that those of earlier turns are the first to go.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._has_states = has_states
        self.size_bytes = 0

    def find(self, prompt: NDArray[np.int64], limit: int) -> Prefix:
        """Return the kept part of a prompt, of positions before `limit`."""
        keys = _page_keys(prompt)
        matches = next((i for i, key in enumerate(keys) if key not in self._entries), len(keys))
        matches = min(matches, limit // PAGE_TOKENS)
        count, states = self._find_states(keys[:matches]) if self._has_states else (matches, [])
        prefix = Prefix([self._entries[key].tensors[0] for key in keys[:count]], states, keys[count:])
        if self._has_states:
            # The next turn begins near the end; other prompts fork where this one leaves an earlier prompt.
            places = (self.round_down(pages) for pages in (matches, (len(prompt) - 1) // PAGE_TOKENS))
            prefix.state_places.update(place for place in places if place > count)
        return prefix

    def _find_states(self, keys: Sequence[bytes]) -> tuple[int, list[DeltaState]]:
        """Return the largest number of the pages after which states are kept, and these states."""
        for count in range(len(keys), 0, -1):
            entry = self._entries.get(keys[count - 1] + _STATES)
            if entry is not None:
                pairs = zip(entry.tensors[::2], entry.tensors[1::2], strict=True)
                return count, [DeltaState(tail, memory) for tail, memory in pairs]
        return 0, []

    def round_down(self, pages: int) -> int:
        """Return the largest number of pages, at most `pages`, after which a prompt can be continued."""
        return pages // _STATE_PAGES * _STATE_PAGES if self._has_states else pages

    def put(
        self,
        prompt: NDArray[np.int64],
        pages: Sequence[Tensor],
        states: Mapping[int, Sequence[DeltaState]],
        owners: Iterable[str],
    ) -> None:
        """Keep the whole pages of a prompt, and states by the pages before them, for its owners; mark them as used."""
        for count, (key, kv) in reversed([*enumerate(zip(_page_keys(prompt), pages, strict=False), start=1)]):
            tensors = [*chain.from_iterable((state.tail, state.memory) for state in states.get(count, ()))]
            if tensors:
                self._put(key + _STATES, tensors, owners)
            self._put(key, [kv], owners)

    def _put(self, key: bytes, tensors: Sequence[Tensor], owners: Iterable[str]) -> None:
        if key not in self._entries:
            self._entries[key] = _Entry(tensors, set())
            self.size_bytes += self._entries[key].size_bytes
        self._entries[key].owners.update(owners)
        self._entries.move_to_end(key)

    def drop_oldest(self) -> None:
        """Drop the page, or the states, not used for the longest time."""
        self.size_bytes -= self._entries.popitem(last=False)[1].size_bytes

    def drop_owner(self, owner: str) -> None:
        """Drop all pages and states that only `owner` used."""
        for key, entry in [*self._entries.items()]:
            entry.owners.discard(owner)
            if not entry.owners:
                self.size_bytes -= self._entries.pop(key).size_bytes


def _page_keys(prompt: NDArray[np.int64]) -> list[bytes]:
    """Return the key of each whole page: a digest of all tokens up to its end."""
    digest, keys = sha256(), list[bytes]()
    for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS):
        digest.update(prompt[end - PAGE_TOKENS : end].tobytes())
        keys.append(digest.digest())
    return keys
