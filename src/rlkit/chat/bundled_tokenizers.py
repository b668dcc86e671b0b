"""Tokenizers that come inside Python packages, and so need no hub.

Invariant: text with special tokens in it becomes the tokens that the model's own tokenizer makes of it, and every token
becomes its text again.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Protocol, cast

NATIVE = {
    r"Qwen/Qwen3\.(5|6|8)-.+": "Qwen35Tokenizer",
    r"Qwen/Qwen3-(?!VL).+": "Qwen3Tokenizer",
    r"openai/gpt-oss-.+": "HarmonyTokenizer",
    r"deepseek-ai/DeepSeek-V3\.1.*": "DeepSeekV31Tokenizer",
    r"zai-org/GLM-5\.3.*": "GlmTokenizer",
    r"nvidia/NVIDIA-Nemotron-3-.+": "Nemotron3Tokenizer",
}
"""Patterns of models' names, and the class in `tml_renderers.tokenizers` that embeds their tokenizer."""

LLAMA = re.compile(r"meta-llama/(Meta-)?Llama-3.*")
"""Models whose tokenizer the package llama-models carries."""

_ENDS = {"HarmonyTokenizer": "<|return|>"}
"""The token that ends a text, where the class names another."""

_KEPT = re.compile(r"</?(think|tool_call|tool_response|arg_key|arg_value)>")
"""Marks that are part of what a model says; the other special tokens are left out where these are asked to be."""


class Vocabulary(Protocol):
    """What is needed of a package's tokenizer."""

    def encode_ordinary(self, text: str) -> Sequence[int]:
        """Tokens of a text in which nothing is special."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        ...


class PackagedTokenizer:
    """As much of the interface of `transformers` as chat formats use, over a package's tokenizer.

    Args:
        name: of the model.
        vocabulary: of the package.
        special: the special tokens, by their text.
        eos: the one that ends a text.
        bos: the one that begins it, where there is one.
    """

    chat_template: str | None = None
    """There is none: conversations are written by one of tinker-cookbook's renderers."""

    def __init__(
        self, name: str, vocabulary: Vocabulary, special: Mapping[str, int], *, eos: str, bos: str | None = None
    ) -> None:
        self.name_or_path = name
        self.eos_token, self.bos_token = eos, bos
        self.eos_token_id = special[eos]
        self.bos_token_id = None if bos is None else special[bos]
        self._vocabulary = vocabulary
        self._special = dict(special)
        self._dropped = {token for text, token in special.items() if not _KEPT.fullmatch(text)}

    def __len__(self) -> int:
        return max(self._special.values()) + 1

    @property
    def all_special_tokens(self) -> list[str]:
        """Their texts."""
        return list(self._special)

    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """The tokens of a text, in which special tokens are known by their names.

        Args:
            text: to be encoded.
            add_special_tokens: put the beginning of a text before it, where the model has a token for that.
            split_special_tokens: take the names of special tokens for ordinary text.
        """
        tokens = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else list[int]()
        if split_special_tokens:
            return [*tokens, *self._vocabulary.encode_ordinary(text)]
        for piece in self._splitter.split(text):
            if piece in self._special:
                tokens.append(self._special[piece])
            elif piece:
                tokens.extend(self._vocabulary.encode_ordinary(piece))
        return tokens

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        """The text of tokens; what is no whole character is shown as U+FFFD."""
        tokens = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self._dropped]
        return self._vocabulary.decode(tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int] | None:
        """The ids of special tokens; None for any other."""
        if isinstance(tokens, str):
            return self._special.get(tokens)
        return [self._special[token] for token in tokens]

    @cached_property
    def _splitter(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def packaged(model: str) -> PackagedTokenizer | None:
    """The tokenizer of a model that an installed package carries; None where none does."""
    model = model.split(":", 1)[0]
    for pattern, name in NATIVE.items():
        if re.fullmatch(pattern, model):
            return _native(model, name)
    if LLAMA.fullmatch(model) and importlib.util.find_spec("llama_models") is not None:
        return _llama(model)
    return None


class _Native(Vocabulary, Protocol):
    """A tokenizer of `tml_renderers`."""

    eos_token: str
    bos_token: str

    def special_tokens(self) -> list[str]: ...

    def encode_special(self, name: str) -> int: ...


@cache
def _native(model: str, name: str) -> PackagedTokenizer:
    module = importlib.import_module("tml_renderers.tokenizers")
    native = cast("Callable[[], _Native]", getattr(module, name))()
    ids = {own: native.encode_special(own) for own in native.special_tokens()}
    texts = {own: native.decode([token]) for own, token in ids.items()}
    return PackagedTokenizer(
        model,
        native,
        {texts[own]: token for own, token in ids.items()},
        eos=_ENDS.get(name) or texts[native.eos_token],
    )


class _Tiktoken:
    """A tiktoken encoding; what it decodes has replacement characters where bytes are no text."""

    def __init__(self, encoding: _Encoding) -> None:
        self._encoding = encoding

    def encode_ordinary(self, text: str) -> Sequence[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._encoding.decode(token_ids, errors="replace")


class _Encoding(Protocol):
    def encode_ordinary(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int], errors: str) -> str: ...


class _Llama(Protocol):
    special_tokens: Mapping[str, int]
    model: _Encoding


@cache
def _llama(model: str) -> PackagedTokenizer:
    module = importlib.import_module("llama_models.llama3.tokenizer")
    get_instance = cast("Callable[[], _Llama]", module.Tokenizer.get_instance)
    llama = get_instance()
    return PackagedTokenizer(
        model, _Tiktoken(llama.model), llama.special_tokens, eos="<|eot_id|>", bos="<|begin_of_text|>"
    )
