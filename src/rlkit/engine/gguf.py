"""A llama.cpp model file (GGUF) turned into a Hugging Face model directory.

Invariant: the output directory appears whole or not at all. Everything is written to a temporary neighbour, flushed to
disk and renamed; of two conversions that run at once one wins the rename and the other discards its copy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit import atomic
from rlkit.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader
    from numpy.typing import NDArray
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

Progress = Callable[[str, float | None], None]
"""Told what is being done and which fraction of it is finished (None where that is unknown)."""

JSONValue = str | int | float | bool | list[str] | None

# GGUF names of a llama's tensors, `blk.<layer>.` taken off, and what Hugging Face calls them.
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4  # values of `tokenizer.ggml.token_type`, gguf.TokenType


def convert_gguf(path: Path, out: Path, *, progress: Progress | None = None) -> Path:
    """Write `out`, a directory that transformers loads, from the GGUF file `path`.

    Only the llama architecture with a byte-level BPE vocabulary is supported. Quantised weights are dequantised in
    float32 and stored as bfloat16: half the disk space, and the rounding (2⁻⁹ of a weight) is far below the error that
    the quantisation itself made. Weights that are not quantised are stored as float32.

    Returns:
        `out`. If a finished directory is already there when the conversion ends, it is kept.

    Raises:
        UsageError: the file is no GGUF, or its architecture, tensors or tokenizer are not supported.
    """
    from gguf import GGUFReader

    say = progress or _silent
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a readable GGUF file ({error})") from error
    metadata = _read_metadata(reader, path)
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise UsageError(f"{path}: GGUF architecture {architecture!r} is not supported, only 'llama' is")

    temporary = out.with_name(f".{out.name}.{os.getpid()}.converting")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        config = _llama_config(reader, metadata)
        say("rebuilding the tokenizer", 0.0)
        _write_tokenizer(temporary, metadata)
        _write_weights(temporary / "model.safetensors", reader, config, say)
        _write_json(temporary / "config.json", config)
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(temporary / "generation_config.json", generation)
        say("finishing", 1.0)
        _rename_or_discard(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


@dataclass(frozen=True)
class _Metadata:
    """The key-value part of a GGUF file, with one typed reader for each kind of value."""

    values: Mapping[str, object]
    path: Path

    def text(self, key: str) -> str:
        """The string at `key`; UsageError where it is absent."""
        return str(self._required(key))

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer at `key`; UsageError where it is absent and there is no default."""
        if default is not None and key not in self.values:
            return default
        return int(cast("int", self._required(key)))

    def real(self, key: str, default: float | None = None) -> float:
        """The float32 at `key`, as the shortest decimal that stands for it (1e-05, not 9.99999974e-06)."""
        import numpy as np

        if default is not None and key not in self.values:
            return default
        return float(str(np.float32(cast("float", self._required(key)))))

    def texts(self, key: str) -> list[str]:
        """The array of strings at `key`."""
        return cast("list[str]", self._required(key))

    def integers(self, key: str) -> list[int]:
        """The array of integers at `key`."""
        return cast("list[int]", self._required(key))

    def _required(self, key: str) -> object:
        if key not in self.values:
            raise UsageError(f"{self.path}: the GGUF metadata has no {key!r}")
        return self.values[key]


def _read_metadata(reader: GGUFReader, path: Path) -> _Metadata:
    return _Metadata({key: cast("object", field.contents()) for key, field in reader.fields.items()}, path)


def _llama_config(reader: GGUFReader, metadata: _Metadata) -> dict[str, JSONValue]:
    """The `config.json` of a LlamaForCausalLM with the file's hyper-parameters."""
    if "llama.rope.scaling.type" in metadata.values and metadata.text("llama.rope.scaling.type") != "none":
        raise UsageError(f"{metadata.path}: scaled rotary embeddings (llama.rope.scaling.type) are not supported")
    heads = metadata.integer("llama.attention.head_count")
    hidden = metadata.integer("llama.embedding_length")
    head_dim = metadata.integer("llama.attention.key_length", hidden // heads)
    if metadata.integer("llama.rope.dimension_count", head_dim) != head_dim:
        raise UsageError(f"{metadata.path}: rotary embeddings over part of a head are not supported")
    eos = metadata.integer("tokenizer.ggml.eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata.texts("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "rms_norm_eps": metadata.real("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.real("llama.rope.freq_base", 10_000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id", eos),
        "eos_token_id": eos,
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id", eos),
        "dtype": _storage_dtype(reader),
    }


def _storage_dtype(reader: GGUFReader) -> str:
    """`float32` where a matrix is kept in full or half precision, else `bfloat16`."""
    exact = any(t.tensor_type.name in {"F32", "F16"} for t in reader.tensors if len(t.shape) > 1)
    return "float32" if exact else "bfloat16"


def _write_weights(path: Path, reader: GGUFReader, config: Mapping[str, JSONValue], say: Progress) -> None:
    """Dequantise every tensor of the file into one safetensors file of the dtype in `config`."""
    import torch
    from gguf import dequantize
    from safetensors.torch import save

    dtype = torch.float32 if config["dtype"] == "float32" else torch.bfloat16
    heads = {"q": cast("int", config["num_attention_heads"]), "k": cast("int", config["num_key_value_heads"])}
    total = sum(tensor.n_elements for tensor in reader.tensors)
    done = 0
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        say("converting the weights", done / total)
        array = cast("NDArray[np.float32]", dequantize(tensor.data, tensor.tensor_type))
        for projection, count in heads.items():
            if tensor.name.endswith(f".attn_{projection}.weight"):
                array = _unpermute(array, count)
        weights[_tensor_name(tensor.name)] = torch.from_numpy(array.copy()).to(dtype)
        done += int(tensor.n_elements)
    say("writing the weights", None)
    atomic.write_bytes(path, save(weights, metadata={"format": "pt"}))


def _tensor_name(name: str) -> str:
    """The Hugging Face name of the GGUF tensor `name`."""
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    block, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    if block != "blk" or kind not in _LAYER_TENSORS:
        raise UsageError(f"GGUF tensor {name!r} is not part of a plain llama, so this model cannot be converted")
    return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}"


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of a query or key projection.

    llama.cpp rotates neighbouring pairs of a head's dimensions (2i, 2i+1), Hugging Face pairs the halves
    (i, i + head_dim/2), so llama.cpp's converter interleaves the two halves of each head.

    Args:
        weight: `[heads * head_dim, hidden]`.
        heads: number of query heads for `attn_q`, of key heads for `attn_k`.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [heads, head_dim/2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(folder: Path, metadata: _Metadata) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` from the vocabulary, merges and template in the file.

    transformers' own GGUF reader is not used: it takes every llama's vocabulary for a SentencePiece one, which adds
    tokens and moves the end-of-sequence token of a model that has GPT-2's byte-level vocabulary.
    """
    tokens = metadata.texts("tokenizer.ggml.tokens")
    _build_tokenizer(tokens, metadata).save(str(folder / "tokenizer.json"))
    config: dict[str, JSONValue] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.integer("llama.context_length"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if f"tokenizer.ggml.{key}_token_id" in metadata.values:
            config[f"{role}_token"] = tokens[metadata.integer(f"tokenizer.ggml.{key}_token_id")]
    if "tokenizer.chat_template" in metadata.values:
        config["chat_template"] = metadata.text("tokenizer.chat_template")
    _write_json(folder / "tokenizer_config.json", config)


def _build_tokenizer(tokens: list[str], metadata: _Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer of the file: token id = index in `tokens`."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    kind = metadata.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UsageError(f"{metadata.path}: GGUF tokenizer {kind!r} is not supported, only 'gpt2' (byte-level BPE) is")
    if metadata.values.get("tokenizer.ggml.add_bos_token", False):
        raise UsageError(f"{metadata.path}: a GGUF tokenizer that adds a beginning-of-sequence token is not supported")
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in metadata.texts("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata)
    tokenizer.decoder = ByteLevel()
    types = metadata.integers("tokenizer.ggml.token_type")
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED_TOKEN:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def _pre_tokenizer(metadata: _Metadata) -> PreTokenizer:
    """How text is cut before merging, after llama.cpp's name for it (`llama_vocab_pre_type`)."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    name = metadata.text("tokenizer.ggml.pre")
    words = ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return Sequence([Digits(individual_digits=True), words])
    if name == "gpt-2":
        return words
    raise UsageError(f"{metadata.path}: GGUF pre-tokenizer {name!r} is not supported, only 'smollm' and 'gpt-2' are")


def _rename_or_discard(temporary: Path, out: Path) -> None:
    """Move the finished directory into place, unless another process has put its own there first."""
    try:
        temporary.rename(out)
    except OSError:
        if not (out / "config.json").is_file():
            raise


def _write_json(path: Path, value: Mapping[str, JSONValue]) -> None:
    atomic.write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _silent(_message: str, _fraction: float | None) -> None:
    """The progress of a caller that does not want any."""
