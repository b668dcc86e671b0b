"""List an environment's tasks, and choose the tasks that a run plays.

Invariant: the sizes of the splits, the settings and the seed determine the chosen tasks and their order. A resumed run
plays its original tasks, or fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, cast

from pydantic import ConfigDict, Field, StrictBool

from rlkit._util.seeds import derive_seed
from rlkit._util.threads import run_in_new_loop, run_together
from rlkit.envs.openreward.connection.clients import Access, environment
from rlkit.envs.openreward.connection.faults import classify_error, configuration_error, describe_error
from rlkit.envs.openreward.connection.target import Target
from rlkit.errors import EnvironmentFault, RlkitError, UsageError, did_you_mean
from rlkit.tasks.provenance import PinTasks
from rlkit.tasks.sources import epoch_order
from rlkit.types import Json

type Note = Callable[[str], None]
type _Count = Annotated[int, Field(strict=True, ge=1)]

_HASHED_TASKS = 16  # number of tasks in the hash of a list; each costs a request
TRAIN = "train"


@dataclass(frozen=True)
class Split:
    """Selection of the tasks of a split."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    shuffle: StrictBool = True  # draw `num_samples` tasks from the whole split, not from its beginning
    num_samples: _Count | None = None
    size: _Count | None = None  # number of tasks to use, for runs begun before the server had more; None for all


async def list_tasks(
    access: Access, splits: Mapping[str, Split] | None, *, limit_s: float
) -> tuple[Access, Mapping[str, int]]:
    """Return the access to a server with its resolved variant, and the sizes of splits.

    None selects `train`, or the only split.

    Raises:
        UsageError: the environment or split does not exist, or the server does not answer.
        MissingError: the key for OpenReward is not set.
    """
    name = access.target.name
    access = replace(access, target=await _request(name, lambda: _resolve_variant(access), limit_s))
    env = await environment(access)
    names = await _request(name, env.list_splits, limit_s)
    selected = list(splits) if splits is not None else _default_splits(names)
    for split in selected:
        if split not in names:
            hint = did_you_mean(split, names)
            raise UsageError(f"splits: {name} has no split {split!r}.{hint} It has: {', '.join(names) or 'none'}")
    sizes = {split: await _request(name, partial(env.num_tasks, split), limit_s) for split in selected}
    for split, settings in (splits or {}).items():
        if settings.size is not None:
            if settings.size > sizes[split]:
                raise UsageError(f"splits.{split}.size: the split has {sizes[split]} tasks, not {settings.size}")
            sizes[split] = settings.size
    return access, sizes


def _default_splits(names: list[str]) -> list[str]:
    if TRAIN in names or len(names) == 1:
        return [TRAIN if TRAIN in names else names[0]]
    raise UsageError(f"splits: name the splits to play; available: {', '.join(names) or 'none'}")


async def _resolve_variant(access: Access) -> Target:
    """Return the target with its variant; without a variant, every session needs an extra request."""
    target = access.target
    if target.base_url is None:
        return target
    env = await environment(access)
    async with env.client.get("/list_environments") as answer:
        if not answer.ok:
            return target  # an older server with one environment
        names = cast("list[str]", await answer.json())
    if target.variant is None:
        return replace(target, variant=names[0]) if names else target
    if target.variant not in names:
        hint = did_you_mean(target.variant, names)
        raise UsageError(f"target: {target.name} has no {target.variant!r}.{hint} It has: {', '.join(names)}")
    return target


async def _request[T](name: str, request: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """Await a request for a limited time; the SDK retries requests that may succeed later."""
    try:
        async with asyncio.timeout(limit_s):
            return await request()
    except RlkitError:
        raise
    except Exception as error:
        kind, text = classify_error(error, opening=True), describe_error(error)
        if kind == "configuration":
            raise configuration_error(name, error) from error
        if kind == "environment":
            raise EnvironmentFault(f"{name}: requesting its tasks: {text}") from error
        raise UsageError(
            f"target: {name} does not answer ({text}): check that the server is running, and its address"
        ) from error


def choose_tasks(sizes: Mapping[str, int], splits: Mapping[str, Split], *, seed: int) -> list[tuple[str, int]]:
    """Return the tasks to play, as split and index; all tasks of a split without settings in `splits`."""
    tasks = list[tuple[str, int]]()
    for name, size in sizes.items():
        split = splits.get(name, Split())
        shuffled = epoch_order(size, seed=derive_seed(seed, "openreward", name), epoch=0)
        order: list[int] = shuffled.tolist() if split.shuffle else list(range(size))
        tasks += [(name, index) for index in order[: split.num_samples]]
    if not tasks:
        raise UsageError(f"splits: there are no tasks in {', '.join(sizes)}")
    return tasks


def settle_tasks(
    access: Access,
    sizes: Mapping[str, int],
    splits: Mapping[str, Split],
    *,
    seed: int,
    limit_s: float,
    pin: PinTasks,
    note: Note,
) -> list[tuple[str, int]]:
    """Return the tasks of a run, as split and index: those that it played from its beginning.

    Args:
        sizes: current sizes of the splits.
        pin: takes what the tasks are, and returns what they were when the run began.
        note: called with a line if changes of the tasks cannot be detected.

    Raises:
        UsageError: the server no longer has the tasks of the run, or they have changed.
    """
    target = access.target.label
    tasks = choose_tasks(sizes, splits, seed=seed)
    current = {"target": target, "sizes": dict(sizes), "tasks": _group_by_split(tasks)}
    task_hash = run_in_new_loop(_hash_tasks(access, tasks, limit_s))
    if task_hash is None:
        note(f"{target} does not show its tasks, so changes of them cannot be detected")
    pinned = cast("dict[str, Json]", pin(current | {"mark": task_hash}))
    if pinned["target"] != target:
        raise UsageError(f"target: the run was started with {pinned['target']}, not {target}")
    pinned_sizes = cast("dict[str, int]", pinned["sizes"])
    for name, size in pinned_sizes.items():
        if size > sizes.get(name, size):
            raise UsageError(f"target: {name} of {target} had {size} tasks when the run was started, and has fewer now")
    pinned_tasks = choose_tasks(pinned_sizes, splits, seed=seed)
    if _group_by_split(pinned_tasks) != pinned["tasks"]:  # the settings have changed
        return tasks
    if pinned_tasks != tasks:
        task_hash = run_in_new_loop(_hash_tasks(access, pinned_tasks, limit_s))
    if task_hash is not None and pinned["mark"] not in (None, task_hash):
        raise UsageError(
            f"target: the tasks of {target} have changed since the run was started; restore the server's version of "
            "that time, or start a new run"
        )
    return pinned_tasks


def _group_by_split(tasks: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    indices = dict[str, list[int]]()
    for split, index in tasks:
        indices.setdefault(split, []).append(index)
    return indices


async def _hash_tasks(access: Access, tasks: Sequence[tuple[str, int]], limit_s: float) -> str | None:
    """Return a hash of tasks sampled evenly from the list; None if the server does not show them."""
    env = await environment(access)

    async def encode_task(split: str, index: int) -> bytes:
        task = await _request(access.target.name, lambda: env.get_task(split, index), limit_s)
        return json.dumps([split, index, task.task_spec], sort_keys=True).encode()

    count = min(len(tasks), _HASHED_TASKS)
    try:
        lines = await run_together(encode_task(*tasks[place * len(tasks) // count]) for place in range(count))
    except RlkitError:
        return None
    return hashlib.sha256(b"\n".join(lines)).hexdigest()
