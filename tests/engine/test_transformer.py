"""The forward pass against an independent implementation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlkit.engine.model.attention import lay_out
from rlkit.engine.model.matrices import matmul
from rlkit.engine.model.transformer import compute_hidden, compute_rope
from rlkit.engine.model.weights import load_weights
from rlkit.errors import UsageError

from .tiny_models import LLAMA3, VOCABULARY, write_model

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"tied": True}),
    "llama3-rope": ("llama", {"tied": False, "rope_scaling": LLAMA3}),
    "rope-parameters": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    "qwen2": ("qwen2", {"tied": False}),
    "qwen3": ("qwen3", {"tied": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, options = CASES[case]
    directory = write_model(tmp_path / "m", family, **options)  # pyright: ignore[reportArgumentType]
    lengths = [3, 90, 17]
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, sum(lengths)))
    weights = load_weights(directory)
    with torch.inference_mode():
        actual = torch.log_softmax(matmul(compute_hidden(weights, tokens, lay_out(lengths)), weights.output), -1)
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for part, logprobs in zip(tokens.split(lengths), actual.split(lengths), strict=True):
            expected = torch.log_softmax(reference(part[None]).logits[0], -1)
            torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"vocab_size": 300}, "embed_tokens"),
    ],
)
def test_an_unsupported_model_is_rejected_by_name(extra: dict[str, object], named: str, tmp_path: Path) -> None:
    import json

    directory = write_model(tmp_path / "m")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | extra))
    with pytest.raises(UsageError, match=named):
        load_weights(directory)


def test_end_tokens_come_from_both_configurations(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "generation_config.json").write_text('{"eos_token_id": [257, 5]}')
    assert load_weights(directory).config.eos == {258, 257, 5}


def test_rotations_of_far_positions_are_computed_directly(tmp_path: Path) -> None:
    config = load_weights(write_model(tmp_path / "m")).config
    where = torch.tensor([70_000, 3, 0, 1023, 1024, 70_001])
    kind = config.attention[0]
    cos, sin = compute_rope(kind, where, torch.zeros(()))
    angles = where[:, None] * torch.tensor(kind.frequencies * 2, dtype=torch.float32)
    torch.testing.assert_close(cos[:, 0], angles.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[:, 0], angles.sin(), atol=1e-6, rtol=0)
    for first in range(69_980, 70_002):  # the bits of a row do not depend on the others
        rows = torch.arange(first, 70_010)
        for rotations, others in zip((cos, sin), compute_rope(kind, rows, torch.zeros(())), strict=True):
            assert torch.equal(others[rows == 70_001], rotations[where == 70_001])
