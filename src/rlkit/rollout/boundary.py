"""One rollout, or the scoring of a group, at the boundary where an environment's faults become data.

Invariant: whatever an environment does, playing it ends: with an outcome, or with a line that says why there is none.
What the service or the configuration did wrong is raised.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from rlkit._util.json_values import escape_surrogates, safe_str
from rlkit._util.stopwatch import Stopwatch, use_stopwatches
from rlkit.env import Env, GroupScorer
from rlkit.errors import EnvironmentFault, LimitReached, MissingError, RewardError, ServiceError, UsageError
from rlkit.policy import Policy
from rlkit.rollout.task_guard import Exited, guard_tasks, stop
from rlkit.rollout.validation import as_outcome, as_scores
from rlkit.types import Episode, Outcome


async def play_env(env: Env, policy: Policy, *, timeout_s: float, name: str = "") -> tuple[Outcome | None, str | None]:
    """Play an environment; its outcome, or why it failed.

    Args:
        env: the task to play.
        policy: the handle that it samples through.
        timeout_s: the limit in seconds, as `Stopwatch` counts them.
        name: the environment's name in the run; by default that of its class.

    Raises:
        ServiceError: the service failed after retries.
        UsageError: the environment and the model do not fit together.
        MissingError: something that has to be installed is not there.
    """
    kind = type(env).__name__
    read = partial(as_outcome, of=kind)
    what, doing = f"{kind}.rollout", "the rollout"
    return await _bounded(lambda: env.rollout(policy), read, what, doing=doing, timeout_s=timeout_s, name=name or kind)


async def scores_of(
    env: GroupScorer, episodes: Sequence[Episode], *, timeout_s: float, name: str = ""
) -> tuple[list[float] | None, str | None]:
    """Score a group; the rewards, or why that failed; neither if its environment does not compare episodes.

    Args and errors are those of `play_env`; `episodes` are those that did not fail.
    """
    kind = type(env).__name__
    read = partial(as_scores, count=len(episodes), of=kind)
    what, doing = f"{kind}.score_group", "scoring the group"
    return await _bounded(
        lambda: env.score_group(episodes), read, what, doing=doing, timeout_s=timeout_s, name=name or kind
    )


async def _bounded[T](
    call: Callable[[], object], read: Callable[[object], T], what: str, *, doing: str, timeout_s: float, name: str
) -> tuple[T | None, str | None]:
    """Return what a method of an environment gave, read, or why there is nothing."""
    stopwatch = Stopwatch(name)
    stopped = True
    with guard_tasks():
        with use_stopwatches([stopwatch]):  # a task of its own, or it could cancel the group's
            playing = asyncio.create_task(_awaited(call, read, what))
        try:
            late = await stopwatch.wait_for_limit(timeout_s, playing)
        finally:
            if not playing.done():
                stopped = await stop([playing])
    took_long = f"{doing} took longer than {timeout_s:g} s (timeout_s)"
    if late:
        return None, took_long if stopped else f"{took_long} and ignored its cancellation"
    try:
        result = playing.result()
        if stopwatch.played_s > timeout_s:  # it held the event loop, so that nothing could interrupt it
            return None, took_long
        return result, None
    except (ServiceError, UsageError, MissingError, KeyboardInterrupt):  # the last is a signal's
        raise
    except asyncio.CancelledError:
        return None, "the environment cancelled its own rollout"
    except BaseException as error:  # an environment may raise anything; the record says what
        errors = _leaves(error)
        for ours in errors:
            if isinstance(ours, ServiceError | UsageError | MissingError):
                raise ours from error
        return None, _described(errors[0])  # a line has room for one


async def _awaited[T](call: Callable[[], object], read: Callable[[object], T], what: str) -> T:
    """Await a method and read its result: the texts of the user's own objects are the user's code, too."""
    playing = call()
    if not inspect.isawaitable(playing):
        name = what.rpartition(".")[2]
        raise RewardError(f"{what} is an ordinary function; write `async def {name}`")
    return read(await playing)


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group of errors, and in groups inside it."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for inner in group.exceptions for leaf in _leaves(inner)]


def _described(error: BaseException) -> str:
    if isinstance(error, EnvironmentFault):  # raised on purpose
        return safe_str(error)
    if isinstance(error, LimitReached):
        return f"{safe_str(error)}; an environment that catches rlkit.LimitReached can grade what is there"
    raised = (error.__cause__ if isinstance(error, Exited) else None) or error
    frames = traceback.extract_tb(raised.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return escape_surrogates(f"{type(raised).__name__}: {safe_str(raised)}{where}")
