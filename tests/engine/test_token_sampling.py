"""Drawing tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.engine.decode.requests import StopRule
from rlkit.engine.decode.token_sampling import DrawSettings, draw_tokens


def draw_frequencies(logits: torch.Tensor, s: DrawSettings, count: int = 20_000) -> np.ndarray:
    uniforms = torch.from_numpy(np.random.default_rng(0).random(count))
    tokens, _ = draw_tokens(logits.expand(count, -1).clone(), [s] * count, uniforms)
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1]) / count


def test_tokens_are_drawn_in_proportion_to_their_probability() -> None:
    logits = torch.randn(150, generator=torch.Generator().manual_seed(0))
    for temperature in (1.0, 0.5, 2.0):
        expected = torch.softmax(logits / temperature, -1).numpy()
        np.testing.assert_allclose(draw_frequencies(logits, DrawSettings(temperature)), expected, atol=0.012)


def test_top_k_and_top_p_leave_the_tail_out() -> None:
    logits = torch.log(torch.tensor([0.4, 0.05, 0.3, 0.15, 0.1]))
    np.testing.assert_allclose(draw_frequencies(logits, DrawSettings(top_k=2)), [4 / 7, 0, 3 / 7, 0, 0], atol=0.02)
    np.testing.assert_allclose(
        draw_frequencies(logits, DrawSettings(top_p=0.8)), [40 / 85, 0, 30 / 85, 15 / 85, 0], atol=0.02
    )
    np.testing.assert_array_equal(draw_frequencies(logits, DrawSettings(top_k=1), 10), [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(draw_frequencies(logits, DrawSettings(temperature=0.0), 10), [1, 0, 0, 0, 0])


def test_the_reported_log_probability_is_of_the_untempered_distribution() -> None:
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(0)) * 4
    rows = [DrawSettings(), DrawSettings(0.3), DrawSettings(0.0), DrawSettings(top_k=3), DrawSettings(top_p=0.5)]
    tokens, logprobs = draw_tokens(logits[:5].clone(), rows, torch.full((5,), 0.6, dtype=torch.float64))
    expected = torch.log_softmax(logits[:5], -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 200), st.integers(0, 2**32))
@settings(deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(uniform: float, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.where(torch.rand(width, generator=generator) < 0.5, -torch.inf, 0.0)
    logits[int(torch.randint(width, (1,), generator=generator))] = 0.0
    tokens, logprobs = draw_tokens(logits[None].clone(), [DrawSettings()], torch.tensor([uniform], dtype=torch.float64))
    assert logits[int(tokens)] == 0.0
    assert torch.isfinite(logprobs).all()


def test_the_last_possible_token_is_drawn_if_rounding_leaves_none() -> None:
    logits = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    logits[:, 40:] = -300
    almost_one = torch.full((4000,), float(np.nextafter(1, 0)), dtype=torch.float64)
    tokens, _ = draw_tokens(logits, [DrawSettings()] * 4000, almost_one)
    assert int(tokens.max()) == 39


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-44, 1e-46, 1e-300, 5e-324])
def test_a_low_temperature_draws_the_likeliest(temperature: float) -> None:
    logits = torch.randn(3, 131, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0, 0.5, 0.999], dtype=torch.float64)
    tokens, logprobs = draw_tokens(logits, [DrawSettings(temperature)] * 3, uniforms)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1))


def test_non_finite_logits_still_give_a_token() -> None:
    logits = torch.zeros(4, 100)
    logits[0], logits[1], logits[2, 7], logits[3, 99] = torch.nan, -torch.inf, torch.inf, torch.nan
    tokens, _ = draw_tokens(logits, [DrawSettings()] * 4, torch.full((4,), 0.9, dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < 100)).all()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_share_the_rows_draw_the_same_tokens(threads: int) -> None:
    logits = torch.randn(41, 259, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(41, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = draw_tokens(logits, [DrawSettings()] * 41, uniforms)
    torch.set_num_threads(threads)
    try:
        shared = draw_tokens(logits, [DrawSettings()] * 41, uniforms)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(shared[0], alone[0])
    assert torch.equal(shared[1], alone[1])


def test_a_row_draws_the_same_token_for_any_settings_of_its_neighbours() -> None:
    logits = torch.randn(40, 259, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = [DrawSettings(1.0 if i % 2 else 0.7, top_p=1.0 if i % 3 else 0.9) for i in range(40)]
    together = draw_tokens(logits.clone(), rows, uniforms)
    for i in range(40):
        alone = draw_tokens(logits[i : i + 1].clone(), rows[i : i + 1], uniforms[i : i + 1])
        assert torch.equal(alone[0], together[0][i : i + 1])
        assert torch.equal(alone[1], together[1][i : i + 1])


def test_a_stop_string_may_span_tokens() -> None:
    rule = StopRule(strings=("END", "é"), decode=lambda ids: bytes(ids).decode(errors="replace"))
    text = list(b"this is the E")
    assert not rule.is_finished(text)
    assert not rule.is_finished([*text, *b"N"])
    assert rule.is_finished([*text, *b"ND"])
    assert not rule.is_finished([*text, 0xC3])
    assert rule.is_finished([*text, 0xC3, 0xA9])
    assert StopRule(tokens=frozenset({5})).is_finished([1, 5])
    assert not StopRule(tokens=frozenset({5})).is_finished([5, 1])


def test_a_draw_stays_on_the_device_of_its_logits() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    settings = [DrawSettings(), DrawSettings(temperature=0.0), DrawSettings(temperature=0.7)]
    with FakeTensorMode():  # shapes and devices without a GPU
        logits = torch.empty(3, 300, device="cuda")
        uniforms = torch.empty(3, dtype=torch.float64, device="cuda")
        for some in (settings[:2], settings):
            rows = len(some)
            tokens, logprobs = draw_tokens(logits[:rows].clone(), some, uniforms[:rows])
            assert tokens.device == logprobs.device == logits.device
