"""What tasks an environment has, and which of them a run plays.

Invariant: which tasks are chosen, and their order, follow from the sizes of the splits, the settings and the seed. A
run that goes on plays the tasks that it began with, or does not go on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

from pydantic import ConfigDict

from rlkit._util.seeds import derive_seed
from rlkit._util.threads import run_together
from rlkit.envs.openreward.connection import sdk
from rlkit.envs.openreward.connection.clients import Access, environment
from rlkit.envs.openreward.connection.faults import configuration_error, describe_error, kind_of
from rlkit.envs.openreward.connection.target import Target
from rlkit.errors import EnvironmentFault, RlkitError, UsageError, did_you_mean
from rlkit.tasks.sources import epoch_order

if TYPE_CHECKING:
    from rlkit.tasks.provenance import PinTasks
    from rlkit.types import Json

type Note = Callable[[str], None]

_ASKED = 4
"""Times that a server is asked which tasks it has."""

_PAUSE_S = 0.5

_MARKED = 16
"""Tasks that a list is recognised by: each costs a request."""

TRAIN = "train"


@dataclass(frozen=True)
class Split:
    """Which tasks of a split are played.

    Args:
        shuffle: take `num_samples` anywhere in the split, not from its beginning.
        size: ignore tasks from this one on, for what was played before a server had them; None for all.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    shuffle: bool = True
    num_samples: int | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("num_samples", self.num_samples), ("size", self.size)):
            if value is not None and value < 1:
                raise UsageError(f"splits: {name} is {value}, and must be at least 1")


@dataclass(frozen=True)
class TaskListing:
    """The tasks of a server: its `access` with the variant filled in, and the sizes of the splits that are wanted."""

    access: Access
    sizes: Mapping[str, int]


def list_tasks(access: Access, splits: Mapping[str, Split] | None, *, limit_s: float) -> TaskListing:
    """Ask a server which tasks the wanted splits have; None for `train`, or the only one.

    Raises:
        UsageError: there is no such environment or split, or the server does not answer.
        MissingError: there is no key for OpenReward.
    """
    return sdk.blocking(lambda: _list_tasks(access, splits, limit_s))


async def _list_tasks(access: Access, splits: Mapping[str, Split] | None, limit_s: float) -> TaskListing:
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
    for split, settings in (splits or {}).items():
        if settings.size is not None:
            if settings.size > sizes[split]:
                raise UsageError(f"splits.{split}.size: it has {sizes[split]} tasks, and not {settings.size}")
            sizes[split] = settings.size
    return TaskListing(access, sizes)


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
            kind, text = kind_of(error, opening=True), describe_error(error)
            if kind == "configuration":
                raise configuration_error(name, error) from error
            if kind == "environment":
                raise EnvironmentFault(f"{name}: asking for its tasks: {text}") from error
            if not left:
                raise UsageError(
                    f"target: {name} does not answer ({text}): is the server running, and the address right?"
                ) from error
        await asyncio.sleep(_PAUSE_S * 2 ** (_ASKED - left - 1))
    raise AssertionError("the last question is answered or raises")


def choose_tasks(sizes: Mapping[str, int], splits: Mapping[str, Split], *, seed: int) -> list[tuple[str, int]]:
    """Return the tasks that are played, as split and index; all of a split that `splits` does not have."""
    tasks = list[tuple[str, int]]()
    for name, size in sizes.items():
        split = splits.get(name, Split())
        order = (
            epoch_order(size, seed=derive_seed(seed, "openreward", name), epoch=0)
            if split.shuffle
            else list(range(size))
        )
        tasks += [(name, index) for index in order[: split.num_samples]]
    if not tasks:
        raise UsageError(f"splits: there are no tasks in {', '.join(sizes)}")
    return tasks


def settle_sizes(
    listing: TaskListing, splits: Mapping[str, Split], *, seed: int, limit_s: float, recorded: PinTasks, note: Note
) -> Mapping[str, int]:
    """Return the sizes of the splits that a run plays from: those at its beginning.

    Args:
        listing: tasks that the server has now.
        recorded: takes what the tasks are, and returns what they were when the run began.
        note: takes a line if a change of the tasks would not be noticed.

    Raises:
        UsageError: the server no longer has those tasks, or they have changed.
    """
    target = listing.access.target.label
    tasks = choose_tasks(listing.sizes, splits, seed=seed)
    now = {"target": target, "sizes": dict(listing.sizes), "tasks": _by_split(tasks)}
    mark = sdk.blocking(lambda: _mark(listing.access, tasks, limit_s))
    if mark is None:
        note(f"{target} does not show its tasks, so that a change of them is not noticed")
    begun = cast("dict[str, Json]", recorded(now | {"mark": mark}))
    if begun["target"] != target:
        raise UsageError(f"target: the run was begun with {begun['target']}, and this is {target}")
    sizes = cast("dict[str, int]", begun["sizes"])
    for name, size in sizes.items():
        if size > listing.sizes.get(name, size):
            raise UsageError(f"target: {name} of {target} had {size} tasks when the run began, and has fewer now")
    tasks_begun = choose_tasks(sizes, splits, seed=seed)
    if _by_split(tasks_begun) != begun["tasks"]:  # the settings are others by now
        return listing.sizes
    if tasks_begun != tasks:
        mark = sdk.blocking(lambda: _mark(listing.access, tasks_begun, limit_s))
    if mark is not None and begun["mark"] not in (None, mark):
        raise UsageError(
            f"target: the tasks of {target} are no longer those that the run was begun with; bring back the version of "
            "that time, or begin a new run"
        )
    return sizes


def _by_split(tasks: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    indices = dict[str, list[int]]()
    for split, index in tasks:
        indices.setdefault(split, []).append(index)
    return indices


async def _mark(access: Access, tasks: Sequence[tuple[str, int]], limit_s: float) -> str | None:
    """A hash of tasks that are spread over the list; None where the server does not show them."""
    env = await environment(access)

    async def shown(split: str, index: int) -> bytes:
        task = await _patiently(access.target.name, lambda: env.get_task(split, index), limit_s)
        return json.dumps([split, index, task.task_spec], sort_keys=True).encode()

    picked = [tasks[place * len(tasks) // _MARKED] for place in range(_MARKED)] if len(tasks) > _MARKED else tasks
    try:
        lines = await run_together(shown(split, index) for split, index in picked)
    except RlkitError:
        return None
    return hashlib.sha256(b"\n".join(lines)).hexdigest()
