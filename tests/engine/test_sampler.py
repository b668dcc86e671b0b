"""Continuous batching without HTTP."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlkit.engine import sampler as sampler_module
from rlkit.engine.draw import DrawSettings
from rlkit.engine.kv import bucket, kv_bytes
from rlkit.engine.sampler import Decoder, SampleRequest, SampleResult
from rlkit.engine.stops import StopRule
from rlkit.engine.weights import Weights, load_weights
from rlkit.errors import UsageError

from .tiny_models import write_model


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return load_weights(write_model(tmp_path / "m"))


def request(seed: int, *, length: int = 5, samples: int = 3, max_tokens: int | None = 6) -> SampleRequest:
    tokens = np.arange(length, dtype=np.int64) + seed
    return SampleRequest(tokens, samples, max_tokens, seed, DrawSettings(), StopRule())


def run(decoder: Decoder) -> None:
    while decoder.busy:
        decoder.step()


def same(first: SampleResult, second: SampleResult) -> bool:
    pairs = zip(first.samples, second.samples, strict=True)
    return all(np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs) for a, b in pairs)


def test_a_request_that_arrives_late_joins_and_changes_nothing(weights: Weights) -> None:
    alone: dict[int, SampleResult] = {}
    for seed in range(4):
        decoder = Decoder(weights)
        decoder.submit(request(seed), lambda result, seed=seed: alone.__setitem__(seed, result))
        run(decoder)
    joined: dict[int, SampleResult] = {}
    decoder = Decoder(weights)
    for seed in range(4):
        decoder.submit(request(seed), lambda result, seed=seed: joined.__setitem__(seed, result))
        decoder.step()
    run(decoder)
    assert all(same(alone[seed], joined[seed]) for seed in range(4))


def test_what_does_not_fit_waits_and_changes_nothing(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[SampleResult] = []
    decoder = Decoder(weights)
    decoder.submit(request(0, samples=20), results.append)
    run(decoder)
    monkeypatch.setattr(sampler_module, "_ROWS_MAX", 3)
    monkeypatch.setattr(sampler_module, "_KV_BYTES_MAX", 2 * kv_bytes(weights.config, 11))
    decoder.submit(request(0, samples=20), results.append)
    run(decoder)
    assert same(*results)


def test_samples_of_one_request_differ_and_a_seed_repeats_them(weights: Weights) -> None:
    results: list[SampleResult] = []
    for seed in (0, 0, 1):
        decoder = Decoder(weights)
        wanted = request(0, samples=8)
        decoder.submit(SampleRequest(wanted.prompt, 8, 6, seed, wanted.settings, wanted.stop), results.append)
        run(decoder)
    assert same(results[0], results[1])
    assert not same(results[0], results[2])
    assert len({sample.tokens.tobytes() for sample in results[0].samples}) == 8


@pytest.mark.parametrize(
    ("length", "max_tokens", "named"),
    [(0, 5, "empty"), (1020, 5, "context"), (1024, None, "context"), (5, 2000, "1024")],
)
def test_a_request_that_cannot_be_answered_is_refused(
    weights: Weights, length: int, max_tokens: int | None, named: str
) -> None:
    wanted = request(0, length=0, max_tokens=max_tokens)
    tokens = np.zeros(length, dtype=np.int64)
    with pytest.raises(UsageError, match=named):
        Decoder(weights).submit(SampleRequest(tokens, 1, max_tokens, 0, wanted.settings, wanted.stop), lambda _: None)


def test_a_bucket_holds_its_sequence() -> None:
    assert [bucket(n) for n in (1, 64, 65, 512, 513, 1000)] == [64, 64, 128, 512, 768, 1024]
