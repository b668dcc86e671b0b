"""Models for benchmarks: existing models, or random weights in the shape of a well-known model."""

from __future__ import annotations

from pathlib import Path

# vocabulary, hidden, intermediate, layers, heads, key/value heads, head size
SHAPES = {
    "smollm2-135m": ("llama", 49152, 576, 1536, 30, 9, 3, 64),
    "smollm2-360m": ("llama", 49152, 960, 2560, 32, 15, 5, 64),
    "qwen3-0.6b": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128),
    "qwen3-4b": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128),
    "qwen3.5-0.8b": ("qwen3_5_text", 248320, 1024, 3584, 24, 8, 2, 256),
    "qwen3.5-small": ("qwen3_5_text", 4096, 512, 1792, 8, 4, 2, 128),  # with delta nets of the same size
}
# Value heads of delta nets; other sizes of delta nets are those of transformers.
VALUE_HEADS = {"qwen3_5_text": {"linear_num_value_heads": 16}}


def model_directory(name: str, scratch: Path) -> Path:
    """Return the directory of a model. For a name in `SHAPES`, write random weights to `scratch`."""
    if name in SHAPES:
        directory = scratch / name
        if not (directory / "model.safetensors").exists():
            write_random(directory, name)
        return directory
    from rlkit.engine.model.model_files import resolve_model

    return resolve_model(name)


def write_random(directory: Path, shape: str) -> None:
    """Write a tied bfloat16 model of the shape with the initial weights of transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, vocab, hidden, inner, layers, heads, kv_heads, head_dim = SHAPES[shape]
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=vocab - 1,
        **VALUE_HEADS.get(family, {}),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory, max_shard_size="100GB")
