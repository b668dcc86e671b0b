"""Task source of a search: each task starts from a state of the archive, and new states are added to it.

Invariant: a resumed search chooses the same states as an uninterrupted search, and has all states found earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from rlkit.env import TaskSource
from rlkit.envs.discovery import records
from rlkit.envs.discovery.archive import Archive
from rlkit.envs.discovery.runners import check_runner
from rlkit.envs.discovery.state import State
from rlkit.envs.discovery.task import CHILD, SAVED, ConstructionProblem, PlaySettings
from rlkit.errors import UsageError
from rlkit.types import Group, Json


class Discovery(TaskSource):
    """Search over one problem."""

    def __init__(self, archive: Archive, play: PlaySettings) -> None:
        self.archive = archive
        """Archive of states."""
        self.play = play
        """Settings for playing its tasks."""
        self._folder: Path | None = None
        self._saved: dict[str, tuple[State, ...]] = {}
        self._playing: dict[str, str] = {}
        self._cpu_s = 0.0

    def set_folder(self, folder: Path) -> None:
        """Save the records of later tasks in a folder.

        Existing records return with the episodes of their tasks if these are played again: the run may have been killed
        after a record was saved and before its rollout was.

        Raises:
            MissingError: programs cannot be run as configured. The run then fails before it samples.
        """
        check_runner(self.play.runner)
        self._folder = folder
        for record in records.read_records(folder):
            self._saved[record.task] = (*self._saved.get(record.task, ()), record.state)

    def next(self) -> ConstructionProblem:  # noqa: D102  inherited
        number = self.archive.choices
        best = self.archive.best.value
        parent = self.archive.choose()
        lineage = ((parent.id, parent.value), *self.archive.ancestors(parent.id))
        task = ConstructionProblem(self.archive.problem, parent, number, self.play, self._folder, best, (), lineage)
        task = replace(task, saved=self._saved.get(task.task_id, ()))
        self._playing[task.task_id] = parent.id
        return task

    def observe(self, group: Group) -> None:
        """Add the children of a group to the archive, as one expansion whatever its number of rollouts."""
        parent = self._playing.pop(group.task, None)
        if parent is None:
            raise UsageError(f"a group has the task {group.task!r}, which is not running in this search")
        children = dict[str, State]()
        for episode in group.episodes:
            self._cpu_s += episode.metrics.get("program_cpu_s", 0.0) + episode.metrics.get("polish_cpu_s", 0.0)
            child_of_episode = [episode.info[CHILD]] if CHILD in episode.info else []
            for content in (*child_of_episode, *cast("Sequence[Json]", episode.info.get(SAVED, ()))):
                child = State.from_json(cast("Mapping[str, Json]", content))
                children.setdefault(child.id, child)
        self.archive.record_expansion(parent, list(children.values()))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the archive, and `cpu_s`, the processor seconds of programs and polishing.

        `scripted` is the value of a scripted search without a model after the same processor seconds, if measured.
        """
        scripted = self.archive.problem.scripted_best(self._cpu_s)
        metrics = self.archive.metrics() | {"cpu_s": self._cpu_s}
        return metrics if scripted is None else metrics | {"scripted": scripted}

    def state_dict(self) -> Mapping[str, Json]:  # noqa: D102  inherited
        return {"archive": self.archive.state_dict(), "playing": dict(self._playing), "cpu_s": self._cpu_s}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:  # noqa: D102  inherited
        self.archive.load_state_dict(cast("Mapping[str, Json]", state["archive"]))
        self._playing = dict(cast("Mapping[str, str]", state["playing"]))
        self._cpu_s = float(cast("float", state["cpu_s"]))
