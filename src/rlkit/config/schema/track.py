"""The section `track`: experiment-tracking services.

Invariant: a service is off unless it is configured, because most services send data off the machine. Each tracker
defines its own section.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Annotated, Any, cast

from pydantic import Field, GetPydanticSchema, ValidationInfo, create_model
from pydantic_core import core_schema

from rlkit._util.sections import Section
from rlkit.errors import MissingError

BUILT_IN = {
    "wandb": "rlkit.trackers.wandb:WandbTracker",
    "trackio": "rlkit.trackers.trackio:TrackioTracker",
    "tensorboard": "rlkit.trackers.tensorboard:TensorboardTracker",
    "docent": "rlkit.trackers.docent:DocentTracker",
    "openreward": "rlkit.trackers.openreward:OpenRewardTracker",
}
"""Trackers of rlkit as `module:Class`. Installed packages add theirs as entry points of the group `rlkit.trackers`."""


@cache
def tracker_paths() -> Mapping[str, str]:
    """Return `module:Class` of each installed tracker by name."""
    installed = {point.name: point.value for point in entry_points(group="rlkit.trackers")}
    return BUILT_IN | installed | BUILT_IN  # a package replaces none of rlkit's


def load_tracker_class(name: str) -> Any:  # trackers are above the configuration
    """Return a subclass of `rlkit.trackers.service.ServiceTracker`; MissingError if it cannot be imported."""
    path = tracker_paths()[name]
    try:
        return resolve_name(path)
    except Exception as error:  # a third-party package may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise MissingError(f"the tracker {name}, {path}, cannot be loaded: {reason}; fix its package") from error


class _TrackSection(Section):
    """Base of the types of the section `track`, which differ in the trackers that they load."""


@cache
def _section_type(*loaded: str) -> type[Section]:
    """Return the type of the section `track` in which only the trackers of these names can be on."""
    fields: dict[str, Any] = {}
    for name in tracker_paths():
        if name not in loaded:
            fields[name] = (None, None)
            continue
        settings: type[Section] = load_tracker_class(name).settings_type
        text = f"{settings.__doc__} `{{}}` for the default settings; null is off."
        fields[name] = (Annotated[settings | None, Field(description=text)], None)
    text = "Experiment-tracking services to send the run to. A separate process per service reads the run's folder."
    return create_model("TrackConfig", __base__=_TrackSection, __doc__=text, **fields)


def track_config(sections: object = None) -> Section:
    """Return the section `track` with these sections; None for no services."""
    if isinstance(sections, _TrackSection):
        return sections
    return _choose_type(sections).model_validate({} if sections is None else sections)


def _choose_type(sections: object) -> type[Section]:
    if not isinstance(sections, Mapping):
        return _section_type()
    section_by_name = cast("Mapping[object, object]", sections)
    return _section_type(*(name for name in tracker_paths() if section_by_name.get(name) is not None))


def _validate(sections: object, info: ValidationInfo) -> Section:
    if info.mode == "json":  # as strict as the rest of a configuration file
        return _choose_type(sections).model_validate_json(json.dumps(sections), strict=True)
    return track_config(sections)


type TrackConfig = Annotated[
    Section,
    GetPydanticSchema(  # called at the first use, because trackers import the configuration
        lambda source, handler: core_schema.with_info_plain_validator_function(_validate),
        lambda schema, handler: handler(_section_type(*tracker_paths()).__pydantic_core_schema__),
    ),
]
