# trackio is optional and has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingImports=false, reportPrivateImportUsage=false, reportUnknownArgumentType=false
"""Trackio: a local database, which `trackio show` shows.

Invariant: no data leaves the machine unless a variable of Trackio's requests it, such as TRACKIO_SPACE_ID.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from rlkit._util.sections import Section
from rlkit.errors import missing_extra
from rlkit.trackers.recorded_run import RecordedRun, RecordedStep
from rlkit.trackers.service import ServiceTracker
from rlkit.types import Json

if TYPE_CHECKING:
    import trackio


class TrackioSettings(Section):
    """Trackio: a database of runs on this machine."""

    project: str = "rlkit"
    """Project of the run."""
    name: str | None = None
    """Name of the run in Trackio; null for the name of the rlkit run."""


class TrackioTracker(ServiceTracker[TrackioSettings]):
    """Send a run's metrics to Trackio."""

    name = "trackio"
    settings_type = TrackioSettings
    _run: trackio.Run

    def require(self) -> None:  # noqa: D102  inherited
        if importlib.util.find_spec("trackio") is None:
            raise missing_extra("trackio")

    def open(self, run: RecordedRun, state: Mapping[str, Json]) -> Mapping[str, Json]:  # noqa: D102  inherited
        import trackio

        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                self.settings.project,
                name=self.settings.name or run.name,
                config=dict(run.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return {}

    def show(self, step: RecordedStep) -> None:  # noqa: D102  inherited
        self._run.log(dict(step.metrics), step=step.number)

    def close(self, status: str) -> None:  # noqa: D102  inherited
        with redirect_stdout(sys.stderr):
            self._run.finish()
