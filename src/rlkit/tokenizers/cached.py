"""A cache of the tokens of short texts.

Invariant: a cached tokenizer returns the tokens of the original one, as a list of the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache, wraps
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
    encode = cast("Callable[..., list[int]]", tokenizer.encode)

    # The options differ between tokenizers: `add_special_tokens`, and `split_special_tokens` of some.
    @lru_cache(_TEXTS_MAX)
    def encode_short(text: str, **options: bool) -> Tokens:
        return np.asarray(encode(text, **options), np.int32)

    def encode_cached(text: str, **options: bool) -> list[int]:
        return encode(text, **options) if len(text) > TEXT_CHARS_MAX else encode_short(text, **options).tolist()

    cached = copy(tokenizer)
    cached.encode = encode_cached  # pyright: ignore[reportAttributeAccessIssue]  the part of it that renderers use
    return cached


def with_cached_encodings[**P](load: Callable[P, Tokenizer]) -> Callable[P, Tokenizer]:
    """Decorate a function that loads a tokenizer: the tokenizer remembers its latest encodings."""

    @wraps(load)
    def load_cached(*args: P.args, **kwargs: P.kwargs) -> Tokenizer:
        return cache_encodings(load(*args, **kwargs))

    return load_cached
