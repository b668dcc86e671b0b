"""Task sources: a shuffled sequence, and a mixture of several sources.

Invariant: the order of tasks depends on the seed and the observed groups, never on timing.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from rlkit._util.loop_holds import attribute_holds
from rlkit._util.seeds import derive_seed
from rlkit.env import Env, Task, TaskSource
from rlkit.errors import EnvironmentFault, MissingError, UsageError
from rlkit.types import Group, Json

type Tasks = TaskSource | Iterable[Env]
"""Tasks of a user: a task source, or any collection of tasks."""

_ORDERS_MAX = 64  # number of permutations in memory; each source needs that of its current epoch


class SequenceSource(TaskSource):
    """Draws each task of a collection once per epoch, in a new order; without end if `epochs` is None."""

    def __init__(self, envs: Iterable[Env], *, seed: int, epochs: int | None = None) -> None:
        self._envs = list(envs)
        if not self._envs:
            raise UsageError("there are no tasks: give at least one Env")
        self._seed = seed
        self._epochs = epochs
        self._draws = 0

    @property
    def remaining(self) -> int | None:
        """Number of remaining draws; None without an end."""
        return None if self._epochs is None else max(0, self._epochs * len(self._envs) - self._draws)

    def next(self) -> Env | None:  # noqa: D102  inherited
        if self.remaining == 0:
            return None
        epoch, index = divmod(self._draws, len(self._envs))
        self._draws += 1
        return self._envs[int(epoch_order(len(self._envs), seed=self._seed, epoch=epoch)[index])]

    def state_dict(self) -> Mapping[str, Json]:  # noqa: D102  inherited
        return {"drawn": self._draws} if self._epochs is None else {"drawn": self._draws, "tasks": len(self._envs)}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Restore a result of `state_dict`; raise UsageError if the number of tasks, and so the end, has changed."""
        recorded, count = state.get("tasks"), len(self._envs)
        if self._epochs is not None and recorded not in (None, count):
            raise UsageError(f"there were {recorded} tasks when the run began, and now there are {count}")
        self._draws = cast("int", state["drawn"])


@lru_cache(_ORDERS_MAX)
def epoch_order(count: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the permutation of 0 … `count` − 1 of an epoch, which callers must not change."""
    return np.random.default_rng([seed, epoch]).permutation(count)


@dataclass(eq=False)
class Mixture:
    """Draws from several sources in proportion to their weights."""

    sources: Mapping[str, TaskSource]  # by name of the environment
    _: KW_ONLY
    # Relative weights by the same names. None uses the number of remaining tasks, as if all tasks were shuffled;
    # every source must then be a `SequenceSource` with an end.
    weights: Mapping[str, float] | None
    seed: int
    first: tuple[str, int] = ("", 0)  # environment of the first draws, which has no later ones, and their number
    draws: int = field(default=0, init=False)  # number of drawn tasks
    _exhausted: set[str] = field(default_factory=set[str], init=False)

    @property
    def is_exhausted(self) -> bool:
        """True if every source is known to have no more tasks."""
        return not self._open_weights()

    def set_folder(self, folder: Path) -> None:
        """Set the folder of each source, below `folder`."""
        for name, source in self.sources.items():
            with _name_in_errors(name):
                source.set_folder(folder / name)

    def draw(self) -> Task | None:
        """Draw the next task; None if no source has more."""
        while weights := self._open_weights():
            name = self._choose(weights)
            with _name_in_errors(name):
                env = self.sources[name].next()
            if env is not None:
                self.draws += 1
                return Task(self.draws - 1, name, env)
            self._exhausted.add(name)
        return None

    def observe(self, group: Group) -> None:
        """Report a finished group to its source."""
        with _name_in_errors(group.env):
            self.sources[group.env].observe(group)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the sources, under `env/<name>/tasks/…`."""
        metrics = dict[str, float]()
        for name, source in self.sources.items():
            with _name_in_errors(name):
                metrics |= {f"env/{name}/tasks/{key}": float(value) for key, value in source.metrics().items()}
        return metrics

    def state_dict(self) -> Mapping[str, Json]:
        """Return the number of draws, and the state of every source."""
        states = dict[str, Mapping[str, Json]]()
        for name, source in self.sources.items():
            with _name_in_errors(name):
                states[name] = source.state_dict()
            try:
                json.dumps(states[name])
            except (TypeError, ValueError) as error:
                raise EnvironmentFault(f"the state of the task source of {name} is not JSON: {error}") from error
        return {"drawn": self.draws, "exhausted": sorted(self._exhausted), "sources": states}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Restore a result of `state_dict`; raise UsageError if a source rejects its state."""
        self.draws = cast("int", state["drawn"])
        self._exhausted = set(cast("Sequence[str]", state["exhausted"]))
        for name, source_state in cast("Mapping[str, Mapping[str, Json]]", state["sources"]).items():
            try:
                with _name_in_errors(name):
                    self.sources[name].load_state_dict(source_state)
            except EnvironmentFault as error:
                if isinstance(error.__cause__, UsageError):
                    raise UsageError(f"envs.{name}: {error.__cause__}") from error
                raise

    def _open_weights(self) -> dict[str, float]:
        """Return the weights of the sources that may have another task."""
        first, count = self.first
        if self.draws < count and first not in self._exhausted:
            return {first: 1.0}
        later = {name: source for name, source in self.sources.items() if name != first}
        if self.weights is None:
            counts = {name: cast("SequenceSource", source).remaining for name, source in later.items()}
            return {name: count for name, count in counts.items() if count}
        return {name: self.weights[name] for name in later if name not in self._exhausted}

    def _choose(self, weights: Mapping[str, float]) -> str:
        names = list(weights)
        if len(names) == 1:
            return names[0]
        shares = np.array([*weights.values()], np.float64)
        shares /= shares.max()  # prevents an overflow of the sum
        rng = np.random.default_rng(derive_seed(self.seed, "mixture", self.draws, len(names)))
        return names[int(rng.choice(len(names), p=shares / shares.sum()))]


@contextmanager
def _name_in_errors(name: str) -> Generator[None]:
    """Turn an error of a source, except MissingError, into an EnvironmentFault with its name."""
    try:
        with attribute_holds(name):
            yield
    except MissingError:
        raise
    except Exception as error:
        raise EnvironmentFault(f"the task source of {name} failed: {type(error).__name__}: {error}") from error
