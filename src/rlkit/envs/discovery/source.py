"""The tasks of a search: each starts from a state of the archive, and what is found goes back into it.

Invariant: a search that is resumed chooses the states that it would have chosen, and knows all that it had found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from rlkit.env import TaskSource
from rlkit.envs.discovery import records
from rlkit.envs.discovery.archive import Archive
from rlkit.envs.discovery.runners import demand
from rlkit.envs.discovery.state import State
from rlkit.envs.discovery.task import CHILD, SAVED, ConstructionProblem, Play
from rlkit.errors import UsageError
from rlkit.types import Group, Json


class Discovery(TaskSource):
    """A search over one problem."""

    def __init__(self, archive: Archive, play: Play) -> None:
        self._archive = archive
        self._play = play
        self._folder: Path | None = None
        self._saved: dict[str, tuple[State, ...]] = {}
        self._playing: dict[str, str] = {}
        self._cpu_s = 0.0

    @property
    def archive(self) -> Archive:
        """The states that it knows."""
        return self._archive

    def keep_in(self, folder: Path) -> None:
        """Save the records of tasks that are drawn from now on in this folder.

        Those that are there already come back with the episodes of their tasks, where these are played again: the run
        may have been killed when a record was saved and its rollout was not.

        Raises:
            MissingError: programs cannot be run as was asked for; a run says so before it samples anything.
        """
        demand(self._play.runner)
        self._folder = folder
        for one in records.read(folder):
            self._saved[one.task] = (*self._saved.get(one.task, ()), one.state)

    def next(self) -> ConstructionProblem:  # noqa: D102  inherited
        number = self._archive.chosen
        best = self._archive.best.value
        parent = self._archive.choose()
        task = ConstructionProblem(self._archive.problem, parent, number, self._play, self._folder, best)
        task = replace(task, saved=self._saved.get(task.task_id, ()))
        self._playing[task.task_id] = parent.id
        return task

    def observe(self, group: Group) -> None:
        """Put what a group has found into the archive: one expansion, however many rollouts it had."""
        parent = self._playing.pop(group.task, None)
        if parent is None:
            raise UsageError(f"a group of {group.task!r} is of none of the search's tasks")
        children = dict[str, State]()
        for episode in group.episodes:
            self._cpu_s += episode.metrics.get("program_cpu_s", 0.0) + episode.metrics.get("polish_cpu_s", 0.0)
            found = [episode.info[CHILD]] if CHILD in episode.info else []
            for held in (*found, *cast("Sequence[Json]", episode.info.get(SAVED, ()))):
                child = State.from_json(cast("Mapping[str, Json]", held))
                children.setdefault(child.id, child)
        self._archive.expanded(parent, list(children.values()))

    def metrics(self) -> dict[str, float]:
        """What the archive holds, and the processor seconds that programs and the polishing of children have used.

        `scripted` is what a scripted search, without a model, reached in as many seconds, where that was measured.
        """
        scripted = self._archive.problem.scripted_best(self._cpu_s)
        found = self._archive.metrics() | {"cpu_s": self._cpu_s}
        return found if scripted is None else found | {"scripted": scripted}

    def state_dict(self) -> Mapping[str, Json]:  # noqa: D102  inherited
        return {"archive": self._archive.state_dict(), "playing": dict(self._playing), "cpu_s": self._cpu_s}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:  # noqa: D102  inherited
        self._archive.load_state_dict(cast("Mapping[str, Json]", state["archive"]))
        self._playing = dict(cast("Mapping[str, str]", state["playing"]))
        self._cpu_s = float(cast("float", state["cpu_s"]))
