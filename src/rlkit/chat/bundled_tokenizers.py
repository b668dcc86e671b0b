"""Tokenizers that come inside Python packages, and need no hub.

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
"""Patterns of models' names, and the class in `tml_renderers.tokenizers` with their tokenizer."""

LLAMA = re.compile(r"meta-llama/(Meta-)?Llama-3.*")
"""Models whose tokenizer the package llama-models carries."""

_ENDS = {"HarmonyTokenizer": "<|return|>"}
"""The token that ends a text, if it is not the one that the class names."""

_KEPT = re.compile(r"</?(think|tool_call|tool_response|arg_key|arg_value)>")
"""Special tokens that are part of a reply's text; decoding without special tokens keeps them."""


class Vocabulary(Protocol):
    """The tokenizer of a package: text without special tokens as tokens, and any tokens as text."""

    def encode_ordinary(self, text: str, /) -> Sequence[int]: ...  # noqa: D102  the class says it

    def decode(self, token_ids: Sequence[int], /) -> str: ...  # noqa: D102  the class says it


class PackagedTokenizer:
    """The part of the interface of `transformers` that chat formats use, over a package's tokenizer.

    Args:
        name: the model's name.
        vocabulary: the package's tokenizer.
        special: ids of the special tokens by their texts.
        eos: text of the token that ends a text.
        bos: text of the token that begins one, if there is such a token.
    """

    chat_template: str | None = None  # tinker-cookbook's renderers write the conversations

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
        """Return the tokens of a text, in which special tokens stand by their names.

        Args:
            text: any text.
            add_special_tokens: put the model's token for the beginning of a text first, if it has one.
            split_special_tokens: read the names of special tokens as ordinary text.
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
        """Return the text of tokens, with U+FFFD for bytes that are no whole character."""
        tokens = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self._dropped]
        return self._vocabulary.decode(tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int] | None:
        """Return the ids of special tokens; None for any other."""
        if isinstance(tokens, str):
            return self._special.get(tokens)
        return [self._special[token] for token in tokens]

    @cached_property
    def _splitter(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def packaged(model: str) -> PackagedTokenizer | None:
    """Return the tokenizer of a model from an installed package; None if no package has it."""
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
    special = {native.decode([token]): token for token in map(native.encode_special, native.special_tokens())}
    eos = _ENDS.get(name) or native.decode([native.encode_special(native.eos_token)])
    return PackagedTokenizer(model, native, special, eos=eos)


class _Llama(Protocol):
    special_tokens: Mapping[str, int]
    model: Vocabulary


@cache
def _llama(model: str) -> PackagedTokenizer:
    module = importlib.import_module("llama_models.llama3.tokenizer")
    get_instance = cast("Callable[[], _Llama]", module.Tokenizer.get_instance)
    llama = get_instance()
    return PackagedTokenizer(model, llama.model, llama.special_tokens, eos="<|eot_id|>", bos="<|begin_of_text|>")
