from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from rlkit.engine.gguf import convert_gguf
from rlkit.engine.models import load_tokenizer
from rlkit.errors import UsageError
from rlkit.testing import tiny_model

HEADS, KV_HEADS, LAYERS, HIDDEN = 4, 2, 4, 128
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, kind = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[kind]}.weight"


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
    architecture: str = "llama",
    pre: str = "smollm",
    extra_tensor: str | None = None,
) -> Path:
    """A GGUF file of the Hugging Face model in `source`."""
    from safetensors.numpy import load_file

    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(384)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
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
    for name, original in load_file(source / "model.safetensors").items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        weight = permute(original, heads) if heads else original
        if quantisation is None or weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, quantisation), raw_dtype=quantisation)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def test_every_weight_is_loaded_and_none_is_left_over(converted: Path) -> None:
    _, info = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not any(info.values())


def test_a_quantised_file_is_dequantised_to_bfloat16(source: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", source, quantisation=gguf.GGMLQuantizationType.Q8_0)
    folder = convert_gguf(path, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert (folder / "model.safetensors").stat().st_size < (source / "model.safetensors").stat().st_size * 0.52
    difference = (logits(folder) - logits(source)).abs()
    assert 0 < difference.max() < 0.2


def test_hyper_parameters_are_the_files(converted: Path) -> None:
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


def test_other_architectures_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", source, architecture="mamba")
    with pytest.raises(UsageError, match="'mamba' is not supported"):
        convert_gguf(path, tmp_path / "model")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"pre": "qwen2"}, "'qwen2'"), ({"extra_tensor": "blk.0.attn_q.bias"}, "attn_q.bias"), ({}, "rope_freqs")],
)
def test_what_a_plain_llama_does_not_have_is_refused(
    source: Path, tmp_path: Path, wrong: dict[str, str], message: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", source, **(wrong or {"extra_tensor": "rope_freqs.weight"}))
    with pytest.raises(UsageError, match=message):
        convert_gguf(path, tmp_path / "model")
    assert names(tmp_path) == ["model.gguf"]


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model at all, but long enough to be read")
    with pytest.raises(UsageError, match="not a readable GGUF"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")


@pytest.mark.parametrize("moment", ["tokenizer", "converting", "writing", "finishing"])
def test_an_interrupted_conversion_leaves_nothing(source: Path, tmp_path: Path, moment: str) -> None:
    def interrupt(message: str, _fraction: float | None) -> None:
        if moment in message:
            raise KeyboardInterrupt

    path = write_gguf(tmp_path / "model.gguf", source)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(path, tmp_path / "model", progress=interrupt)
    assert names(tmp_path) == ["model.gguf"]


def test_of_two_conversions_at_once_the_first_to_finish_is_kept(source: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", source)

    def finish_first(message: str, _fraction: float | None) -> None:
        if message == "finishing":
            (tmp_path / "model").mkdir()
            (tmp_path / "model" / "config.json").write_text("{}")

    convert_gguf(path, tmp_path / "model", progress=finish_first)
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    assert names(tmp_path) == ["model", "model.gguf"]


def test_progress_runs_from_nothing_to_all(source: Path, tmp_path: Path) -> None:
    fractions: list[float] = []
    path = write_gguf(tmp_path / "model.gguf", source)
    convert_gguf(
        path, tmp_path / "model", progress=lambda _, done: fractions.append(done) if done is not None else None
    )
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
