"""Continuous batching without HTTP."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.kv_cache import KvBlock, bucket_size, kv_bytes
from rlkit.engine.decode.requests import Row, SampleRequest, SampleResult, StopRule
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.kernels.devices import batch_limits
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import LoraSettings, make_adapter, make_sampling_weights
from rlkit.engine.model.matrices import PackedMatrix, pack
from rlkit.engine.model.weights import Weights, load_weights
from rlkit.errors import UsageError

from .helpers import as_double
from .tiny_models import write_model


@pytest.fixture
def base(tmp_path: Path) -> Weights:
    return load_weights(write_model(tmp_path / "m"))


@pytest.fixture
def weights(base: Weights, lanes: Lanes) -> Weights:
    return make_sampling_weights(base, None, lanes.run)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(1)
    yield lanes
    lanes.close()


@pytest.fixture
def two_lanes() -> Iterator[Lanes]:
    lanes = Lanes(2)
    yield lanes
    lanes.close()


def request(seed: int, *, length: int = 5, samples: int = 3, max_tokens: int | None = 6) -> SampleRequest:
    tokens = np.arange(length, dtype=np.int64) + seed
    return SampleRequest(tokens, samples, max_tokens, seed, DrawSettings(), StopRule())


def run(decoder: Decoder) -> None:
    while decoder.busy:
        decoder.step()


def same(first: SampleResult, second: SampleResult) -> bool:
    pairs = zip(first.samples, second.samples, strict=True)
    return all(np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs) for a, b in pairs)


def test_a_late_request_joins_without_changing_results(weights: Weights, lanes: Lanes) -> None:
    alone: dict[int, SampleResult] = {}
    for seed in range(4):
        decoder = Decoder(weights, lanes)
        decoder.submit(request(seed), lambda result, seed=seed: alone.__setitem__(seed, result))
        run(decoder)
    joined: dict[int, SampleResult] = {}
    decoder = Decoder(weights, lanes)
    for seed in range(4):
        decoder.submit(request(seed), lambda result, seed=seed: joined.__setitem__(seed, result))
        decoder.step()
    run(decoder)
    assert all(same(alone[seed], joined[seed]) for seed in range(4))


def test_a_request_that_does_not_fit_waits_without_changing_results(
    weights: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[SampleResult] = []
    decoder = Decoder(weights, lanes)
    decoder.submit(request(0, samples=20), results.append)
    run(decoder)
    little = replace(batch_limits(torch.device("cpu")), rows=3, kv_bytes=2 * kv_bytes(weights.config, 11, 4))
    decoder = Decoder(weights, lanes, limits=little)
    decoder.submit(request(0, samples=20), results.append)
    run(decoder)
    assert same(*results)


def used_bytes(weights: Weights, *decoders: Decoder) -> int:
    """Return the memory of the rows of some decoders."""
    rows = [row for decoder in decoders for row in decoder._batch.rows]
    return sum(kv_bytes(weights.config, row.length - 1, 4) for row in rows)


def test_unlimited_samples_are_decoded_together_while_they_are_short(weights: Weights, lanes: Lanes) -> None:
    two_windows = replace(batch_limits(torch.device("cpu")), kv_bytes=2 * kv_bytes(weights.config, 1024, 4))
    decoder = Decoder(weights, lanes, limits=two_windows)
    decoder.submit(request(0, samples=16, max_tokens=None), lambda _: None)
    decoder.step()
    assert len(decoder._batch) == 16


def test_samples_that_outgrow_the_memory_are_requeued_without_changing_results(
    weights: Weights, two_lanes: Lanes
) -> None:
    large_request = replace(request(0, samples=8, max_tokens=100), top=2)
    alone: list[SampleResult] = []
    decoder = Decoder(weights, two_lanes)
    decoder.submit(large_request, alone.append)
    run(decoder)
    three = replace(batch_limits(torch.device("cpu")), kv_bytes=3 * kv_bytes(weights.config, 105, 4))
    decoder = Decoder(weights, two_lanes, limits=three)
    results: list[SampleResult] = []
    together: list[int] = []
    decoder.submit(large_request, results.append)
    while decoder.busy:
        decoder.step()
        together.append(len(decoder._batch))
        assert used_bytes(weights, decoder) <= three.kv_bytes
    assert together[0] == 6
    assert together[90] == 3
    assert same(results[0], alone[0])
    for sample, expected in zip(results[0].samples, alone[0].samples, strict=True):
        assert sample.top is not None
        assert expected.top is not None
        np.testing.assert_array_equal(sample.top.logprobs, expected.top.logprobs)


def test_a_single_sample_may_exceed_the_memory_limit(weights: Weights, lanes: Lanes) -> None:
    none = replace(batch_limits(torch.device("cpu")), kv_bytes=1)
    decoder = Decoder(weights, lanes, limits=none)
    results: list[SampleResult] = []
    decoder.submit(request(0, samples=3, max_tokens=70), results.append)
    run(decoder)
    assert [len(sample.tokens) for sample in results[0].samples] == [70] * 3


def test_decoders_share_memory_without_starving_each_other(weights: Weights, lanes: Lanes) -> None:
    requests = [request(0, samples=20, max_tokens=40), request(1, samples=3, max_tokens=58)]
    alone: dict[int, SampleResult] = {}
    results: dict[int, SampleResult] = {}
    four = replace(batch_limits(torch.device("cpu")), kv_bytes=4 * kv_bytes(weights.config, 64, 4))
    pair = [Decoder(weights, lanes, limits=four) for _ in requests]
    for i, (sample_request, decoder) in enumerate(zip(requests, pair, strict=True)):
        single = Decoder(weights, lanes)
        single.submit(sample_request, lambda result, i=i: alone.__setitem__(i, result))
        run(single)
        decoder.submit(sample_request, lambda result, i=i: results.__setitem__(i, result))
        decoder.step(others=[other for other in pair if other is not decoder and other.busy])
    assert [len(decoder._batch) for decoder in pair] == [4, 0]
    while any(decoder.busy for decoder in pair):
        for decoder in pair:
            if decoder.busy:
                decoder.step(others=[other for other in pair if other is not decoder and other.busy])
            assert used_bytes(weights, *pair) <= four.kv_bytes
    assert list(results) == [1, 0]
    assert all(same(results[i], alone[i]) for i in range(2))


@pytest.mark.parametrize("lengths", [[40] * 40, range(21, 61)], ids=["together", "one by one"])
def test_the_cache_stays_within_its_budget_while_rows_change_buckets(
    tmp_path: Path, lanes: Lanes, monkeypatch: pytest.MonkeyPatch, lengths: Sequence[int]
) -> None:
    weights = make_sampling_weights(load_weights(write_model(tmp_path / "deep", layers=8)), None, lanes.run)
    live = peak = 0
    real = KvBlock._zeros

    def counted(block: KvBlock[Row], layers: int, rows: int) -> torch.Tensor:
        nonlocal live, peak
        tensor = real(block, layers, rows)
        live += tensor.nbytes
        peak = max(peak, live)
        weakref.finalize(tensor, freed, tensor.nbytes)
        return tensor

    def freed(size: int) -> None:
        nonlocal live
        live -= size

    monkeypatch.setattr(KvBlock, "_zeros", counted)
    decoder = Decoder(weights, lanes)
    results: list[SampleResult] = []
    for seed, length in enumerate(lengths):
        decoder.submit(request(seed, length=length, samples=1, max_tokens=96 - length + seed % 2), results.append)
    run(decoder)
    assert len(results) == 40
    assert peak < 1.4 * 40 * kv_bytes(weights.config, 96, 4)
    assert live == 0


def test_samples_of_one_request_differ_and_a_seed_repeats_them(weights: Weights, lanes: Lanes) -> None:
    results: list[SampleResult] = []
    for seed in (0, 0, 1):
        decoder = Decoder(weights, lanes)
        template = request(0, samples=8)
        decoder.submit(SampleRequest(template.prompt, 8, 6, seed, template.settings, template.stop), results.append)
        run(decoder)
    assert same(results[0], results[1])
    assert not same(results[0], results[2])
    assert len({sample.tokens.tobytes() for sample in results[0].samples}) == 8


@pytest.mark.parametrize(
    ("length", "max_tokens", "named"),
    [(0, 5, "empty"), (1020, 5, "context"), (1024, None, "context"), (5, 2000, "1024")],
)
def test_an_impossible_request_is_rejected(
    weights: Weights, lanes: Lanes, length: int, max_tokens: int | None, named: str
) -> None:
    template = request(0, length=0, max_tokens=max_tokens)
    tokens = np.zeros(length, dtype=np.int64)
    with pytest.raises(UsageError, match=named):
        Decoder(weights, lanes).submit(
            SampleRequest(tokens, 1, max_tokens, 0, template.settings, template.stop), lambda _: None
        )


@pytest.mark.parametrize(
    ("sample_request", "values"),
    [
        (replace(request(0, samples=256, max_tokens=400), top=1024), 256 * 400 * 1024),
        (replace(request(0, samples=17, max_tokens=None), top=1024), 17 * 1019 * 1024),
        (replace(request(0, samples=32, max_tokens=512), top=1023, prompt_top=1024 * 100), 32 * 512 * 1023 + 512_000),
    ],
)
def test_the_number_of_top_tokens_is_limited_by_memory(
    weights: Weights, lanes: Lanes, sample_request: SampleRequest, values: int
) -> None:
    with pytest.raises(UsageError, match=rf"topk_sample_logprobs .* {values} values.* at most {16 << 20}: lower"):
        Decoder(weights, lanes).submit(sample_request, lambda _: None)


def test_a_sample_has_the_top_tokens_that_it_requested(weights: Weights, lanes: Lanes) -> None:
    results: list[SampleResult] = []
    decoder = Decoder(weights, lanes)
    decoder.submit(replace(request(0, samples=1), top=2), results.append)
    decoder.submit(replace(request(1, samples=7), top=200), lambda _: None)
    run(decoder)
    top = results[0].samples[0].top
    assert top is not None
    for values in (top.ids, top.logprobs):
        assert values.base is not None
        assert values.base.nbytes == 6 * 2 * 4


def test_tied_top_tokens_do_not_depend_on_the_neighbours(base: Weights, lanes: Lanes) -> None:
    assert isinstance(base.output, PackedMatrix)
    head = base.output.unpack().t()
    twins = replace(base, output=pack(torch.cat([head[:128], head[:128], head[256:]])))  # each token twice
    sample_request = replace(request(0, samples=1), top=3)
    results: list[SampleResult] = []
    for neighbours in (0, 100):
        decoder = Decoder(make_sampling_weights(twins, None, lanes.run), lanes)
        decoder.submit(replace(request(1), top=neighbours), lambda _: None)
        decoder.submit(sample_request, results.append)
        run(decoder)
    alone, beside = (result.samples[0].top for result in results)
    assert alone is not None
    assert beside is not None
    np.testing.assert_array_equal(alone.ids, beside.ids)
    np.testing.assert_array_equal(alone.logprobs, beside.logprobs)


@pytest.mark.parametrize("token", [-5, 259, 10**30])
def test_an_impossible_stop_token_is_rejected(weights: Weights, lanes: Lanes, token: int) -> None:
    sample_request = replace(request(0), stop=StopRule(tokens=frozenset({3, token})))
    with pytest.raises(UsageError, match=f"stop token {token} is outside 0 … 258"):
        Decoder(weights, lanes).submit(sample_request, lambda _: None)


def test_a_prompt_that_fills_the_context_can_be_scored(weights: Weights, lanes: Lanes) -> None:
    results: list[SampleResult] = []
    decoder = Decoder(weights, lanes)
    scoring_request = replace(request(0, samples=1, max_tokens=1), prompt=np.arange(1024) % 259, prompt_logprobs=True)
    decoder.submit(scoring_request, results.append)
    decoder.submit(replace(scoring_request, prompt=scoring_request.prompt[:-1]), results.append)
    run(decoder)
    whole, shorter = (result.prompt_scores.logprobs for result in results)
    assert whole is not None
    assert shorter is not None
    assert np.isfinite(whole[1:]).all()
    np.testing.assert_allclose(whole[:-1], shorter, atol=1e-5)
    for refused in (replace(scoring_request, prompt_logprobs=False), replace(scoring_request, max_tokens=2)):
        with pytest.raises(UsageError, match="fill the context"):
            decoder.submit(refused, lambda _: None)


def test_a_bucket_fits_its_sequence() -> None:
    assert [bucket_size(n) for n in (1, 32, 33, 256, 257, 1000)] == [32, 32, 64, 256, 512, 1024]


def test_results_do_not_depend_on_the_number_of_lanes(weights: Weights, lanes: Lanes, two_lanes: Lanes) -> None:
    def answers(lanes: Lanes) -> list[SampleResult]:
        results: dict[int, SampleResult] = {}
        decoder = Decoder(weights, lanes)
        for seed in range(6):  # of different lengths, so that one lane runs out of rows before the other
            sample_request = request(seed, length=5 + seed, samples=7, max_tokens=3 + 25 * (seed % 2))
            decoder.submit(sample_request, lambda result, seed=seed: results.__setitem__(seed, result))
        run(decoder)
        return [results[seed] for seed in range(6)]

    assert all(same(a, b) for a, b in zip(answers(lanes), answers(two_lanes), strict=True))


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_gives_the_same_bits_alone_and_in_company(
    tmp_path: Path, two_lanes: Lanes, base_dtype: torch.dtype
) -> None:
    base = load_weights(write_model(tmp_path / "typed", dtype=base_dtype))
    adapter = make_adapter(base.config, LoraSettings(3), seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    served = make_sampling_weights(base, adapter, two_lanes.run)
    alone, in_company, plain = [], [], []
    single = request(0, samples=1, max_tokens=40)
    for weights, neighbours, results in ((served, 0, alone), (served, 6, in_company), (base, 0, plain)):
        decoder = Decoder(weights, two_lanes)
        decoder.submit(single, results.append)
        for seed in range(neighbours):  # some of them end earlier
            decoder.submit(request(1 + seed, samples=1, max_tokens=5 + 5 * seed), lambda _: None)
        run(decoder)
    assert same(alone[0], in_company[0])
    assert not same(alone[0], plain[0])


def test_owners_share_the_batch_without_changing_results(weights: Weights, two_lanes: Lanes) -> None:
    large, small = request(0, samples=12, max_tokens=60), request(1, samples=3, max_tokens=5)
    alone: list[SampleResult] = []
    for one in (large, small):
        decoder = Decoder(weights, two_lanes)
        decoder.submit(one, alone.append)
        run(decoder)
    eight = replace(batch_limits(torch.device("cpu")), rows=8)
    decoder = Decoder(weights, two_lanes, limits=eight)
    results: list[tuple[str, int, SampleResult]] = []
    steps = 0
    decoder.submit(large, lambda result: results.append(("large", steps, result)), owner="large")
    for _ in range(20):
        decoder.step()
        steps += 1
    assert len(decoder._batch) == 8
    decoder.submit(small, lambda result: results.append(("small", steps, result)), owner="small")
    decoder.step()
    assert Counter(row.ticket.owner for row in decoder._batch.rows) == {"large": 5, "small": 3}
    while decoder.busy:
        decoder.step()
        steps += 1
        assert len(decoder._batch) <= 8
    assert [
        (name, same(result, expected)) for (name, _, result), expected in zip(results, alone[::-1], strict=True)
    ] == [
        ("small", True),
        ("large", True),
    ]
    assert results[0][1] <= 26  # it did not wait for the samples of the other


def test_owners_that_lack_memory_go_on_after_the_last_row(weights: Weights, lanes: Lanes) -> None:
    decoder = Decoder(
        weights, lanes, limits=replace(batch_limits(torch.device("cpu")), kv_bytes=1)
    )  # one row at a time
    results: list[SampleResult] = []
    for seed, owner in enumerate("aba"):
        decoder.submit(request(seed, samples=1), results.append, owner=owner)
    run(decoder)
    assert len(results) == 3


def test_a_single_owner_keeps_its_rows(weights: Weights, lanes: Lanes) -> None:
    decoder = Decoder(weights, lanes, limits=replace(batch_limits(torch.device("cpu")), rows=4))
    decoder.submit(request(0, samples=4, max_tokens=50), lambda _: None, owner="one")
    decoder.submit(request(1, samples=4, max_tokens=50), lambda _: None, owner="one")
    for _ in range(10):
        decoder.step()
    assert [len(row.tokens) for row in decoder._batch.rows] == [11] * 4  # nothing was drawn again


def test_a_cancelled_request_leaves_and_the_others_continue(weights: Weights, lanes: Lanes) -> None:
    alone: list[SampleResult] = []
    decoder = Decoder(weights, lanes)
    decoder.submit(request(1), alone.append)
    run(decoder)
    results: list[SampleResult] = []
    tickets = [decoder.submit(request(seed, max_tokens=900), results.append) for seed in (0, 2)]
    decoder.submit(request(1), results.append)
    decoder.step()
    for ticket in tickets:
        decoder.cancel(ticket)
    run(decoder)
    assert len(results) == 1
    assert same(results[0], alone[0])


def test_rows_leave_and_others_continue_without_kernels(base: Weights, lanes: Lanes) -> None:
    weights = as_double(base)
    alone: list[SampleResult] = []
    decoder = Decoder(weights, lanes)
    decoder.submit(request(1, samples=1, max_tokens=60), alone.append)
    run(decoder)
    three = replace(batch_limits(torch.device("cpu")), kv_bytes=3 * kv_bytes(weights.config, 65, 8))
    decoder = Decoder(weights, lanes, limits=three)
    results: list[SampleResult] = []
    ticket = decoder.submit(request(0, samples=2, max_tokens=900), results.append)
    decoder.submit(request(1, samples=1, max_tokens=60), results.append)
    decoder.submit(request(1, samples=3, max_tokens=60), results.append)
    for _ in range(9):
        decoder.step()
    decoder.cancel(ticket)
    run(decoder)
    assert len(results) == 2
    for result in results:
        np.testing.assert_allclose(result.samples[0].logprobs, alone[0].samples[0].logprobs, atol=1e-6)


def test_log_probabilities_of_a_prompt_are_consistent(weights: Weights, lanes: Lanes) -> None:
    results: list[SampleResult] = []
    decoder = Decoder(weights, lanes)
    prompt = np.arange(100, 100 + 90)  # longer than one run of the output layer
    targets = np.stack([prompt[1:], np.full(89, -1)], 1)
    sample_request = SampleRequest(
        prompt, 2, 3, 5, DrawSettings(temperature=0.7), StopRule(),
        top=4, prompt_logprobs=True, prompt_top=259, targets=targets, alternatives=3,
    )  # fmt: skip
    decoder.submit(sample_request, results.append)
    decoder.submit(replace(sample_request, last_tokens=10, targets=None, alternatives=0, prompt_top=2), results.append)
    run(decoder)
    full, last = results[0].prompt_scores, results[1].prompt_scores
    assert full.logprobs is not None and full.top is not None and full.targets is not None
    assert full.alternatives is not None
    assert np.isnan(full.logprobs[0])
    np.testing.assert_array_equal(full.targets[:, 0], full.logprobs[1:])
    assert np.isnan(full.targets[:, 1]).all()
    everything = np.full((90, 259), np.nan, np.float32)
    np.put_along_axis(everything[1:], full.top.ids[1:].astype(np.int64), full.top.logprobs[1:], 1)
    np.testing.assert_allclose(np.exp(everything[1:].astype(np.float64)).sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(everything[np.arange(1, 90), prompt[1:]], full.logprobs[1:])
    drawn_logprobs = np.take_along_axis(everything[1:], full.alternatives.ids.astype(np.int64), 1)
    np.testing.assert_allclose(full.alternatives.logprobs, drawn_logprobs, atol=2e-6)
    assert (np.diff(full.top.logprobs[1:], axis=1) <= 0).all()
    assert (full.top.ids[0] == -1).all()
    assert last.logprobs is not None
    assert last.top is not None
    assert np.isnan(last.logprobs[:80]).all()
    np.testing.assert_array_equal(last.logprobs[80:], full.logprobs[80:])
    assert (last.top.ids[:80] == -1).all()
    for sample in results[0].samples:
        assert sample.top is not None
        assert sample.top.ids.shape == (len(sample.tokens), 4)
        assert (sample.top.logprobs[:, 0] >= sample.logprobs - 2e-6).all()


def test_alternatives_are_drawn_from_the_distribution_at_the_temperature(weights: Weights, lanes: Lanes) -> None:
    results: list[SampleResult] = []
    decoder = Decoder(weights, lanes)
    sample_request = SampleRequest(
        np.array([3, 5]), 1, 1, 5, DrawSettings(temperature=0.5), StopRule(), prompt_top=259, alternatives=4000
    )
    decoder.submit(sample_request, results.append)
    run(decoder)
    scores = results[0].prompt_scores
    assert scores.top is not None
    assert scores.alternatives is not None
    logprobs = np.zeros(259)
    logprobs[scores.top.ids[1]] = scores.top.logprobs[1]
    expected = np.exp(logprobs / 0.5) / np.exp(logprobs / 0.5).sum()
    frequency = np.bincount(scores.alternatives.ids[0], minlength=259) / 4000
    assert np.abs(frequency - expected).max() < 5 * np.sqrt(0.25 / 4000)
