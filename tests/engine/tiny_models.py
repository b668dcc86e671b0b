"""Model directories with random weights, small enough to train in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 259
EOS = 258
LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    tied: bool = True,
    layers: int = 2,
    hidden: int = 64,
    inner: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    scale: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **extra: object,
) -> Path:
    """A byte-level model: tokens 0 … 255 are bytes, 258 ends a text."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS,
        **extra,
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def norm(width: int) -> torch.Tensor:
        return 1 + random(width)

    tensors = {"model.embed_tokens.weight": random(VOCABULARY, hidden), "model.norm.weight": norm(hidden)}
    if not tied:
        tensors["lm_head.weight"] = random(VOCABULARY, hidden)
    widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    for i in range(layers):
        stem = f"model.layers.{i}"
        for part, width in widths.items():
            tensors[f"{stem}.self_attn.{part}_proj.weight"] = random(width, hidden)
            if family == "qwen2":
                tensors[f"{stem}.self_attn.{part}_proj.bias"] = random(width)
        if family == "qwen3":
            for part in ("q", "k"):
                tensors[f"{stem}.self_attn.{part}_norm.weight"] = norm(head_dim)
        tensors[f"{stem}.self_attn.o_proj.weight"] = random(hidden, heads * head_dim)
        tensors[f"{stem}.input_layernorm.weight"] = norm(hidden)
        tensors[f"{stem}.post_attention_layernorm.weight"] = norm(hidden)
        for part in ("gate", "up"):
            tensors[f"{stem}.mlp.{part}_proj.weight"] = random(inner, hidden)
        tensors[f"{stem}.mlp.down_proj.weight"] = random(hidden, inner)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
