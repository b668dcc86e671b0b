"""Services that show a run, each behind one small protocol.

Invariant: a sink is only ever given what is in the run's folder, so that what it missed can be sent again.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlkit.errors import MissingError, UsageError, did_you_mean, missing_extra
from rlkit.trackers.feed import Step, Told

if TYPE_CHECKING:
    from rlkit.config.schema.section import Section
    from rlkit.config.schema.track import TrackConfig
    from rlkit.types import Json


class Sink(Protocol):
    """A service that shows runs. Whatever it raises ends the sending, and never the run."""

    def open(self, run: Told, state: Mapping[str, Json]) -> Mapping[str, Json]:
        """Begin, or go on with, the run.

        Args:
            run: as its folder has it.
            state: what an earlier `open` gave for this run; empty for the first.

        Returns:
            What is needed to go on with the same run later.
        """
        ...

    def step(self, step: Step) -> None:
        """Show a step. It may be shown twice, if the process dies in between."""
        ...

    def close(self, status: str) -> None:
        """There is no more to show for now, and the run stands like this."""
        ...


NAMES = ("wandb", "trackio", "tensorboard", "docent")
"""What `rlkit sync --to` and the section `track` know."""


def settings_of(name: str, section: Mapping[str, object]) -> Section:
    """The settings of a service, checked.

    Raises:
        UsageError: there is no such service, or a setting is wrong.
    """
    from pydantic import ValidationError

    from rlkit.config.schema import track

    kinds: Mapping[str, type[Section]] = {
        "wandb": track.WandbConfig,
        "trackio": track.TrackioConfig,
        "tensorboard": track.TensorboardConfig,
        "docent": track.DocentConfig,
    }
    if name not in kinds:
        raise UsageError(f"--to: {name!r} is none of {', '.join(NAMES)}.{did_you_mean(name, NAMES)}")
    try:
        return kinds[name].model_validate(section)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        hint = did_you_mean(place, kinds[name].model_fields) if first["type"] == "extra_forbidden" else ""
        raise UsageError(f"track.{name}.{place}: {first['msg']}.{hint}") from None


def sink(name: str, settings: Section) -> Sink:
    """The sink of a service.

    Raises:
        MissingError: its package or its credential is missing.
    """
    make = _maker(settings)
    require(name, settings)
    return make()


def _maker(settings: Section) -> Callable[[], Sink]:
    """What makes the sink of a service out of its settings; packages are imported when it does."""
    from rlkit.config.schema.track import DocentConfig, TensorboardConfig, TrackioConfig, WandbConfig

    match settings:
        case WandbConfig(project=project, entity=entity, name=name, tags=tags, mode=mode, rollouts=rollouts):

            def wandb() -> Sink:
                from rlkit.trackers.services.wandb import WandbSink

                return WandbSink(
                    project=project, entity=entity, name=name, tags=tags, offline=mode == "offline", rollouts=rollouts
                )

            return wandb
        case TrackioConfig(project=project, name=name):

            def trackio() -> Sink:
                from rlkit.trackers.services.trackio import TrackioSink

                return TrackioSink(project=project, name=name)

            return trackio
        case TensorboardConfig(directory=directory):

            def tensorboard() -> Sink:
                from rlkit.trackers.services.tensorboard import TensorboardSink

                return TensorboardSink(directory=None if directory is None else Path(directory).expanduser())

            return tensorboard
        case DocentConfig(collection=collection, rollouts=rollouts, url=url):

            def docent() -> Sink:
                from rlkit.trackers.services.docent import DocentSink

                return DocentSink(collection=collection, rollouts=rollouts, url=url)

            return docent
        case _:
            raise TypeError(f"{type(settings).__name__} is of no service")


def chosen(track: TrackConfig) -> dict[str, Section]:
    """The services that a configuration names, with their settings."""
    named = {
        "wandb": track.wandb,
        "trackio": track.trackio,
        "tensorboard": track.tensorboard,
        "docent": track.docent,
    }
    return {name: settings for name, settings in named.items() if settings is not None}


def require(name: str, settings: Section) -> None:
    """Check that a service can be used, before a run is begun.

    Raises:
        MissingError: its package or its credential is missing.
    """
    if name in ("trackio", "docent") and importlib.util.find_spec(name) is None:
        raise missing_extra(name)
    if name == "wandb" and getattr(settings, "mode", "") == "online" and not _wandb_login():
        raise MissingError(
            "track.wandb: WANDB_API_KEY is not set, and nobody has logged in with `wandb login`: set it, or set "
            "track.wandb.mode to offline"
        )
    if name == "docent" and not os.environ.get("DOCENT_API_KEY"):
        raise MissingError("track.docent: DOCENT_API_KEY is not set: set it, or leave track.docent out")


def _wandb_login() -> bool:
    """Whether Weights & Biases will find a credential, or was told to need none."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    import netrc

    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        hosts = netrc.netrc(str(path)).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)
