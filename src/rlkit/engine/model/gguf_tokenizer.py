"""Convert the tokenizer of a llama.cpp model file (GGUF) to Hugging Face files.

Invariant: a token's id is its index in the file's list, and text is tokenised as in llama.cpp. An unknown vocabulary or
pre-tokenizer raises an error with its name.

transformers' own GGUF reader is not used, because it reads the vocabulary of every llama as SentencePiece. If the model
has GPT-2's byte-level vocabulary, this adds tokens and changes the end-of-sequence token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, TypeAdapter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from rlkit._util import files
from rlkit._util.files.model_fields import FLAG, Fields
from rlkit.errors import UsageError

_UNKNOWN_TOKEN, _CONTROL_TOKEN, _USER_DEFINED_TOKEN = 2, 3, 4  # of `tokenizer.ggml.token_type`, gguf.TokenType
_SPACE = "▁"

# llama.cpp's regular expressions (`llama_vocab_pre_type`); {digits} limits the digits of a piece.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _WORDS.format(digits=""), "llama-bpe": _WORDS.format(digits="{1,3}")}


TEXT, TEXTS, INTEGER = TypeAdapter(str), TypeAdapter(list[str]), TypeAdapter(int)
_INTEGERS, _NUMBERS = TypeAdapter(list[int]), TypeAdapter(list[float])
REAL = TypeAdapter[float](Annotated[float, AfterValidator(lambda number: float(str(np.float32(number))))])
"""A float32 as its shortest decimal (1e-05, not 9.99999974e-06)."""


def write_tokenizer(folder: Path, metadata: Fields, *, model_max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` from the vocabulary, merges and template in the file."""
    tokens = metadata.read("tokenizer.ggml.tokens", TEXTS)
    _build(tokens, metadata).save(str(folder / "tokenizer.json"))
    config: dict[str, str | int | bool] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if f"tokenizer.ggml.{key}_token_id" in metadata.raw:
            config[f"{role}_token"] = _special_token(tokens, metadata, key)
    if "tokenizer.chat_template" in metadata.raw:
        config["chat_template"] = metadata.read("tokenizer.chat_template", TEXT)
    files.write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _special_token(tokens: list[str], metadata: Fields, role: str) -> str:
    index = metadata.read(f"tokenizer.ggml.{role}_token_id", INTEGER)
    if not 0 <= index < len(tokens):
        raise UsageError(f"{metadata.path}: {role}_token_id {index} is outside the vocabulary of {len(tokens)} tokens")
    return tokens[index]


def _build(tokens: list[str], metadata: Fields) -> Tokenizer:
    """Build the tokenizer: token id = index in `tokens`."""
    kind = metadata.read("tokenizer.ggml.model", TEXT)
    if kind not in ("gpt2", "llama"):
        raise UsageError(
            f"{metadata.path}: GGUF tokenizer {kind!r} is not supported, only 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE) are"
        )
    types = metadata.read("tokenizer.ggml.token_type", _INTEGERS)
    if len(types) != len(tokens):
        raise UsageError(f"{metadata.path}: {len(types)} token types for {len(tokens)} tokens")
    tokenizer = _byte_level(tokens, metadata) if kind == "gpt2" else _sentencepiece(tokens, metadata)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL_TOKEN or (token_type == _UNKNOWN_TOKEN and kind == "llama"):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED_TOKEN:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    # The defaults are llama.cpp's.
    adds_bos = kind == "llama" or metadata.raw.get("tokenizer.ggml.pre") == "llama-bpe"
    if metadata.read("tokenizer.ggml.add_bos_token", FLAG, default=adds_bos):
        bos = _special_token(tokens, metadata, "bos")
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def _byte_level(tokens: list[str], metadata: Fields) -> Tokenizer:
    """Build GPT-2's byte-level BPE, with the pre-tokenizer of llama.cpp's name in the file."""
    name = metadata.read("tokenizer.ggml.pre", TEXT)
    lines = metadata.read("tokenizer.ggml.merges", TEXTS)
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe"))
    tokenizer.decoder = decoders.ByteLevel()
    splits = {"gpt-2": None, "smollm": pre_tokenizers.Digits(individual_digits=True)} | {
        each: pre_tokenizers.Split(Regex(pattern), behavior="isolated") for each, pattern in _SPLITS.items()
    }
    if name not in splits:
        raise UsageError(f"{metadata.path}: GGUF pre-tokenizer {name!r} is not supported, only {', '.join(splits)} are")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in _SPLITS)
    split = splits[name]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, words]) if split else words
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(tokens: list[str], metadata: Fields) -> Tokenizer:
    """Build Llama's SentencePiece BPE: pairs whose concatenation has the highest score are merged first."""
    scores = dict(zip(tokens, metadata.read("tokenizer.ggml.scores", _NUMBERS), strict=True))
    splits = ((token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token)))
    merges = [(left, right) for left, right in splits if left in scores and right in scores]
    merges.sort(key=lambda merge: scores["".join(merge)], reverse=True)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = _special_token(tokens, metadata, "unknown") if "tokenizer.ggml.unknown_token_id" in metadata.raw else None
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", _SPACE)]
    adds_prefix = metadata.read("tokenizer.ggml.add_space_prefix", FLAG, default=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if adds_prefix else spaces)
    words = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*words, decoders.Strip(" ", 1, 0)] if adds_prefix else words)
    return tokenizer
