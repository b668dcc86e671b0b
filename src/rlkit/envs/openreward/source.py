"""Task source of an environment.

Invariant: a resumed run draws from its original tasks, even if the server's tasks have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast, overload

from rlkit.envs.openreward.task import OpenRewardTask
from rlkit.errors import UsageError
from rlkit.tasks.sources import SequenceSource
from rlkit.types import Json

type Sizes = Mapping[str, int]


class OpenRewardTasks(SequenceSource, Sequence[OpenRewardTask]):
    """Tasks drawn in epochs, shuffled in each epoch; the state includes the sizes of the splits.

    Args:
        sizes: number of tasks of each split on the server.
        make: function from the sizes to the tasks that are played.
    """

    def __init__(self, sizes: Sizes, make: Callable[[Sizes], Sequence[OpenRewardTask]], *, seed: int) -> None:
        self._make = make
        self._sizes: dict[str, int] = dict(sizes)
        self._tasks = make(sizes)
        super().__init__(self._tasks, seed=seed)

    def state_dict(self) -> Mapping[str, Json]:  # noqa: D102  inherited
        target = self._tasks[0].settings.access.target.label
        return {"target": target, "sizes": self._sizes.copy(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Restore a state of the same environment, with its original tasks."""
        target = self._tasks[0].settings.access.target.label
        if state["target"] != target:
            raise UsageError(f"target: the run was started with {state['target']}, not {target}")
        sizes = cast("dict[str, int]", state["sizes"])
        if sizes != self._sizes:
            self._sizes = sizes.copy()
            self._tasks = self._make(sizes)
            super().__init__(self._tasks, seed=self._seed)
        super().load_state_dict(state)

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> OpenRewardTask: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[OpenRewardTask]: ...

    def __getitem__(self, index: int | slice) -> OpenRewardTask | Sequence[OpenRewardTask]:
        return self._tasks[index]
