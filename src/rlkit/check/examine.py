"""The order of the checks, and the tasks that they are given.

Invariant: the same source, seed and chat format are checked by the same plays in the same order.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import cast

from rlkit.check import checks, deterministic, leftovers
from rlkit.check.exam import Exam, Problems
from rlkit.check.play import Hang, Player
from rlkit.check.report import Finding
from rlkit.check.structure import snapshot
from rlkit.env import Env, TaskSource
from rlkit.types import Json

TIME = "time limit"
SOURCE = "task source"

CHECKS: Mapping[str, Callable[[Exam], Awaitable[Finding]]] = {
    "picklable": checks.picklable,
    "prompt": checks.prompt,
    "gold answer": checks.gold_answer,
    "empty answer": checks.empty_answer,
    "token-exact": checks.token_exact,
    "turn limit": checks.turn_limit,
    "clean-up": leftovers.clean_up,
    "cancellation": leftovers.cancellation,
    "odd replies": checks.odd_replies,
    "unchanged": checks.unchanged,
    "reward range": checks.reward_range,
    "deterministic": deterministic.deterministic,
}
"""Every check by its name, in the order in which they run."""


async def examine(
    envs: Sequence[Env], player: Player, *, seed: int, tell: Callable[[Finding], None], done: Callable[[], None]
) -> None:
    """Run the checks and tell each finding as it is made, up to a rollout that hangs."""
    gc.freeze()  # the collections that the clean-up check asks for need not look at what the caller had
    exam = Exam(envs, player, seed, [snapshot(env) for env in envs])
    try:
        for name, check in CHECKS.items():
            player.say(name)
            tell(await check(exam))
        seconds = sorted(play.seconds for play in player.plays)
        took = f"{len(seconds)} rollouts, median {seconds[len(seconds) // 2]:.2g} s, slowest {seconds[-1]:.2g} s"
        tell(Finding(TIME, "passed", took))
    except Hang as hang:
        fix = "let CancelledError pass" if hang.swallowed else "give every wait in the environment a time limit"
        tell(Finding(TIME, "failed", str(hang), fix))
    done()


def draw(source: TaskSource | Sequence[Env], *, tasks: int, seed: int) -> tuple[Sequence[Env], Finding]:
    """Some tasks to play, and whether the source that gave them can be trusted to give them again."""
    if isinstance(source, Sequence):
        chosen = random.Random(seed).sample(range(len(source)), min(tasks, len(source)))
        return [source[index] for index in sorted(chosen)], Finding(
            SOURCE, "skipped", "the tasks were given themselves"
        )
    problems = Problems(SOURCE, "make next() a function of the seed and of what state_dict() holds")
    start = source.state_dict()
    envs = list(_next(source, tasks))
    try:
        source.load_state_dict(cast("Mapping[str, Json]", json.loads(json.dumps(start))))
        again = list(_next(source, tasks))
    except Exception as error:
        problems.lines.append(f"its state cannot be written as JSON and loaded again: {type(error).__name__}: {error}")
        return envs, problems.finding("")
    if [snapshot(env) for env in envs] != [snapshot(env) for env in again]:
        problems.lines.append("after load_state_dict(state_dict()) it gives other tasks")
    return envs, problems.finding(f"gives the same {len(envs)} tasks again from its saved state")


def _next(source: TaskSource, count: int) -> Iterator[Env]:
    for _ in range(count):
        env = source.next()
        if env is None:
            return
        yield env
