# trackio is optional and has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingImports=false, reportPrivateImportUsage=false, reportUnknownArgumentType=false
"""Trackio: a database on this machine, which `trackio show` shows.

Invariant: nothing leaves the machine unless Trackio's own variables say so, such as TRACKIO_SPACE_ID.
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

if TYPE_CHECKING:
    import trackio

    from rlkit.types import Json


class TrackioSettings(Section):
    """Trackio, which keeps runs in a database on this machine."""

    project: str = "rlkit"
    """The project that the run is shown in."""
    name: str | None = None
    """The run's name there; null for the name of the run."""


class TrackioTracker(ServiceTracker[TrackioSettings]):
    """Shows a run's metrics in Trackio."""

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
