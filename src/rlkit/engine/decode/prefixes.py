"""Keys and values of prompts, kept by token prefix for one set of weights.

Invariant: a page depends only on the tokens up to its end, and is computed by prefill, whose bits do not depend on the
part of a prompt that is kept. Every page is kept with all pages before it.

Keys and values that decoding computes have other bits, so a reply is computed again in the prompt of the next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

PAGE_TOKENS = 32
"""Positions of a page; a shorter rest of a prompt is computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class _Page:
    kv: Tensor
    owners: set[str]


class PrefixCache:
    """Pages of keys and values [layers, 32, 2K, D], by all tokens up to their end."""

    def __init__(self) -> None:
        # From the least to the most recently used; a page is used before the pages in front of it.
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        self.size_bytes = 0

    def find(self, prompt: NDArray[np.int64], limit: int) -> tuple[list[Tensor], list[bytes]]:
        """Return pages of the first positions, before `limit`, and the keys of the pages after them in the prompt."""
        keys = _page_keys(prompt)
        count = next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))
        count = min(count, limit // PAGE_TOKENS)
        return [self._pages[key].kv for key in keys[:count]], keys[count:]

    def put(self, prompt: NDArray[np.int64], pages: Sequence[Tensor], owners: Iterable[str]) -> None:
        """Keep the whole pages of a prompt for its owners, and mark them as used."""
        for key, kv in reversed([*zip(_page_keys(prompt), pages, strict=False)]):
            if key not in self._pages:
                self._pages[key] = _Page(kv, set())
                self.size_bytes += kv.nbytes
            self._pages[key].owners.update(owners)
            self._pages.move_to_end(key)

    def drop_oldest(self) -> None:
        """Drop the page that was not used for the longest time."""
        self.size_bytes -= self._pages.popitem(last=False)[1].kv.nbytes

    def drop_owner(self, owner: str) -> None:
        """Drop all pages that only `owner` used."""
        for key, page in [*self._pages.items()]:
            page.owners.discard(owner)
            if not page.owners:
                self.size_bytes -= self._pages.pop(key).kv.nbytes


def _page_keys(prompt: NDArray[np.int64]) -> list[bytes]:
    """Return the key of each whole page: a digest of all tokens up to its end."""
    digest, keys = sha256(), list[bytes]()
    for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS):
        digest.update(prompt[end - PAGE_TOKENS : end].tobytes())
        keys.append(digest.digest())
    return keys
