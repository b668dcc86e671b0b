"""Gradients against an independent implementation: transformers and peft, differentiated by torch throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import GROUPS, Adapter, LoraSettings, make_adapter
from rlkit.engine.model.weights import load_weights
from rlkit.engine.storage.peft import peft_tensors
from rlkit.engine.training.learner import Learner
from rlkit.engine.training.losses import make_loss
from rlkit.engine.training.packing import Example

from .test_families import CASES, make
from .tiny_models import FAMILIES, VOCABULARY, write_model


def make_examples() -> list[Example]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, 20)
    examples: list[Example] = []
    for n in (5, 11, 30):
        tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, n)])
        advantages = np.where(np.arange(len(tokens)) < 19, 0, rng.normal(size=len(tokens))).astype(np.float32)
        inputs = {"advantages": advantages, "logprobs": rng.normal(-5.5, 0.3, len(tokens)).astype(np.float32)}
        examples.append(Example(tokens, np.append(tokens[1:], 0), inputs))
    return examples


def loss_of(model: Any, examples: list[Example]) -> torch.Tensor:
    """The policy gradient's loss by transformers."""
    total = torch.zeros(())
    for example in examples:
        logits = model(torch.from_numpy(example.tokens)[None]).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(example.targets)[:, None])[:, 0]
        q, advantages = (torch.from_numpy(example.inputs[name]) for name in ("logprobs", "advantages"))
        total = total - (torch.exp(logprobs - q) * advantages).sum()
    return total


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # it adapts the output alone, as we do
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "qwen3.5", "qwen3.5-tied-bias-and-yarn"])
def test_the_policy_gradient_is_that_of_transformers_and_peft(tmp_path: Path, family: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    if family in CASES and family not in FAMILIES:
        directory = make(tmp_path / "m", *CASES[family][:1], **CASES[family][1] | {"vocab_size": VOCABULARY})
    else:
        directory = write_model(tmp_path / "m", family, tied=family == "llama", scale=0.1)
    weights = load_weights(directory)
    adapter = make_adapter(weights.config, LoraSettings(4), seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    examples = make_examples()
    lanes = Lanes(1)
    learner = Learner(weights, adapter, lanes)
    loss = learner.run(examples, make_loss("importance_sampling", {})).loss
    lanes.close()
    gradients = peft_tensors(Adapter(weights.config, adapter.settings, learner.gradients.sum(0)))

    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # What `all-linear` adapts, and the output layer.
    names = {name.rpartition(".")[2] for name, part in plain.named_modules() if isinstance(part, torch.nn.Linear)}
    model = get_peft_model(plain, LoraConfig(r=4, lora_alpha=32, target_modules=names))
    parameters = {
        name.replace(".default.", "."): value for name, value in model.named_parameters() if value.requires_grad
    }
    with torch.no_grad():
        for name, value in peft_tensors(adapter).items():
            parameters[name].copy_(value)
    total = loss_of(model, examples)
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    assert gradients.keys() == parameters.keys()
    for name, value in gradients.items():
        theirs = parameters[name].grad
        assert theirs is not None
        # Both are equally far from the gradient in float64, and farther with delta nets.
        tolerance = 1e-4 if "qwen3.5" in family else 1e-5
        assert float((value - theirs).norm()) <= tolerance * max(float(theirs.norm()), 1.0), name


def parameter_of(model: Any, layer: int, expert: int | None, part: str) -> torch.Tensor:
    """The rows of transformers' parameter that a part of the adapter changes."""
    block = model.model.layers[layer]
    if part in "qkvo":
        return getattr(block.self_attn, f"{part}_proj").weight
    if expert is None:
        return getattr(block.mlp, f"{part}_proj").weight
    if part == "down":
        return block.mlp.experts.down_proj[expert]
    return block.mlp.experts.gate_up_proj[expert].chunk(2)[part == "up"]


def test_the_gradient_of_experts_is_that_of_merged_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = {**CASES["qwen3-moe"][1], "mlp_only_layers": [1], "vocab_size": VOCABULARY}
    directory = make(tmp_path / "m", "qwen3_moe", **options)
    weights = load_weights(directory)
    adapter = make_adapter(weights.config, LoraSettings(4, train_unembed=False), seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    lanes, examples = Lanes(1), make_examples()
    learner = Learner(weights, adapter, lanes)
    loss = learner.run(examples, make_loss("importance_sampling", {})).loss
    lanes.close()
    gradients = Adapter(weights.config, adapter.settings, learner.gradients.sum(0)).views

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    factors: dict[str, tuple[tuple[int, int | None, str], torch.Tensor, torch.Tensor]] = {}
    for name in [name for name in adapter.views if name.endswith(".lora_A")]:
        _, layer, *middle, group = name.removesuffix(".lora_A").split(".")
        for index, part in enumerate(GROUPS[group]):
            place = int(layer), int(middle[1]) if middle else None, part
            rows = slice(4 * index, 4 * index + 4)
            b_name = name.replace(f"{group}.lora_A", f"{part}.lora_B")
            a, b = adapter.views[name][rows], adapter.views[b_name]
            with torch.no_grad():
                parameter_of(model, *place).add_(b.t() @ a, alpha=adapter.scale)
            factors[b_name] = place, a, b
            gradients[f"{b_name}/a"] = gradients[name][rows]
    total = loss_of(model, examples)
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.grad, None
    expert_norms: list[float] = []
    for name, (place, a, b) in factors.items():
        full = parameter_of(model, *place).detach() * adapter.scale  # now the gradient
        for mine, theirs in ((gradients[name], a @ full.t()), (gradients[f"{name}/a"], b @ full)):
            assert float((mine - theirs).norm()) <= 1e-5 * max(float(theirs.norm()), 1.0), name
        expert_norms += [float(full.norm())] if place[1] is not None else []
    assert len(expert_norms) == 4 * 6 * 3
    assert max(expert_norms) > 1
