"""Kept prefixes of prompts: the same bits as without, the memory that they take, and when they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.kv_cache import kv_bytes
from rlkit.engine.decode.prefixes import PAGE_TOKENS, Prefix
from rlkit.engine.decode.prompts import PrefilledPrompt, prefill
from rlkit.engine.decode.requests import SampleRequest, SampleResult, StopRule
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.kernels.devices import batch_limits
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import LoraSettings, make_adapter, make_sampling_weights
from rlkit.engine.model.ops import ROWS
from rlkit.engine.model.weights import Weights, load_weights
from tests.marks import split_slow

from .helpers import as_double
from .tiny_models import VOCABULARY, write_model

LIMITS = batch_limits(torch.device("cpu"))
NOTHING_KEPT = replace(LIMITS, prefix_bytes=0)


@pytest.fixture(scope="module")
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(2)
    yield lanes
    lanes.close()


@pytest.fixture(scope="module", params=split_slow(["llama", "qwen3"], lambda family: family == "qwen3"))
def weights(request: pytest.FixtureRequest, lanes: Lanes, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("m")
    base = load_weights(write_model(folder, request.param, max_position_embeddings=4096))
    return make_sampling_weights(base, make_adapter(base.config, LoraSettings(4), seed=0), lanes.run)


def tokens(length: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCABULARY - 3, length)


def request(prompt: NDArray[np.int64], seed: int = 0, *, samples: int = 1, max_tokens: int = 3) -> SampleRequest:
    return SampleRequest(prompt, samples, max_tokens, seed, DrawSettings(), StopRule())


def answer(decoder: Decoder, *requests: SampleRequest, owner: str = "") -> list[SampleResult]:
    results: dict[int, SampleResult] = {}
    for i, one in enumerate(requests):
        decoder.submit(one, lambda result, i=i: results.__setitem__(i, result), owner=owner)
    while decoder.busy:
        decoder.step()
    return [results[i] for i in range(len(requests))]


def assert_same(first: Sequence[SampleResult], second: Sequence[SampleResult]) -> None:
    for a, b in zip(first, second, strict=True):
        for mine, other in zip(a.samples, b.samples, strict=True):
            np.testing.assert_array_equal(mine.tokens, other.tokens)
            np.testing.assert_array_equal(mine.logprobs, other.logprobs)
        for name in ("logprobs", "targets"):
            np.testing.assert_array_equal(getattr(a.prompt_scores, name), getattr(b.prompt_scores, name))
        assert (a.prompt_scores.top is None) == (b.prompt_scores.top is None)
        if a.prompt_scores.top is not None and b.prompt_scores.top is not None:
            np.testing.assert_array_equal(a.prompt_scores.top.logprobs, b.prompt_scores.top.logprobs)


class Counted:
    """Counts the rows that the model computes for prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from rlkit.engine.decode import prompts

        self.rows = 0
        compute = prompts.compute_hidden

        def count(weights: Weights, tokens: torch.Tensor, *arguments: object, **others: object) -> torch.Tensor:
            self.rows += len(tokens)
            return compute(weights, tokens, *arguments, **others)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(prompts, "compute_hidden", count)


@pytest.mark.parametrize("kept", [32, 64, 96, 480, 992, 1024])
@pytest.mark.parametrize("new", [1, 7, 33, 600])
def test_a_continued_prompt_has_the_bits_of_a_whole_prompt(weights: Weights, kept: int, new: int) -> None:
    whole = request(tokens(kept + new, seed=kept))
    # The kept pages come from a prompt that goes on otherwise, in a pass with another.
    source = request(np.concatenate([whole.prompt[:kept], tokens(5, seed=1)]))
    pages = prefill(weights, [[request(tokens(40, seed=2))], [source]], [Prefix(), Prefix()])[1].pages[
        : kept // PAGE_TOKENS
    ]
    (expected,) = prefill(weights, [[whole]], [Prefix()])
    other, continued = prefill(weights, [[request(tokens(50, seed=3))], [whole]], [Prefix(), Prefix(pages)])
    assert_same_prompt(continued, expected)
    assert_same_prompt(other, prefill(weights, [[request(tokens(50, seed=3))]], [Prefix()])[0])


def assert_same_prompt(first: PrefilledPrompt, second: PrefilledPrompt) -> None:
    assert torch.equal(first.logits, second.logits)
    for mine, other in zip(first.pages, second.pages, strict=True):
        assert torch.equal(mine, other)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 200), st.integers(1, 90)), min_size=2, max_size=9),
    st.lists(st.integers(0, 3), min_size=9, max_size=9),
    st.sampled_from([1, 40, 200, 1 << 20]),
)
@settings(deadline=None, max_examples=25)
def test_conversations_have_the_bits_of_recomputed_ones(
    weights: Weights,
    lanes: Lanes,
    turns: list[tuple[int, int, int]],
    kinds: list[int],
    pages: int,
) -> None:
    """Forks at any place of any earlier prompt, in batches, scored or not, with any room for prefixes."""
    page_bytes = kv_bytes(weights.config, PAGE_TOKENS, 4)
    decoder = Decoder(weights, lanes, limits=replace(LIMITS, prefix_bytes=pages * page_bytes))
    plain = Decoder(weights, lanes, limits=NOTHING_KEPT)
    prompts, batch = [tokens(70, seed=0)], list[SampleRequest]()
    for i, ((parent, cut, new), kind) in enumerate(zip(turns, kinds, strict=False)):
        prompts.append(np.concatenate([prompts[parent % len(prompts)][:cut], tokens(new, seed=i)]))
        one = request(prompts[-1], seed=i, samples=1 + i % 3)
        if kind == 1:
            one = replace(one, prompt_logprobs=True, prompt_top=2, last_tokens=30)
        if kind == 2:
            one = replace(one, prompt_logprobs=True)
        batch.append(one)
        if kind:
            assert_same(answer(decoder, *batch), answer(plain, *batch))
            assert decoder.prefix_bytes <= pages * page_bytes
            batch.clear()
    assert_same(answer(decoder, *batch), answer(plain, *batch))


def test_a_turn_computes_only_what_is_new(weights: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, decoder, prompt, expected = Counted(monkeypatch), Decoder(weights, lanes), tokens(600, seed=0), 0
    for turn in range(6):
        before = 0 if not turn else len(prompt) // PAGE_TOKENS * PAGE_TOKENS
        prompt = np.concatenate([prompt, tokens(50, seed=turn)])
        expected += -(-(len(prompt) - before) // ROWS) * ROWS
        answer(decoder, request(prompt, samples=3))
        assert counted.rows == expected
    # No page is kept twice.
    assert decoder.prefix_bytes == len(prompt) // PAGE_TOKENS * kv_bytes(weights.config, PAGE_TOKENS, 4)


def test_prompts_of_one_batch_compute_their_common_prefix_once(
    weights: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tokens(640, seed=0)
    requests = [request(np.concatenate([shared, tokens(8, seed=1 + i)]), seed=i) for i in range(20)]
    counted = Counted(monkeypatch)
    results = answer(Decoder(weights, lanes), *requests)
    assert counted.rows == 640 + 20 * 8
    assert_same(results, answer(Decoder(weights, lanes, limits=NOTHING_KEPT), *requests))
    assert counted.rows == 640 + 20 * 8 + 20 * 648


def test_scored_positions_are_computed_and_those_before_are_not(
    weights: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = replace(request(tokens(304, seed=0)), prompt_logprobs=True, last_tokens=100)
    (expected,) = answer(Decoder(weights, lanes, limits=NOTHING_KEPT), scored)
    counted, decoder = Counted(monkeypatch), Decoder(weights, lanes)
    for rows, one in ((304, scored), (304 + 112, scored), (720, replace(scored, last_tokens=None))):
        (result,) = answer(decoder, one)
        assert counted.rows == rows
        assert result.prompt_scores.logprobs is not None
        assert expected.prompt_scores.logprobs is not None
        np.testing.assert_array_equal(result.prompt_scores.logprobs[-100:], expected.prompt_scores.logprobs[-100:])


def test_kept_prefixes_yield_to_rows(weights: Weights, lanes: Lanes) -> None:
    room = kv_bytes(weights.config, 1024, 4)
    limits = replace(LIMITS, kv_bytes=room, prefix_bytes=room)
    decoder, idle, plain = (Decoder(weights, lanes, limits=limits) for _ in range(3))
    for seed in range(5):
        answer(idle, request(tokens(170, seed=100 + seed)))
    assert idle.prefix_bytes == 5 * 5 * kv_bytes(weights.config, PAGE_TOKENS, 4)
    requests = [request(tokens(100, seed=seed), seed=seed, samples=2, max_tokens=40 + 50 * seed) for seed in range(6)]
    expected = answer(plain, *requests)
    # Conversations fill the memory, and then the same rows run as beside an empty cache.
    for seed in range(20):
        answer(decoder, request(tokens(200, seed=50 + seed)))
    assert decoder.prefix_bytes == room - kv_bytes(weights.config, 7 * PAGE_TOKENS, 4)  # beside the last row
    running: list[list[int]] = []
    for one, others in ((Decoder(weights, lanes, limits=replace(limits, prefix_bytes=0)), []), (decoder, [idle])):
        counts: list[int] = []
        results: dict[int, SampleResult] = {}
        for i, sample_request in enumerate(requests):
            one.submit(sample_request, lambda result, i=i, results=results: results.__setitem__(i, result))
        while one.busy:
            one.step(others=others)
            counts.append(one.running_count)
            rows_bytes = sum(kv_bytes(weights.config, row.length - 1, 4) for row in one._batch.rows)
            assert rows_bytes + sum(other.prefix_bytes for other in (one, *others)) <= room
        assert_same([results[i] for i in range(6)], expected)
        running.append(counts)
    assert running[0] == running[1]


def test_the_least_recently_used_prefix_goes_first(
    weights: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = [tokens(33 * 3, seed=seed) for seed in range(4)]
    limits = replace(LIMITS, prefix_bytes=9 * kv_bytes(weights.config, PAGE_TOKENS, 4))
    decoder = Decoder(weights, lanes, limits=limits)
    for index in (0, 1, 2, 0, 3):
        answer(decoder, request(conversations[index]))
    counted = Counted(monkeypatch)
    answer(decoder, request(conversations[0]), request(conversations[3]), request(conversations[2]))
    assert counted.rows <= 3 * 8  # the last three tokens of each, padded
    answer(decoder, request(conversations[1]))
    assert counted.rows > 99


def test_prefixes_go_with_the_last_client_that_used_them(weights: Weights, lanes: Lanes) -> None:
    decoder, shared = Decoder(weights, lanes), tokens(64, seed=0)
    for seed, owner in ((1, "a"), (2, "b")):
        answer(decoder, request(np.concatenate([shared, tokens(40, seed=seed)])), owner=owner)
    page_bytes = kv_bytes(weights.config, PAGE_TOKENS, 4)
    for owner, pages in (("c", 4), ("a", 3), ("b", 0)):
        decoder.drop_prefixes(owner)
        assert decoder.prefix_bytes == pages * page_bytes


def test_a_continued_prompt_is_close_to_a_whole_one_without_kernels(tmp_path: Path) -> None:
    weights = as_double(load_weights(write_model(tmp_path)))
    whole = request(tokens(300, seed=0))
    (expected,) = prefill(weights, [[whole]], [Prefix()])
    other, continued = prefill(
        weights, [[request(tokens(50, seed=3))], [whole]], [Prefix(), Prefix(expected.pages[:6])]
    )
    torch.testing.assert_close(continued.logits, expected.logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat([*continued.pages], 1), torch.cat([*expected.pages], 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        other.pages[1], prefill(weights, [[request(tokens(50, seed=3))]], [Prefix()])[0].pages[1]
    )
