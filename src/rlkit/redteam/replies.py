"""Cheats against environments that grade replies: each in rollouts of its own, in a process of its own.

Invariant: nothing that an environment does ends the attack but a rollout that cannot be ended; what was not tried by
then is said.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from rlkit.check.examine import draw
from rlkit.check.isolate import Died, Silent, isolated
from rlkit.check.play import GRACE_S, Hang, Play, Player, name_of
from rlkit.env import Env, TaskSource
from rlkit.errors import RlkitError, UsageError
from rlkit.redteam.reply_cheats import REPLY_CHEATS, ReplyCheat, Situation
from rlkit.redteam.report import Attempt, RedTeamReport, Result, attempt_result
from rlkit.testing.policies import ByteChat
from rlkit.types import Json

HONEST_REPLY = ""
"""The reply of an honest empty attempt."""

MARGIN_S = 1.0
AT_ONCE = 4
"""Rollouts at one time: environments with servers and programs wait more than they work."""

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
    """Play each cheat on some tasks, and compare what it earns with an honest empty attempt.

    Args:
        tasks: how many tasks of the source are attacked.
        timeout_s: for one rollout.
        seed: chooses tasks of a sequence, and what cheats draw by chance.

    Raises:
        UsageError: there is nothing to attack.
    """

    def work(say: Callable[[Json], None]) -> None:
        player = Player(ByteChat(), timeout_s, lambda doing: say({"doing": doing}))
        player.say("drawing tasks")
        envs, _ = draw(source, tasks=tasks, seed=seed)
        if not envs:
            return say({"usage": "the source has no tasks to attack"})
        asyncio.run(_attack(envs, player, cheats, seed=seed, say=say))

    stop = threading.Event()
    try:
        return await asyncio.to_thread(_collect, work, cheats, silence_s=timeout_s + GRACE_S + MARGIN_S, stop=stop)
    finally:
        stop.set()


def _collect(
    work: Callable[[Callable[[Json], None]], None],
    cheats: Sequence[ReplyCheat],
    *,
    silence_s: float,
    stop: threading.Event,
) -> RedTeamReport:
    attempts: list[Attempt] = []
    untried: dict[str, str] = {}
    doing = ""
    sentences = {cheat.name: cheat.does for cheat in cheats}
    try:
        for message in isolated(work, silence_s=silence_s, stop=stop):
            match message:
                case {"doing": str(doing)}:
                    pass
                case {"attempt": [str(cheat), str(task_id), str(result), reward, honest, str(detail)]}:
                    numbers = cast("tuple[float | None, float]", (reward, honest))
                    attempts.append(Attempt(cheat, sentences[cheat], task_id, cast("Result", result), *numbers, detail))
                case {"untried": [str(task_id), str(reason)]}:
                    untried[task_id] = reason
                case {"usage": str(complaint)}:
                    raise UsageError(complaint)
                case _:
                    raise RlkitError(f"the red team itself failed at {doing}: {message}")
    except Silent:
        untried["the remaining cheats"] = f"{doing}: it blocks the event loop for more than {silence_s:g} s"
    except Died as error:
        untried["the remaining cheats"] = f"{doing}: {error}"
    return RedTeamReport(attempts, untried)


async def _attack(
    envs: Sequence[Env], player: Player, cheats: Sequence[ReplyCheat], *, seed: int, say: Callable[[Json], None]
) -> None:
    tasks = list[_Task]()
    try:
        for env in envs:
            play = await player.play(env, HONEST_REPLY)
            if play.reward is None:
                say({"untried": [name_of(env), f"an honest empty attempt gets no reward: it {play.told}"]})
            else:
                tasks.append(_Task(env, name_of(env), play.reward, _situation(env, play, seed)))
        for cheat in cheats:
            for task in tasks:
                attempt = await _attempt(cheat, task, player)
                say(
                    {"attempt": [cheat.name, task.task_id, attempt.result, attempt.reward, task.honest, attempt.detail]}
                )
    except Hang as hang:
        say({"untried": ["the remaining cheats", str(hang)]})
    say(None)  # before the loop ends, which would wait for a rollout that swallows cancellation


def _situation(env: Env, play: Play, seed: int) -> Situation:
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
            detail = detail or (play if isinstance(play, str) else f"it {play.told}")
        elif best is None or play.reward > best:
            best = play.reward
    if not replies:
        result: Result = "not tried"
        detail = "the prompt asks for nothing that this cheat could answer"
    else:
        result = attempt_result(best, task.honest)
    return Attempt(cheat.name, cheat.does, task.task_id, result, best, task.honest, detail if best is None else "")


async def _played(player: Player, env: Env, reply: str, places: asyncio.Semaphore) -> Play | str:
    """Play one reply; return the rollout, or how it did not end."""
    try:
        async with places:
            return await player.play(env, reply)
    except Hang as hang:
        if hang.swallowed:
            raise
        return str(hang)
