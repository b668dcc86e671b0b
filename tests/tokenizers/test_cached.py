"""A cached tokenizer returns what the original one returns, and encodes a short text once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rlkit.tokenizers.cached import TEXT_CHARS_MAX, cache_encodings


class CountingTokenizer:
    bos_token_id = 1

    def __init__(self) -> None:
        self.encoded = list[str]()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        return [self.bos_token_id] * add_special_tokens + [ord(letter) for letter in text]


@pytest.mark.parametrize(("chars", "times"), [(0, 1), (3, 1), (TEXT_CHARS_MAX, 1), (TEXT_CHARS_MAX + 1, 3)])
def test_a_short_text_is_encoded_once(chars: int, times: int) -> None:
    original: Any = CountingTokenizer()
    cached, text = cache_encodings(original), "x" * chars
    for _ in range(3):
        tokens = cached.encode(text, add_special_tokens=False)
        assert tokens == [120] * chars
        tokens.append(0)  # a caller's change stays its own
    assert original.encoded == [text] * times


def test_special_tokens_are_part_of_the_key() -> None:
    original: Any = CountingTokenizer()
    cached = cache_encodings(original)
    assert [cached.encode("a"), cached.encode("a", add_special_tokens=False)] == [[1, 97], [97]]
    assert cached.bos_token_id == original.bos_token_id


def test_a_cached_tokenizer_can_be_pickled_for_a_worker() -> None:
    original: Any = CountingTokenizer()
    cached = pickle.loads(pickle.dumps(cache_encodings(original)))
    assert [cached.encode("a"), cached.encode("a")] == [[1, 97], [1, 97]]
    assert cached.encode._encode.__self__.encoded == ["a"]
