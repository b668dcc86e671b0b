"""Checks of samples and of the log-probabilities that a sampler returns."""

from __future__ import annotations

import math

import numpy as np
from tinker import types

from rlkit.conformance.probe import Deviation, ServiceProbe, Skipped, expect, expect_close

_DEPTHS = (16, 128, 512)
_MEAN_DIFFERENCE_MAX = 0.05
"""Mean difference in nats between sampler and trainer that bfloat16 explains; a wrong position or weight exceeds it."""

_DRAWS = 1024
_Z_MAX = 5.0
_COLD = 0.2


def check_agreement(probe: ServiceProbe) -> str:
    """Compare a trained sampler's log-probabilities with the trainer's, by depth in the context."""
    trainer = probe.fork()
    probe.step(trainer, rate=probe.adam_rate)
    sampler = probe.wait(trainer.save_weights_and_get_sampling_client())
    details = list[str]()
    for depth in _DEPTHS:
        prompt = (probe.text * (depth // len(probe.text) + 1))[:depth]
        (sequence,) = probe.sample(sampler, prompt=prompt).sequences
        tokens = [*prompt, *sequence.tokens]
        trained, scored = probe.logprobs(trainer, tokens), probe.score(sampler, tokens)
        differences = np.abs(np.array([*(scored - trained), *(np.array(sequence.logprobs) - trained[depth - 1 :])]))
        expect(
            differences.mean() <= _MEAN_DIFFERENCE_MAX,
            f"mean difference {differences.mean():.2g} nats at depth {depth}, largest {differences.max():.2g}",
        )
        details.append(f"{depth}: {differences.mean():.1g}/{differences.max():.1g}")
    return f"mean/largest difference in nats by depth: {', '.join(details)}"


def check_seed(probe: ServiceProbe) -> str:
    """Repeat a request with one seed, and with another; the samples of a request differ from each other."""
    first, again, other = (_draw(probe, seed=seed) for seed in (1, 1, 2))
    expect(len(first) == 8, f"{len(first)} samples of 8")
    expect(len(set(first)) > 1, "all samples of a request are equal")
    expect(first != other, "another seed gives the same samples")
    ids = [s.sequence_id for s in probe.sample(samples=4).sequences]
    expect(len(set(ids)) == 4, f"sequence ids {ids} are not distinct")
    expect(first == again, "the same seed gives other samples")
    expect(_draw(probe, seed=None) != _draw(probe, seed=None), "requests without a seed get equal samples")
    return "repeatable; samples of a request differ"


def check_temperature(probe: ServiceProbe) -> str:
    """Sample greedily twice; log-probabilities are those of temperature 1 at each temperature."""
    greedy = probe.sample(temperature=0.0).sequences[0]
    expect(probe.sample(temperature=0.0, seed=9).sequences[0].tokens == greedy.tokens, "greedy samples differ")
    worst = 0.0
    for temperature in (0.0, 0.5, 2.0):
        (sequence,) = probe.sample(temperature=temperature).sequences
        scored = probe.score(probe.sampler, [*probe.text, *sequence.tokens])[len(probe.text) - 1 :]
        worst = max(worst, float(np.abs(np.array(sequence.logprobs) - scored).max()))
    expect(worst <= 4 * _MEAN_DIFFERENCE_MAX, f"log-probabilities differ by {worst:.2g} nats from those of a prompt")
    return f"largest difference to the prompt's {worst:.1g} nats"


def check_distribution(probe: ServiceProbe) -> str:
    """Draw 1,024 tokens at temperatures 1 and 0.2, and count the two likeliest."""
    (top, top_logprob), (second, second_logprob) = _likeliest(probe, 2)
    details = list[str]()
    for temperature in (1.0, _COLD):
        sequences = probe.sample(samples=_DRAWS, max_tokens=1, temperature=temperature).sequences
        tokens = [sequence.tokens[0] for sequence in sequences]
        counts = tokens.count(top), tokens.count(second)
        if temperature == 1.0:
            share, hits, draws = math.exp(top_logprob), counts[0], _DRAWS
        else:  # of these two tokens alone, because the sum over all others is unknown
            share = 1 / (1 + math.exp((second_logprob - top_logprob) / temperature))
            hits, draws = counts[0], sum(counts)
        z = (hits - draws * share) / max(math.sqrt(draws * share * (1 - share)), 0.5)
        detail = f"{hits} of {draws} expected {draws * share:.1f} at temperature {temperature:g}"
        expect(abs(z) <= _Z_MAX, detail)
        details.append(f"{detail} (z = {z:.1f})")
    return "; ".join(details)


def check_truncation(probe: ServiceProbe) -> str:
    """Sample with `top_k=1` and a tiny `top_p`: both are greedy. With `top_k=2` both of the likeliest appear."""
    greedy = probe.sample(temperature=0.0).sequences[0].tokens
    expect(probe.sample(top_k=1).sequences[0].tokens == greedy, "top_k=1 does not sample greedily")
    expect(probe.sample(top_p=1e-6).sequences[0].tokens == greedy, "top_p=1e-6 does not sample greedily")
    allowed = {token for token, _ in _likeliest(probe, 2)}
    drawn = {s.tokens[0] for s in probe.sample(samples=64, max_tokens=1, top_k=2, temperature=3.0).sequences}
    expect(drawn <= allowed, f"top_k=2 draws tokens besides the likeliest two: {sorted(drawn - allowed)[:5]}")
    return f"{len(drawn)} tokens drawn of 2"


def check_stop(probe: ServiceProbe) -> str:
    """Sample without a stop, and until a token of the greedy continuation."""
    (whole,) = probe.sample(temperature=0.0, max_tokens=16).sequences
    expect(len(whole.tokens) == 16, f"{len(whole.tokens)} tokens of max_tokens 16 with stop=[]")
    expect(whole.stop_reason == "length", f"stop reason {whole.stop_reason!r} at max_tokens")
    end = whole.tokens[8]
    (stopped,) = probe.sample(temperature=0.0, max_tokens=16, stop=[end]).sequences
    expected = whole.tokens[: whole.tokens.index(end) + 1]
    expect(stopped.tokens == expected, f"tokens {stopped.tokens} with the stop token {end}, expected {expected}")
    expect(stopped.stop_reason == "stop", f"stop reason {stopped.stop_reason!r} at a stop token")
    return "a sample ends with its stop token"


def check_stop_strings(probe: ServiceProbe) -> str:
    """Stop at a text of the greedy continuation."""
    try:
        tokenizer = probe.trainer.get_tokenizer()
    except Exception as error:  # a hub that cannot be reached fails in many ways
        raise Skipped(f"no tokenizer: {type(error).__name__}") from error
    (whole,) = probe.sample(temperature=0.0, max_tokens=16).sequences
    for index, token in enumerate(whole.tokens[1:], 1):
        text = str(tokenizer.decode([token]))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  transformers is untyped
        before = str(tokenizer.decode(whole.tokens[:index]))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  transformers is untyped
        if text.isprintable() and text.strip() and "\ufffd" not in text and text not in before:
            (stopped,) = probe.sample(temperature=0.0, max_tokens=16, stop=[text]).sequences
            expect(
                stopped.tokens == whole.tokens[: index + 1],
                f"{len(stopped.tokens)} tokens until {text!r}, expected {index + 1}",
            )
            return f"ended by {text!r}"
    raise Skipped("the greedy continuation holds no printable text")


def check_prompt_logprobs(probe: ServiceProbe) -> str:
    """Compare the prompt's log-probabilities with the trainer's, and ask for the last four only."""
    scored = probe.score(probe.sampler)
    worst = float(np.abs(scored - probe.start_logprobs).max())
    expect(worst <= 4 * _MEAN_DIFFERENCE_MAX, f"differ from the trainer's by {worst:.2g} nats")
    last = probe.sample(max_tokens=1, include_prompt_logprobs=True, prompt_logprobs_last_n=4).prompt_logprobs or []
    expect(last[:-4] == [None] * (len(probe.text) - 4), "positions before the last 4 have log-probabilities")
    expect_close(np.array(last[-4:], np.float64), scored[-4:])
    expect(
        probe.sample(max_tokens=1).prompt_logprobs is None, "log-probabilities of the prompt without a request for them"
    )
    return f"largest difference to the trainer {worst:.1g} nats"


def check_topk(probe: ServiceProbe) -> str:
    """Ask for the likeliest tokens at each sampled token: ordered, and the greedy token first."""
    response = probe.sample(
        temperature=0.0, topk_sample_logprobs=4, include_prompt_logprobs=True, topk_prompt_logprobs=3
    )
    (sequence,) = response.sequences
    rows = sequence.topk_logprobs or []
    expect(len(rows) == len(sequence.tokens), f"{len(rows)} rows of {len(sequence.tokens)} tokens")
    for row, token, logprob in zip(rows, sequence.tokens, sequence.logprobs or [], strict=True):
        values = [value for _, value in row or []]
        expect(len(values) == 4 and values == sorted(values, reverse=True), f"row {row} is not 4 values in order")
        expect(row is not None and row[0][0] == token, f"the likeliest token of {row} is not the greedy token {token}")
        expect_close(values[0], logprob)
    prompt_rows = response.topk_prompt_logprobs or []
    expect(len(prompt_rows) == len(probe.text) and prompt_rows[0] is None, f"{len(prompt_rows)} rows of the prompt")
    return f"{len(rows)} rows of samples and {len(prompt_rows)} of the prompt"


def check_targets(probe: ServiceProbe) -> str:
    """Ask for the log-probabilities of chosen tokens of the prompt."""
    tokens = np.full((len(probe.text) - 1, 2), -1, np.int64)
    tokens[3, 0] = probe.text[4]
    response = probe.sample(max_tokens=1, target_prompt_logprobs=types.TensorData.from_numpy(tokens))
    if response.target_prompt_logprobs is None:
        raise Deviation("no log-probabilities")
    values = np.asarray(response.target_prompt_logprobs.to_numpy()).reshape(tokens.shape)
    return expect_close(float(values[3, 0]), float(probe.score(probe.sampler)[3]))


def check_alternatives(probe: ServiceProbe) -> str:
    """Ask for alternatives at each position of the prompt, greedily: the likeliest token each time."""
    alternatives = probe.sample(max_tokens=1, temperature=0.0, prompt_alt_tokens_k=2).prompt_alt_tokens
    if alternatives is None:
        raise Deviation("no alternatives")
    tokens = np.asarray(alternatives.tokens.to_numpy())
    expect(tokens.shape == (len(probe.text) - 1, 2), f"shape {tokens.shape}")
    (top, _), _ = _likeliest(probe, 2, prompt=probe.text[:5])
    expect(set(tokens[4].tolist()) == {top}, f"{tokens[4].tolist()} instead of {top} twice")
    return "greedy alternatives are the likeliest tokens"


def _draw(probe: ServiceProbe, *, seed: int | None) -> list[tuple[int, ...]]:
    return [tuple(s.tokens) for s in probe.sample(samples=8, seed=seed, temperature=2.0).sequences]


def _likeliest(probe: ServiceProbe, k: int, *, prompt: list[int] | None = None) -> list[tuple[int, float]]:
    """Return the likeliest next tokens with their log-probabilities."""
    (sequence,) = probe.sample(prompt=prompt, max_tokens=1, temperature=0.0, topk_sample_logprobs=k).sequences
    rows = sequence.topk_logprobs
    if not rows or rows[0] is None or len(rows[0]) < k:
        raise Skipped("needs topk_sample_logprobs")
    return list(rows[0])
