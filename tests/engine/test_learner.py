"""Gradients against autograd on the written formula in float64, and the optimiser against torch's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.engine.learner import AdamSettings, Example, Learner, check_examples, micro_batches
from rlkit.engine.lora import Adapter, LoraSettings, merge, new_adapter
from rlkit.engine.losses import LOSSES, make_loss
from rlkit.engine.model import trunk
from rlkit.engine.weights import Weights, load_weights
from rlkit.errors import UsageError

from .tiny_models import VOCABULARY, write_model


def formula(name: str, logp: torch.Tensor, q: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logp - q)
    if name == "importance_sampling":
        return -(ratio * advantage).sum()
    if name == "ppo":
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    if name == "cispo":
        return -(ratio.detach().clamp(0.0, 4.0) * logp * advantage).sum()
    if name == "dro":
        return -(logp * advantage - 0.5 * 0.05 * (logp - q) ** 2).sum()
    return -(advantage * logp).sum()


def as_double(weights: Weights, adapter: Adapter) -> tuple[Weights, Adapter]:
    """A float64 copy, the adapter trainable."""
    from dataclasses import fields, replace

    def double(value: object) -> object:
        return value.double() if isinstance(value, torch.Tensor) else value

    layers = tuple(replace(l, **{f.name: double(getattr(l, f.name)) for f in fields(l)}) for l in weights.layers)  # noqa: E741
    copy = replace(
        weights,
        embedding=weights.embedding.double(),
        layers=layers,
        norm=weights.norm.double(),
        head=weights.head.double(),
    )
    return copy, Adapter(adapter.config, adapter.settings, adapter.flat.detach().double().clone(), trainable=True)


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return load_weights(write_model(tmp_path / "m", "qwen3", tied=False, scale=0.15))


def random_adapter(weights: Weights, lora: LoraSettings) -> Adapter:
    adapter = new_adapter(weights.config, lora, seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    return adapter


def random_examples(loss: str, lengths: list[int]) -> list[Example]:
    rng = np.random.default_rng(0)
    examples: list[Example] = []
    for n in lengths:
        tokens, targets = rng.integers(0, VOCABULARY, (2, n))
        weight = np.where(np.arange(n) < n // 3, 0, rng.normal(size=n)).astype(np.float32)
        q = rng.normal(-5, 0.5, n).astype(np.float32)
        inputs = {"weights": weight} if loss == "cross_entropy" else {"advantages": weight, "logprobs": q}
        examples.append(Example(tokens, targets, inputs))
    return examples


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("unembed", [True, False])
def test_gradients_equal_autograd_on_the_formula(weights: Weights, loss: str, unembed: bool) -> None:
    adapter = random_adapter(weights, LoraSettings(4, train_unembed=unembed))
    examples = random_examples(loss, [7, 150, 40, 7])
    learner = Learner(weights, adapter)
    half = learner.forward_backward(examples[:2], make_loss(loss, {}))
    rest = learner.forward_backward(examples[2:], make_loss(loss, {}))

    exact, trainable = as_double(weights, adapter)
    total = torch.zeros((), dtype=torch.float64)
    for example in examples:
        tokens = torch.from_numpy(example.tokens)
        hidden = trunk(exact, tokens, [len(tokens)], adapter=trainable)
        lora = trainable.unembed()
        logits = hidden @ exact.head.t() + (0 if lora is None else lora.delta(hidden))
        logp = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.from_numpy(example.targets)]
        factor = torch.from_numpy(example.inputs.get("weights", example.inputs.get("advantages"))).double()
        q = torch.from_numpy(example.inputs["logprobs"]).double() if "logprobs" in example.inputs else logp.detach()
        total = total + formula(loss, logp, q, factor)
    total.backward()
    expected = torch.cat([view.grad.flatten() for view in trainable.views.values() if view.grad is not None])
    assert half.loss + rest.loss == pytest.approx(total.item(), rel=1e-4)
    assert float((learner.gradient - expected).norm() / expected.norm()) < 1e-4


def test_merged_weights_give_the_same_log_probabilities_as_the_adapter(weights: Weights) -> None:
    adapter = random_adapter(weights, LoraSettings(4))
    example = random_examples("cross_entropy", [60])
    trained = Learner(weights, adapter).forward(example, make_loss("cross_entropy", {})).logprobs[0]
    plain = new_adapter(weights.config, LoraSettings(4), seed=3)  # B is zero: it changes nothing
    merged = Learner(merge(weights, adapter.snapshot()), plain).forward(example, make_loss("cross_entropy", {}))
    np.testing.assert_allclose(merged.logprobs[0], trained, atol=1e-4)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_optimiser_takes_the_steps_of_torch_adamw(weights: Weights, clip: float) -> None:
    learner = Learner(weights, random_adapter(weights, LoraSettings(2)))
    reference = torch.nn.Parameter(learner.adapter.flat.detach().clone())
    optimiser = torch.optim.AdamW([reference], lr=3e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for step in range(5):
        gradient = torch.randn(len(reference), generator=torch.Generator().manual_seed(step))
        learner.gradient.copy_(gradient)
        reference.grad = gradient.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_([reference], clip)
        optimiser.step()
        norm = learner.step(AdamSettings(3e-3, 0.9, 0.95, 1e-12, 0.1, clip))
        assert norm == pytest.approx(float(gradient.norm()), rel=1e-5)
        torch.testing.assert_close(learner.adapter.flat, reference.detach(), atol=1e-6, rtol=1e-5)
    assert not learner.gradient.any()


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(weights: Weights) -> None:
    learner = Learner(weights, random_adapter(weights, LoraSettings(2)))
    before = learner.adapter.flat.clone()
    learner.gradient[0] = torch.inf
    with pytest.raises(UsageError, match="not finite"):
        learner.step(AdamSettings(1e-3, 0.9, 0.95, 1e-12, 0.0, 0.0))
    assert torch.equal(learner.adapter.flat, before)
    assert learner.steps == 0


@given(st.lists(st.integers(1, 700), max_size=40))
@settings(deadline=None)
def test_micro_batches_hold_every_sequence_once_within_the_bound(lengths: list[int]) -> None:
    batches = list(micro_batches(lengths))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= 512 for batch in batches)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": np.array([1, 999])}, "model_input"),
        ({"targets": np.array([-1, 2])}, "target_tokens"),
        ({"targets": np.array([1, 2, 3])}, "target_tokens"),
        ({"inputs": {"advantages": np.ones(2, np.float32)}}, "logprobs"),
        ({"inputs": {"advantages": np.ones(2, np.float32), "logprobs": np.full(2, np.nan, np.float32)}}, "finite"),
        ({"inputs": {n: np.ones(2, np.float32) for n in ("advantages", "logprobs", "mask")}}, "mask"),
    ],
)
def test_a_malformed_example_is_refused_by_field(change: dict[str, np.ndarray], named: str) -> None:
    from dataclasses import replace

    inputs = {"advantages": np.ones(2, np.float32), "logprobs": np.ones(2, np.float32)}
    good = Example(np.array([1, 2]), np.array([2, 3]), inputs)
    check_examples([good], "ppo", vocab_size=10)
    with pytest.raises(UsageError, match=named):
        check_examples([replace(good, **change)], "ppo", vocab_size=10)
