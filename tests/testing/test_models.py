from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rlkit.engine.model.model_files import load_tokenizer
from rlkit.testing import byte_model, tiny_model
from rlkit.testing.models import Family


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "byte": byte_model(folder / "byte"),
        "llama": tiny_model(folder / "llama"),
        "qwen3": tiny_model(folder / "qwen3", family="qwen3"),
    }


@pytest.mark.parametrize(("kind", "parameters"), [("byte", 131_776), ("llama", 1_082_496), ("qwen3", 1_181_184)])
def test_the_model_loads_whole_and_its_next_token_is_open(models: dict[str, Path], kind: str, parameters: int) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(models[kind], output_loading_info=True)
    assert not any(info.values())
    assert model.num_parameters() == parameters
    tokens = torch.tensor([load_tokenizer(models[kind]).encode("The sea is wide. ")])
    with torch.no_grad():
        logprobs = model(tokens).logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    uniform = torch.tensor(float(logprobs.shape[-1])).log()
    assert 0.7 * uniform < entropy < 0.98 * uniform


@given(st.text())
def test_the_byte_tokenizers_tokens_are_the_bytes(text: str) -> None:
    from tokenizers import Tokenizer

    from rlkit.testing.models import _make_byte_tokenizer

    tokenizer: Tokenizer = _make_byte_tokenizer()
    tokens = tokenizer.encode(text.replace("<", "")).ids
    assert bytes(tokens) == text.replace("<", "").encode()
    assert tokenizer.decode(tokens) == text.replace("<", "")


@given(st.text())
def test_the_trained_tokenizer_round_trips(text: str) -> None:
    from rlkit.testing.models import _train_tokenizer

    tokenizer = _train_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_trained_tokenizer_joins_common_words(models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(models["llama"])
    assert len(tokenizer) == 2304
    assert len(tokenizer.encode("If the value of the function is not given")) <= 10


def test_the_byte_template_marks_each_message(models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(models["byte"])
    messages = [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1+1"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<bos>system\nSum.<eos>\n<bos>user\n1+1<eos>\n<bos>assistant\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


def test_the_chatml_template_shows_tools_calls_and_results(models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(models["qwen3"])
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    tool = {"type": "function", "function": {"name": "add"}}
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n{")
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\n<tool_response>\n2\n</tool_response><|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_the_chatml_template_adds_nothing_that_was_not_said(models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(models["llama"])
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_seed_alone_decides_the_weights(tmp_path: Path, family: Family) -> None:
    folders = [tiny_model(tmp_path / str(i), family=family, seed=seed) for i, seed in enumerate([1, 1, 2])]
    first, again, other = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert first == again != other
    assert (folders[0] / "tokenizer.json").read_bytes() == (folders[2] / "tokenizer.json").read_bytes()


def test_making_a_model_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rlkit.testing import byte_model, tiny_model\n"
        f"byte_model(Path({str(tmp_path / 'b')!r})); tiny_model(Path({str(tmp_path / 't')!r}))\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
