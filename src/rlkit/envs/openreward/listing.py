"""What tasks an environment has, and which of them a run plays.

Invariant: which tasks are chosen, and their order, follow from the sizes of the splits, the settings and the seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from pydantic import ConfigDict

from rlkit.envs.openreward import sdk
from rlkit.envs.openreward.clients import Access, environment
from rlkit.envs.openreward.faults import kind_of, misconfigured, told
from rlkit.envs.openreward.target import Target
from rlkit.errors import EnvironmentFault, RlkitError, UsageError, did_you_mean
from rlkit.seeds import derive
from rlkit.sources import shuffled

_ASKED = 4
"""Times that a server is asked which tasks it has."""

_PAUSE_S = 0.5

TRAIN = "train"


@dataclass(frozen=True)
class Split:
    """Which tasks of a split are played.

    Args:
        shuffle: take `num_samples` anywhere in the split, not from its beginning.
        num_samples: at most so many; None for all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    shuffle: bool = True
    num_samples: int | None = None

    def __post_init__(self) -> None:
        if self.num_samples is not None and self.num_samples < 1:
            raise UsageError(f"splits: num_samples is {self.num_samples}, and must be at least 1")


@dataclass(frozen=True)
class Found:
    """What a server has.

    Args:
        access: to it, with the environment that is meant.
        sizes: tasks of each split that was asked for.
    """

    access: Access
    sizes: Mapping[str, int]


def find(access: Access, splits: Mapping[str, Split] | None, *, limit_s: float) -> Found:
    """Ask a server which tasks it has.

    Args:
        access: to it.
        splits: that are wanted; None for `train`, or the only one.
        limit_s: seconds that each question may take.

    Raises:
        UsageError: there is no such environment or split, or the server does not answer.
        MissingError: there is no key for OpenReward.
    """
    return sdk.blocking(lambda: _find(access, splits, limit_s))


async def _find(access: Access, splits: Mapping[str, Split] | None, limit_s: float) -> Found:
    name = access.target.name

    async def asked[T](question: Callable[[], Awaitable[T]]) -> T:
        return await _patiently(name, question, limit_s)

    access = replace(access, target=await asked(lambda: _whole(access)))
    env = await environment(access)
    known = await asked(env.list_splits)
    wanted = list(splits) if splits is not None else _usual(known)
    for split in wanted:
        if split not in known:
            hint = did_you_mean(split, known)
            raise UsageError(f"splits: {name} has no split {split!r}.{hint} It has: {', '.join(known) or 'none'}")
    sizes = {split: await asked(lambda split=split: env.num_tasks(split)) for split in wanted}
    return Found(access, sizes)


def _usual(known: list[str]) -> list[str]:
    if TRAIN in known or len(known) == 1:
        return [TRAIN if TRAIN in known else known[0]]
    raise UsageError(f"splits: say which to play; there are {', '.join(known) or 'none'}")


async def _whole(access: Access) -> Target:
    """The target with its variant: a server that is asked for its first answers each request twice."""
    target = access.target
    if target.base_url is None:
        return target
    env = await environment(access)
    async with env.client.get("/list_environments") as answer:
        if not answer.ok:
            return target  # an older server, which has one
        names = cast("list[str]", await answer.json())
    if target.variant is None:
        return replace(target, variant=names[0]) if names else target
    if target.variant not in names:
        hint = did_you_mean(target.variant, names)
        raise UsageError(f"target: {target.name} has no {target.variant!r}.{hint} It has: {', '.join(names)}")
    return target


async def _patiently[T](name: str, question: Callable[[], Awaitable[T]], limit_s: float) -> T:
    for left in reversed(range(_ASKED)):
        try:
            async with asyncio.timeout(limit_s):
                return await question()
        except RlkitError:
            raise
        except Exception as error:
            kind = kind_of(error, opening=True)
            if kind == "configuration":
                raise misconfigured(name, error) from error
            if kind == "environment":
                raise EnvironmentFault(f"{name}: asking for its tasks: {told(error)}") from error
            if not left:
                raise UsageError(
                    f"target: {name} does not answer ({told(error)}): is the server running, and the address right?"
                ) from error
        await asyncio.sleep(_PAUSE_S * 2 ** (_ASKED - left - 1))
    raise AssertionError("the last question is answered or raises")


def chosen(sizes: Mapping[str, int], splits: Mapping[str, Split], *, seed: int) -> list[tuple[str, int]]:
    """The tasks that are played, as split and index.

    Args:
        sizes: tasks of each split.
        splits: which of them; a split that is not in it is played whole.
        seed: of the shuffling.

    Raises:
        UsageError: there is none.
    """
    tasks = list[tuple[str, int]]()
    for name, size in sizes.items():
        split = splits.get(name, Split())
        order = shuffled(size, seed=derive(seed, "openreward", name), epoch=0) if split.shuffle else list(range(size))
        tasks += [(name, index) for index in order[: split.num_samples]]
    if not tasks:
        raise UsageError(f"splits: there are no tasks in {', '.join(sizes)}")
    return tasks
