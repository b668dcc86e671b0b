"""Models for benchmarks: a directory that exists, or random weights in a well-known shape."""

from __future__ import annotations

import json
from pathlib import Path

SHAPES = {
    "smollm2-135m": ("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64),
    "qwen3-0.6b": ("Qwen3ForCausalLM", 151936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-4b": ("Qwen3ForCausalLM", 151936, 2560, 9728, 36, 32, 8, 128),
}


def model_directory(name: str, scratch: Path) -> Path:
    """The directory of `name`: one of `SHAPES`, written to `scratch` with random weights, or what rlkit resolves."""
    if name in SHAPES:
        directory = scratch / name
        if not (directory / "model.safetensors").exists():
            write_random(directory, name)
        return directory
    from rlkit.engine.models import resolve_model

    return resolve_model(name)


def write_random(directory: Path, shape: str) -> None:
    """A tied model of the shape, with weights that keep activations of order one."""
    import torch
    from safetensors.torch import save_file

    architecture, vocab, hidden, inner, layers, heads, kv_heads, head_dim = SHAPES[shape]
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "model_type": "qwen3" if architecture.startswith("Qwen3") else "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": vocab - 1,
        "bos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)

    def ones(width: int) -> torch.Tensor:
        return torch.ones(width, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": ones(hidden)}
    for i in range(layers):
        stem = f"model.layers.{i}"
        widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        for part, width in widths.items():
            tensors[f"{stem}.self_attn.{part}_proj.weight"] = matrix(width, hidden)
        if architecture.startswith("Qwen3"):
            tensors |= {f"{stem}.self_attn.{part}_norm.weight": ones(head_dim) for part in ("q", "k")}
        tensors[f"{stem}.self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        tensors[f"{stem}.input_layernorm.weight"] = ones(hidden)
        tensors[f"{stem}.post_attention_layernorm.weight"] = ones(hidden)
        tensors |= {f"{stem}.mlp.{part}_proj.weight": matrix(inner, hidden) for part in ("gate", "up")}
        tensors[f"{stem}.mlp.down_proj.weight"] = matrix(hidden, inner)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
