from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algorithms.advantages import as_estimator, step_estimator
from rlkit.algorithms.datums import Preparation, PreparedGroup, episode_data
from rlkit.algorithms.estimator import ConstantAdvantage
from rlkit.algorithms.estimators import GroupMean
from rlkit.algorithms.losses import Distillation, ImportanceSampling, Loss
from rlkit.algorithms.references import Reference, Scores, discounted_sums
from rlkit.algorithms.shaping import LengthPenalty, Normalization
from rlkit.errors import EnvironmentFault, ServiceError
from rlkit.testing.world import digest
from rlkit.types import Datum, Floats, Group, Message, Prompt, as_prompt
from tests.builders import episode, group, turn


def without_top(logprobs: Floats) -> Scores:
    return Scores(logprobs, np.empty((len(logprobs), 0), np.int32), np.empty((len(logprobs), 0), np.float32))


async def score(prompt: Prompt, last: int, top: int = 0) -> Scores:
    """A reference: the log-probability of a token follows from all tokens up to it."""
    tokens = prompt.tokens.tolist()
    every = [-5 * digest(*tokens[: place + 1]) / 2**64 for place in range(len(tokens))]
    return without_top(np.array(every[-last:], np.float32))


@st.composite
def sequences(draw: st.DrawFn) -> list[Datum]:
    """The sequences of a group: several turns, forced tokens, none sampled at all."""
    data = list[Datum]()
    for member in range(draw(st.integers(1, 4))):
        turns = [
            turn(
                draw(st.lists(st.integers(1, 99), min_size=1, max_size=4)),
                draw(st.lists(st.integers(1, 99), min_size=1, max_size=5)),
                forced=draw(st.integers(0, 5)),
                parent=index - 1 if index else None,
            )
            for index in range(draw(st.integers(1, 3)))
        ]
        played = episode(1.0, member=member, turns=turns)
        data += [datum for _, datum in episode_data(played, np.full(len(turns), draw(st.integers(-2, 2)), np.float64))]
    return data


def compute_by_hand(
    data: Sequence[Datum], coefficient: float, discount: float
) -> tuple[list[list[float]], list[float]]:
    """The penalised advantages of every position, and all drifts, one number at a time."""
    drifts = dict[tuple[int, int], float]()
    for number, datum in enumerate(data):
        tokens = [*datum.prompt.tokens.tolist(), int(datum.targets[-1])]
        for place in range(len(datum.targets)):
            if datum.mask[place]:
                reference = np.float32(-5 * digest(*tokens[: place + 2]) / 2**64)
                drifts[number, place] = float(datum.logprobs[place]) - float(reference)
    mean = sum(drifts.values()) / max(len(drifts), 1)
    rows = list[list[float]]()
    for number, datum in enumerate(data):
        row = datum.advantages.astype(float).tolist()
        sampled = [place for place in range(len(row)) if datum.mask[place]]
        for first, place in enumerate(sampled):
            for distance, later_place in enumerate(sampled[first:]):
                row[place] += coefficient * discount**distance * (mean - drifts[number, later_place])
        rows.append(row)
    return rows, list(drifts.values())


NO_ADVANTAGES = {"env": ConstantAdvantage(value=0)}


@given(sequences(), st.floats(0.01, 3), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_penalty_is_the_centred_drift_of_each_sampled_token(
    data: list[Datum], coefficient: float, discount: float
) -> None:
    penalty = Reference(score, coefficient, discount)
    found_drifts = asyncio.run(penalty.drifts([(datum, turn([1], [1])) for datum in data]))
    penalized = penalty.apply(data, found_drifts)
    rows, drifts = compute_by_hand(data, coefficient, discount)
    for datum, row in zip(penalized, rows, strict=True):
        np.testing.assert_allclose(datum.advantages, row, rtol=1e-4, atol=1e-4)
        assert not datum.advantages[~datum.mask].any()
    np.testing.assert_allclose(np.concatenate([drift.ratios for drift in found_drifts]), drifts, atol=1e-6)
    if not discount:
        added = sum(
            float((b.advantages - a.advantages).sum(dtype=np.float64)) for a, b in zip(data, penalized, strict=True)
        )
        assert added == pytest.approx(0, abs=1e-3)


@given(st.lists(st.floats(-3, 3), max_size=8), st.floats(0, 1))
def test_discounted_sums_are_those_of_their_definition(values: list[float], discount: float) -> None:
    expected = [
        sum(discount**later * value for later, value in enumerate(values[place:])) for place in range(len(values))
    ]
    np.testing.assert_allclose(discounted_sums(np.array(values, np.float64), discount), expected, atol=1e-9)


def prepare(played: Group, **more: object) -> PreparedGroup:
    return asyncio.run(
        Preparation({"env": GroupMean()}, references={"env": [Reference(score, 1.0)]}, **more).prepare(played)
    )  # type: ignore[arg-type]


def test_equal_rewards_are_trained_for_the_penalty_but_have_no_signal() -> None:
    same = group([1, 1])
    longer = Group("env", "task", 0, (same.episodes[0], episode(1, member=1, turns=[turn([9], [8, 7])])))
    result = prepare(longer)
    assert len(result.data) == 2
    assert any(datum.advantages.any() for datum in result.data)
    assert not result.has_signal
    assert prepare(group([0, 1])).has_signal


def test_failed_episode_is_not_scored() -> None:
    result = prepare(group([1, None, 0]))
    assert len(result.data) == 2
    assert [[len(drift.ratios) for drift in drifts] for _, drifts in result.drifts] == [[2, 2]]


def test_penalty_of_a_group_is_repeatable() -> None:
    first, again = prepare(group([1, 0, 2])), prepare(group([1, 0, 2]))
    assert [datum.advantages.tolist() for datum in first.data] == [datum.advantages.tolist() for datum in again.data]


def test_step_estimates_keep_the_penalty_without_new_requests() -> None:
    scored_lengths = list[int]()

    async def counting(prompt: Prompt, last: int, top: int) -> Scores:
        scored_lengths.append(last)
        return await score(prompt, last)

    def minus_the_steps_mean(groups: Sequence[Group]) -> list[np.ndarray]:
        mean = float(np.mean([played.rewards.mean() for played in groups]))
        return [played.rewards - mean for played in groups]

    preparation = Preparation(
        {"env": as_estimator(step_estimator(minus_the_steps_mean))},
        references={"env": [Reference(counting, 1.0, 0.5)]},
        length_penalty={"env": LengthPenalty(0.5, 0, 4)},
        clip={"env": 0.6},
        normalization=Normalization("token", 2, 1),
    )
    separate = [asyncio.run(preparation.prepare(played)) for played in (group([1, 0]), group([3, 3], draw=1))]
    count = len(scored_lengths)
    first, second = preparation.prepare_step(separate)
    assert len(scored_lengths) == count == 4
    assert [row.tolist() for row in first.advantages] == [[-0.6], [-0.6]]  # its rewards of 0.75 and −0.25 less 1.5
    assert [row.tolist() for row in second.advantages] == [[0.6], [0.6]]
    assert first.length_penalty == 0.25
    by_kl = separate[1].data[0].advantages * 2 * 4  # alone, its equal rewards have no advantage
    np.testing.assert_allclose(second.data[0].advantages * 2 * 4, by_kl + 0.6 * second.data[0].mask, atol=1e-6)


def test_missing_logprob_of_the_reference_is_a_service_error() -> None:
    async def nothing(prompt: Prompt, last: int, top: int) -> Scores:
        return without_top(np.full(last, np.nan, np.float32))

    preparation = Preparation({"env": GroupMean()}, references={"env": [Reference(nothing, 1.0)]})
    with pytest.raises(ServiceError, match="no log-probability for a sampled token"):
        asyncio.run(preparation.prepare(group([0, 1])))


def test_tokens_beyond_the_context_of_a_reference_have_no_term() -> None:
    async def score_first(prompt: Prompt, last: int, top: int) -> Scores:
        return (await score(prompt, last)).take(slice(0, 2))

    played = Group("env", "task", 0, (episode(1.0, turns=[turn([1], [2, 3, 4, 5])]),))
    cut, whole = (
        asyncio.run(
            Preparation(NO_ADVANTAGES, references={"env": [Reference(function, 1.0, is_teacher=True)]}).prepare(played)
        ).data[0]
        for function in (score_first, score)
    )
    assert cut.advantages[whole.mask].tolist() == [*whole.advantages[whole.mask][:2].tolist(), 0.0, 0.0]
    assert whole.advantages[whole.mask].all()


def compute_teacher_by_hand(data: Sequence[Datum], weight: float, discount: float, clip: float | None) -> list[float]:
    """The terms of all sampled tokens, one number at a time, in float64."""
    terms = list[float]()
    for datum in data:
        tokens = [*datum.prompt.tokens.tolist(), int(datum.targets[-1])]
        drifts = list[float]()
        for place in np.flatnonzero(datum.mask).tolist():
            drift = float(datum.logprobs[place]) - float(np.float32(-5 * digest(*tokens[: place + 2]) / 2**64))
            drifts.append(drift if clip is None else max(-clip, min(clip, drift)))
        for first in range(len(drifts)):
            terms.append(-weight * sum(discount**later * drift for later, drift in enumerate(drifts[first:])))
    return terms


@given(sequences(), st.floats(0.01, 3), st.sampled_from([0.0, 0.9]), st.none() | st.floats(0.1, 5))
def test_a_teacher_adds_the_uncentred_ratio_of_each_sampled_token(
    data: list[Datum], weight: float, discount: float, clip: float | None
) -> None:
    teacher = Reference(score, weight, discount, is_teacher=True, clip=clip or np.inf)
    taught = teacher.apply(data, asyncio.run(teacher.drifts([(datum, turn([1], [1])) for datum in data])))
    terms = [b.advantages[b.mask] - a.advantages[a.mask] for a, b in zip(data, taught, strict=True)]
    expected = compute_teacher_by_hand(data, weight, discount, clip)
    np.testing.assert_allclose(np.concatenate([np.empty(0), *terms]), expected, rtol=1e-4, atol=1e-4)
    assert not any(datum.advantages[~datum.mask].any() for datum in taught)


VOCABULARY = 6


def draw_distribution(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(VOCABULARY, 0.5)).astype(np.float64)


def make_teacher(probabilities: np.ndarray, top: int, weight: float) -> Reference:
    async def score_top(prompt: Prompt, last: int, count: int) -> Scores:
        tokens = np.argsort(-probabilities)[:count].astype(np.int32)
        logprobs = np.log(probabilities[prompt.tokens[-last:]]).astype(np.float32)
        rows = np.log(probabilities[tokens]).astype(np.float32)
        return Scores(logprobs, np.tile(tokens, (last, 1)), np.tile(rows, (last, 1)))

    return Reference(score_top, weight, is_teacher=True, top_tokens=top)


def make_datum(token: int, q: np.ndarray, reward: float = 0.0) -> Datum:
    """A forced token, and then one that was sampled from q."""
    return Datum(
        prompt=as_prompt([0, 0]),
        targets=np.array([0, token], np.int32),
        logprobs=np.array([0, np.log(q[token])], np.float32),
        advantages=np.array([0, reward], np.float32),
        mask=np.array([False, True]),
    )


@pytest.mark.parametrize("tops", [(1,), (3,), (VOCABULARY,), (3, 3), (VOCABULARY, VOCABULARY)])
def test_distillation_has_the_expected_gradient_of_the_divergence_with_less_variance(tops: tuple[int, ...]) -> None:
    q, logits = draw_distribution(0), torch.tensor(np.log(draw_distribution(0)), requires_grad=True)
    teachers = [make_teacher(draw_distribution(n), top, weight=n / 2) for n, top in enumerate(tops, 1)]
    expected = torch.zeros((), dtype=torch.float64)
    for number in range(1, len(tops) + 1):
        ratios = torch.log_softmax(logits, 0) - torch.log(torch.tensor(draw_distribution(number)))
        expected = expected + number / 2 * (torch.softmax(logits, 0) * ratios).sum()
    (expected_gradient,) = torch.autograd.grad(expected, logits)

    def differentiate(loss: Loss, data: Datum) -> torch.Tensor:
        logp = torch.log_softmax(logits, 0)
        targets = data.targets if data.top is None else np.column_stack([data.targets, data.top[0]])
        row = torch.stack([logp.detach()[targets[0]], logp[targets[1]]])
        if isinstance(loss, Distillation):
            value, _ = loss.compute([data], [row])
        else:
            value = -(row[:, 0] - float(data.logprobs[1])).exp()[1] * float(data.advantages[1])
        (gradient,) = torch.autograd.grad(value, logits)
        return gradient

    gradients: dict[str, list[torch.Tensor]] = {"distillation": [], "sampled": []}
    for token in range(VOCABULARY):
        data = [make_datum(token, q)]
        for teacher in teachers:
            data = teacher.apply(data, asyncio.run(teacher.drifts([(data[0], turn([0, 0], [token]))])))
        assert data[0].top is not None
        assert [array.shape for array in data[0].top] == [(2, sum(tops))] * 3
        gradients["distillation"].append(differentiate(Distillation(top_tokens=max(tops)), data[0]))
        gradients["sampled"].append(differentiate(ImportanceSampling(), data[0]))
    variances = dict[str, float]()
    for name, rows in gradients.items():
        mean = sum((float(share) * row for share, row in zip(q, rows, strict=True)), torch.zeros(VOCABULARY))
        np.testing.assert_allclose(mean, expected_gradient, atol=1e-5)
        variances[name] = sum(
            float(share) * float((row - mean).square().sum()) for share, row in zip(q, rows, strict=True)
        )
    assert variances["distillation"] <= variances["sampled"] + 1e-6
    if max(tops) >= VOCABULARY:
        assert variances["distillation"] < 1e-9


def test_the_advantage_of_a_reward_counts_beside_the_likeliest_tokens() -> None:
    q = draw_distribution(0)
    teacher, logp = make_teacher(draw_distribution(1), VOCABULARY, weight=2), torch.tensor(np.log(q))
    values = list[float]()
    for reward in (0.0, 3.0):
        data = [make_datum(4, q, reward)]
        data = teacher.apply(data, asyncio.run(teacher.drifts([(data[0], turn([0, 0], [4]))])))
        assert data[0].top is not None
        row = logp[np.column_stack([data[0].targets, data[0].top[0]])]
        values.append(float(Distillation().compute(data, [row])[0]))
    assert values[1] - values[0] == pytest.approx(-3.0, abs=1e-5)


def test_places_without_a_token_and_beyond_the_context_have_no_weight() -> None:
    async def score_partly(prompt: Prompt, last: int, top: int) -> Scores:
        logprobs = np.array([[-1, -np.inf], [-2, -99999]], np.float32)  # of the first two of three tokens
        return Scores(np.full(2, -1, np.float32), np.array([[3, 5], [0, 0]], np.int32), logprobs)

    played = Group("env", "task", 0, (episode(1.0, turns=[turn([1], [2, 3, 0])]),))
    teacher = Reference(score_partly, 2.0, is_teacher=True, top_tokens=3)
    (datum,) = asyncio.run(Preparation(NO_ADVANTAGES, references={"env": [teacher]}).prepare(played)).data
    assert datum.top is not None
    tokens, logprobs, weights = (array.tolist() for array in datum.top)
    assert (tokens, logprobs) == ([[3, 0, 0], [0, 0, 0], [0, 0, 0]], [[-1, 0, 0], [-2, 0, 0], [0, 0, 0]])
    assert weights == [[2, 0, 0], [2, 0, 0], [0, 0, 0]]
    row = torch.full((3, 4), -1.0, requires_grad=True)
    value, _ = Distillation(top_tokens=3).compute([datum], [row])
    value.backward()
    assert row.grad is not None
    assert row.grad[2, 1:].tolist() == [0, 0, 0]  # token 0 was sampled there, and no place holds it
    assert bool(value.isfinite())


def test_the_likeliest_tokens_count_with_the_weights_of_today_and_the_sampled_token_with_its_ratio() -> None:
    q, p = draw_distribution(0), draw_distribution(5)
    teacher = make_teacher(draw_distribution(1), VOCABULARY, weight=2)
    data = [make_datum(4, q, 3.0)]
    data = teacher.apply(data, asyncio.run(teacher.drifts([(data[0], turn([0, 0], [4]))])))
    assert data[0].top is not None
    row = torch.tensor(np.log(p))[np.column_stack([data[0].targets, data[0].top[0]])]
    divergence = float((p * np.log(p / draw_distribution(1))).sum())
    expected = 2 * divergence - 3 * p[4] / q[4]
    assert float(Distillation(top_tokens=VOCABULARY).compute(data, [row])[0]) == pytest.approx(expected, rel=1e-4)


def test_weights_of_the_likeliest_tokens_are_normalised_as_advantages_are() -> None:
    played = Group("env", "task", 0, (episode(1.0, turns=[turn([1], [2, 3, 4])]),))
    references = {"env": [make_teacher(draw_distribution(1), 2, weight=1)]}
    (plain,) = asyncio.run(Preparation(NO_ADVANTAGES, references=references).prepare(played)).data
    normalization = Normalization("token", 4, 1)
    preparation = Preparation(NO_ADVANTAGES, references=references, normalization=normalization)
    (scaled,) = asyncio.run(preparation.prepare(played)).data
    assert plain.top is not None
    assert scaled.top is not None
    np.testing.assert_allclose(scaled.advantages, plain.advantages / 12, rtol=1e-6)
    np.testing.assert_allclose(scaled.top[2], plain.top[2] / 12, rtol=1e-6)


def test_a_teacher_is_a_signal_without_rewards() -> None:
    preparation = Preparation(NO_ADVANTAGES, references={"env": [Reference(score, 1.0, is_teacher=True)]})
    prepared = asyncio.run(preparation.prepare(group([0])))
    assert prepared.has_signal
    assert [row.any() for row in prepared.advantages] == [False]
    assert prepared.data[0].advantages[prepared.data[0].mask].all()


@pytest.mark.parametrize(("version", "is_active"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_teacher_counts_in_its_steps_only(version: int, is_active: bool) -> None:
    played = Group("env", "task", 0, (episode(1.0, turns=[turn([1], [2, 3], version=version)]),))
    teacher = Reference(score, 1.0, is_teacher=True, first_step=2, last_step=3)
    prepared = asyncio.run(Preparation(NO_ADVANTAGES, references={"env": [teacher]}).prepare(played))
    assert bool(prepared.drifts) == prepared.has_signal == is_active


def test_a_teacher_sees_its_own_prompt_and_the_same_reply() -> None:
    seen = list[list[int]]()

    async def note_tokens(prompt: Prompt, last: int, top: int) -> Scores:
        seen.append(prompt.tokens.tolist())
        return await score(prompt, last)

    def make_context(messages: Sequence[Message]) -> Prompt:
        return as_prompt([len(messages), 7, 7, 7])

    messages: tuple[Message, ...] = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})
    turns = [
        turn([1, 2], [3, 4], messages=messages),
        turn([5], [6], parent=0, messages=messages),
        turn([8], [9, 10], messages=(messages[0], *messages)),
    ]
    played = Group("env", "task", 0, (episode(1.0, turns=turns),))
    teacher = Reference(note_tokens, 1.0, is_teacher=True, make_context=make_context)
    asyncio.run(Preparation(NO_ADVANTAGES, references={"env": [teacher]}).prepare(played))
    assert sorted(seen) == [[1, 7, 7, 7, 3, 4, 5, 6], [2, 7, 7, 7, 9, 10]]
    bare = Group("env", "task", 0, (episode(1.0, turns=[turn([1], [2])]),))
    with pytest.raises(EnvironmentFault, match=r"use policy\.chat, or leave out teacher\.prompt"):
        asyncio.run(Preparation(NO_ADVANTAGES, references={"env": [teacher]}).prepare(bare))
