from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.envs.discovery.archive import MAX_CHILDREN, Archive, Reuse, ReuseRule
from rlkit.envs.discovery.problem import Construction, Problem, VerifiedConstruction
from rlkit.envs.discovery.state import State
from rlkit.errors import UsageError

RULES: tuple[Reuse, ...] = ("puct", "epsilon_greedy", "fixed", "none")


@dataclass(frozen=True)
class Number(Problem):
    """A number, as small as possible."""

    name = "number"
    minimise = True

    def statement(self) -> str:
        return "Find a small number."

    def verify(self, construction: Construction) -> VerifiedConstruction:
        return VerifiedConstruction(construction, float(construction[0]))

    def start(self, rng: np.random.Generator) -> Construction:
        return rng.uniform(1, 2, 1)


def state(value: float, parent: State | None = None) -> State:
    return State(np.array([value]), value, None if parent is None else parent.id)


PUCT = ReuseRule()


def make_archive(rule: ReuseRule = PUCT, *starts: float) -> Archive:
    archive = Archive(Number(), rule, seed=3)
    archive.plant([state(value) for value in starts or (1.0,)])
    return archive


def test_the_archive_stores_a_construction_once() -> None:
    archive = make_archive()
    root = archive.choose()
    archive.record_expansion(root.id, [state(0.5, root), state(0.5, root)])
    assert [child.value for child in archive.states] == [0.5, 1.0]


def test_an_expansion_is_counted_once_for_any_number_of_rollouts() -> None:
    archive = make_archive()
    root = archive.choose()
    archive.record_expansion(root.id, [state(0.5 + n / 100, root) for n in range(64)])
    assert archive.expansions == 1
    nodes = archive.state_dict()["nodes"]
    assert isinstance(nodes, list)
    assert sorted(node["expansions"] for node in nodes) == [0] * MAX_CHILDREN + [1]  # pyright: ignore


def test_puct_keeps_the_best_two_children_of_a_state() -> None:
    archive = make_archive()
    root = archive.choose()
    archive.record_expansion(root.id, [state(value, root) for value in (0.9, 0.3, 0.5, 0.1)])
    assert [kept_state.value for kept_state in archive.states] == [0.1, 0.3, 1.0]


def test_ancestors_keep_their_values_after_they_were_dropped() -> None:
    archive = make_archive(ReuseRule("epsilon_greedy", size=1))
    parent = archive.choose()
    for value in (0.9, 0.8, 0.7):
        child = state(value, parent)
        archive.record_expansion(parent.id, [child])
        parent = child
    again = make_archive(archive.rule)
    again.load_state_dict(json.loads(json.dumps(archive.state_dict())))
    for each in (archive, again):
        assert [kept_state.value for kept_state in each.states] == [0.7]
        assert [value for _, value in each.ancestors(parent.id)] == [0.8, 0.9, 1.0]


def test_an_expansion_counts_for_the_state_and_its_ancestors() -> None:
    archive = make_archive()
    root = archive.choose()
    child = state(0.5, root)
    archive.record_expansion(root.id, [child])
    archive.record_expansion(child.id, [state(0.4, child)])
    nodes = archive.state_dict()["nodes"]
    assert isinstance(nodes, list)
    assert {node["value"]: node["expansions"] for node in nodes} == {1.0: 2, 0.5: 1, 0.4: 0}  # pyright: ignore


def puct_by_hand(values: list[float], best_child: list[float | None], counts: list[int], total: int, c: float) -> int:
    """The formula of the paper, state by state; the place of the one to expand."""
    scores = [-value for value in values]
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    scale = max(scores) - min(scores)
    puct_scores = list[float]()
    for place, score in enumerate(scores):
        prior = (len(scores) - order.index(place)) / sum(len(scores) - rank for rank in range(len(scores)))
        child = best_child[place]
        quality = score if child is None else -child
        puct_scores.append(quality + c * scale * prior * (1 + total) ** 0.5 / (1 + counts[place]))
    return max(range(len(puct_scores)), key=lambda place: (puct_scores[place], -order.index(place)))


def test_puct_expands_the_state_with_the_greatest_score() -> None:
    archive = make_archive(ReuseRule("puct", c=3.0), 1.0, 1.3, 1.1)
    values, counts = [1.0, 1.3, 1.1], [0, 0, 0]
    children: list[float | None] = [None, None, None]
    for total in range(20):
        chosen = archive.choose()
        expected = puct_by_hand(values, children, counts, total, 3.0)
        assert chosen.value == values[expected]
        archive.record_expansion(chosen.id, [])  # nothing valid came of it
        counts[expected] += 1
    assert min(counts) > 0


def test_states_in_play_block_their_ancestors_and_descendants() -> None:
    archive = make_archive(ReuseRule("puct"), 1.0, 1.5)
    first = archive.choose()
    archive.record_expansion(first.id, [state(0.5, first), state(0.6, first)])
    parents = [archive.choose() for _ in range(3)]
    lineages = [{parent.id, *archive.lineage(parent.id)} for parent in parents]
    assert len({parent.id for parent in parents}) == 3
    assert not any(parents[i].id in lineages[j] for i in range(3) for j in range(3) if i != j)
    archive.choose()  # there is none left that is free, and one is chosen all the same


def test_epsilon_greedy_takes_the_best_but_for_a_share() -> None:
    archive = make_archive(ReuseRule("epsilon_greedy", size=4, epsilon=0.25))
    root = archive.choose()
    archive.record_expansion(root.id, [state(value, root) for value in (0.1, 0.2, 0.3, 0.4, 0.5)])
    assert [kept_state.value for kept_state in archive.states] == [0.1, 0.2, 0.3, 0.4]
    values = [archive.choose().value for _ in range(2000)]
    assert values.count(0.1) / 2000 == pytest.approx(0.75 + 0.25 / 4, abs=0.03)
    assert set(values) == {0.1, 0.2, 0.3, 0.4}


def test_fixed_and_none_never_reuse_children_but_report_the_best() -> None:
    for rule in ("fixed", "none"):
        archive = make_archive(ReuseRule(rule), 1.5, 1.7)
        for value in (1.2, 0.9, 1.1):
            parent = archive.choose()
            assert parent.value > 1
            archive.record_expansion(parent.id, [state(value, parent)])
        assert archive.best.value == 0.9
        assert archive.metrics()["best"] == 0.9


@settings(max_examples=40)
@given(st.sampled_from(RULES), st.lists(st.lists(st.floats(0.01, 3), max_size=5), max_size=12), st.integers(0, 12))
def test_an_archive_continues_identically_after_saving_and_loading(
    rule: Reuse, values_by_step: list[list[float]], reload_step: int
) -> None:
    def play_expansions(reload_step: int | None) -> list[str]:
        archive = make_archive(ReuseRule(rule, size=5, epsilon=0.5), 1.0, 1.5)
        state_ids = list[str]()
        for step, values in enumerate(values_by_step):
            if step == reload_step:
                saved_state = json.loads(json.dumps(archive.state_dict()))
                archive = Archive(Number(), ReuseRule(rule, size=5, epsilon=0.5), seed=3)
                archive.load_state_dict(saved_state)
            parents = [archive.choose(), archive.choose()]
            state_ids += [node.id for node in parents]
            archive.record_expansion(parents[0].id, [state(value, parents[0]) for value in values])
            archive.record_expansion(parents[1].id, [])
        return [*state_ids, *(node.id for node in archive.states)]

    assert play_expansions(reload_step) == play_expansions(None)


@settings(max_examples=40)
@given(st.sampled_from(RULES), st.lists(st.lists(st.floats(0.01, 3), max_size=5), max_size=12))
def test_the_archive_never_loses_the_best_state(rule: Reuse, values_by_step: list[list[float]]) -> None:
    archive = make_archive(ReuseRule(rule, size=2), 5.0)
    best = 5.0
    for values in values_by_step:
        parent = archive.choose()
        archive.record_expansion(parent.id, [state(value, parent) for value in values])
        best = min([best, *values])
        assert archive.best.value == best


def test_the_archive_of_another_search_is_rejected() -> None:
    saved_state = make_archive(ReuseRule("puct")).state_dict()
    with pytest.raises(UsageError, match="reuse: the run was started with puct, not fixed"):
        make_archive(ReuseRule("fixed")).load_state_dict(saved_state)


def test_a_state_round_trips() -> None:
    given_state = State(np.array([[0.1, 1e-300], [-0.0, 3.0]]), 0.1, "a", 0.2, "print('é')", "out", True)
    again = State.from_json(json.loads(json.dumps(given_state.to_json())))
    assert again.construction.tobytes() == given_state.construction.tobytes()
    assert again.to_json() == given_state.to_json()
    assert again.id == given_state.id
