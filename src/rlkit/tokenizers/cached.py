"""A cache of the tokens of short texts.

Invariant: a cached tokenizer returns the tokens of the original one, as a list of the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np

from rlkit.types import Tokens

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer

TEXT_CHARS_MAX = 4096
"""Maximum length of a cached text: longer texts repeat less, and 1,024 of them would take much memory."""

_TEXTS_MAX = 1024


def cache_encodings(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer that remembers its latest encodings.

    Renderers encode each part of a conversation anew for every turn: headers, ends of messages, the tools and all
    earlier messages.
    """
    cached, encode = copy(tokenizer), cast("Callable[..., list[int]]", tokenizer.encode)
    cached.encode = _CachedEncoder(encode)  # pyright: ignore[reportAttributeAccessIssue]  the part that renderers use
    return cached


class _CachedEncoder:
    """A tokenizer's `encode` with a cache, which a pickle leaves out.

    The options differ between tokenizers: `add_special_tokens`, and `split_special_tokens` of some.
    """

    def __init__(self, encode: Callable[..., list[int]]) -> None:
        self._encode = encode
        self._encode_short: Callable[..., Tokens] = lru_cache(_TEXTS_MAX)(self._encode_array)

    def _encode_array(self, text: str, **options: bool) -> Tokens:
        return np.asarray(self._encode(text, **options), np.int32)

    def __call__(self, text: str, **options: bool) -> list[int]:
        if len(text) > TEXT_CHARS_MAX:
            return self._encode(text, **options)
        return self._encode_short(text, **options).tolist()

    def __reduce__(self) -> tuple[type[_CachedEncoder], tuple[Callable[..., list[int]]]]:
        return _CachedEncoder, (self._encode,)
