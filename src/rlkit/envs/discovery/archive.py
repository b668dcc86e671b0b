"""Archive of a search's constructions, which chooses the next construction to start from.

Invariant: the seed and the sequence of calls determine the archive. It has no construction twice, and its best
construction is never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np

from rlkit._util.seeds import derive_seed
from rlkit.envs.discovery.problem import Problem
from rlkit.envs.discovery.state import State
from rlkit.errors import UsageError
from rlkit.types import Json

type Reuse = Literal["epsilon_greedy", "puct", "fixed", "none"]

MAX_CHILDREN = 2
"""Maximum number of kept children per state with `puct`, so that one state does not fill the archive."""


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """Rule for keeping states and choosing the next one to expand.

    Args:
        name: `epsilon_greedy`: a random kept state with probability `epsilon`, otherwise the best. `puct`: the state
            with the greatest PUCT score. `fixed`: the initial states in turn. `none`: a new random state each time.
        size: maximum number of kept states, in addition to the initial ones.
        c: exploration constant of `puct`.
    """

    name: Reuse = "puct"
    size: int = 1000
    epsilon: float = 0.125
    c: float = 1.0


@dataclass(slots=True, eq=False)
class _Node:
    """State with the results of its expansions."""

    state: State
    expansions: int = 0  # expansions of the state and of its descendants
    best_child: float | None = None  # best score of its children


@dataclass(slots=True, eq=False)
class Archive:
    """States of a search over one problem.

    An expansion is one group of rollouts from a state; it counts once for any number of rollouts.
    """

    problem: Problem
    rule: ReuseRule
    seed: int
    choices: int = 0  # number of calls of `choose`
    expansions: int = 0  # number of recorded expansions
    _nodes: dict[str, _Node] = field(default_factory=dict[str, _Node])
    _parents: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    _values: dict[str, float] = field(default_factory=dict[str, float])
    _running: list[str] = field(default_factory=list[str])

    def plant(self, states: Sequence[State]) -> None:
        """Add states that are new; those without a parent are initial states."""
        for state in states:
            self._nodes.setdefault(state.id, _Node(state))
            self._parents.setdefault(state.id, state.parent)
            self._values[state.id] = state.value

    def choose(self) -> State:
        """Return the next state to expand; it counts as running until `record_expansion`."""
        rng = np.random.default_rng(derive_seed(self.seed, "archive", self.choices))
        self.choices += 1
        match self.rule.name:
            case "none":
                verified = self.problem.verify(self.problem.start(rng))
                state = State(verified.construction, verified.value)
            case "fixed":
                seeds = [node.state for node in self._nodes.values() if node.state.parent is None]
                state = seeds[(self.choices - 1) % len(seeds)]
            case "epsilon_greedy":
                states = self.states
                state = states[int(rng.integers(len(states))) if rng.random() < self.rule.epsilon else 0]
            case "puct":
                state = self._nodes[self._choose_by_puct()].state
        self._running.append(state.id)
        return state

    def record_expansion(self, parent: str, children: Sequence[State]) -> None:
        """Record the valid constructions of a group that started from a state."""
        if parent in self._running:
            self._running.remove(parent)
        self.expansions += 1
        for name in self._nodes.keys() & self._list_relatives([parent]):
            self._nodes[name].expansions += 1
        if parent in self._nodes and children:
            node, scores = self._nodes[parent], [self.score(child) for child in children]
            node.best_child = max(scores if node.best_child is None else [node.best_child, *scores])
        self.plant(children)
        self._trim(parent)

    def lineage(self, name: str) -> list[str]:
        """Return the ids of a state's ancestors, parent first."""
        ancestors = list[str]()
        while (ancestor := self._parents.get(name)) is not None and ancestor not in ancestors:
            ancestors.append(ancestor)
            name = ancestor
        return ancestors

    def ancestors(self, name: str) -> list[tuple[str, float]]:
        """Return ids and values of a state's ancestors, parent first, also of those that were dropped."""
        return [(ancestor, self._values[ancestor]) for ancestor in self.lineage(name) if ancestor in self._values]

    def score(self, state: State) -> float:
        """Return the score of a state: higher is better, whether values are minimised or maximised."""
        return -state.value if self.problem.minimise else state.value

    @property
    def states(self) -> list[State]:
        """Kept states, best first."""
        return [node.state for _, node in self._rank()]

    @property
    def best(self) -> State:
        """Best kept state."""
        return self.states[0]

    def metrics(self) -> dict[str, float]:
        """Return `best`, `median` and `size` of the kept states, `generation` of the best, and `expansions`."""
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
        """Return the archive as JSON."""
        nodes = list[Json]()
        for node in self._nodes.values():
            results = {"expansions": node.expansions, "best_child": node.best_child}
            nodes.append({**node.state.to_json(), "seed": node.state.parent is None, **results})
        return {
            "problem": self.problem.name,
            "reuse": self.rule.name,
            "chosen": self.choices,
            "expansions": self.expansions,
            "in_play": list(self._running),
            "parents": dict(self._parents),
            "values": dict(self._values),
            "nodes": nodes,
        }

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Restore a `state_dict`; raise `UsageError` if it has another problem or reuse."""
        for name, current in (("problem", self.problem.name), ("reuse", self.rule.name)):
            if state[name] != current:
                raise UsageError(f"{name}: the run was started with {state[name]}, not {current}")
        self.choices, self.expansions = cast("int", state["chosen"]), cast("int", state["expansions"])
        self._running = list(cast("Sequence[str]", state["in_play"]))
        self._parents = dict(cast("Mapping[str, str | None]", state["parents"]))
        self._values = dict(cast("Mapping[str, float]", state.get("values", {})))
        self._nodes = {}
        for node in cast("Sequence[Mapping[str, Json]]", state["nodes"]):
            loaded, best_child = State.from_json(node), cast("float | None", node["best_child"])
            self._nodes[loaded.id] = _Node(loaded, cast("int", node["expansions"]), best_child)

    def _trim(self, parent: str) -> None:
        """Drop states beyond the size; keep the initial states, except with `epsilon_greedy`."""
        is_puct, is_fixed = self.rule.name == "puct", self.rule.name in ("fixed", "none")
        if is_puct:
            children = [name for name, node in self._rank() if node.state.parent == parent]
            for name in children[MAX_CHILDREN:]:
                del self._nodes[name]
        removable = [name for name, node in self._rank() if not ((is_puct or is_fixed) and node.state.parent is None)]
        for name in removable[1 if is_fixed else self.rule.size :]:
            del self._nodes[name]
        # Only kept and running states, and their ancestors.
        reachable = self._list_relatives((*self._nodes, *self._running))
        self._parents = {name: self._parents[name] for name in reachable if name in self._parents}
        self._values = {name: self._values[name] for name in self._parents if name in self._values}

    def _list_relatives(self, names: Iterable[str]) -> Mapping[str, None]:
        return dict.fromkeys(relative for name in names for relative in (name, *self.lineage(name)))

    def _rank(self) -> list[tuple[str, _Node]]:
        """Return the kept states with their ids, best first; of equal states, the older first."""
        return sorted(self._nodes.items(), key=lambda item: self.score(item[1].state), reverse=True)

    def _choose_by_puct(self) -> str:
        """Choose by Q + c · scale · P · √(1 + T) / (1 + n), see TTT-Discover §A.2 (arXiv:2601.16175).

        Q: score of the best child, or of the state before its first expansion. n: number of expansions of the state and
        its descendants. T: number of all expansions. P: falls linearly with the rank. scale: range of scores. States
        with a running ancestor or descendant are skipped if there are others.
        """
        names, nodes = zip(*self._rank(), strict=True)
        scores = [self.score(node.state) for node in nodes]
        quality = np.array([self.score(node.state) if node.best_child is None else node.best_child for node in nodes])
        expansions = np.array([node.expansions for node in nodes])
        prior = np.arange(len(nodes), 0, -1) / (len(nodes) * (len(nodes) + 1) / 2)
        bonus = self.rule.c * float(np.ptp(scores)) * prior * math.sqrt(1 + self.expansions) / (1 + expansions)
        places: list[int] = np.argsort(-(quality + bonus), kind="stable").tolist()
        order = [names[place] for place in places]
        in_play = set(self._running)
        blocked = self._list_relatives(in_play)
        free = [name for name in order if name not in blocked and in_play.isdisjoint(self.lineage(name))]
        return (free or [name for name in order if name not in in_play] or order)[0]
