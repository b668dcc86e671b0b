"""Valid and invalid fields of a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.engine.model.config import ARCHITECTURES, ModelConfig, read_config
from rlkit.errors import UsageError

from .tiny_models import LLAMA3

PLAIN: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def read_written(directory: Path, **extra: object) -> ModelConfig:
    fields = {name: value for name, value in (PLAIN | extra).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(fields))
    return read_config(directory)


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma2ForCausalLM",
        "GPT2LMHeadModel",
        "GraniteForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "Qwen3MoeForCausalLM",
    ],
)
def test_an_unknown_architecture_is_rejected_with_a_list_of_known_ones(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_written(tmp_path, architectures=[architecture])
    assert all(name in str(caught.value) for name in (architecture, *ARCHITECTURES, "TINKER_BASE_URL"))


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "differ by layer"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, "sliding_window = 256"),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 511}, "sliding_window = 511"),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}, "sliding_window"),
    ],
)
def test_unsupported_configuration_fields_are_rejected(extra: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=named):
        read_written(tmp_path, **extra)


@pytest.mark.parametrize(
    "extra",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 512},
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": False},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 8,
            "use_sliding_window": True,
            "layer_types": ["full_attention"] * 8,
        },
    ],
)
def test_a_sliding_window_without_effect_is_accepted(extra: dict[str, object], tmp_path: Path) -> None:
    assert read_written(tmp_path, **extra).max_positions == 512


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        *(({name: value}, name) for name in ("vocab_size", "hidden_size") for value in (-1, 0, 1e3, True, "9", 10**30)),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers"),
        ({"num_attention_heads": [4]}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": "absent"}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": -4}}, "original_max_position_embeddings"),
        ({"rope_scaling": YARN | {"attention_factor": "big"}}, "attention_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, "no_rope_layers"),
    ],
)
def test_a_field_with_an_absurd_value_is_named(extra: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=named):
        read_written(tmp_path, **extra)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"architectures": 3}', "\udcff"])
def test_an_invalid_configuration_file_is_a_one_line_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=r"config\.json") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_field_has_the_default_of_its_family(tmp_path: Path) -> None:
    assert read_written(tmp_path, num_key_value_heads="absent").kv_heads == 4
    assert read_written(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128
    smollm3 = read_written(tmp_path, architectures=["SmolLM3ForCausalLM"])
    assert (smollm3.tied, smollm3.rope_theta, smollm3.unrotated) == (True, 2e6, {3, 7})


def test_a_configuration_is_hashable_and_frozen(tmp_path: Path) -> None:
    scaled = read_written(tmp_path, rope_scaling=YARN)
    assert len({scaled, read_written(tmp_path, rope_scaling=YARN), read_written(tmp_path)}) == 2
    with pytest.raises(AttributeError):
        scaled.layers = 1  # pyright: ignore[reportAttributeAccessIssue]  # the point of the test
