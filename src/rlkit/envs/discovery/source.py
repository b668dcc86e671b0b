"""Task source of a search: each task starts from a state of the archive, and new states are added to it.

Invariant: a resumed search chooses the same states as an uninterrupted search, and has all states found earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from rlkit._util.seeds import derive_seed
from rlkit.env import TaskSource
from rlkit.envs.discovery import records
from rlkit.envs.discovery.archive import Archive, ReuseRule
from rlkit.envs.discovery.problem import InvalidConstruction, Problem, load_published_with_program
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.settings import PlaySettings, check_isolation
from rlkit.envs.discovery.state import State
from rlkit.envs.discovery.task import CHILD, SAVED, ConstructionProblem
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
        check_isolation(self.play.min_isolation)
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
        children = list[State]()
        for episode in group.episodes:
            self._cpu_s += episode.metrics.get("program_cpu_s", 0.0) + episode.metrics.get("polish_cpu_s", 0.0)
            contents = [episode.info[CHILD]] if CHILD in episode.info else []
            contents += cast("Sequence[Json]", episode.info.get(SAVED, ()))
            children += [State.from_json(cast("Mapping[str, Json]", content)) for content in contents]
        self.archive.record_expansion(parent, children)

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


def make_archive(problem: Problem, rule: ReuseRule, *, start: str, starts: int | None, seed: int) -> Archive:
    """Return an archive with the initial states of the arguments `start` and `starts` of `discovery`.

    Raises:
        UsageError: there is no such start, or it is not a construction of the problem.
    """
    rng, program = np.random.default_rng(derive_seed(seed, "starts")), ""
    if start == "random":
        constructions = [problem.start(rng) for _ in range(starts or (8 if rule.name == "puct" else 1))]
    elif starts is not None:
        raise UsageError("starts: has an effect only with start: random; leave it out")
    elif start == "flat":
        if not isinstance(problem, Erdos) or problem.n_points is None:
            raise UsageError("start: flat needs the problem erdos with the option n_points")
        constructions = [np.full(problem.n_points, 0.5)]
    else:
        construction, program = load_published_with_program(start)
        constructions = [construction]
    try:
        planted = [problem.verify(construction) for construction in constructions]
    except InvalidConstruction as error:
        raise UsageError(f"start: {start} is not a construction of {problem.name}: {error}") from None
    archive = Archive(problem, rule, derive_seed(seed, "discovery"))
    archive.plant([State(verified.construction, verified.value, program=program) for verified in planted])
    return archive
