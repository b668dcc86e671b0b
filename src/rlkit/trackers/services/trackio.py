# trackio is optional and has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingImports=false, reportPrivateImportUsage=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
"""Trackio: a database on this machine, which `trackio show` shows.

Invariant: nothing leaves the machine unless Trackio's own variables say so, such as TRACKIO_SPACE_ID.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import trackio

from rlkit.trackers.feed import Step, Told

if TYPE_CHECKING:
    from rlkit.types import Json


class TrackioSink:
    """Shows a run's metrics in Trackio.

    Args:
        project: that it is shown in.
        name: of the run there; None for the run's own.
    """

    def __init__(self, *, project: str, name: str | None) -> None:
        self._project = project
        self._name = name
        self._run: trackio.Run | None = None

    def open(self, run: Told, state: Mapping[str, Json]) -> Mapping[str, Json]:  # noqa: D102  of the protocol
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                self._project,
                name=self._name or run.name,
                config=dict(run.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return {}

    def step(self, step: Step) -> None:  # noqa: D102  of the protocol
        assert self._run is not None  # opened before
        self._run.log(dict(step.metrics), step=step.number)

    def close(self, status: str) -> None:  # noqa: D102  of the protocol
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._run.finish()
