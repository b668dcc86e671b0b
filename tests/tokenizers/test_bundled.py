"""Tokenizers out of packages write conversations as the models' own would."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.chat.renderers import chat_format
from rlkit.tokenizers.bundled import TML_TOKENIZERS, PackagedTokenizer, load_bundled_tokenizer
from rlkit.types import Message

QWEN3_IDS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<think>": 151667}
ASKED: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi é"}]


@pytest.fixture(scope="module", params=["Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3.1"])
def tokenizer(request: pytest.FixtureRequest) -> PackagedTokenizer:
    bundled = load_bundled_tokenizer(request.param)
    assert bundled is not None
    return bundled


def load_qwen() -> PackagedTokenizer:
    bundled = load_bundled_tokenizer("Qwen/Qwen3-8B")
    assert bundled is not None
    return bundled


@given(st.text())
def test_decoding_ordinary_text_restores_it(tokenizer: PackagedTokenizer, text: str) -> None:
    import unicodedata

    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert unicodedata.normalize("NFC", tokenizer.decode(tokens)) == unicodedata.normalize("NFC", text)
    assert max(tokens, default=0) < len(tokenizer)


def test_special_token_is_one_token_and_decodes_to_itself(tokenizer: PackagedTokenizer) -> None:
    for text in tokenizer.all_special_tokens:
        tokens = tokenizer.encode(f"a{text}b", add_special_tokens=False)
        assert tokenizer.convert_tokens_to_ids(text) in tokens
        assert tokenizer.decode(tokens) == f"a{text}b"


def test_the_ids_of_qwen3_are_those_of_its_own_tokenizer() -> None:
    assert {text: load_qwen().convert_tokens_to_ids(text) for text in QWEN3_IDS} == QWEN3_IDS
    assert load_qwen().encode("What is 12 + 34?") == [3838, 374, 220, 16, 17, 488, 220, 18, 19, 30]
    assert load_qwen().eos_token_id == QWEN3_IDS["<|im_end|>"]


def test_names_of_special_tokens_can_be_ordinary_text() -> None:
    tokens = load_qwen().encode("<|im_end|>", split_special_tokens=True)
    assert len(tokens) > 1
    assert load_qwen().decode(tokens) == "<|im_end|>"


def test_decoding_can_skip_end_tokens_but_keeps_thinking() -> None:
    tokens = load_qwen().encode("<think>\nhm\n</think>\n\n4<|im_end|>")
    assert load_qwen().decode(tokens, skip_special_tokens=True) == "<think>\nhm\n</think>\n\n4"
    assert load_qwen().decode(QWEN3_IDS["<|im_end|>"]) == "<|im_end|>"


def test_a_conversation_is_written_by_the_recommended_renderer() -> None:
    chat = chat_format("Qwen/Qwen3-8B", load_qwen())  # type: ignore[arg-type]  what renderers use of a tokenizer is there
    tokens = chat.render(ASKED).tokens
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
    assert load_qwen().decode(tokens.tolist()) == expected
    parsed = chat.parse(np.array(load_qwen().encode("<think>\nhm\n</think>\n\n4<|im_end|>"), np.int32))
    assert parsed.message["content"] == "4"
    assert parsed.message.get("thinking") == "hm"


def test_every_class_of_the_table_exists() -> None:
    module = importlib.import_module("tml_renderers.tokenizers")
    assert all(hasattr(module, name) for name in TML_TOKENIZERS.values())


@pytest.mark.parametrize("model", ["me/my-model", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3-8B"])
def test_unknown_model_has_no_bundled_tokenizer(model: str) -> None:
    assert load_bundled_tokenizer(model) is None


def test_llama_3_tokenizer_is_loaded_from_its_package() -> None:
    pytest.importorskip("llama_models")
    bundled = load_bundled_tokenizer("meta-llama/Llama-3.1-8B-Instruct")
    assert bundled is not None
    assert bundled.encode("Hi<|eot_id|>") == [128000, 13347, 128009]
