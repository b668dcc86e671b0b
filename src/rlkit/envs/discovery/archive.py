"""The constructions that a search has found, and which of them it starts from next.

Invariant: an archive is a function of its seed, of what it was asked for and of what it was told, in that order. It
holds no construction twice, and its best one is never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np

from rlkit._util.seeds import derive_seed
from rlkit.envs.discovery.problem import Problem
from rlkit.envs.discovery.state import State
from rlkit.errors import UsageError
from rlkit.types import Json

type Reuse = Literal["epsilon_greedy", "puct", "fixed", "none"]

CHILDREN_KEPT = 2
"""With `puct`: of the children of one state, so that one lucky state does not fill the archive with its like."""


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """Which states are kept, and which one is expanded next.

    Args:
        name: `epsilon_greedy`: one of the best at random with probability `epsilon`, or else the best. `puct`: the one
            with the greatest PUCT score. `fixed`: the ones that were there at the beginning. `none`: a new random
            beginning each time.
        size: states that are kept beside those that were there at the beginning.
        c: of `puct`, how much states count that were expanded seldom.
    """

    name: Reuse = "puct"
    size: int = 1000
    epsilon: float = 0.125
    c: float = 1.0


@dataclass(slots=True, eq=False)
class _Node:
    """A state, and what came of expanding it."""

    state: State
    seed: bool
    expansions: int = 0
    """Of itself and of its descendants."""
    best_child: float = -math.inf
    """The best score of what was made of it."""


@dataclass(slots=True, eq=False)
class Archive:
    """The states of a search over one problem.

    An expansion is one group of rollouts that start from a state; it is counted once, however many rollouts it has.
    """

    problem: Problem
    rule: ReuseRule
    seed: int
    chosen: int = 0
    """States that were chosen."""
    expansions: int = 0
    """Groups that it was told of."""
    _nodes: dict[str, _Node] = field(default_factory=dict[str, _Node])
    _parents: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    _in_play: list[str] = field(default_factory=list[str])

    def plant(self, states: Sequence[State]) -> None:
        """Put in the states that a search begins with."""
        for state in states:
            self._nodes.setdefault(state.id, _Node(state, seed=True))
            self._parents.setdefault(state.id, None)

    def choose(self) -> State:
        """The state to expand next; it counts as in play until `expanded` is told of it."""
        rng = np.random.default_rng(derive_seed(self.seed, "archive", self.chosen))
        self.chosen += 1
        match self.rule.name:
            case "none":
                return self._fresh(rng)
            case "fixed":
                seeds = [name for name, node in self._nodes.items() if node.seed]
                name = seeds[(self.chosen - 1) % len(seeds)]
            case "epsilon_greedy":
                ranked = self._ranked()
                name = ranked[int(rng.integers(len(ranked)))] if rng.random() < self.rule.epsilon else ranked[0]
            case "puct":
                name = self._most_promising()
        self._in_play.append(name)
        return self._nodes[name].state

    def expanded(self, parent: str, children: Sequence[State]) -> None:
        """A group that started from a state has come back, with these valid constructions."""
        if parent in self._in_play:
            self._in_play.remove(parent)
        self.expansions += 1
        for name in (parent, *self.lineage(parent)):
            if name in self._nodes:
                self._nodes[name].expansions += 1
        if parent in self._nodes and children:
            node = self._nodes[parent]
            node.best_child = max(node.best_child, *(self.score(child) for child in children))
        if self.rule.name in ("fixed", "none"):
            found = [node.state for node in self._nodes.values() if not node.seed]
            children = self._best_first([*children, *found])[:1]  # one, so that the best is known
        for child in children:
            if child.id not in self._nodes:
                self._nodes[child.id] = _Node(child, seed=False)
                self._parents.setdefault(child.id, child.parent)
        self._trim(parent)

    def lineage(self, name: str) -> list[str]:
        """The ids of a state's parent, of that one's parent and so on."""
        found = list[str]()
        while (above := self._parents.get(name)) is not None and above not in found:
            found.append(above)
            name = above
        return found

    def score(self, state: State) -> float:
        """Higher is better, whatever the problem's direction."""
        return -state.value if self.problem.minimise else state.value

    @property
    def states(self) -> list[State]:
        """Those that are held, the best first."""
        return [self._nodes[name].state for name in self._ranked()]

    @property
    def best(self) -> State:
        """The best that is held."""
        return self.states[0]

    def metrics(self) -> dict[str, float]:
        """`best`, `median` and `size` of what is held, `generation` of the best, and `expansions`."""
        states = self.states
        values = [state.value for state in states]
        return {
            "best": values[0],
            "median": float(np.median(values)),
            "size": float(len(states)),
            "generation": float(len(self.lineage(states[0].id))),
            "expansions": float(self.expansions),
        }

    def state_dict(self) -> dict[str, Json]:
        """Everything, as JSON."""
        nodes: list[Json] = [
            {
                **node.state.to_json(),
                "seed": node.seed,
                "expansions": node.expansions,
                "best_child": None if math.isinf(node.best_child) else node.best_child,
            }
            for node in self._nodes.values()
        ]
        return {
            "problem": self.problem.name,
            "reuse": self.rule.name,
            "chosen": self.chosen,
            "expansions": self.expansions,
            "in_play": list(self._in_play),
            "parents": dict(self._parents),
            "nodes": nodes,
        }

    def load_state_dict(self, held: Mapping[str, Json]) -> None:
        """Go on from what `state_dict` gave; raise `UsageError` if it is of another problem or reuse."""
        for name, now in (("problem", self.problem.name), ("reuse", self.rule.name)):
            if held[name] != now:
                raise UsageError(f"{name}: the run was begun with {held[name]}, and this is {now}")
        self.chosen, self.expansions = cast("int", held["chosen"]), cast("int", held["expansions"])
        self._in_play = list(cast("Sequence[str]", held["in_play"]))
        self._parents = dict(cast("Mapping[str, str | None]", held["parents"]))
        self._nodes = {}
        for node in cast("Sequence[Mapping[str, Json]]", held["nodes"]):
            state = State.from_json(node)
            best_child = cast("float | None", node["best_child"])
            best_child = -math.inf if best_child is None else best_child
            self._nodes[state.id] = _Node(state, bool(node["seed"]), cast("int", node["expansions"]), best_child)

    def _fresh(self, rng: np.random.Generator) -> State:
        verified = self.problem.verified(self.problem.start(rng))
        state = State(verified.construction, verified.value)
        self._in_play.append(state.id)
        return state

    def _best_first(self, states: Sequence[State]) -> list[State]:
        return sorted(states, key=self.score, reverse=True)  # of equals, the one that was there first

    def _ranked(self) -> list[str]:
        return sorted(self._nodes, key=lambda name: self.score(self._nodes[name].state), reverse=True)

    def _trim(self, parent: str) -> None:
        """Leave out what there is no room for; what was there at the beginning stays, but for `epsilon_greedy`."""
        puct = self.rule.name == "puct"
        if puct:
            own = [node.state for node in self._nodes.values() if not node.seed and node.state.parent == parent]
            for state in self._best_first(own)[CHILDREN_KEPT:]:
                del self._nodes[state.id]
        fixed = self.rule.name in ("fixed", "none")
        loose = [node.state for node in self._nodes.values() if not (node.seed and (puct or fixed))]
        for state in self._best_first(loose)[1 if fixed else self.rule.size :]:
            del self._nodes[state.id]
        # Only what is held or in play, and all that it came from.
        reachable = dict.fromkeys(
            relative for name in (*self._nodes, *self._in_play) for relative in (name, *self.lineage(name))
        )
        self._parents = {name: self._parents[name] for name in reachable if name in self._parents}

    def _most_promising(self) -> str:
        """By Q + c · scale · P · √(1 + T) / (1 + n), as TTT-Discover §A.2 (arXiv:2601.16175) defines it.

        Q is the score of the best child, or of the state itself where it was not expanded; n counts its expansions and
        those of its descendants, T all of them. P falls in equal steps with the rank; scale is the range of scores. One
        whose ancestor or descendant is in play is passed over while there is another.
        """
        names = self._ranked()
        nodes = [self._nodes[name] for name in names]
        own = np.array([self.score(node.state) for node in nodes])
        expansions = np.array([node.expansions for node in nodes])
        best_child = np.array([node.best_child for node in nodes])
        quality = np.where(np.isfinite(best_child), best_child, own)
        prior = np.arange(len(nodes), 0, -1) / (len(nodes) * (len(nodes) + 1) / 2)
        bonus = self.rule.c * float(np.ptp(own)) * prior * math.sqrt(1 + self.expansions) / (1 + expansions)
        places: list[int] = np.argsort(-(quality + bonus), kind="stable").tolist()
        order = [names[place] for place in places]
        in_play = set(self._in_play)
        blocked = {relative for name in in_play for relative in (name, *self.lineage(name))}
        free = [name for name in order if name not in blocked and in_play.isdisjoint(self.lineage(name))]
        return (free or [name for name in order if name not in in_play] or order)[0]
