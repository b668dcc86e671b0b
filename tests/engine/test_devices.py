"""The engine in bfloat16, as it computes on a GPU, against the engine in float32.

What needs a GPU is skipped where torch finds none; how bfloat16 and float32 meet is then still seen on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from rlkit.engine import EngineServer
from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.kv_cache import kv_bytes
from rlkit.engine.decode.requests import SampleRequest, SampleResult, StopRule
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.kernels.devices import batch_limits
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import LoraSettings, make_adapter, make_sampling_weights
from rlkit.engine.model.matrices import PackedMatrix
from rlkit.engine.model.weights import Weights, load_weights
from rlkit.engine.training.learner import AdamSettings, Learner
from rlkit.engine.training.losses import LOSSES, make_loss
from rlkit.engine.training.packing import Example

from .conftest import connect
from .helpers import ce_datum, logprobs_of, prompt, rl_datum
from .test_families import CASES, make
from .tiny_models import VOCABULARY, write_model

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA GPU")

TEXT = list(b"the cat sat on the mat and the dog sat on the log")
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(1)
    yield lanes
    lanes.close()


@pytest.fixture
def gpu_client(resolve: Callable[[str], Path], tmp_path: Path) -> Iterator[tinker.ServiceClient]:
    with EngineServer(root=tmp_path, resolve=resolve, device="cuda") as server, connect(server) as client:
        yield client


def examples(loss: str) -> list[Example]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCABULARY, 30)
    made_examples: list[Example] = []
    for n in (5, 9, 40, 200, 9):
        tokens = np.concatenate([shared, rng.integers(0, VOCABULARY, n)])
        weight = rng.normal(size=len(tokens)).astype(np.float32)
        inputs = {"weights": weight} if loss == "cross_entropy" else {"advantages": weight}
        if loss != "cross_entropy":
            inputs["logprobs"] = np.full(len(tokens), -5.5, np.float32)
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(len(tokens), np.float32)
        made_examples.append(Example(tokens, np.append(tokens[1:], 0), inputs))
    return made_examples


def in_bfloat16(weights: Weights) -> Weights:
    """Weights as they are on a GPU, on the CPU."""

    def halved(value: object) -> object:
        value = value.unpack() if isinstance(value, PackedMatrix) else value
        return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) else value

    layers = tuple(
        replace(layer, **{f.name: halved(getattr(layer, f.name)) for f in fields(layer)}) for layer in weights.layers
    )
    whole = {name: halved(getattr(weights, name)) for name in ("embedding", "norm", "output")}
    return replace(weights, layers=layers, **whole)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_log_probabilities_and_gradients_are_close_to_float32(
    tmp_path: Path, lanes: Lanes, family: str, device: str
) -> None:
    if family == "gemma3":
        directory = make(tmp_path / "m", *CASES[family][:1], **CASES[family][1] | {"vocab_size": VOCABULARY})
    else:
        directory = write_model(tmp_path / "m", family, tied=family == "llama", scale=0.08)
    results: list[tuple[np.ndarray, torch.Tensor]] = []
    exact = load_weights(directory)
    for weights in (exact, load_weights(directory, device) if device == "cuda" else in_bfloat16(exact)):
        adapter = make_adapter(weights.config, LoraSettings(4), seed=0)
        adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
        learner = Learner(weights, adapter, lanes)
        output = learner.run(examples("importance_sampling"), make_loss("importance_sampling", {}))
        results.append((np.concatenate(output.logprobs), learner.gradients.sum(0).cpu()))
    (logprobs, gradient), (rough, rough_gradient) = results
    assert np.abs(logprobs - rough).max() < 0.3
    assert np.abs(logprobs - rough).mean() < 0.03
    assert torch.cosine_similarity(gradient, rough_gradient, dim=0) > 0.995
    assert 0.95 < rough_gradient.norm() / gradient.norm() < 1.05


@on_gpu
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_a_finite_gradient_and_adam_takes_a_step(tmp_path: Path, lanes: Lanes, loss: str) -> None:
    weights = load_weights(write_model(tmp_path / "m", "qwen3", scale=0.08), "cuda")
    learner = Learner(weights, make_adapter(weights.config, LoraSettings(4), seed=0), lanes)
    before = learner.adapter.flat.clone()
    learner.run(examples(loss), make_loss(loss, {}))
    assert learner.step(AdamSettings(1e-3, 0.9, 0.95, 1e-12, 0.0, 0.0)) > 0
    assert torch.isfinite(learner.adapter.flat).all()
    assert not torch.equal(before, learner.adapter.flat)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_sampled_log_probabilities_equal_scored_ones(tmp_path: Path, lanes: Lanes, device: str) -> None:
    weights = load_weights(write_model(tmp_path / "m", "qwen3", scale=0.08), device)
    weights = weights if device == "cuda" else in_bfloat16(weights)
    results: list[SampleResult] = []
    decoder = Decoder(make_sampling_weights(weights, None, lanes.run), lanes)
    for seed in range(20):
        start = np.arange(5 + 7 * seed) % 250
        decoder.submit(SampleRequest(start, 30, 40, seed, DrawSettings(), StopRule()), results.append)
    while decoder.busy:
        decoder.step()
    assert len(results) == 20
    scored: list[SampleResult] = []
    sample = results[0].samples[3]
    whole = np.concatenate([np.arange(5), sample.tokens.astype(np.int64)])
    decoder.submit(SampleRequest(whole, 1, 1, 0, DrawSettings(), StopRule(), prompt_logprobs=True), scored.append)
    while decoder.busy:
        decoder.step()
    assert scored[0].prompt_scores.logprobs is not None
    assert np.abs(scored[0].prompt_scores.logprobs[-len(sample.tokens) :] - sample.logprobs).max() < 0.1


@pytest.mark.slow
def test_twice_as_many_rows_of_bfloat16_fit_the_cache(tmp_path: Path, lanes: Lanes) -> None:
    exact = load_weights(write_model(tmp_path / "m"))
    two = replace(batch_limits(torch.device("cpu")), kv_bytes=2 * kv_bytes(exact.config, 11, 4))
    for weights, rows in ((exact, 2), (in_bfloat16(exact), 4)):
        decoder = Decoder(make_sampling_weights(weights, None, lanes.run), lanes, limits=two)
        decoder.submit(SampleRequest(np.arange(5), 20, 6, 0, DrawSettings(), StopRule()), lambda _: None)
        decoder.step()
        assert len(decoder._batch) == rows


@on_gpu
def test_the_sdk_trains_samples_saves_and_resumes(gpu_client: tinker.ServiceClient) -> None:
    trainer = gpu_client.create_lora_training_client(base_model="llama", rank=8, seed=0).result()
    losses: list[float] = []
    for _ in range(8):
        losses.append(trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"])
        trainer.optim_step(ADAM).result()
    assert losses[-1] < 0.7 * losses[0]
    sampler = trainer.save_weights_and_get_sampling_client()
    answer = sampler.sample(prompt(*TEXT[:8]), 4, types.SamplingParams(max_tokens=12, seed=1)).result()
    data = [rl_datum(TEXT[:8], sequence, 1.0) for sequence in answer.sequences]
    trained = logprobs_of(trainer.forward(data, "importance_sampling").result())
    for sequence, logprobs in zip(answer.sequences, trained, strict=True):
        assert np.abs(logprobs[-len(sequence.tokens) :] - np.array(sequence.logprobs)).max() < 0.1
    path = trainer.save_state("one").result().path
    resumed = gpu_client.create_training_client_from_state_with_optimizer(path).result()
    pair = [
        client.forward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"] for client in (trainer, resumed)
    ]
    assert pair[0] == pytest.approx(pair[1], rel=1e-3)
