"""Every model family and rotary scaling against transformers' own class for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkit.engine.model.attention import lay_out
from rlkit.engine.model.matrices import matmul
from rlkit.engine.model.transformer import compute_hidden
from rlkit.engine.model.weights import load_weights
from rlkit.errors import UsageError

from .tiny_models import LLAMA3

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-odd-head-width": ("llama", {"head_dim": 22}),
    "llama-one-head-each": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window-as-long-as-the-context": ("mistral", {"sliding_window": 512}),
    "phi3": ("phi3", {}),
    "phi3-tied": ("phi3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-attention-bias": ("qwen3", {"attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "smollm3-untied": ("smollm3", {"tie_word_embeddings": False, "no_rope_layers": [0, 1, 1, 0, 0]}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0}}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}}),
    "yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e6}, "head_dim": 32}),
    "yarn-by-the-contexts": ("qwen2", {"rope_parameters": {**YARN, "factor": None, "rope_theta": 1e4}}),
    "yarn-in-detail": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e4,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.3,
                "truncate": False,
            }
        },
    ),
    "yarn-with-its-own-amplitude": (
        "llama",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": 1.3}},
    ),
}


def make(directory: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "1GB", **options: Any) -> Path:
    """A random model of `family`, saved by transformers; every bias and norm is random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | options), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.15 + float("norm" in name)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


def log_probabilities(directory: Path, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The engine's."""
    weights = load_weights(directory)
    with torch.inference_mode():
        return torch.log_softmax(matmul(compute_hidden(weights, tokens, lay_out(lengths)), weights.output), -1)


def assert_equal_to_transformers(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    lengths = [3, 150, 17]
    tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    actual = log_probabilities(directory, tokens, lengths)
    with torch.inference_mode():
        for part, logprobs in zip(tokens.split(lengths), actual.split(lengths), strict=True):
            expected = torch.log_softmax(reference(part[None]).logits[0], -1)
            torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    assert_equal_to_transformers(make(tmp_path, family, **options))


def test_a_checkpoint_in_shards_is_read_by_its_index(tmp_path: Path) -> None:
    make(tmp_path, "llama", shard="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same weights in another form")
    assert_equal_to_transformers(tmp_path)


def test_a_bfloat16_checkpoint_is_computed_in_float32(tmp_path: Path) -> None:
    assert_equal_to_transformers(make(tmp_path, "qwen2", torch.bfloat16))


def test_a_scaled_rotation_changes_the_numbers(tmp_path: Path) -> None:
    tokens = torch.arange(60)
    numbers = [log_probabilities(make(tmp_path / "plain", "llama"), tokens, [60])]
    for name in ("linear", "llama3", "yarn-in-detail", "yarn-with-its-own-amplitude"):
        options = CASES[name][1]
        theta = {"rope_parameters": {**options["rope_parameters"], "rope_theta": 10_000.0}}
        numbers.append(log_probabilities(make(tmp_path / name, "llama", **theta), tokens, [60]))
    for i, some in enumerate(numbers):
        assert all((some - other).abs().max() > 1e-2 for other in numbers[:i])


def break_missing(directory: Path) -> str:
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    return shard.name


def break_truncated(directory: Path) -> str:
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    return shard.name


def break_corrupt(directory: Path) -> str:
    shard = sorted(directory.glob("model-*.safetensors"))[0]
    shard.write_bytes(b"\xff" * 100 + shard.read_bytes()[100:])
    return shard.name


def break_index(directory: Path) -> str:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../elsewhere.safetensors"}}')
    return "weight_map"


def break_tensor(directory: Path) -> str:
    from safetensors.torch import load_file, save_file

    for shard in directory.glob("model-*.safetensors"):
        tensors = load_file(shard)
        save_file({name: t for name, t in tensors.items() if "layers.1.mlp.up" not in name}, shard)
    return "model.layers.1.mlp.up_proj.weight"


def break_dtype(directory: Path) -> str:
    from safetensors.torch import load_file, save_file

    for shard in directory.glob("model-*.safetensors"):
        save_file({name: t.to(torch.float8_e4m3fn) for name, t in load_file(shard).items()}, shard)
    return "float8_e4m3fn"


@pytest.mark.parametrize(
    "spoil", [break_missing, break_truncated, break_corrupt, break_index, break_tensor, break_dtype]
)
def test_non_finite_weights_are_a_one_line_error_that_names_them(spoil: Callable[[Path], str], tmp_path: Path) -> None:
    named = spoil(make(tmp_path, "llama", shard="100KB"))
    with pytest.raises(UsageError) as caught:
        load_weights(tmp_path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
