"""Attack environments that grade replies: each reply in its own rollout, all in a forked process.

Invariant: the attack ends early only if a rollout cannot be stopped; the report then names the untried part.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from rlkit.check.context import draw_tasks
from rlkit.check.forked_process import Send, run_isolated
from rlkit.check.player import Abort, Player, WatchedRollout, get_task_name
from rlkit.env import Env, TaskSource
from rlkit.errors import UsageError
from rlkit.redteam.reply_cheats import REPLY_CHEATS, ReplyCheat, Situation
from rlkit.redteam.report import Attempt, RedTeamReport, Result, classify_attempt
from rlkit.testing.policies import ByteChat

HONEST_REPLY = ""  # reply of an honest empty attempt
CONCURRENCY = 4  # number of concurrent rollouts; environments with servers and programs mostly wait

type SkippedTask = tuple[str, str]  # task without any attempt, with the reason

_REMAINING = "the remaining cheats"

_CONTENT = re.compile(r"[^\W_]")  # letter or digit of a gold answer


@dataclass(frozen=True, slots=True)
class _Task:
    """Task under attack, with the reward of an honest empty attempt."""

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
    """Play each cheat on some tasks, and compare its reward with that of an honest empty attempt.

    Arguments are as in `attack_environment`.

    Raises:
        UsageError: the source has no tasks.
    """

    def work(send: Send[Attempt | SkippedTask]) -> Coroutine[object, object, None]:
        player = Player(ByteChat(), timeout_s, send)
        player.announce("drawing tasks")
        envs = draw_tasks(source, tasks=tasks, seed=seed)
        if not envs:
            raise UsageError("the source has no tasks to attack")
        return _attack(envs, player, cheats, seed=seed, send=send)

    results, abort = await run_isolated(work, timeout_s=timeout_s)
    skipped_tasks = dict(result for result in results if not isinstance(result, Attempt))
    if abort is not None:
        skipped_tasks[_REMAINING] = abort.reason
    return RedTeamReport([result for result in results if isinstance(result, Attempt)], skipped_tasks)


async def _attack(
    envs: Sequence[Env],
    player: Player,
    cheats: Sequence[ReplyCheat],
    *,
    seed: int,
    send: Callable[[Attempt | SkippedTask], None],
) -> None:
    tasks = list[_Task]()
    for env in envs:
        rollout = await player.play(env, HONEST_REPLY)
        name = get_task_name(env)
        if rollout.reward is None:
            send((name, f"an honest empty attempt gets no reward: it {rollout.result}"))
        else:
            tasks.append(_Task(env, name, rollout.reward, _make_situation(env, rollout, seed)))
    for cheat in cheats:
        for task in tasks:
            send(await _try_cheat(cheat, task, player))


def _make_situation(env: Env, rollout: WatchedRollout, seed: int) -> Situation:
    gold = getattr(env, "gold", None)
    form = _CONTENT.sub("", gold) if isinstance(gold, str) else ""
    return Situation(rollout.prompts[0] if rollout.prompts else "", rollout.tools, form, seed)


async def _try_cheat(cheat: ReplyCheat, task: _Task, player: Player) -> Attempt:
    """Return the attempt with the highest reward of a cheat's replies."""
    replies = list(dict.fromkeys(cheat.replies(task.situation)))
    slots = asyncio.Semaphore(CONCURRENCY)
    rewards = await asyncio.gather(*(_play_reply(player, task.env, reply, slots) for reply in replies))
    best = max((reward for reward in rewards if not isinstance(reward, str)), default=None)
    detail = next((reason for reason in rewards if isinstance(reason, str)), "")
    result: Result = classify_attempt(best, task.honest) if replies else "not tried"
    reason = detail if replies else "this cheat does not apply to the prompt"
    return Attempt(
        cheat.name, cheat.description, task.task_id, result, best, task.honest, reason if best is None else ""
    )


async def _play_reply(player: Player, env: Env, reply: str, slots: asyncio.Semaphore) -> float | str:
    """Play one reply; return the reward, or the reason why there is none."""
    try:
        async with slots:
            rollout = await player.play(env, reply)
        return f"it {rollout.result}" if rollout.reward is None else rollout.reward
    except Abort as abort:
        if abort.is_stuck:
            raise
        return abort.reason
