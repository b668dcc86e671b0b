"""Valid and invalid fields of a model's config.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlkit.engine.model.config import ARCHITECTURES, ModelConfig, read_config
from rlkit.engine.model.rotary import ALL_POSITIONS, AttentionKind
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
FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
MOE: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GEMMA: dict[str, object] = {"architectures": ["Gemma3ForCausalLM"]}
QWEN35: dict[str, object] = {"architectures": ["Qwen3_5ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
QWEN: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], "layer_types": [FULL] * 7 + [SLIDING]}


def frequencies(theta: float, head_dim: int, *, factor: float = 1.0) -> tuple[float, ...]:
    return tuple(theta ** (-2 * i / head_dim) / factor for i in range(head_dim // 2))


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
        "Qwen2MoeForCausalLM",
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
        ({"attention_bias": "false"}, "attention_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**GEMMA, "rope_parameters": {FULL: {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
        ({**GEMMA, "rope_parameters": {SLIDING: {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 8.0}}, "rope_parameters and rope_scaling"),
        ({**GEMMA, "rope_parameters": {FULL: {}}, "rope_scaling": YARN}, "rope_parameters and rope_scaling"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "differ by layer"),
        ({**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA, "attention_bias": True}, "attention_bias"),
        ({**GEMMA, "hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({**QWEN35, "hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'"),
        ({**QWEN35, "layer_types": [LINEAR] * 8}, "without a layer of full attention"),
        ({**QWEN35, "full_attention_interval": 9}, "without a layer of full attention"),
    ],
)
def test_unsupported_configuration_fields_are_rejected(extra: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=named):
        read_written(tmp_path, **extra)


@pytest.mark.parametrize(
    ("architecture", "extra", "layers"),
    [
        ("MistralForCausalLM", {"sliding_window": 512}, []),  # as long as the context
        ("MistralForCausalLM", {"sliding_window": None}, []),
        ("MistralForCausalLM", {}, range(8)),
        ("Phi3ForCausalLM", {}, range(8)),
        ("LlamaForCausalLM", {"use_sliding_window": True}, []),
        ("Qwen2ForCausalLM", {}, []),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, range(3, 8)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}, range(8)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, []),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": [SLIDING, FULL] * 4}, [0, 2, 4, 6]),
        ("Qwen3MoeForCausalLM", {**MOE, "use_sliding_window": True}, range(8)),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, [3, 7]),
        ("Gemma3ForCausalLM", {}, [0, 1, 2, 3, 4, 6, 7]),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3}, [0, 1, 3, 4, 6, 7]),
        ("Gemma3ForCausalLM", {"layer_types": [FULL] * 7 + [SLIDING]}, [7]),
    ],
)
def test_layers_with_a_sliding_window_are_those_of_the_family(
    architecture: str, extra: dict[str, object], layers: Sequence[int], tmp_path: Path
) -> None:
    config = read_written(tmp_path, **{"sliding_window": 256} | extra | {"architectures": [architecture]})
    assert [kind.window for kind in config.attention] == [256 if i in layers else ALL_POSITIONS for i in range(8)]


@pytest.mark.parametrize(
    "extra",
    [
        {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                SLIDING: {"rope_type": "default", "rope_theta": 3e4},
            }
        },
        {
            "rope_theta": 2e6,
            "rope_local_base_freq": 3e4,
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}, SLIDING: {"rope_type": "default"}},
        },
    ],
    ids=["older", "newer", "both"],
)
def test_the_rotation_of_gemma_depends_on_the_window(extra: dict[str, object], tmp_path: Path) -> None:
    config = read_written(tmp_path, **GEMMA, sliding_window=256, **extra)
    assert config.attention[5] == AttentionKind(frequencies(2e6, config.head_dim, factor=8.0))
    assert config.attention[0] == AttentionKind(frequencies(3e4, config.head_dim), window=256)


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
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({**GEMMA, "sliding_window": None}, "sliding_window = None, but layers have a sliding window"),
        ({**QWEN, "use_sliding_window": True, "sliding_window": None}, "sliding_window = None"),
        ({**QWEN, "use_sliding_window": False}, "use_sliding_window = False"),
        ({**GEMMA, "rope_local_base_freq": "3e4"}, "rope_local_base_freq"),
        ({**GEMMA, "rope_local_base_freq": 1}, "rope_local_base_freq must be greater than 1"),
        ({**GEMMA, "rope_parameters": {FULL: [1]}}, "full_attention"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({**GEMMA, "layer_types": [FULL] * 7}, "layer_types"),
        ({**GEMMA, "layer_types": [FULL] * 9}, "layer_types"),
        ({**GEMMA, "layer_types": ["chunked_attention"] * 8}, "layer_types"),
        ({**GEMMA, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({**MOE, "num_experts_per_tok": 5}, "num_experts_per_tok 5 is greater than the number of experts, 4"),
        ({**MOE, "mlp_only_layers": 3}, "mlp_only_layers"),
        ({**MOE, "moe_intermediate_size": None}, "moe_intermediate_size"),
        ({**MOE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        (
            {**QWEN35, "linear_num_key_heads": 3},
            "linear_num_value_heads 32 is not a multiple of linear_num_key_heads 3",
        ),
        ({**QWEN35, "linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({**QWEN35, "layer_types": [SLIDING, FULL] * 4}, "layer_types"),
        ({**QWEN35, "head_dim": 16, "partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of head_dim 16"),
        ({**QWEN35, "rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor 1.5"),
        ({**QWEN35, "rope_parameters": {"partial_rotary_factor": "all"}}, "partial_rotary_factor"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": [1]}, "text_config"),
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


@pytest.mark.parametrize(
    ("architecture", "extra", "window"),
    [
        ("Gemma3ForCausalLM", {}, 4096),
        ("MistralForCausalLM", {}, 4096),
        ("MistralForCausalLM", {"sliding_window": None}, ALL_POSITIONS),
        ("Phi3ForCausalLM", {}, ALL_POSITIONS),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": None}, ALL_POSITIONS),
        ("Qwen3MoeForCausalLM", {**MOE, "use_sliding_window": True}, 4096),
        ("Qwen3MoeForCausalLM", {**MOE, "sliding_window": 0}, ALL_POSITIONS),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, ALL_POSITIONS),
    ],
)
def test_a_missing_sliding_window_has_the_default_of_its_family(
    architecture: str, extra: dict[str, object], window: int, tmp_path: Path
) -> None:
    fields = {"max_position_embeddings": 8192} | extra | {"architectures": [architecture]}
    assert read_written(tmp_path, **fields).attention[0].window == window


def test_a_missing_field_has_the_default_of_its_family(tmp_path: Path) -> None:
    assert read_written(tmp_path, num_key_value_heads="absent").kv_heads == 4
    assert read_written(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128
    smollm3 = read_written(tmp_path, architectures=["SmolLM3ForCausalLM"])
    assert smollm3.tied
    rotated, still = frequencies(2e6, smollm3.head_dim), (0.0,) * (smollm3.head_dim // 2)
    assert [kind.frequencies for kind in smollm3.attention] == [rotated, rotated, rotated, still] * 2


def test_a_model_that_reads_images_has_its_text_model_in_a_section(tmp_path: Path) -> None:
    names: dict[str, object] = {"architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(names | {"text_config": {**PLAIN, "eos_token_id": 7}}))
    config = read_config(tmp_path)
    assert (config.tied, config.hidden_size, config.head_dim, config.eos) == (True, 48, 256, {7})
    assert config.attention[3] == AttentionKind(frequencies(10_000.0, 64))
    assert config.delta is not None
    assert config.delta.layers == {0, 1, 2, 4, 5, 6}
    text = read_written(tmp_path, **QWEN35, full_attention_interval=2, rope_parameters={"partial_rotary_factor": 0.5})
    assert [text.find_delta_net(index) for index in range(8)] == [text.delta, None] * 4
    assert text.delta
    assert text.attention[1].frequencies == frequencies(10_000.0, 128)


def test_a_configuration_is_hashable_and_frozen(tmp_path: Path) -> None:
    scaled = read_written(tmp_path, rope_scaling=YARN)
    assert len({scaled, read_written(tmp_path, rope_scaling=YARN), read_written(tmp_path)}) == 2
    with pytest.raises(AttributeError):
        scaled.layers = 1  # pyright: ignore[reportAttributeAccessIssue]  # the point of the test
