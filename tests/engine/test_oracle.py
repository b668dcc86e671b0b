"""Gradients against an independent implementation: transformers and peft, differentiated by torch throughout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import Adapter, LoraSettings, make_adapter
from rlkit.engine.model.weights import load_weights
from rlkit.engine.storage.peft import peft_tensors
from rlkit.engine.training.learner import Learner
from rlkit.engine.training.losses import make_loss
from rlkit.engine.training.packing import Example

from .tiny_models import VOCABULARY, write_model


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # it adapts the output alone, as we do
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_policy_gradient_is_that_of_transformers_and_peft(tmp_path: Path, family: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "m", family, tied=family == "llama", scale=0.1)
    weights = load_weights(directory)
    adapter = make_adapter(weights.config, LoraSettings(4), seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, 20)
    examples: list[Example] = []
    for n in (5, 11, 30):
        tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, n)])
        advantages = np.where(np.arange(len(tokens)) < 19, 0, rng.normal(size=len(tokens))).astype(np.float32)
        inputs = {"advantages": advantages, "logprobs": rng.normal(-5.5, 0.3, len(tokens)).astype(np.float32)}
        examples.append(Example(tokens, np.append(tokens[1:], 0), inputs))

    lanes = Lanes(1)
    learner = Learner(weights, adapter, lanes)
    loss = learner.forward_backward(examples, make_loss("importance_sampling", {})).loss
    lanes.close()
    gradients = peft_tensors(Adapter(weights.config, adapter.settings, learner.gradients.sum(0)))

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = get_peft_model(plain, LoraConfig(r=4, lora_alpha=32, target_modules=names))
    parameters = {
        name.replace(".default.", "."): value for name, value in model.named_parameters() if value.requires_grad
    }
    with torch.no_grad():
        for name, value in peft_tensors(adapter).items():
            parameters[name].copy_(value)
    total = torch.zeros(())
    for example in examples:
        logits = model(torch.from_numpy(example.tokens)[None]).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(example.targets)[:, None])[:, 0]
        q, advantages = (torch.from_numpy(example.inputs[name]) for name in ("logprobs", "advantages"))
        total = total - (torch.exp(logprobs - q) * advantages).sum()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    assert gradients.keys() == parameters.keys()
    for name, value in gradients.items():
        theirs = parameters[name].grad
        assert theirs is not None
        assert float((value - theirs).norm()) <= 1e-5 * max(float(theirs.norm()), 1.0), name
