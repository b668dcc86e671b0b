"""Create trackers (W&B and others) from the section `track`, or for `rlkit sync --to`.

Invariant: missing packages and credentials are reported before a run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlkit._util.sections import Section, validate_fields
from rlkit.config.schema.track import load_tracker_class, tracker_paths
from rlkit.errors import UsageError, did_you_mean
from rlkit.trackers import Tracker
from rlkit.trackers.service import ServiceTracker


def make_trackers(track: Section) -> list[Tracker]:
    """Return the trackers of the section `track`; MissingError if a package or credential is missing."""
    return [_make_tracker(name, settings) for name, settings in track if settings is not None]


def load_service(name: str, section: Mapping[str, object]) -> ServiceTracker[Any]:
    """Return the tracker of this name, with the settings of `section`.

    Raises:
        UsageError: the tracker does not exist, or a setting is invalid.
        MissingError: the tracker's package or credential is missing.
    """
    names = tracker_paths()
    if name not in names:
        raise UsageError(f"--to: {name!r} is not one of {', '.join(names)}.{did_you_mean(name, names)}")
    settings_type: type[Section] = load_tracker_class(name).settings_type
    return _make_tracker(name, validate_fields(settings_type, section, place=f"track.{name}"))


def _make_tracker(name: str, settings: Section) -> ServiceTracker[Any]:
    tracker: ServiceTracker[Any] = load_tracker_class(name)(settings)
    tracker.require()
    return tracker
