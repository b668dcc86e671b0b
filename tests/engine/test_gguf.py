from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Regex, SentencePieceBPETokenizer, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM

from rlkit.engine.model.gguf import convert_gguf
from rlkit.engine.model.model_files import load_tokenizer
from rlkit.errors import UsageError
from rlkit.testing import tiny_model

from .test_families import LLAMA3, YARN, log_probabilities, make

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }[name]
    _, _, layer, kind = name.split(".", 3)
    kind, _, part = kind.rpartition(".")
    return f"blk.{layer}.{NAMES[kind]}.{part}"


def permute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows in llama.cpp's order: written as loops, independent of the code under test."""
    head_dim = weight.shape[0] // heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def write_gguf(
    path: Path,
    source: Path,
    *,
    quantisation: gguf.GGMLQuantizationType | None = None,
    architecture: str | None = None,
    pre: str = "smollm",
    extra_tensor: tuple[str, NDArray[np.float32]] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """A GGUF file of the Hugging Face model in `source`."""
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    head_dim = config.get("head_dim") or config["hidden_size"] // heads["q"]
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    architecture = architecture or config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    if extra:
        extra(writer)
    for name, original in load_file(source / "model.safetensors").items():
        projection = name[-13] if name.endswith(("q_proj.weight", "k_proj.weight")) else None
        weight = permute(original, heads[projection]) if projection and architecture == "llama" else original
        if quantisation is None or weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, quantisation), raw_dtype=quantisation)
    if extra_tensor:
        writer.add_tensor(*extra_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def family_model(folder: Path, family: str, **options: Any) -> Path:
    """A random model of `family` with the tokenizer of `tiny_model`."""
    sizes = {"vocab_size": 2304, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    make(folder, family, **sizes | options)
    for path in tiny_model(folder / "tokenizer").glob("tokenizer*"):
        path.rename(folder / path.name)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    return convert_gguf(write_gguf(folder / "model.gguf", source), folder / "model")


def test_an_unquantised_file_gives_the_source_models_logits(source: Path, converted: Path) -> None:
    torch.testing.assert_close(logits(converted), logits(source), rtol=0, atol=0)


def test_every_weight_is_loaded(converted: Path) -> None:
    _, info = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not any(info.values())


def test_a_quantised_file_is_dequantised_to_bfloat16(source: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", source, quantisation=gguf.GGMLQuantizationType.Q8_0)
    folder = convert_gguf(path, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert (folder / "model.safetensors").stat().st_size < (source / "model.safetensors").stat().st_size * 0.52
    difference = (logits(folder) - logits(source)).abs()
    assert 0 < difference.max() < 0.2


def test_the_configuration_comes_from_the_file(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-5, 10_000.0, 32)
    assert (config["bos_token_id"], config["eos_token_id"], config["tie_word_embeddings"]) == (1, 2, True)


@pytest.mark.parametrize(
    "text",
    [
        "Hello  world\n\n\t x ",
        "naïve 日本語 🤖👩‍👩‍👧",
        "a\r\nb\x00\x7f",
        "<|im_start|>user\nhi<|im_end|>",
        " 2024 don't",
    ],
)
def test_the_tokenizer_equals_the_source_and_round_trips(source: Path, converted: Path, text: str) -> None:
    tokenizer, original = load_tokenizer(converted), load_tokenizer(source)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens == original.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text


def test_the_tokenizer_keeps_the_vocabulary_the_specials_and_the_template(converted: Path) -> None:
    tokenizer = load_tokenizer(converted)
    assert len(tokenizer) == 2304
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12")) == ["1", "2"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n"


def test_other_architectures_are_rejected_by_name(source: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", source, architecture="mamba")
    with pytest.raises(UsageError, match="'mamba' is not supported"):
        convert_gguf(path, tmp_path / "model")


ONES = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pre": "deepseek-v3"}, "'deepseek-v3'"),
        ({"extra_tensor": ("blk.0.attn_q.bias", ONES)}, "attn_q.bias"),
        ({"extra_tensor": ("rope_freqs.weight", ONES)}, "rope_freqs"),
        ({"extra_tensor": ("rope_freqs.weight", np.nan * ONES)}, "rope_freqs"),
        ({"extra_tensor": ("rope_freqs.weight", -ONES)}, "rope_freqs"),
        ({"extra": lambda writer: writer.add_uint16("split.count", 3)}, "split.count"),
        ({"extra": lambda writer: writer.add_expert_count(4)}, "mixture of experts"),
        (
            {"extra": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)},
            "'longrope'",
        ),
    ],
)
def test_features_beyond_a_plain_llama_are_rejected(
    source: Path, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", source, **wrong)
    with pytest.raises(UsageError, match=message):
        convert_gguf(path, tmp_path / "model")


def test_a_truncated_file_is_rejected_for_any_length(source: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", source).read_bytes()
    for length in (0, 3, 20, 500, 30_000, len(whole) // 2, len(whole) - 40):
        path = tmp_path / "model.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"model\.gguf"):
            convert_gguf(path, tmp_path / "model")
    assert names(tmp_path) == ["model.gguf", "whole.gguf"]


# --- families, quantisations and rotary scalings ---------------------------------------------------------------------


def engine(folder: Path) -> torch.Tensor:
    return log_probabilities(folder, torch.arange(3, 80), [77])


def expected(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.arange(3, 80)[None]).logits[0], -1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_architecture_gives_the_source_models_log_probabilities(family: str, tied: bool, tmp_path: Path) -> None:
    source = family_model(tmp_path / "source", family, tie_word_embeddings=tied)
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", source), tmp_path / "model")
    torch.testing.assert_close(engine(folder), engine(source), rtol=0, atol=0)
    torch.testing.assert_close(engine(folder), expected(source), rtol=0, atol=1e-4)


def add_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(3.0)


def add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(YARN["factor"])
    writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])


def llama3_divisors(theta: float, head_dim: int, factor: float) -> NDArray[np.float32]:
    """Compute the divisors as llama.cpp's converter does."""
    divisors: list[float] = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (8192 / wavelength - 1) / 3
        inner = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wavelength < 2048 else factor if wavelength > 8192 else inner)
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    ("rope", "written"),
    [
        ({"rope_type": "linear", "factor": 3.0}, {"extra": add_linear}),
        (YARN, {"extra": add_yarn}),
        (
            LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
            {"extra_tensor": ("rope_freqs.weight", llama3_divisors(40_000.0, 32, 32.0))},
        ),
    ],
)
def test_a_rotary_scaling_survives(rope: dict[str, Any], written: dict[str, Any], tmp_path: Path) -> None:
    source = family_model(tmp_path / "source", "llama", rope_parameters={**rope, "rope_theta": 40_000.0})
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", source, **written), tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"]["rope_type"] == rope["rope_type"]
    torch.testing.assert_close(engine(folder), expected(source), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0", "Q4_1"])
def test_a_quantised_model_computes_with_the_dequantised_weights(source: Path, tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    kind = gguf.GGMLQuantizationType[name]
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", source, quantisation=kind), tmp_path / "model")
    shutil.copytree(source, tmp_path / "reference")
    weights = load_file(source / "model.safetensors")
    for key in [key for key, weight in weights.items() if weight.ndim > 1]:
        dequantised = torch.from_numpy(gguf.dequantize(gguf.quantize(weights[key].numpy(), kind), kind))
        weights[key] = dequantised if name == "F16" else dequantised.bfloat16().float()
    save_file(weights, tmp_path / "reference" / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(engine(folder), expected(tmp_path / "reference"), rtol=0, atol=1e-4)
    assert (engine(folder) - expected(source)).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_dequantised(tmp_path: Path, name: str) -> None:
    """The package has no quantiser for them, so the blocks are random bytes with small finite scales."""
    from safetensors.torch import load_file

    source = family_model(tmp_path / "source", "qwen2", intermediate_size=256)
    kind = gguf.GGMLQuantizationType[name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (64, size), np.uint8)
    scale = np.array([0.001, 0.002], np.float16).view(np.uint8)
    where = {"Q2_K": size - 4, "Q3_K": size - 2, "Q4_K": 0, "Q5_K": 0, "Q6_K": size - 2}[name]
    blocks[:, where : where + 4] = scale[: size - where]

    writer = write_gguf(tmp_path / "plain.gguf", source)
    model = convert_gguf(replace_tensor(writer, "blk.0.ffn_down.weight", blocks, kind), tmp_path / "model")
    actual = load_file(model / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    dequantised = torch.from_numpy(gguf.dequantize(blocks, kind))
    assert dequantised.isfinite().all() and dequantised.std() > 1e-4
    torch.testing.assert_close(actual.float(), dequantised, rtol=2**-8, atol=0)
    assert engine(model).isfinite().all()


def replace_tensor(path: Path, name: str, data: NDArray[np.uint8], kind: gguf.GGMLQuantizationType) -> Path:
    """A copy of the GGUF file with another tensor in the place of `name`."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("replaced.gguf"), "qwen2")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != gguf.Keys.General.ARCHITECTURE:
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if tensor.name == name:
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("replaced.gguf")


# --- tokenizers ------------------------------------------------------------------------------------------------------

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["Hello  world\n\n\t x ", "naïve 日本語 🤖", "it'S 20245 don't!?\n", "<|im_start|>user\nhi<|im_end|>"]


def byte_level(source: Path, pattern: str) -> Tokenizer:
    """The tokenizer of `source` with another way of cutting text."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


def test_the_pretokenizer_of_qwen_is_supported(source: Path, tmp_path: Path) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", source, pre="qwen2"), tmp_path / "model")
    tokenizer, original = load_tokenizer(folder), byte_level(source, QWEN2)
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")  # Qwen composes characters


def test_llama_3s_tokenizer_begins_with_its_token_and_keeps_whole_words(source: Path, tmp_path: Path) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", source, pre="llama-bpe"), tmp_path / "model")
    tokenizer, original = load_tokenizer(folder), byte_level(source, QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"))
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *original.encode(text).ids]
        assert tokenizer.encode(text, add_special_tokens=False) == original.encode(text).ids


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_sentencepiece_vocabulary_gives_the_same_tokens(source: Path, tmp_path: Path, prefixed: bool) -> None:
    original = SentencePieceBPETokenizer(add_prefix_space=prefixed)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    original.train_from_iterator([Path(__file__).read_text()], 2304, min_frequency=1, special_tokens=specials)
    tokens = [original.id_to_token(i) for i in range(2304)]
    merges = json.loads(original.to_str())["model"]["merges"]
    rank = {"".join(merge): -float(i) for i, merge in reversed(list(enumerate(merges)))}

    def sentencepiece(writer: gguf.GGUFWriter) -> None:
        for key in ("model", "pre", "merges", "tokens", "token_type"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([rank.get(token, -1e6) for token in tokens])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (2304 - 259)])
        writer.add_add_space_prefix(prefixed)

    folder = convert_gguf(write_gguf(tmp_path / "model.gguf", source, extra=sentencepiece), tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    for text in ("def test(source: Path) -> None:", "two  spaces", "tokenizer", "a b"):
        tokens_of = tokenizer.encode(text)
        assert tokens_of[0] == 1
        assert tokens_of[1:] == original.encode(text).ids
        assert tokenizer.decode(tokens_of[1:]) == text
    unseen = tokenizer.encode(" a\u9f98", add_special_tokens=False)  # as its bytes, and leading spaces are kept
    assert tokenizer.convert_ids_to_tokens(unseen)[-3:] == ["<0xE9>", "<0xBE>", "<0x98>"]
    assert tokenizer.decode(unseen) == " a\u9f98"


# --- the conversion --------------------------------------------------------------------------------------------------


def test_a_file_of_another_format_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model at all, but long enough to be read")
    with pytest.raises(UsageError, match="not a readable GGUF"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")


def test_progress_runs_from_zero_to_one(source: Path, tmp_path: Path) -> None:
    fractions: list[float] = []
    path = write_gguf(tmp_path / "model.gguf", source)
    convert_gguf(
        path, tmp_path / "model", progress=lambda _, done: fractions.append(done) if done is not None else None
    )
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
