"""A decoding step on its two ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlkit.engine.kv import KvBlock
from rlkit.engine.lora import serve
from rlkit.engine.model import rope_at
from rlkit.engine.steps import Steps
from rlkit.engine.weights import load_weights

from .tiny_models import VOCABULARY, write_model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_step_has_the_same_bits_in_one_call_and_in_many(family: str, tmp_path: Path) -> None:
    weights = load_weights(write_model(tmp_path / "m", family))
    first, *others = weights.layers
    odd = replace(first, rotary=False, o_bias=torch.linspace(-1, 1, weights.config.hidden_size))
    weights = replace(weights, layers=(odd, *others))
    served = serve(weights, None, lambda tasks: [task() for task in tasks])
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (5, 16)))

    def hidden(threads: int) -> torch.Tensor:
        steps, block = Steps(served), KvBlock[int](weights.config, 32, weights.embedding)
        nothing = torch.zeros(weights.config.layers, weights.config.kv_heads, 0, weights.config.head_dim)
        block.add(list(range(16)), nothing, nothing)
        torch.set_num_threads(threads)
        try:
            for place, row in enumerate(tokens):
                block.begin()
                x = weights.embedding[row]
                found = steps.run(x, rope_at(weights.config, torch.full((16,), place), x), block.attend)
        finally:
            torch.set_num_threads(1)
        return found

    with torch.inference_mode():
        assert torch.equal(hidden(1), hidden(3))
