"""Numbers that the SDK receives for samples and losses: log-probabilities, stops, seeds, sums."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from rlkit.engine import EngineServer

from .conformance import covers
from .helpers import ce_datum, logprobs_of, prompt

TEXT = [72, 101, 108, 108, 111, 44, 32]
ADAM = types.AdamParams(learning_rate=1e-2)
VOCABULARY = 259
LENGTH = len(TEXT)


@pytest.fixture
def sampler(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model="llama").result()


@pytest.fixture
def trainer(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()


def sample(
    sampler: tinker.SamplingClient, samples: int = 1, *, tokens: int = 6, **settings: object
) -> list[types.SampledSequence]:
    params = types.SamplingParams(**{"max_tokens": tokens, "seed": 5, "stop": [], **settings})
    return list(sampler.sample(prompt(*TEXT), samples, params).result().sequences)


def ask_prompt(sampler: tinker.SamplingClient, *, temperature: float = 1.0, **options: object) -> types.SampleResponse:
    params = types.SamplingParams(max_tokens=1, seed=0, temperature=temperature)
    return sampler.sample(prompt(*TEXT), 1, params, **options).result()


def distribution(sampler: tinker.SamplingClient, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of every next token, [V], each asked for as the last token of a prompt."""
    futures = [sampler.compute_logprobs(prompt(*tokens, token)) for token in range(VOCABULARY)]
    return np.array([future.result()[-1] for future in futures])


@covers(routes=(17,), points=(7,))
def test_every_sequence_has_a_unique_id(sampler: tinker.SamplingClient) -> None:
    ids = [s.sequence_id for _ in range(2) for s in sample(sampler, 4)]
    assert len(set(ids)) == 8


@covers(routes=(17,), points=(14,))
def test_the_seed_and_the_index_decide_a_sample(sampler: tinker.SamplingClient) -> None:
    first, again, other = ([s.tokens for s in sample(sampler, 6, temperature=5.0, seed=seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(tokens) for tokens in first}) == 6
    free = [sample(sampler, 1, tokens=12, temperature=5.0, seed=None)[0].tokens for _ in range(2)]
    assert free[0] != free[1]


@covers(routes=(17,), points=(14,))
def test_stop_is_empty_tokens_or_the_models_end_token(sampler: tinker.SamplingClient) -> None:
    def run(stop: list[int] | None) -> list[types.SampledSequence]:
        return sample(sampler, 32, tokens=30, temperature=20.0, stop=stop)

    assert {(len(s.tokens), s.stop_reason) for s in run([])} == {(30, "length")}
    for ends, stop in (({7, 8, 9}, [7, 8, 9]), ({258}, None)):
        stopped = [s for s in run(stop) if s.stop_reason == "stop"]
        assert stopped
        assert all(s.tokens[-1] in ends and not ends & set(s.tokens[:-1]) for s in stopped)


@covers(routes=(17,), points=(14,))
@pytest.mark.parametrize("many", [False, True])
def test_stop_strings_end_a_sample_with_the_token_that_completes_them(
    client: tinker.ServiceClient, byte_model_dir: Path, many: bool
) -> None:
    sampler = client.create_sampling_client(base_model=str(byte_model_dir)).result()
    whole = bytes(sample(sampler, tokens=40, temperature=0.0)[0].tokens)
    mark = whole[10:12].decode("latin-1")
    (sequence,) = sample(sampler, tokens=40, temperature=0.0, stop=["no such text", mark] if many else mark)
    assert sequence.stop_reason == "stop"
    assert bytes(sequence.tokens) == whole[: whole.index(mark.encode("latin-1")) + 2]


@covers(points=(14,))
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.3}, {"temperature": 0.0}])
def test_log_probabilities_do_not_depend_on_sampling_settings(
    sampler: tinker.SamplingClient, settings: dict[str, float]
) -> None:
    (sequence,) = sample(sampler, **settings)
    scored = sampler.compute_logprobs(prompt(*TEXT, *sequence.tokens)).result()
    np.testing.assert_allclose(sequence.logprobs, scored[LENGTH:], atol=1e-4)


@covers(routes=(17,), points=(14,))
def test_prompt_log_probabilities_start_with_none_and_may_be_of_the_end_only(sampler: tinker.SamplingClient) -> None:
    whole = sampler.compute_logprobs(prompt(*TEXT)).result()
    assert len(whole) == LENGTH
    assert whole[0] is None
    assert all(value < 0 for value in whole[1:])
    assert sampler.compute_logprobs(prompt(*TEXT), prompt_logprobs_last_n=2).result() == [None] * 5 + whole[5:]
    assert ask_prompt(sampler).prompt_logprobs is None


@covers(routes=(17,))
def test_topk_log_probabilities_are_the_largest_in_order(sampler: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=2, temperature=0.0, stop=[])
    response = sampler.sample(
        prompt(*TEXT), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=4
    ).result()
    expected = distribution(sampler, TEXT)
    best = np.argsort(-expected)[:4]
    top = response.sequences[0].topk_logprobs
    assert top is not None
    assert top[0] is not None
    assert [token for token, _ in top[0]] == best.tolist()
    np.testing.assert_allclose([value for _, value in top[0]], expected[best], atol=1e-4)
    assert top[0][0][0] == response.sequences[0].tokens[0]
    rows = response.topk_prompt_logprobs
    assert rows is not None
    assert len(rows) == LENGTH
    assert rows[0] is None
    expected = distribution(sampler, TEXT[:4])
    assert rows[4] is not None
    np.testing.assert_allclose([value for _, value in rows[4]], np.sort(expected)[::-1][:3], atol=1e-4)


@covers(routes=(17,))
@pytest.mark.parametrize("sparse", [False, True])
def test_log_probabilities_of_target_tokens_have_the_requested_shape(
    sampler: tinker.SamplingClient, sparse: bool
) -> None:
    ids = torch.full((LENGTH - 1, 2), -1, dtype=torch.int64)
    ids[3, 0], ids[3, 1], ids[5, 0] = 17, TEXT[4], TEXT[6]
    target = types.TensorData.from_torch_sparse(ids, pad_value=-1) if sparse else types.TensorData.from_torch(ids)
    response = ask_prompt(sampler, include_prompt_logprobs=True, target_prompt_logprobs=target)
    assert response.target_prompt_logprobs is not None
    values = response.target_prompt_logprobs.to_torch()
    assert values.shape == ids.shape
    assert response.prompt_logprobs is not None
    assert float(values[3, 1]) == pytest.approx(response.prompt_logprobs[4], abs=1e-5)
    assert float(values[5, 0]) == pytest.approx(response.prompt_logprobs[6], abs=1e-5)
    assert float(values[3, 0]) == pytest.approx(distribution(sampler, TEXT[:4])[17], abs=1e-4)
    assert float(values[ids == -1].abs().sum()) == 0


@covers(routes=(17,))
def test_alternatives_are_drawn_at_every_position_of_the_prompt(sampler: tinker.SamplingClient) -> None:
    alternatives = ask_prompt(sampler, prompt_alt_tokens_k=3).prompt_alt_tokens
    assert alternatives is not None
    tokens, logprobs = alternatives.tokens.to_torch(), alternatives.logprobs.to_torch()
    assert tokens.shape == logprobs.shape == (LENGTH - 1, 3)
    expected = distribution(sampler, TEXT[:3])
    np.testing.assert_allclose(logprobs[2], expected[tokens[2].numpy()], atol=1e-4)
    greedy = ask_prompt(sampler, prompt_alt_tokens_k=2, temperature=0.0).prompt_alt_tokens
    assert greedy is not None
    assert set(greedy.tokens.to_torch()[2].tolist()) == {int(expected.argmax())}


@covers(routes=(17,))
@pytest.mark.parametrize("way", ["pickle", "handle"])
def test_a_sampler_can_be_passed_to_another_process(
    server: EngineServer, sampler: tinker.SamplingClient, way: str
) -> None:
    if way == "pickle":
        other = pickle.loads(pickle.dumps(sampler))
    else:
        other = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=server.api_key)
    assert other.get_base_model() == "llama"
    assert [s.tokens for s in sample(other, 3)] == [s.tokens for s in sample(sampler, 3)]


@covers(routes=(8, 17), points=(11,))
def test_adapters_of_one_base_are_independent(client: tinker.ServiceClient) -> None:
    def alone(seed: int, steps: int) -> list[float | None]:
        trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=seed).result()
        for _ in range(steps):
            trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
            trainer.optim_step(ADAM).result()
        return trainer.save_weights_and_get_sampling_client().result().compute_logprobs(prompt(*TEXT)).result()

    expected = [alone(seed, seed) for seed in (1, 2, 3)]
    trainers = [client.create_lora_training_client(base_model="llama", rank=4, seed=s).result() for s in (1, 2, 3)]
    for round_ in range(3):
        for trainer in trainers[round_:]:
            trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
            trainer.optim_step(ADAM)
    samplers = [trainer.save_weights_and_get_sampling_client().result() for trainer in trainers]
    futures = [sampler.compute_logprobs(prompt(*TEXT)) for sampler in samplers]
    assert [future.result() for future in futures] == expected
    assert expected[0] != expected[1] != expected[2]


FORMULAS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "importance_sampling": lambda p, q, a: -np.exp(p - q) * a,
    "ppo": lambda p, q, a: -np.minimum(np.exp(p - q) * a, np.clip(np.exp(p - q), 0.8, 1.2) * a),
    "cispo": lambda p, q, a: -np.clip(np.exp(p - q), 0.0, 4.0) * p * a,
    "dro": lambda p, q, a: -(p * a - 0.5 * 0.05 * (p - q) ** 2),
}


@covers(routes=(10,), points=(15,))
@pytest.mark.parametrize("loss", FORMULAS)
def test_a_loss_is_the_sum_over_tokens_with_the_defaults_of_the_service(
    trainer: tinker.TrainingClient, loss: types.LossFnType
) -> None:
    score = trainer.forward([ce_datum(TEXT)], "cross_entropy").result()
    p = logprobs_of(score)[0].astype(np.float64)
    q, advantages = p + np.linspace(-2, 2, len(p)), np.linspace(-1, 1.5, len(p))
    inputs = {"target_tokens": TEXT[1:], "logprobs": q.tolist(), "advantages": advantages.tolist()}
    datum = types.Datum(model_input=prompt(*TEXT[:-1]), loss_fn_inputs=inputs)
    output = trainer.forward([datum, datum], loss).result()
    assert output.metrics["loss:sum"] == pytest.approx(2 * FORMULAS[loss](p, q, advantages).sum(), rel=1e-4)


@covers(routes=(10,), points=(15,))
def test_gspo_accepts_the_mask_of_its_ratio_and_has_a_gradient(trainer: tinker.TrainingClient) -> None:
    score = trainer.forward([ce_datum(TEXT)], "cross_entropy").result()
    p = logprobs_of(score)[0].astype(np.float64)
    q = p - np.linspace(-0.02, 0.03, len(p))
    mask = [0.0] + [1.0] * (len(p) - 1)
    inputs = {"target_tokens": TEXT[1:], "logprobs": q.tolist(), "advantages": [2.0] * len(p)}
    datum = types.Datum(model_input=prompt(*TEXT[:-1]), loss_fn_inputs={**inputs, "sequence_ratio_mask": mask})
    output = trainer.forward_backward([datum], "gspo").result()
    assert np.isfinite(output.metrics["loss:sum"])
    assert trainer.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] > 0


@covers(routes=(10,), points=(5,))
@pytest.mark.parametrize("sparse", [False, True])
def test_several_targets_for_each_position_are_a_soft_target(trainer: tinker.TrainingClient, sparse: bool) -> None:
    targets, weights = torch.zeros(6, 4, dtype=torch.int64), torch.zeros(6, 4)
    targets[:, 0], weights[:, 0] = torch.tensor(TEXT[1:]), 0.75
    targets[2, 1], weights[2, 1] = 33, 0.25
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    inputs = {"target_tokens": make(targets), "weights": make(weights)}
    soft = types.Datum(model_input=prompt(*TEXT[:-1]), loss_fn_inputs=inputs)
    other = ce_datum([*TEXT[:3], 33])
    hard = [trainer.forward([datum], "cross_entropy").result() for datum in (ce_datum(TEXT), other)]
    expected = 0.75 * hard[0].metrics["loss:sum"] - 0.25 * float(logprobs_of(hard[1])[0][2])
    output = trainer.forward([soft], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


@covers(routes=(10,), points=(8,))
def test_a_custom_loss_has_the_gradient_of_its_formula(client: tinker.ServiceClient) -> None:
    def norm(custom: bool) -> float:
        trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
        if custom:
            output = trainer.forward_backward_custom(
                [ce_datum(TEXT)], lambda _, logps: (0.5 * (logps[0] ** 2).sum(), {"half:mean": 0.5})
            ).result()
            assert output.metrics["half:mean"] == 0.5
            assert {"loss:sum", "surrogate_loss:sum"} <= output.metrics.keys()
        else:  # d ½ p² = p dp, which is the cross entropy with weights −p
            logps = logprobs_of(trainer.forward([ce_datum(TEXT)], "cross_entropy").result())[0]
            inputs = {"target_tokens": TEXT[1:], "weights": (-logps).tolist()}
            weighted = types.Datum(model_input=prompt(*TEXT[:-1]), loss_fn_inputs=inputs)
            trainer.forward_backward([weighted], "cross_entropy")
        return trainer.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"]

    assert norm(custom=True) == pytest.approx(norm(custom=False), rel=1e-6)
