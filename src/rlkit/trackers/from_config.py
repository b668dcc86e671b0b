"""Trackers of services, by the names that `track` and `rlkit sync --to` have for them.

Invariant: what is missing for a service is known before a run begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rlkit._util.sections import Section
from rlkit.config.schema.track import load_tracker_class, tracker_paths
from rlkit.errors import UsageError, did_you_mean
from rlkit.trackers import Tracker
from rlkit.trackers.service import ServiceTracker


def make_trackers(track: Section) -> list[Tracker]:
    """Return the trackers that a configuration names; MissingError without their packages or credentials."""
    return [_make_tracker(name, settings) for name, settings in track if settings is not None]


def load_service(name: str, section: Mapping[str, object]) -> ServiceTracker[Any]:
    """Return the tracker of the service that `rlkit sync --to` names, with the settings of its section.

    Raises:
        UsageError: there is no such service, or a setting is wrong.
        MissingError: its package or its credential is missing.
    """
    names = tracker_paths()
    if name not in names:
        raise UsageError(f"--to: {name!r} is none of {', '.join(names)}.{did_you_mean(name, names)}")
    settings_type: type[Section] = load_tracker_class(name).settings_type
    try:
        return _make_tracker(name, settings_type.model_validate(section))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        hint = did_you_mean(place, settings_type.model_fields) if first["type"] == "extra_forbidden" else ""
        raise UsageError(f"track.{name}.{place}: {first['msg']}.{hint}") from None


def _make_tracker(name: str, settings: Section) -> ServiceTracker[Any]:
    tracker: ServiceTracker[Any] = load_tracker_class(name)(settings)
    tracker.require()
    return tracker
