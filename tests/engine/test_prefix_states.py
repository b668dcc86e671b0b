"""Kept states of delta nets: the same bits as without, what a prompt computes, and which states go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.kv_cache import kv_bytes
from rlkit.engine.decode.prefixes import PAGE_TOKENS, Prefix, PrefixCache
from rlkit.engine.decode.prompts import prefill
from rlkit.engine.decode.requests import SampleResult
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import LoraSettings, make_adapter, make_sampling_weights
from rlkit.engine.model.ops import ROWS
from rlkit.engine.model.weights import Weights, load_weights

from .helpers import as_double
from .test_families import CASES, VOCABULARY, make
from .test_prefixes import LIMITS, NOTHING_KEPT, Counted, answer, assert_same, request


@pytest.fixture(scope="module")
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(2)
    yield lanes
    lanes.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    family, options = CASES["qwen3.5"]
    return load_weights(make(tmp_path_factory.mktemp("m"), family, **options, max_position_embeddings=4096))


@pytest.fixture(scope="module")
def both(base: Weights, lanes: Lanes) -> list[Weights]:
    """Two sets of weights: the base model's, and with an adapter."""
    adapter = make_adapter(base.config, LoraSettings(4), seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    return [make_sampling_weights(base, part, lanes.run) for part in (None, adapter.snapshot())]


def tokens(length: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(2, VOCABULARY, length)


def join(*parts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(parts)


def page_bytes(weights: Weights) -> int:
    return kv_bytes(weights.config, 2 * PAGE_TOKENS, 4) - kv_bytes(weights.config, PAGE_TOKENS, 4)


def state_bytes(weights: Weights) -> int:
    return kv_bytes(weights.config, PAGE_TOKENS, 4) - page_bytes(weights)


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 330), st.integers(1, 150), st.integers(0, 1)),
        min_size=2,
        max_size=9,
    ),
    st.lists(st.integers(0, 3), min_size=9, max_size=9),
    st.sampled_from([0.5, 3, 8, 1 << 20]),
)
@settings(deadline=None, max_examples=20)
def test_conversations_have_the_bits_of_recomputed_ones(
    both: list[Weights], lanes: Lanes, turns: list[tuple[int, int, int, int]], kinds: list[int], states: float
) -> None:
    """Forks at any place of any earlier prompt, in batches, scored or not, of two sets of weights that share room."""
    room = int(states * state_bytes(both[0]))
    decoders = [Decoder(weights, lanes, limits=replace(LIMITS, prefix_bytes=room)) for weights in both]
    plain = [Decoder(weights, lanes, limits=NOTHING_KEPT) for weights in both]
    prompts = [tokens(140, seed=0)]
    for i, ((parent, cut, new, which), kind) in enumerate(zip(turns, kinds, strict=False)):
        prompts.append(join(prompts[parent % len(prompts)][:cut], tokens(new, seed=i)))
        batch = [request(prompt, seed=i, samples=1 + i % 2) for prompt in prompts[-1 - kind :]]
        if kind == 1:
            batch[0] = replace(batch[0], prompt_logprobs=True, prompt_top=2, last_tokens=70)
        if kind == 2:
            batch[0] = replace(batch[0], prompt_logprobs=True)
        mine, other = decoders[which], decoders[1 - which]
        results = dict[int, SampleResult]()
        for index, one in enumerate(batch):
            mine.submit(one, lambda result, index=index, results=results: results.__setitem__(index, result))
        while mine.busy:
            mine.step(others=[other])
            assert mine.prefix_bytes + other.prefix_bytes <= room
        assert_same([results[index] for index in range(len(batch))], answer(plain[which], *batch))


def test_a_turn_computes_what_is_new_since_the_last_chunk(
    base: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, decoder, prompt, expected, start = Counted(monkeypatch), Decoder(base, lanes), tokens(600, seed=0), 0, 0
    for turn in range(6):
        prompt = join(prompt, tokens(50, seed=turn))
        expected += -(-(len(prompt) - start) // ROWS) * ROWS
        answer(decoder, request(prompt, samples=3))
        assert counted.rows == expected
        start = (len(prompt) - 1) // 64 * 64
    # The states are at 640, 640 again, 704, 768, 832 and 896; the last prompt of 900 tokens has 28 pages.
    assert decoder.prefix_bytes == 28 * page_bytes(base) + 5 * state_bytes(base)


def test_a_repeated_prompt_begins_at_its_last_chunk(
    base: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, decoder, prompt = Counted(monkeypatch), Decoder(base, lanes), tokens(256, seed=0)
    for rows in (256, 256 + 64, 256 + 2 * 64):
        answer(decoder, request(prompt))
        assert counted.rows == rows


def test_prompts_of_one_batch_compute_their_common_prefix_once(
    base: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tokens(640, seed=0)
    requests = [request(join(shared, tokens(128 + 8 * (i % 2), seed=1 + i)), seed=i) for i in range(10)]
    counted = Counted(monkeypatch)
    results = answer(Decoder(base, lanes), *requests)
    assert counted.rows == 640 + 10 * 132
    assert_same(results, answer(Decoder(base, lanes, limits=NOTHING_KEPT), *requests))


def test_a_prompt_of_whole_chunks_is_continued_in_the_same_batch(
    base: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, counted = tokens(128, seed=0), Counted(monkeypatch)
    requests = [request(short), request(join(short, tokens(32, seed=1)))]
    results = answer(Decoder(base, lanes), *requests)
    assert counted.rows == 128 + 96  # the states before the last token are those at 64
    assert_same(results, answer(Decoder(base, lanes, limits=NOTHING_KEPT), *requests))


def test_a_third_prompt_begins_where_the_second_left_the_first(
    base: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, decoder, shared = Counted(monkeypatch), Decoder(base, lanes), tokens(300, seed=0)
    for seed, rows in ((1, 400), (2, 800), (3, 800 + 400 - 256), (4, 800 + 2 * (400 - 256))):
        answer(decoder, request(join(shared, tokens(100, seed=seed))))
        assert counted.rows == rows


def test_states_of_earlier_turns_go_first(base: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [tokens(100 + 64 * turn, seed=0) for turn in range(6)]
    # The pages of the last turn, and the states of the last two.
    room = len(turns[-1]) // PAGE_TOKENS * page_bytes(base) + 2 * state_bytes(base)
    decoder = Decoder(base, lanes, limits=replace(LIMITS, prefix_bytes=room))
    for prompt in turns:
        answer(decoder, request(prompt))
    assert decoder.prefix_bytes == room
    for prompt, start in ((turns[4], 320), (join(turns[5], turns[0]), 384), (turns[2], 0)):
        counted = Counted(monkeypatch)
        answer(Decoder(base, lanes, limits=NOTHING_KEPT), request(prompt))
        whole, counted.rows = counted.rows, 0
        answer(decoder, request(prompt))
        assert counted.rows == whole - start


def test_states_go_before_the_pages_that_they_need(base: Weights) -> None:
    cache, prompt, page = PrefixCache(has_states=True), tokens(130, seed=0), torch.zeros(page_bytes(base) // 4)
    cache.put(prompt, [page] * 4, {2: base.make_states(), 4: base.make_states()}, ["a"])
    sizes = [cache.size_bytes]
    while cache.size_bytes:
        cache.drop_oldest()
        sizes.append(cache.size_bytes)
    steps = [before - after for before, after in pairwise(sizes)]
    states, pages = [state_bytes(base)], [page_bytes(base)] * 2
    assert steps == [*states, *pages, *states, *pages]


def test_states_where_prompts_begin_stay(base: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tokens(200, seed=0)
    room = 9 * page_bytes(base) + 2 * state_bytes(base)  # for one of the prompts that begin at 192
    decoder = Decoder(base, lanes, limits=replace(LIMITS, prefix_bytes=room))
    answer(decoder, request(shared))
    for seed in range(1, 5):
        counted = Counted(monkeypatch)
        answer(decoder, request(join(shared, tokens(96, seed=seed))))
        assert counted.rows == 296 - 192


def test_states_yield_to_rows_and_to_newer_prefixes_of_other_weights(both: list[Weights], lanes: Lanes) -> None:
    room = 12 * page_bytes(both[0]) + 3 * state_bytes(both[0])
    first, second = (Decoder(weights, lanes, limits=replace(LIMITS, kv_bytes=room)) for weights in both)
    for seed in range(9):
        answer(first, request(tokens(130, seed=seed)))
        row_bytes = kv_bytes(both[0].config, 130, 4)
        assert first.prefix_bytes <= room - row_bytes
    before = first.prefix_bytes
    assert before > 2 * state_bytes(both[0])
    second.submit(request(tokens(130, seed=0), max_tokens=40), lambda result: None)
    while second.busy:
        second.step(others=[first])
        rows_bytes = sum(kv_bytes(both[0].config, row.length - 1, 4) for row in second._batch.rows)
        assert first.prefix_bytes + second.prefix_bytes + rows_bytes <= room
    assert 0 < first.prefix_bytes < before
    assert second.prefix_bytes > 0


def test_states_go_with_the_last_client_that_used_them(base: Weights, lanes: Lanes) -> None:
    decoder, shared = Decoder(base, lanes), tokens(128, seed=0)
    answer(decoder, request(join(shared, tokens(5, seed=1))), owner="a")
    answer(decoder, request(join(shared, tokens(70, seed=2))), owner="b")
    for owner, pages, states in (("c", 6, 2), ("b", 4, 1), ("a", 0, 0)):
        decoder.drop_prefixes(owner)
        assert decoder.prefix_bytes == pages * page_bytes(base) + states * state_bytes(base)


def test_a_continued_prompt_is_close_to_a_whole_one_without_kernels(base: Weights) -> None:
    weights, whole, other = as_double(base), request(tokens(300, seed=0)), request(tokens(50, seed=3))
    (expected,) = prefill(weights, [[whole]], [Prefix(state_places={2, 6})])
    assert [*expected.kept_states] == [0, 2, 6]
    for place in (2, 6):
        prefix = Prefix(expected.pages[:place], expected.kept_states[place])
        copies = [state.copy() for state in prefix.states]
        result, continued = prefill(weights, [[other], [whole]], [Prefix(), prefix])
        torch.testing.assert_close(continued.logits, expected.logits, rtol=0, atol=1e-6)
        torch.testing.assert_close(result.logits, prefill(weights, [[other]], [Prefix()])[0].logits)
        for state, copy in zip(prefix.states, copies, strict=True):
            assert torch.equal(state.memory, copy.memory)
            assert torch.equal(state.tail, copy.tail)
