"""Convert a llama.cpp model file (GGUF) to a Hugging Face model directory.

Invariant: the directory holds the same model as the file, with weights rounded as `convert_gguf` says. A file that
cannot be converted in this way raises an error that names the feature, tensor or quantisation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] its PathLike is bare

from rlkit._util import files
from rlkit._util.files.model_fields import Fields
from rlkit.engine.model.gguf_tokenizer import INTEGER, REAL, TEXT, TEXTS, write_tokenizer
from rlkit.engine.model.rotary import scale_as_llama3
from rlkit.engine.model.wheel import Progress
from rlkit.errors import UsageError

JSONValue = str | int | float | bool | list[str] | Mapping[str, "JSONValue"] | None

# GGUF names of the tensors, without `blk.<layer>.`, and their Hugging Face names.
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

_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
_BIASES = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_ROPE_DIVISORS = "rope_freqs.weight"


# By GGUF's names: Hugging Face's name, and the tensors of a layer beside `_LAYER_TENSORS`.
_ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", _BIASES),
    "qwen3": ("Qwen3ForCausalLM", _NORMS),
}
_PERMUTED = "llama"  # the architecture whose rows of query and key are interleaved


def convert_gguf(path: Path, out: Path, *, progress: Progress | None = None) -> Path:
    """Write the new directory `out`, which transformers can load, from a GGUF file, and return it.

    Supported architectures are llama (also used for Mistral), qwen2 and qwen3. Quantised weights are dequantised in
    float32 and stored as bfloat16. This halves the disk space, and the rounding error (2⁻⁹ of a weight) is far below
    the quantisation error. float32 and float16 are stored as float32, bfloat16 unchanged. All files are flushed to
    disk; after an error `out` is incomplete.

    Raises:
        UsageError: the file is not GGUF or is truncated, or its architecture, tensors or tokenizer are not supported.
    """
    report: Progress = progress or (lambda _message, _fraction: None)
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise UsageError(f"{path}: not a readable GGUF file; it may be truncated ({error})") from error
    metadata = Fields(path, {key: cast("object", field.contents()) for key, field in reader.fields.items()})
    config = _read_config(reader, metadata)

    out.mkdir()
    report("rebuilding the tokenizer", 0.0)
    write_tokenizer(out, metadata, model_max_length=cast("int", config["max_position_embeddings"]))
    _write_weights(out / "model.safetensors", reader, config, report)
    _write_json(out / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "generation_config.json", generation)
    report("finishing", 1.0)
    return out


def _read_config(reader: GGUFReader, metadata: Fields) -> dict[str, JSONValue]:
    kind = metadata.read("general.architecture", TEXT)
    if kind not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise UsageError(f"{metadata.path}: GGUF architecture {kind!r} is not supported, only {supported} are")
    if metadata.read("split.count", INTEGER, 1) > 1:
        raise UsageError(f"{metadata.path}: one of several parts of a GGUF file (split.count); merge them into one")
    if metadata.read(f"{kind}.expert_count", INTEGER, 0):
        raise UsageError(f"{metadata.path}: a mixture of experts ({kind}.expert_count) is not supported")
    heads = metadata.read(f"{kind}.attention.head_count", INTEGER)
    hidden = metadata.read(f"{kind}.embedding_length", INTEGER)
    head_dim = metadata.read(f"{kind}.attention.key_length", INTEGER, hidden // heads)
    if metadata.read(f"{kind}.rope.dimension_count", INTEGER, head_dim) != head_dim:
        raise UsageError(f"{metadata.path}: rotary embeddings over part of a head are not supported")
    theta = metadata.read(f"{kind}.rope.freq_base", REAL, 10_000.0)
    eos = metadata.read("tokenizer.ggml.eos_token_id", INTEGER)
    shapes = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    vocabulary = len(metadata.read("tokenizer.ggml.tokens", TEXTS))
    if shapes.get("token_embd.weight") != [vocabulary, hidden]:
        raise UsageError(
            f"{metadata.path}: token_embd.weight has shape {shapes.get('token_embd.weight')}, "
            f"the metadata say {[vocabulary, hidden]}"
        )
    return {
        "architectures": [_ARCHITECTURES[kind][0]],
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": metadata.read(f"{kind}.feed_forward_length", INTEGER),
        "num_hidden_layers": metadata.read(f"{kind}.block_count", INTEGER),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.read(f"{kind}.attention.head_count_kv", INTEGER, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.read(f"{kind}.context_length", INTEGER),
        "rms_norm_eps": metadata.read(f"{kind}.attention.layer_norm_rms_epsilon", REAL),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(reader, metadata, kind, theta, head_dim),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.read("tokenizer.ggml.bos_token_id", INTEGER, eos),
        "eos_token_id": eos,
        "pad_token_id": metadata.read("tokenizer.ggml.padding_token_id", INTEGER, eos),
        "dtype": "float32" if any(_is_exact(t) for t in reader.tensors if len(t.shape) > 1) else "bfloat16",
    }


def _rope_scaling(
    reader: GGUFReader, metadata: Fields, kind: str, theta: float, head_dim: int
) -> Mapping[str, JSONValue] | None:
    """Return `rope_scaling` of config.json, for Llama 3 from the tensor of divisors [head_dim / 2]."""
    stem = f"{kind}.rope.scaling"
    scaling = metadata.read(f"{stem}.type", TEXT, "none")
    divisors = next((tensor for tensor in reader.tensors if tensor.name == _ROPE_DIVISORS), None)
    if divisors is not None:
        return _llama3_scaling(divisors, metadata, theta, head_dim)
    if scaling == "none":
        return None
    if scaling == "linear":
        return {"rope_type": "linear", "factor": metadata.read(f"{stem}.factor", REAL)}
    if scaling != "yarn":
        raise UsageError(f"{metadata.path}: scaled rotary embeddings of the type {scaling!r} are not supported")
    return {
        "rope_type": "yarn",
        "factor": metadata.read(f"{stem}.factor", REAL),
        "original_max_position_embeddings": metadata.read(f"{stem}.original_context_length", INTEGER),
        "beta_fast": metadata.read(f"{stem}.yarn_beta_fast", REAL, 32.0),
        "beta_slow": metadata.read(f"{stem}.yarn_beta_slow", REAL, 1.0),
    }


def _llama3_scaling(divisors: ReaderTensor, metadata: Fields, theta: float, head_dim: int) -> dict[str, JSONValue]:
    """Return the parameters of Llama 3.1 and its successors; raise `UsageError` for other `divisors`.

    llama.cpp stores the divisors instead of the parameters. All parameters except one are the same in every release.
    """
    factor = round(float(divisors.data.max()), 3)
    scaling: dict[str, JSONValue] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    reason = "its values are not those of Llama 3"
    problem = UsageError(f"{metadata.path}: {_ROPE_DIVISORS} is not supported, because {reason}")
    try:
        expected = np.divide(frequencies, scale_as_llama3(frequencies, Fields(metadata.path, scaling)))
    except UsageError:  # the factor is not a number above 0
        raise problem from None
    if divisors.data.shape != expected.shape or not np.allclose(divisors.data, expected, rtol=1e-5, atol=0):
        raise problem
    return scaling


def _is_exact(tensor: ReaderTensor) -> bool:
    """Return whether a weight has more precision than bfloat16."""
    return tensor.tensor_type.name in {"F32", "F16", "F64"}


def _write_weights(path: Path, reader: GGUFReader, config: Mapping[str, JSONValue], report: Progress) -> None:
    architecture = cast("str", config["model_type"])
    heads = {"q": cast("int", config["num_attention_heads"]), "k": cast("int", config["num_key_value_heads"])}
    total = sum(tensor.n_elements for tensor in reader.tensors)
    elements_done = 0
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        report("converting the weights", elements_done / total)
        elements_done += int(tensor.n_elements)
        if tensor.name == _ROPE_DIVISORS:
            continue
        name = _tensor_name(tensor.name, architecture)
        try:
            array = cast("NDArray[np.float32]", dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise UsageError(f"{tensor.name}: the GGUF quantisation {kind} is not supported") from error
        for projection, count in heads.items():
            if architecture == _PERMUTED and tensor.name.endswith(f".attn_{projection}.weight"):
                array = _unpermute(array, count)
        weights[name] = torch.from_numpy(array.copy()).to(torch.float32 if _is_exact(tensor) else torch.bfloat16)
    report("writing the weights", None)
    save_file(weights, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _tensor_name(name: str, architecture: str) -> str:
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    block, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    plain_name, extra_tensors = _ARCHITECTURES[architecture]
    supported = {**_LAYER_TENSORS, **extra_tensors}
    if block != "blk" or kind not in supported:
        raise UsageError(f"GGUF tensor {name!r} cannot be converted: a plain {plain_name} has no such tensor")
    return f"model.layers.{layer}.{supported[kind]}"


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of a query or key projection, `[heads * head_dim, hidden]`.

    llama.cpp rotates neighbouring pairs of a head's dimensions (2i, 2i+1), Hugging Face pairs the halves
    (i, i + head_dim/2), so llama.cpp's converter interleaves the two halves of each head.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [heads, head_dim/2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_json(path: Path, value: Mapping[str, JSONValue]) -> None:
    files.write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
