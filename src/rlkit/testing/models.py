"""Small random models for tests, as Hugging Face directories.

Invariant: equal arguments give equal files (for `tiny_model` on the same Python version, because its tokenizer is
trained on Python's manual). Nothing is downloaded, and neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from rlkit.tokenizers.token_text import bytes_by_character

Family = Literal["llama", "qwen3"]
Setting = str | int | float | bool | list[str]

_TINY_VOCABULARY_TOKENS = 2304
_TRAINING_TEXT_CHARACTERS = 200_000

BYTE_TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)

# ChatML with tools in the Hermes form: signatures as JSON in the system message, calls and results between tags.
CHATML_TEMPLATE = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + system + ('\\n\\n' if system else '') + '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nTo call one, reply with\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif system %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message['role'] != 'system' or not loop.first %}
        {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
        {%- for call in message['tool_calls'] or [] %}
            {%- set call = call['function'] if 'function' in call else call %}
            {{- '\\n' if message['content'] or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + (call['name'] | tojson) + ', "arguments": ' }}
            {{- call['arguments'] if call['arguments'] is string else (call['arguments'] | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def byte_model(path: Path, *, seed: int = 0) -> Path:
    """Write a random Llama of 131,776 parameters with a byte-level vocabulary, and return `path`.

    Token id b < 256 is the byte b; 256, 257 and 258 are `<bos>`, `<eos>` and `<pad>`. The chat template renders a
    message as `<bos>role`, a newline, the content, `<eos>` and a newline.
    """
    size = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
    config = {**_make_config("llama"), **size, "tie_word_embeddings": False}
    specials = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"}
    return _write_model(path, config, _make_byte_tokenizer(), specials=specials, template=BYTE_TEMPLATE, seed=seed)


def tiny_model(path: Path, *, family: Family = "llama", seed: int = 0) -> Path:
    """Write a random model of about a million parameters with a trained BPE tokenizer, and return `path`.

    The tokenizer is byte-level BPE of 2,304 tokens with ChatML's special tokens. Its ChatML template renders the roles
    system, user, assistant and tool. Input and output embeddings are tied.

    Args:
        family: `llama`, or `qwen3` (query and key norms, heads wider than hidden/heads).
    """
    config = _make_config(family)
    specials = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|endoftext|>"}
    return _write_model(path, config, _train_tokenizer(), specials=specials, template=CHATML_TEMPLATE, seed=seed)


def _make_config(family: Family) -> dict[str, Setting]:
    return {
        "architectures": ["LlamaForCausalLM" if family == "llama" else "Qwen3ForCausalLM"],
        "model_type": family,
        "vocab_size": _TINY_VOCABULARY_TOKENS,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family == "llama" else 48,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def _write_model(
    path: Path,
    config: dict[str, Setting],
    tokenizer: Tokenizer,
    *,
    specials: Mapping[str, str],
    template: str,
    seed: int,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    ids = {f"{role}_token_id": cast("int", tokenizer.token_to_id(token)) for role, token in specials.items()}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": token for role, token in specials.items()},
        "chat_template": template,
    }
    (path / "model.safetensors").write_bytes(save(_make_weights(config, seed), metadata={"format": "pt"}))
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in {
        "config.json": {**config, **ids},
        "generation_config.json": ids,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _make_weights(config: Mapping[str, Setting], seed: int) -> dict[str, NDArray[np.float32]]:
    """Return all tensors: ones for norms, and normal `[out, in]` matrices with standard deviation in^-1/2.

    The standard deviation of the logits is then near 1, so the next token is neither certain nor uniform.
    """
    generator = np.random.default_rng(seed)
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, intermediate, head_dim = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    query, key = size["num_attention_heads"] * head_dim, size["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return generator.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    def ones(length: int) -> NDArray[np.float32]:
        return np.ones(length, np.float32)

    weights = {"model.embed_tokens.weight": matrix(size["vocab_size"], hidden), "model.norm.weight": ones(hidden)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(size["vocab_size"], hidden)
    for layer in range(size["num_hidden_layers"]):
        block = {
            "input_layernorm": ones(hidden),
            "self_attn.q_proj": matrix(query, hidden),
            "self_attn.k_proj": matrix(key, hidden),
            "self_attn.v_proj": matrix(key, hidden),
            "self_attn.o_proj": matrix(hidden, query),
            "post_attention_layernorm": ones(hidden),
            "mlp.gate_proj": matrix(intermediate, hidden),
            "mlp.up_proj": matrix(intermediate, hidden),
            "mlp.down_proj": matrix(hidden, intermediate),
        }
        if config["model_type"] == "qwen3":
            block |= {"self_attn.q_norm": ones(head_dim), "self_attn.k_norm": ones(head_dim)}
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in block.items()}
    return weights


def _make_byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab=dict(bytes_by_character()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    return tokenizer


@cache
def _train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer on the Python manual that ships with the interpreter."""
    from pydoc_data.topics import topics  # pyright: ignore[reportUnknownVariableType]  # the stub leaves it open

    manual = "\n".join(topics[name] for name in sorted(topics))[:_TRAINING_TEXT_CHARACTERS]
    tokenizer = Tokenizer(BPE())
    splitters = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=_TINY_VOCABULARY_TOKENS,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=cast("list[str]", pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(manual.splitlines(keepends=True), trainer)
    return tokenizer
