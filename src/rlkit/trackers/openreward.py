"""Uploads of rollouts to OpenReward.

    rlkit.train("config.yaml", trackers=[ConsoleTracker(), OpenRewardTracker()])

Only episodes of OpenReward's environments are uploaded. What is uploaded is read from the run's own tables, so that it
is on this machine first, and a resumed run uploads what is missing.

Invariant: the run never waits for an upload, nor fails for one; at its end it waits for `last_s` seconds at most. No
more than one step is held in memory. What counts as uploaded was taken.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, cast

from rlkit._util import files
from rlkit.errors import MissingError
from rlkit.trackers import RunInfo, RunResult, Tracker
from rlkit.trackers.openreward_events import SESSION, About, Service, UploadFailed, upload
from rlkit.types import Checkpoint

__all__ = ["OpenRewardTracker", "UploadFailed"]

PROGRESS = "openreward.json"
"""Of a run's folder: how far the uploads have come."""

_KEY = "OPENREWARD_API_KEY"
_POLL_S = 0.5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0
_LAST_S = 30.0


class OpenRewardTracker(Tracker):
    """Uploads each step's rollouts once their table is written.

    Args:
        run_name: on OpenReward; the run's own by default.
        last_s: seconds that the end of the run waits for what is not uploaded yet.

    Raises:
        MissingError: there is no key.
    """

    def __init__(self, *, run_name: str | None = None, last_s: float = _LAST_S) -> None:
        if not os.environ.get(_KEY):
            raise MissingError(f"{_KEY} is not set: uploads to OpenReward need it; set it, or leave them out")
        self._run_name = run_name
        self._last_s = last_s
        self._ending = threading.Event()
        self._stepped = threading.Event()
        self._failure: UploadFailed | None = None
        self._told = False
        self._newest = 0
        self._thread: threading.Thread | None = None

    def started(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._newest = max(self._newest, run.progress().step)
        about = About(self._run_name or run.name, run.model, str(run.directory))
        self._thread = threading.Thread(
            target=self._work, args=(run.directory, about), name="rlkit-openreward-uploads", daemon=True
        )
        self._thread.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done.

        Raises:
            UploadFailed: an earlier one could not be uploaded; told once.
        """
        self._newest = max(self._newest, step)
        self._stepped.set()
        self._tell()

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Nothing to upload."""

    def note(self, message: str) -> None:
        """Nothing to upload."""

    def finished(self, result: RunResult | None) -> None:
        """Wait for what is left, for a while.

        Raises:
            UploadFailed: something could not be uploaded; told once.
        """
        self._ending.set()
        self._stepped.set()
        if self._thread is not None:
            self._thread.join(self._last_s)
            if self._thread.is_alive() and self._failure is None:
                self._failure = UploadFailed(
                    "OpenReward was too slow for the last rollouts; a resumed run uploads them"
                )
        self._tell()

    def _tell(self) -> None:
        if self._failure is not None and not self._told:
            self._told = True
            raise self._failure

    def _work(self, directory: Path, about: About) -> None:
        from rlkit.store.history import table_path

        done, pause_s = _Progress.read(directory), _FIRST_PAUSE_S
        while True:
            ending = self._ending.is_set()
            path = table_path(directory, done.step + 1)
            if done.step >= self._newest or not path.exists():  # tables are written behind the run's back
                if ending:
                    return
                self._stepped.wait(_POLL_S)
                self._stepped.clear()
                continue
            try:
                done = self._uploaded(directory, path, about, done)
                pause_s = _FIRST_PAUSE_S
            except Exception as error:  # whatever it is, the run goes on
                what = str(error) or type(error).__name__
                self._failure = UploadFailed(
                    f"the rollouts of step {done.step + 1} could not be uploaded to OpenReward: {what}; "
                    "it is tried again, also by a resumed run"
                )
                if ending:
                    return
                done = _Progress.read(directory)
                self._ending.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _uploaded(self, directory: Path, path: Path, about: About, done: _Progress) -> _Progress:
        """Upload what is missing of the next step; how far it came."""
        from rlkit.store.history import read_groups

        step = done.step + 1
        groups = [one.group for one in read_groups(path)]
        shown = [(group, episode) for group in groups for episode in group.episodes if SESSION in episode.info]
        if len(shown) > done.rollouts:
            service = Service.connect()
            try:
                for number, (group, episode) in enumerate(shown[done.rollouts :], done.rollouts + 1):
                    try:
                        upload(service, about, group, episode, step=step)
                    except UploadFailed as error:
                        if not error.unfit:
                            raise
                        self._failure = UploadFailed(f"OpenReward did not take a rollout of step {step}: {error}")
                    _Progress(done.step, number).write(directory)
            finally:
                service.close()
        done = _Progress(step)
        done.write(directory)
        return done


@dataclass(frozen=True, slots=True)
class _Progress:
    """The last step that was uploaded whole, 0 for none, and rollouts of the next one."""

    step: int = 0
    rollouts: int = 0

    @classmethod
    def read(cls, directory: Path) -> Self:
        try:
            found = cast("Mapping[str, object]", json.loads((directory / PROGRESS).read_text()))
            step, rollouts = found["step"], found["rollouts"]
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        return cls(step, rollouts) if isinstance(step, int) and isinstance(rollouts, int) else cls()

    def write(self, directory: Path) -> None:
        files.write_text(directory / PROGRESS, json.dumps(asdict(self)) + "\n")
