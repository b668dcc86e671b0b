"""Which checkpoints a command is about.

Invariant: nothing is chosen that was not named: a run, a path, or all of an account by a word that says so.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

from rlkit.cli.common.arguments import resolve, run_directory
from rlkit.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from rlkit.config.schema import Config, ServiceConfig
    from rlkit.service import Stored

type Kind = Literal["training", "sampler", "external"]

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(m|h|d|w)")
_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def age_s(text: str) -> float:
    """`90m`, `12h`, `7d` or `2w` as seconds.

    Raises:
        UsageError: it is none.
    """
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r} is no age: write it as 90m, 12h, 7d or 2w")
    return float(found[1]) * _UNIT_S[found[2]]


@dataclass(frozen=True, slots=True)
class Filter:
    """Of checkpoints.

    Args:
        kind: only these; None for all.
        older_s: only those that were made longer ago; None for all.
        now: seconds since the epoch.
    """

    kind: Kind | None = None
    older_s: float | None = None
    now: float = field(default_factory=time.time)

    @classmethod
    def read(cls, kind: str | None, older_than: str | None) -> Filter:
        """From the options of a command.

        Raises:
            UsageError: there is no such kind, or an age is none.
        """
        known = get_args(Kind.__value__)
        if kind is not None and kind not in known:
            raise UsageError(f"--kind: {kind!r} is none of {', '.join(known)}.{did_you_mean(kind, known)}")
        return cls(cast("Kind | None", kind), None if older_than is None else age_s(older_than))

    @property
    def takes_all(self) -> bool:
        """Whether it leaves nothing out."""
        return self.kind is None and self.older_s is None

    def of(self, every: Iterable[Stored]) -> list[Stored]:
        """Those that it takes."""
        return [
            one
            for one in every
            if (self.kind is None or one.kind == self.kind)
            and (self.older_s is None or one.created < self.now - self.older_s)
        ]


@dataclass(frozen=True, slots=True)
class Named:
    """What a command was given.

    Args:
        service: that keeps the checkpoints.
        paths: that were named, those of the runs included; None for all that the service has.
        runs: the folders of the runs.
    """

    service: ServiceConfig
    paths: frozenset[str] | None
    runs: tuple[Path, ...]


def named(what: Sequence[str], *, every: bool) -> Named:
    """The checkpoints of runs and paths, or all of an account.

    Raises:
        UsageError: nothing is named, there is no such run, or the runs are on different services.
    """
    from rlkit.config.schema import ServiceConfig
    from rlkit.store import checkpoints

    if every and what:
        raise UsageError("--all is every checkpoint of the account: leave the names out, or --all")
    if not every and not what:
        raise UsageError("name runs or tinker:// paths, or give --all for every checkpoint of the account")
    if every:
        return Named(ServiceConfig(), None, ())
    runs = tuple(run_directory(one) for one in what if not one.startswith("tinker://"))
    services = [config_of(run).service for run in runs] or [ServiceConfig()]
    if any(one != services[0] for one in services):
        raise UsageError("the runs are on different services: name them one at a time")
    saved = [path for run in runs for one in checkpoints(run) for path in (one.state, one.sampler)]
    return Named(services[0], frozenset([*saved, *(one for one in what if one.startswith("tinker://"))]), runs)


def config_of(directory: Path) -> Config:
    """The configuration of a run."""
    return resolve([str(directory / "config.yaml")]).config
