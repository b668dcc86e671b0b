"""The text of a single token in bytes, because a character may have several tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from rlkit.tokenizers.bundled import PackagedTokenizer

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # name of a byte in vocabularies of SentencePiece


def token_text(tokenizer: Tokenizer | PackagedTokenizer, token: int) -> bytes:
    """Return the bytes of a token; the names of special tokens as text."""
    text = str(tokenizer.decode([token]))
    if isinstance(tokenizer, PackagedTokenizer):
        return tokenizer.decode_bytes(token) if "\ufffd" in text else text.encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if match := _BYTE.fullmatch(name):
        return bytes.fromhex(match[1])
    if "\ufffd" in text:
        values = bytes_by_character()
        return bytes(values[character] for character in name) if all(c in values for c in name) else text.encode()
    # SentencePiece drops the space before the first token of a text.
    return (" " + text if name.startswith("▁") and not text.startswith(" ") else text).encode()


@cache
def bytes_by_character() -> Mapping[str, int]:
    """Return the byte for each character in the names of byte-level tokens (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
