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

    def verify(self, given: Construction) -> VerifiedConstruction:
        return VerifiedConstruction(given, float(given[0]))

    def start(self, rng: np.random.Generator) -> Construction:
        return rng.uniform(1, 2, 1)


def state(value: float, parent: State | None = None) -> State:
    return State(np.array([value]), value, None if parent is None else parent.id)


PUCT = ReuseRule()


def archive(rule: ReuseRule = PUCT, *starts: float) -> Archive:
    made = Archive(Number(), rule, seed=3)
    made.plant([state(value) for value in starts or (1.0,)])
    return made


def test_a_construction_is_held_once() -> None:
    made = archive()
    root = made.choose()
    made.record_expansion(root.id, [state(0.5, root), state(0.5, root)])
    assert [one.value for one in made.states] == [0.5, 1.0]


def test_an_expansion_is_counted_once_however_many_rollouts_it_had() -> None:
    made = archive()
    root = made.choose()
    made.record_expansion(root.id, [state(0.5 + n / 100, root) for n in range(64)])
    assert made.expansions == 1
    nodes = made.state_dict()["nodes"]
    assert isinstance(nodes, list)
    assert sorted(one["expansions"] for one in nodes) == [0] * MAX_CHILDREN + [1]  # pyright: ignore


def test_of_the_children_of_one_state_puct_keeps_the_best_two() -> None:
    made = archive()
    root = made.choose()
    made.record_expansion(root.id, [state(value, root) for value in (0.9, 0.3, 0.5, 0.1)])
    assert [one.value for one in made.states] == [0.1, 0.3, 1.0]


def test_an_expansion_counts_for_the_state_and_all_that_it_came_from() -> None:
    made = archive()
    root = made.choose()
    child = state(0.5, root)
    made.record_expansion(root.id, [child])
    made.record_expansion(child.id, [state(0.4, child)])
    nodes = made.state_dict()["nodes"]
    assert isinstance(nodes, list)
    assert {one["value"]: one["expansions"] for one in nodes} == {1.0: 2, 0.5: 1, 0.4: 0}  # pyright: ignore


def puct_by_hand(values: list[float], best_child: list[float | None], counts: list[int], total: int, c: float) -> int:
    """The formula of the paper, state by state; the place of the one to expand."""
    scores = [-value for value in values]
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    scale = max(scores) - min(scores)
    found = list[float]()
    for place, score in enumerate(scores):
        prior = (len(scores) - order.index(place)) / sum(len(scores) - rank for rank in range(len(scores)))
        child = best_child[place]
        quality = score if child is None else -child
        found.append(quality + c * scale * prior * (1 + total) ** 0.5 / (1 + counts[place]))
    return max(range(len(found)), key=lambda place: (found[place], -order.index(place)))


def test_puct_expands_the_state_with_the_greatest_score() -> None:
    made = archive(ReuseRule("puct", c=3.0), 1.0, 1.3, 1.1)
    values, counts = [1.0, 1.3, 1.1], [0, 0, 0]
    children: list[float | None] = [None, None, None]
    for total in range(20):
        chosen = made.choose()
        expected = puct_by_hand(values, children, counts, total, 3.0)
        assert chosen.value == values[expected]
        made.record_expansion(chosen.id, [])  # nothing valid came of it
        counts[expected] += 1
    assert min(counts) > 0


def test_states_in_play_block_what_they_came_from_and_what_came_of_them() -> None:
    made = archive(ReuseRule("puct"), 1.0, 1.5)
    first = made.choose()
    made.record_expansion(first.id, [state(0.5, first), state(0.6, first)])
    chosen = [made.choose() for _ in range(3)]
    lineages = [{one.id, *made.lineage(one.id)} for one in chosen]
    assert len({one.id for one in chosen}) == 3
    assert not any(chosen[i].id in lineages[j] for i in range(3) for j in range(3) if i != j)
    made.choose()  # there is none left that is free, and one is chosen all the same


def test_epsilon_greedy_takes_the_best_but_for_a_share() -> None:
    made = archive(ReuseRule("epsilon_greedy", size=4, epsilon=0.25))
    root = made.choose()
    made.record_expansion(root.id, [state(value, root) for value in (0.1, 0.2, 0.3, 0.4, 0.5)])
    assert [one.value for one in made.states] == [0.1, 0.2, 0.3, 0.4]
    taken = [made.choose().value for _ in range(2000)]
    assert taken.count(0.1) / 2000 == pytest.approx(0.75 + 0.25 / 4, abs=0.03)
    assert set(taken) == {0.1, 0.2, 0.3, 0.4}


def test_fixed_and_none_never_start_from_what_was_found_and_know_the_best_of_it() -> None:
    for rule in ("fixed", "none"):
        made = archive(ReuseRule(rule), 1.5, 1.7)
        for value in (1.2, 0.9, 1.1):
            parent = made.choose()
            assert parent.value > 1
            made.record_expansion(parent.id, [state(value, parent)])
        assert made.best.value == 0.9
        assert made.metrics()["best"] == 0.9


@settings(max_examples=40)
@given(st.sampled_from(RULES), st.lists(st.lists(st.floats(0.01, 3), max_size=5), max_size=12), st.integers(0, 12))
def test_an_archive_that_is_saved_and_loaded_goes_on_as_if_it_had_not_been(
    rule: Reuse, found: list[list[float]], at: int
) -> None:
    def played(stop: int | None) -> list[str]:
        made = archive(ReuseRule(rule, size=5, epsilon=0.5), 1.0, 1.5)
        seen = list[str]()
        for step, values in enumerate(found):
            if step == stop:
                held = json.loads(json.dumps(made.state_dict()))
                made = Archive(Number(), ReuseRule(rule, size=5, epsilon=0.5), seed=3)
                made.load_state_dict(held)
            parents = [made.choose(), made.choose()]
            seen += [one.id for one in parents]
            made.record_expansion(parents[0].id, [state(value, parents[0]) for value in values])
            made.record_expansion(parents[1].id, [])
        return [*seen, *(one.id for one in made.states)]

    assert played(at) == played(None)


@settings(max_examples=40)
@given(st.sampled_from(RULES), st.lists(st.lists(st.floats(0.01, 3), max_size=5), max_size=12))
def test_the_best_is_never_lost(rule: Reuse, found: list[list[float]]) -> None:
    made = archive(ReuseRule(rule, size=2), 5.0)
    best = 5.0
    for values in found:
        parent = made.choose()
        made.record_expansion(parent.id, [state(value, parent) for value in values])
        best = min([best, *values])
        assert made.best.value == best


def test_the_archive_of_another_search_is_refused() -> None:
    held = archive(ReuseRule("puct")).state_dict()
    with pytest.raises(UsageError, match="reuse: the run was started with puct, not fixed"):
        archive(ReuseRule("fixed")).load_state_dict(held)


def test_a_state_is_read_as_it_was_written() -> None:
    given_state = State(np.array([[0.1, 1e-300], [-0.0, 3.0]]), 0.1, "a", 0.2, "print('é')", "out", True)
    again = State.from_json(json.loads(json.dumps(given_state.to_json())))
    assert again.construction.tobytes() == given_state.construction.tobytes()
    assert again.to_json() == given_state.to_json()
    assert again.id == given_state.id
