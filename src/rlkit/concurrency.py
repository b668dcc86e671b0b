"""Running coroutines side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import cast


async def together[T](coroutines: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Run them all and return their results in order.

    When one raises, the others are cancelled and awaited, and its own exception (not a group of them) is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


def _first(failure: BaseException) -> BaseException:
    if isinstance(failure, BaseExceptionGroup):
        return _first(cast("BaseExceptionGroup[BaseException]", failure).exceptions[0])
    return failure
