"""Costly objects of environments, made once in each process that plays rollouts.

Invariant: an object is open from its first use until the end of the run, and is closed in the task that opened it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import cast
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakValueDictionary

_resources = WeakValueDictionary[str, "WorkerResource[object]"]()
"""Resources of this process by key: rollouts unpickle their tasks separately, and share the resources."""


class WorkerResource[T]:
    """A browser, a server or another costly object that the rollouts of a process share.

    ::

        browser = rlkit.WorkerResource(open_browser)  # a function that returns an asynchronous context manager

        class Page(rlkit.Env):
            async def rollout(self, policy: rlkit.Policy) -> float:
                page = await (await browser.get()).new_page()

    Args:
        make: returns the context manager; called in each process, at the first use.
        key: identifies the object in all processes; by default unique.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]], *, key: str | None = None) -> None:
        self._make = make
        self._key = key or uuid4().hex
        self._opened = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[asyncio.Future[T], asyncio.Task[None]]]()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Pickle without the open object: another process makes its own."""
        return _find_resource, (self._key, self._make)

    async def get(self) -> T:
        """Return the object of this process; raise what `make` raises if it cannot be opened."""
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            opened = loop.create_future()
            # A task that a rollout creates is cancelled at the end of the run.
            self._opened[loop] = opened, asyncio.create_task(self._hold(opened), name=f"hold {self._make!r}")
        return await asyncio.shield(self._opened[loop][0])

    async def _hold(self, opened: asyncio.Future[T]) -> None:
        """Keep the object open until this task is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            async with self._make() as value:
                opened.set_result(value)
                await loop.create_future()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            self._opened.pop(loop, None)


def _find_resource[T](key: str, make: Callable[[], AbstractAsyncContextManager[T]]) -> WorkerResource[T]:
    """Return the resource of this process with a key, or a new one."""
    resource = cast("WorkerResource[T] | None", _resources.get(key))
    if resource is None:
        resource = WorkerResource(make, key=key)
        _resources[key] = cast("WorkerResource[object]", resource)
    return resource
