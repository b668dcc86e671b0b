"""Gradients against autograd on the written formula in float64, and the optimiser against torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.requests import SampleRequest, SampleResult, StopRule
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.kernels.threads import Lanes, StoppedError
from rlkit.engine.model import transformer
from rlkit.engine.model.attention import lay_out
from rlkit.engine.model.lora import Adapter, Lora, LoraSettings, make_adapter, make_sampling_weights
from rlkit.engine.model.matrices import Matrix
from rlkit.engine.model.transformer import compute_hidden
from rlkit.engine.model.weights import Weights, load_weights
from rlkit.engine.training import lm_head as head_module
from rlkit.engine.training.learner import AdamSettings, Learner
from rlkit.engine.training.losses import LOSSES, SEQUENCE, make_loss
from rlkit.engine.training.packing import Example
from rlkit.errors import UsageError

from .helpers import as_double
from .tiny_models import VOCABULARY, write_model


def formula(
    name: str, logp: torch.Tensor, q: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    if name == "gspo":
        in_ratio = mask != 0
        constant = (logp.detach() - q)[in_ratio].mean() if in_ratio.any() else torch.zeros((), dtype=logp.dtype)
        ratio = torch.exp(constant + logp - logp.detach())
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
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


def double_adapter(adapter: Adapter) -> Adapter:
    """A trainable float64 copy."""
    return Adapter(adapter.config, adapter.settings, adapter.flat.detach().double().clone(), trainable=True)


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return load_weights(write_model(tmp_path / "m", "qwen3", tied=False, scale=0.15))


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(1)
    yield lanes
    lanes.close()


def random_adapter(weights: Weights, lora: LoraSettings) -> Adapter:
    adapter = make_adapter(weights.config, lora, seed=0)
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
        if loss == "gspo":
            inputs["logprobs"] = rng.normal(-5, 0.05, n).astype(np.float32)
            inputs["sequence_ratio_mask"] = (weight != 0).astype(np.float32)
        examples.append(Example(tokens, targets, inputs))
    return examples


def formula_of_project(x: torch.Tensor, weight: torch.Tensor, lora: Lora | None) -> torch.Tensor:
    return x @ weight if lora is None else x @ weight + lora.delta(x)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("unembed", [True, False])
def test_gradients_equal_autograd_on_the_formula(
    weights: Weights, lanes: Lanes, loss: str, unembed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = random_adapter(weights, LoraSettings(4, train_unembed=unembed))
    examples = random_examples(loss, [7, 150, 40, 7])
    learner = Learner(weights, adapter, lanes)
    half = learner.run(examples[:2], make_loss(loss, {}))
    rest = learner.run(examples[2:], make_loss(loss, {}))

    exact, trainable = as_double(weights), double_adapter(adapter)
    monkeypatch.setattr(transformer, "project", formula_of_project)  # not the gradient that is written by hand
    total = torch.zeros((), dtype=torch.float64)
    for example in examples:
        tokens = torch.from_numpy(example.tokens)
        hidden = compute_hidden(exact, tokens, lay_out([len(tokens)]), adapter=trainable)
        lora = trainable.unembed()
        logits = hidden @ exact.output + (0 if lora is None else lora.delta(hidden))
        logp = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.from_numpy(example.targets)]
        factor = torch.from_numpy(example.inputs.get("weights", example.inputs.get("advantages"))).double()
        q = torch.from_numpy(example.inputs["logprobs"]).double() if "logprobs" in example.inputs else logp.detach()
        mask = torch.from_numpy(example.inputs.get("sequence_ratio_mask", example.targets))
        total = total + formula(loss, logp, q, factor, mask)
    total.backward()
    expected = torch.cat([view.grad.flatten() for view in trainable.views.values() if view.grad is not None])
    # The terms of the sum, most of which cancel, come to about a hundred.
    assert half.loss + rest.loss == pytest.approx(total.item(), rel=1e-5, abs=1e-4)
    assert float((learner.gradients.double().sum(0) - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("loss", "name", "default"),
    [("cross_entropy", "weights", 1.0), ("ppo", "clip_low_threshold", 0.8), ("cispo", "clip_high_threshold", 4.0)],
)
def test_an_optional_input_that_a_sequence_lacks_has_its_default(
    weights: Weights, lanes: Lanes, loss: str, name: str, default: float
) -> None:
    first, second = random_examples(loss, [20, 30])
    given = replace(first, inputs={**first.inputs, name: np.full(20, 0.5 if loss != "cispo" else 8.0, np.float32)})
    without = replace(second, inputs={key: values for key, values in second.inputs.items() if key != name})
    filled = replace(without, inputs={**without.inputs, name: np.full(30, default, np.float32)})
    gradients = list[torch.Tensor]()
    for other in (without, filled):
        learner = Learner(weights, random_adapter(weights, LoraSettings(4)), lanes)
        learner.run([given, other], make_loss(loss, {}))
        gradients.append(learner.gradients.sum(0))
    assert torch.equal(*gradients)
    assert gradients[0].norm() > 0


def test_logits_are_computed_for_one_piece_of_a_batch_at_a_time(
    weights: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    product = head_module.matmul

    def counted(hidden: torch.Tensor, weight: Matrix, *, out: torch.Tensor | None = None) -> torch.Tensor:
        assert out is not None
        assert len(out) == 128  # the one room that all pieces have
        rows.append(len(hidden))
        return product(hidden, weight, out=out)

    monkeypatch.setattr(head_module, "matmul", counted)
    learner = Learner(weights, random_adapter(weights, LoraSettings(4, train_unembed=False)), lanes)
    learner.run(random_examples("cross_entropy", [300, 250]), make_loss("cross_entropy", {}))
    assert max(rows) == 128
    assert sum(rows) == 550


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_token_without_an_advantage_has_no_loss_for_any_log_probability(loss: str) -> None:
    logp = torch.tensor([-1.0, -2.0])
    inputs = {"advantages": torch.tensor([0.0, 1.0]), "logprobs": torch.tensor([-1000.0, -2.1])}
    inputs[SEQUENCE] = torch.tensor([1000.0, 0.1])
    losses, gradient = make_loss(loss, {}).gradient(logp, inputs)
    alone = make_loss(loss, {}).gradient(logp[1:], {name: values[1:] for name, values in inputs.items()})
    assert losses.tolist() == [0.0, *alone[0].tolist()]
    assert gradient.tolist() == [0.0, *alone[1].tolist()]


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_an_infinite_ratio_is_clipped_above_the_threshold(loss: str) -> None:
    logp = torch.tensor([-1.0, -1.0])
    inputs = {"advantages": torch.tensor([2.0, 2.0]), "logprobs": torch.tensor([-1000.0, -5.0])}
    inputs[SEQUENCE] = logp - inputs["logprobs"]
    losses, gradient = make_loss(loss, {}).gradient(logp, inputs)
    assert losses.tolist() == pytest.approx([-2.4, -2.4])
    assert gradient.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("quantisation", [None, "int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sampling_gives_the_log_probabilities_of_training(
    tmp_path: Path, lanes: Lanes, dtype: torch.dtype, quantisation: str | None
) -> None:
    directory = write_model(tmp_path / "typed", "qwen3", tied=False, scale=0.15, dtype=dtype)
    weights = load_weights(directory, quantisation=quantisation)
    adapter = random_adapter(weights, LoraSettings(4))
    example = random_examples("cross_entropy", [60])
    trained = Learner(weights, adapter, lanes).run(example, make_loss("cross_entropy", {}), backward=False).logprobs[0]
    results: list[SampleResult] = []
    decoder = Decoder(make_sampling_weights(weights, adapter.snapshot(), lanes.run), lanes)
    tokens = np.append(example[0].tokens, 0)
    prompt_tokens = np.append(example[0].targets, 0)
    request = SampleRequest(tokens, 1, 1, 0, DrawSettings(), StopRule(), targets=prompt_tokens[:-1, None])
    decoder.submit(request, results.append)
    decoder.step()
    assert results[0].prompt_scores.targets is not None
    np.testing.assert_allclose(results[0].prompt_scores.targets[:, 0], trained, atol=1e-4)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_optimiser_takes_the_steps_of_torch_adamw(weights: Weights, lanes: Lanes, clip: float) -> None:
    learner = Learner(weights, random_adapter(weights, LoraSettings(2)), lanes)
    reference = torch.nn.Parameter(learner.adapter.flat.detach().clone())
    optimiser = torch.optim.AdamW([reference], lr=3e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for step in range(5):
        gradient = torch.randn(len(reference), generator=torch.Generator().manual_seed(step))
        learner.gradients[0] = gradient / 4
        learner.gradients[1] = gradient * 3 / 4
        reference.grad = gradient.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_([reference], clip)
        optimiser.step()
        norm = learner.step(AdamSettings(3e-3, 0.9, 0.95, 1e-12, 0.1, clip))
        assert norm == pytest.approx(float(gradient.norm()), rel=1e-5)
        torch.testing.assert_close(learner.adapter.flat, reference.detach(), atol=1e-6, rtol=1e-5)
    assert not learner.gradients.any()


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(weights: Weights, lanes: Lanes) -> None:
    learner = Learner(weights, random_adapter(weights, LoraSettings(2)), lanes)
    before = learner.adapter.flat.clone()
    learner.gradients[1, 0] = torch.inf
    with pytest.raises(UsageError, match="not finite"):
        learner.step(AdamSettings(1e-3, 0.9, 0.95, 1e-12, 0.0, 0.0))
    assert torch.equal(learner.adapter.flat, before)
    assert learner.steps == 0


def plain_gradient(weights: Weights, adapter: Adapter, examples: list[Example], lanes: Lanes) -> torch.Tensor:
    """The gradient with each example in a request of its own, so that nothing can be shared."""
    learner = Learner(weights, adapter, lanes)
    for example in examples:
        learner.run([example], make_loss("cross_entropy", {}))
    return learner.gradients.sum(0)


def test_sharing_a_prompt_changes_neither_log_probabilities_nor_gradients(weights: Weights, lanes: Lanes) -> None:
    rng = np.random.default_rng(0)
    examples: list[Example] = []
    for prompt_length, answers in ((40, (3, 9, 9, 1)), (300, (5, 120)), (8, (4, 4)), (0, (17, 17))):
        prompt = rng.integers(0, VOCABULARY, prompt_length)
        for n in answers:
            tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, n)])
            targets = np.append(tokens[1:], 0)
            # The prompt has weights too, different ones in each example: all of them meet in its shared rows.
            examples.append(Example(tokens, targets, {"weights": rng.normal(size=len(tokens)).astype(np.float32)}))
    examples.append(examples[0])
    adapter = random_adapter(weights, LoraSettings(4))
    learner = Learner(weights, adapter, lanes)
    together = learner.run(examples, make_loss("cross_entropy", {}))
    for example, logprobs in zip(examples, together.logprobs, strict=True):
        alone = learner.run([example], make_loss("cross_entropy", {}), backward=False).logprobs[0]
        np.testing.assert_allclose(logprobs, alone, atol=2e-5)
    expected = plain_gradient(weights, adapter, examples, lanes)
    assert float((learner.gradients.sum(0) - expected).norm() / expected.norm()) < 1e-5


def test_several_targets_a_token_are_a_sum_over_them(weights: Weights, lanes: Lanes) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, 20)
    targets = rng.integers(0, VOCABULARY, (20, 3))
    targets[0, 2] = targets[0, 0]
    factor = rng.normal(size=(20, 3)).astype(np.float32)
    adapter = random_adapter(weights, LoraSettings(4))
    learner = Learner(weights, adapter, lanes)
    both = learner.run([Example(tokens, targets, {"weights": factor})], make_loss("cross_entropy", {}))
    columns = [Example(tokens, targets[:, k], {"weights": factor[:, k]}) for k in range(3)]
    expected = plain_gradient(weights, adapter, columns, lanes)
    assert both.logprobs[0].shape == (20, 3)
    single = learner.run(columns, make_loss("cross_entropy", {}), backward=False)
    np.testing.assert_allclose(both.logprobs[0], np.stack(single.logprobs, 1), atol=2e-5)
    assert both.loss == pytest.approx(single.loss, rel=1e-5)
    assert float((learner.gradients.sum(0) - expected).norm() / expected.norm()) < 1e-5


def test_results_do_not_depend_on_the_number_of_lanes(weights: Weights, lanes: Lanes) -> None:
    examples = random_examples("ppo", [7, 150, 40, 7, 200, 90])
    two = Lanes(2)
    gradients: list[torch.Tensor] = []
    for chosen in (lanes, two):
        learner = Learner(weights, random_adapter(weights, LoraSettings(4)), chosen)
        learner.run(examples, make_loss("ppo", {}))
        gradients.append(learner.gradients)
    two.close()
    assert torch.equal(*gradients)


def test_the_gradient_of_one_sequence_does_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    # Large enough that every product, norm and attention is shared among the threads.
    weights = load_weights(write_model(tmp_path, hidden=320, inner=640, heads=10, kv_heads=5, head_dim=32))
    examples, loss = random_examples("ppo", [600]), make_loss("ppo", {})
    gradients: list[torch.Tensor] = []
    for threads in (1, 2, 3):
        lanes = Lanes(threads)
        learner = Learner(weights, random_adapter(weights, LoraSettings(4)), lanes)
        learner.run(examples, loss)
        gradients.append(learner.gradients)
        lanes.close()
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.slow
def test_sampling_between_micro_batches_changes_neither_gradients_nor_samples(weights: Weights) -> None:
    examples, loss, lanes = random_examples("ppo", [7, 150, 40, 7, 200, 90, 180]), make_loss("ppo", {}), Lanes(2)
    served = make_sampling_weights(weights, None, lanes.run)
    request = SampleRequest(np.arange(5), 20, 12, 0, DrawSettings(), StopRule())

    class Sampling:
        def __init__(self) -> None:
            self.decoder, self.results = Decoder(served, lanes), list[SampleResult]()
            self.decoder.submit(request, self.results.append)

        @property
        def should_yield(self) -> bool:
            return self.decoder.busy

        def let_others_run(self) -> None:
            self.decoder.step()
            self.decoder.step()

    sampling, alone = Sampling(), Sampling()
    while alone.decoder.busy:
        alone.let_others_run()
    gradients: list[torch.Tensor] = []
    for scheduler in (None, sampling):
        learner = Learner(weights, random_adapter(weights, LoraSettings(4)), lanes)
        learner.run(examples, loss, scheduler=scheduler)
        gradients.append(learner.gradients)
    assert len(sampling.decoder._batch) > 0  # pyright: ignore[reportPrivateUsage] they are in the middle
    while sampling.decoder.busy:
        sampling.let_others_run()
    lanes.close()
    assert torch.equal(*gradients)
    for sampled, expected in zip(sampling.results[0].samples, alone.results[0].samples, strict=True):
        np.testing.assert_array_equal(sampled.tokens, expected.tokens)
        np.testing.assert_array_equal(sampled.logprobs, expected.logprobs)


def test_halted_training_ends_within_a_micro_batch(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, done = Lanes(2), list[int]()
    compute = Learner._run_micro_batch

    def counted(*args: object, **kwargs: object) -> object:
        done.append(1)
        lanes.halt()
        return compute(*args, **kwargs)  # pyright: ignore[reportArgumentType] they are passed on as they came

    monkeypatch.setattr(Learner, "_run_micro_batch", counted)
    learner = Learner(weights, random_adapter(weights, LoraSettings(2)), lanes)
    with pytest.raises(StoppedError, match="the engine was stopped"):
        learner.run(random_examples("ppo", [200] * 20), make_loss("ppo", {}))
    lanes.close()
    assert len(done) <= 2


def test_a_partial_gradient_of_a_failed_call_is_not_applied(
    weights: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples, loss = random_examples("ppo", [400] * 4), make_loss("ppo", {})
    adam = AdamSettings(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0)
    expected, learner = (Learner(weights, random_adapter(weights, LoraSettings(2)), lanes) for _ in "ab")
    before = learner.adapter.flat.clone()
    compute, calls = Learner._run_micro_batch, iter(range(10))

    def failing(*args: object, **kwargs: object) -> object:
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return compute(*args, **kwargs)  # pyright: ignore[reportArgumentType] they are passed on as they came

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(Learner, "_run_micro_batch", failing)
        learner.run(examples, loss)
    learner.run(examples[:1], loss)
    with pytest.raises(UsageError, match="a forward_backward of this step failed"):
        learner.step(adam)
    assert torch.equal(learner.adapter.flat, before)
    for each_learner in (expected, learner):
        each_learner.run(examples, loss)
        each_learner.step(adam)
    assert torch.equal(learner.adapter.flat, expected.adapter.flat)
    assert not torch.equal(learner.adapter.flat, before)


def test_activations_of_a_long_sequence_are_recomputed(
    weights: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = random_examples("ppo", [150])
    gradients: list[torch.Tensor] = []
    for limit in (1024, 16):
        monkeypatch.setitem(transformer._KEEP_ALL_TOKENS, "cpu", limit)
        learner = Learner(weights, random_adapter(weights, LoraSettings(4)), lanes)
        learner.run(examples, make_loss("ppo", {}))
        gradients.append(learner.gradients.sum(0))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


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
def test_a_malformed_example_is_rejected_by_field(
    weights: Weights, lanes: Lanes, change: dict[str, np.ndarray], named: str
) -> None:
    from dataclasses import replace

    inputs = {"advantages": np.ones(2, np.float32), "logprobs": np.ones(2, np.float32)}
    good = Example(np.array([1, 2]), np.array([2, 3]), inputs)
    learner, ppo = Learner(weights, random_adapter(weights, LoraSettings(2)), lanes), make_loss("ppo", {})
    assert learner.run([good], ppo, backward=False).logprobs
    with pytest.raises(UsageError, match=named):
        learner.run([replace(good, **change)], ppo, backward=False)


def test_a_step_that_would_make_the_weights_non_finite_is_skipped(weights: Weights, lanes: Lanes) -> None:
    learner = Learner(weights, random_adapter(weights, LoraSettings(2)), lanes)
    learner.adapter.flat[0] = 1e38
    before, moments = learner.adapter.flat.clone(), learner.moments.clone()
    learner.gradients[0] = 1.0
    with pytest.raises(UsageError, match="weight_decay"):
        learner.step(AdamSettings(1.0, 0.9, 0.95, 1e-12, 1000.0, 0.0))
    assert torch.equal(learner.adapter.flat, before)
    assert torch.equal(learner.moments, moments)
    assert learner.steps == 0


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("ppo", {"clip_low_threshold": float("nan")}),
        ("ppo", {"clip_low_threshold": 5.0, "clip_high_threshold": 1.0}),
        ("dro", {"beta": float("inf")}),
        ("dro", {"beta": -1.0}),
    ],
)
def test_invalid_settings_are_rejected(loss: str, settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        make_loss(loss, settings)
