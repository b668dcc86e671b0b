"""Cheats against environments that grade replies: each in rollouts of its own, in a process of its own.

Invariant: nothing that an environment does ends the attack but a rollout that cannot be ended; what was not tried by
then is said.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from rlkit.check.context import draw_tasks
from rlkit.check.forked_process import Send, run_isolated
from rlkit.check.player import Hang, Player, WatchedRollout, name_of
from rlkit.env import Env, TaskSource
from rlkit.errors import UsageError
from rlkit.redteam.reply_cheats import REPLY_CHEATS, ReplyCheat, Situation
from rlkit.redteam.report import Attempt, RedTeamReport, Result, attempt_result
from rlkit.testing.policies import ByteChat

HONEST_REPLY = ""
"""The reply of an honest empty attempt."""

AT_ONCE = 4
"""Rollouts at one time: environments with servers and programs wait more than they work."""

type Untried = tuple[str, str]
"""A task, and why nothing could be tried on it."""

_REMAINING = "the remaining cheats"

_CONTENT = re.compile(r"[^\W_]")
"""Letters and digits of a right answer."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A task under attack, with what an honest empty attempt earned."""

    env: Env
    task_id: str
    honest: float
    situation: Situation


async def attack_replies(
    source: TaskSource | Sequence[Env],
    *,
    tasks: int,
    timeout_s: float,
    seed: int,
    cheats: Sequence[ReplyCheat] = REPLY_CHEATS,
) -> RedTeamReport:
    """WatchedRollout each cheat on some tasks, and compare what it earns with an honest empty attempt.

    Args:
        tasks: how many tasks of the source are attacked.
        timeout_s: for one rollout.
        seed: chooses tasks of a sequence, and what cheats draw by chance.

    Raises:
        UsageError: there is nothing to attack.
    """

    def work(send: Send[Attempt | Untried]) -> Coroutine[object, object, None]:
        player = Player(ByteChat(), timeout_s, send)
        player.say("drawing tasks")
        envs = draw_tasks(source, tasks=tasks, seed=seed)
        if not envs:
            raise UsageError("the source has no tasks to attack")
        return _attack(envs, player, cheats, seed=seed, send=send)

    results, abort = await run_isolated(work, timeout_s=timeout_s)
    untried = dict(result for result in results if not isinstance(result, Attempt))
    if abort is not None:
        untried[_REMAINING] = abort.reason
    return RedTeamReport([result for result in results if isinstance(result, Attempt)], untried)


async def _attack(
    envs: Sequence[Env],
    player: Player,
    cheats: Sequence[ReplyCheat],
    *,
    seed: int,
    send: Callable[[Attempt | Untried], None],
) -> None:
    tasks = list[_Task]()
    try:
        for env in envs:
            play = await player.play(env, HONEST_REPLY)
            if play.reward is None:
                send((name_of(env), f"an honest empty attempt gets no reward: it {play.result}"))
            else:
                tasks.append(_Task(env, name_of(env), play.reward, _situation(env, play, seed)))
        for cheat in cheats:
            for task in tasks:
                send(await _attempt(cheat, task, player))
    except Hang as hang:
        send((_REMAINING, str(hang)))


def _situation(env: Env, play: WatchedRollout, seed: int) -> Situation:
    gold = getattr(env, "gold", None)
    form = _CONTENT.sub("", gold) if isinstance(gold, str) else ""
    return Situation(play.prompts[0] if play.prompts else "", play.tools, form, seed)


async def _attempt(cheat: ReplyCheat, task: _Task, player: Player) -> Attempt:
    """Return the best that the replies of one cheat earn."""
    replies = list(dict.fromkeys(cheat.replies(task.situation)))
    best: float | None = None
    detail = ""
    places = asyncio.Semaphore(AT_ONCE)
    for play in await asyncio.gather(*(_played(player, task.env, reply, places) for reply in replies)):
        if isinstance(play, str) or play.reward is None:
            detail = detail or (play if isinstance(play, str) else f"it {play.result}")
        elif best is None or play.reward > best:
            best = play.reward
    if not replies:
        result: Result = "not tried"
        detail = "the prompt asks for nothing that this cheat could answer"
    else:
        result = attempt_result(best, task.honest)
    return Attempt(cheat.name, cheat.does, task.task_id, result, best, task.honest, detail if best is None else "")


async def _played(player: Player, env: Env, reply: str, places: asyncio.Semaphore) -> WatchedRollout | str:
    """WatchedRollout one reply; return the rollout, or how it did not end."""
    try:
        async with places:
            return await player.play(env, reply)
    except Hang as hang:
        if hang.swallowed:
            raise
        return str(hang)
