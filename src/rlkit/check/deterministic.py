"""Whether the reward is a function of the task and the reply alone.

Invariant: the clock and the random generators are changed here and stay changed, so this is the last check; the clock
never goes back, as clocks do not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from rlkit.check.conditions import Clock, force_chance, seed_chance
from rlkit.check.exam import BUDGET_S, Exam, Problems
from rlkit.check.play import Play, Player, name_of, shown
from rlkit.check.report import Finding
from rlkit.env import Env

DAY_S = 86_400.0

OFFSETS_S = (
    0.37,
    1.0,
    2.5,
    7.0,
    61.0,
    1_801.0,
    18_000.0,
    43_200.0,
    *(DAY_S * n for n in (1, 2, 3, 4, 5, 45, 200, 400)),
)
"""To where the wall clock is moved: through the second, the day, the week and the year."""

DELAY_S = 0.03
"""How much longer a slower model takes."""

type Condition = Callable[[Env, str], Awaitable[Sequence[Play]]]

AGAIN, TOGETHER = "played again", "played four times at once"
STRICT = (AGAIN, TOGETHER)
"""Conditions under which an environment may not raise either; under the others it may miss what it needs."""


async def deterministic(exam: Exam) -> Finding:
    """Whether the same reply to the same task always has the same reward."""
    fix = "compute the reward from the task and the reply alone; a task of chance says so with `stochastic = True`"
    problems = Problems("deterministic", fix)
    if all(getattr(env, "stochastic", False) for env in exam.envs):
        return problems.skipped("the environment says that chance belongs to it (stochastic = True)")
    seed_chance(exam.seed)
    cases = [case for env in exam.envs for case in exam.cases([env], _steady(env, exam), budget_s=BUDGET_S)]
    expected = [(*case, await exam.player.play(*case)) for case in cases]
    conditions = list(_conditions(exam))
    for condition, plays in conditions:
        started_s = time.monotonic()
        for env, reply, first in expected:
            for play in await plays(env, reply):
                if not first.same_reward(play) and (play.end == "done" or condition in STRICT):
                    seen = f"{first.told}, and {condition} {play.told}"
                    problems.lines.append(f"{name_of(env)}: the reply {shown(reply)} gets {seen}")
            if time.monotonic() - started_s > BUDGET_S / len(conditions):
                break
        if problems.lines:
            break
    return problems.finding(f"{len(expected)} replies got the same reward under {len(conditions)} conditions")


def _steady(env: Env, exam: Exam) -> list[str]:
    gold = getattr(env, "gold", None)
    return [*([gold] if isinstance(gold, str) else []), *exam.replies]


def _conditions(exam: Exam) -> Iterator[tuple[str, Condition]]:
    player = exam.player

    async def again(env: Env, reply: str) -> Sequence[Play]:
        seed_chance(exam.seed)
        return [await player.play(env, reply, under=AGAIN)]

    async def slower(env: Env, reply: str) -> Sequence[Play]:
        seed_chance(exam.seed)
        return [await player.play(env, reply, delay_s=DELAY_S, under="with a slower model")]

    async def together(env: Env, reply: str) -> Sequence[Play]:
        return await asyncio.gather(*(player.play(env, reply, under=TOGETHER) for _ in range(4)))

    yield from [(AGAIN, again)] * 3
    yield "with a slower model", slower
    for high in (False, True):
        yield _by_chance(player, lambda high=high: force_chance(high=high))
    for seed in range(4):
        yield _by_chance(player, lambda seed=seed: seed_chance(exam.seed + seed + 1))
    yield TOGETHER, together
    clock = Clock()
    for offset_s in OFFSETS_S:
        yield _at_time(player, clock, offset_s)


def _by_chance(player: Player, prepare: Callable[[], None]) -> tuple[str, Condition]:
    name = "with other random numbers"

    async def play(env: Env, reply: str) -> Sequence[Play]:
        prepare()
        return [await player.play(env, reply, under=name)]

    return name, play


def _at_time(player: Player, clock: Clock, offset_s: float) -> tuple[str, Condition]:
    name = f"with the clock {offset_s:g} s ahead"

    async def play(env: Env, reply: str) -> Sequence[Play]:
        clock.offset_s = offset_s
        return [await player.play(env, reply, under=name)]

    return name, play
