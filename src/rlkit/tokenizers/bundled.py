"""Tokenizers from Python packages, which need no hub.

Invariant: text with special tokens is encoded as by the model's own tokenizer, and every token decodes to its text.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from tml_renderers.tokenizers import Tokenizer as TmlTokenizer

TML_TOKENIZERS = {
    r"Qwen/Qwen3\.(5|6|8)-.+": "Qwen35Tokenizer",
    r"Qwen/Qwen3-(?!VL).+": "Qwen3Tokenizer",
    r"openai/gpt-oss-.+": "HarmonyTokenizer",
    r"deepseek-ai/DeepSeek-V3\.1.*": "DeepSeekV31Tokenizer",
    r"zai-org/GLM-5\.3.*": "GlmTokenizer",
    r"nvidia/NVIDIA-Nemotron-3-.+": "Nemotron3Tokenizer",
}
"""Classes in `tml_renderers.tokenizers` by patterns of model names."""

_LLAMA = re.compile(r"meta-llama/(Meta-)?Llama-3.*")  # models whose tokenizer is in the package llama-models
_REPLY_TOKENS = re.compile(r"</?(think|tool_call|tool_response|arg_key|arg_value)>")
"""Special tokens that are part of a reply's text: `skip_special_tokens` keeps them."""


class Vocabulary(Protocol):
    """The tokenizer of a package."""

    def encode_ordinary(self, text: str, /) -> Sequence[int]: ...  # noqa: D102  text without special tokens
    def decode(self, token_ids: Sequence[int], /) -> str: ...  # noqa: D102  any tokens


class PackagedTokenizer:
    """A package's tokenizer with the part of the `transformers` interface that chat formats use.

    Args:
        special: ids of the special tokens by text.
        eos: text of the end-of-text token.
        bos: text of the beginning-of-text token, if the model has one.
    """

    chat_template: str | None = None  # tinker-cookbook's renderers replace it

    def __init__(
        self, name: str, vocabulary: Vocabulary, special: Mapping[str, int], *, eos: str, bos: str | None = None
    ) -> None:
        self.name_or_path = name
        self.eos_token, self.bos_token = eos, bos
        self.eos_token_id = special[eos]
        self.bos_token_id = None if bos is None else special[bos]
        self._vocabulary = vocabulary
        self._special = dict(special)
        self._dropped = {token for text, token in special.items() if not _REPLY_TOKENS.fullmatch(text)}

    def __len__(self) -> int:
        return max(self._special.values()) + 1

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens."""
        return list(self._special)

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False, **_: object
    ) -> list[int]:
        """Return the tokens of a text with special tokens.

        Args:
            add_special_tokens: prepend the beginning-of-text token, if the model has one.
            split_special_tokens: encode special tokens as ordinary text.
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
        """Return the text of tokens, with U+FFFD for incomplete characters."""
        tokens = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self._dropped]
        return self._vocabulary.decode(tokens)

    def decode_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; U+FFFD if the package does not tell them and they are no whole character."""
        decode = getattr(self._vocabulary, "decode_bytes", None)
        return self._vocabulary.decode([token]).encode() if decode is None else bytes(decode([token]))

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of a special token; None for other text."""
        return self._special.get(tokens)

    @cached_property
    def _splitter(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


class _LlamaTokenizer(Protocol):
    special_tokens: Mapping[str, int]
    model: Vocabulary


@cache
def load_bundled_tokenizer(model: str) -> PackagedTokenizer | None:
    """Return the tokenizer of a model from an installed package; None if no package has it."""
    model = model.split(":", 1)[0]
    for pattern, name in TML_TOKENIZERS.items():
        if re.fullmatch(pattern, model):
            module = importlib.import_module("tml_renderers.tokenizers")
            tml = cast("Callable[[], TmlTokenizer]", getattr(module, name))()
            special = {tml.decode([token]): token for token in map(tml.encode_special, tml.special_tokens())}
            # the class for gpt-oss names another token as the end of a text
            eos = "<|return|>" if name == "HarmonyTokenizer" else tml.decode([tml.encode_special(tml.eos_token)])
            return PackagedTokenizer(model, tml, special, eos=eos)
    if _LLAMA.fullmatch(model) and importlib.util.find_spec("llama_models") is not None:
        module = importlib.import_module("llama_models.llama3.tokenizer")
        llama = cast("Callable[[], _LlamaTokenizer]", module.Tokenizer.get_instance)()
        return PackagedTokenizer(model, llama.model, llama.special_tokens, eos="<|eot_id|>", bos="<|begin_of_text|>")
    return None
