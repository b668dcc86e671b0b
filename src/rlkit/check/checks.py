"""The checks of an environment: one function each, and one table of them.

Invariant: a check asks for plays and judges them. Only the last one changes the process, for good: it moves the clock,
which never goes back, and sets the random generators.
"""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from rlkit.check.conditions import make_conditions, seed_chance
from rlkit.check.context import BUDGET_S, CLOSELY, FULL, CheckContext, draw_tasks
from rlkit.check.leaks import count_resources, find_leaks
from rlkit.check.player import Hang, abbreviate
from rlkit.check.replies import EMPTY, ODD, PLAIN
from rlkit.check.report import Finding
from rlkit.check.snapshots import changes, snapshot
from rlkit.env import Env
from rlkit.testing.policies import MAX_TOKENS, NoisyPolicy
from rlkit.types import Json

TIME = "time limit"

NOISE = 20
"""How many replies of noise are played."""

CUT_TOKENS = 7
"""Where some replies are cut off."""


class Skip(Exception):
    """A check does not apply; the text is the reason."""


async def _task_source(context: CheckContext) -> str:
    if context.source is None:
        raise Skip("the tasks were given themselves")
    try:
        context.source.load_state_dict(cast("Mapping[str, Json]", json.loads(json.dumps(context.state))))
        again = draw_tasks(context.source, tasks=len(context.envs), seed=context.seed)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        context.problems.append(f"its state cannot be written as JSON and loaded again: {reason}")
        return ""
    if [*context.snapshots] != [snapshot(env) for env in again]:
        context.problems.append("after load_state_dict(state_dict()) it gives other tasks")
    return f"gives the same {len(context.envs)} tasks again from its saved state"


async def _picklable(context: CheckContext) -> str:
    for env in context.envs:
        try:
            copy = cast("object", pickle.loads(pickle.dumps(env)))
        except Exception as error:
            context.add_problem(env, f"{type(error).__name__}: {error}")
            continue
        if lost := changes(snapshot(env), snapshot(copy), lazy=False):
            context.add_problem(env, f"its copy differs: {lost[0]}")
    return f"{len(context.envs)} tasks come back from pickle as they were"


async def _prompt(context: CheckContext) -> str:
    for env in context.envs:
        play = await context.player.play(env, PLAIN)
        context.first_plays.append(play)
        if not play.prompts:
            context.add_problem(env, f"it never asked the policy, and {play.result}")
        elif not play.prompts[0].strip():
            context.add_problem(env, "the first prompt is empty")
    lengths = [len(play.prompts[0]) for play in context.first_plays if play.prompts]
    return f"first prompts of {min(lengths, default=0)} to {max(lengths, default=0)} characters"


async def _gold_answer(context: CheckContext) -> str:
    golden = [(env, gold) for env in context.envs for gold in _golds(env)]
    if not golden:
        raise Skip("the environment offers no `gold: str`")
    for env, gold in golden:
        play = await context.player.play(env, gold)
        context.gold_reward = max(context.gold_reward, play.reward or 0.0)
        if play.reward is None or play.reward < _full_reward(env) - 1e-9:
            context.add_problem(env, f"{abbreviate(gold)} gets {play.result}, not {_full_reward(env):g}")
    return f"gets the full reward on {len(golden)} tasks"


async def _empty_answer(context: CheckContext) -> str:
    rewards = list[float]()
    for env, reply in context.cases([env for env in context.envs if getattr(env, "gold", None) not in EMPTY], EMPTY):
        reward = (await context.player.play(env, reply)).reward
        if reward is None:
            continue
        rewards.append(reward)
        if reward >= (_full_reward(env) if hasattr(env, "max_reward") else context.gold_reward) - 1e-9:
            context.add_problem(env, f"the reply {abbreviate(reply)} gets the full reward, {reward:g}")
    if not rewards:
        raise Skip("no empty answer had a reward, or it is the right answer")
    return f"gets at most {max(rewards):g}"


async def _token_exact(context: CheckContext) -> str:
    counts = list[tuple[int, int]]()
    for env, reply in context.cases(context.envs[:CLOSELY], context.replies):
        play = await context.player.play(env, reply)
        if len(play.turns) > 1 or play.end == "limit":
            context.long_cases.append((env, reply))
            counts.append((len(play.turns), sum(turn.parent is None for turn in play.turns)))
        if play.rewritten and play.rewritten not in context.problems:
            context.problems.append(play.rewritten)
    if not counts:
        raise Skip("no rollout asked for a second completion")
    turns, segments = max(counts)[0], max(segments for _, segments in counts)
    if segments == 1:
        return f"up to {turns} turns, each of which extends the one before"
    return f"up to {turns} turns in {segments} segments"


async def _turn_limit(context: CheckContext) -> str:
    if not context.long_cases:
        raise Skip("no rollout asked for a second completion")
    for env, reply in context.long_cases[: 2 * CLOSELY]:
        play = await context.player.play(env, reply, max_turns=1)
        if play.end == "limit":
            context.add_problem(env, f"allowed one turn, it {play.result}")
    return "a rollout that reaches it is graded"


async def _clean_up(context: CheckContext) -> str:
    for env, reply in context.cases(context.envs[:CLOSELY], context.replies):
        leftovers = await find_leaks(partial(context.player.play, env, reply))
        for leftover in leftovers:
            context.add_problem(env, f"each rollout leaves {leftover}")
        if leftovers:
            break
    return f"a rollout leaves none of: {', '.join(count_resources())}"


async def _cancellation(context: CheckContext) -> str:
    waits = [(env, PLAIN, 0) for env in context.envs[:CLOSELY]] + [
        (env, reply, 1) for env, reply in context.long_cases[:CLOSELY]
    ]
    tried = False
    for env, reply, turn in waits:
        cancel = partial(context.player.cancel, env, reply, turn=turn)
        play = await cancel()
        if play is None:
            continue
        tried = True
        if play.end != "cancelled":
            waiting = f"cancelled while it waits for reply {turn + 1}"
            context.add_problem(
                env, f"{waiting}, it should end with CancelledError, but gave {play.detail or 'a reward'}"
            )
        for leftover in await find_leaks(cancel):
            context.add_problem(env, f"each cancelled rollout leaves {leftover}")
    if not tried:
        raise Skip("no rollout asked the policy for anything")
    return "a cancelled rollout ends at once and leaves nothing behind"


async def _odd_replies(context: CheckContext) -> str:
    noise = [NoisyPolicy(context.seed * NOISE + n, chat=context.player.chat) for n in range(NOISE)]
    replies = [*EMPTY, *ODD, *context.replies, *[(await policy.sample("?")).text for policy in noise]]
    played = 0
    for lap in range(len(context.envs)):
        for index, (_, reply) in enumerate(context.cases(context.envs[:1], replies, budget_s=BUDGET_S / (lap + 1))):
            env = context.envs[(lap + index) % len(context.envs)]
            for max_tokens in (MAX_TOKENS, CUT_TOKENS) if index % 8 == 0 else (MAX_TOKENS,):
                play = await context.player.play(env, reply, max_tokens=max_tokens)
                played += 1
                if play.reward is None and play.end != "limit":
                    context.add_problem(env, f"for the reply {abbreviate(reply)} it {play.result}")
    return f"{played} plays of odd text gave finite rewards"


async def _unchanged(context: CheckContext) -> str:
    """Compare the environments; what a private attribute is filled with once is a cache."""
    middle = [snapshot(env) for env in context.envs]
    for env, reply in context.cases(context.envs, ["again", *context.replies]):
        await context.player.play(env, reply)
    for env, before, mid in zip(context.envs, context.snapshots, middle, strict=True):
        lines = [*changes(before, mid, lazy=True), *changes(mid, snapshot(env), lazy=False)]
        for line in lines[:1]:
            context.add_problem(env, f"rollouts change {line}")
    return f"{len(context.player.plays)} rollouts left the environment as it was"


async def _reward_range(context: CheckContext) -> str:
    rewards = [play.reward for play in context.player.plays if play.reward is not None]
    if not rewards:
        context.problems.append(f"no rollout had a reward: it {context.first_plays[0].result}")
        return ""
    most = max((_full_reward(env) for env in context.envs if hasattr(env, "max_reward")), default=None)
    if most is not None and max(rewards) > most + 1e-9:
        context.problems.append(f"a reward of {max(rewards):g} is above max_reward, {most:g}")
    return f"from {min(rewards):g} to {max(rewards):g}"


async def _deterministic(context: CheckContext) -> str:
    if all(getattr(env, "stochastic", False) for env in context.envs):
        raise Skip("the environment says that chance belongs to it (stochastic = True)")
    seed_chance(context.seed)
    cases = [(env, reply) for env in context.envs for reply in (*_golds(env), *context.replies)]
    expected = [(*case, await context.player.play(*case)) for case in cases]
    changed = make_conditions(context.seed)
    for condition in changed:
        started_s = time.monotonic()
        for env, reply, first in expected:
            condition.prepare()
            play = partial(context.player.play, env, reply, delay_s=condition.delay_s, under=condition.name)
            for other in await asyncio.gather(*(play() for _ in range(condition.at_once))):
                if not first.same_reward(other) and (other.end == "done" or condition.strict):
                    rewards = f"{first.result}, and {condition.name} {other.result}"
                    context.add_problem(env, f"the reply {abbreviate(reply)} gets {rewards}")
            if time.monotonic() - started_s > BUDGET_S / len(changed):
                break
        if context.problems:
            break
    return f"{len(expected)} replies got the same reward under {len(changed)} conditions"


def _golds(env: Env) -> list[str]:
    """Return the right answer, if the environment offers it."""
    gold = getattr(env, "gold", None)
    return [gold] if isinstance(gold, str) else []


def _full_reward(env: Env) -> float:
    return float(getattr(env, "max_reward", FULL))


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: a few words.
        run: returns what was seen, for a check without problems, and adds its problems to the context; raises `Skip`.
        fix: what to do about its problems.
    """

    name: str
    run: Callable[[CheckContext], Awaitable[str]]
    fix: str

    async def find(self, context: CheckContext) -> Finding:
        """Run the check; it failed with the first two problems, passed, or does not apply."""
        context.problems = problems = list[str]()
        try:
            detail = await self.run(context)
        except Skip as reason:
            return Finding(self.name, "skipped", str(reason))
        if not problems:
            return Finding(self.name, "passed", detail)
        more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
        return Finding(self.name, "failed", "; ".join(problems[:2]) + more, self.fix)


CHECKS = (
    Check("task source", _task_source, "make next() a function of the seed and of what state_dict() holds"),
    Check(
        "picklable", _picklable, "define the class at the top of a module, and keep files, locks and clients out of it"
    ),
    Check("prompt", _prompt, "ask the policy for a reply, with a prompt that says something"),
    Check("gold answer", _gold_answer, "give env.gold the full reward (1.0, or env.max_reward), or correct env.gold"),
    Check("empty answer", _empty_answer, "make the grader refuse a reply without an answer"),
    Check(
        "token-exact", _token_exact, "append reply.message to the conversation as it is; leave earlier messages alone"
    ),
    Check("turn limit", _turn_limit, "catch rlkit.LimitReached around the policy and grade what is there"),
    Check("clean-up", _clean_up, "close what a rollout opens in a `finally`, and wait for the tasks that it starts"),
    Check("cancellation", _cancellation, "let CancelledError pass, and close what a rollout holds in a `finally`"),
    Check("odd replies", _odd_replies, "give text that cannot be read the reward of a wrong answer, a finite number"),
    Check("unchanged", _unchanged, "keep an episode's state in local variables of rollout, not in the environment"),
    Check(
        "reward range", _reward_range, "return a finite number, at most env.max_reward where the environment names one"
    ),
    Check(
        "deterministic",
        _deterministic,
        "compute the reward from the task and the reply alone; a task of chance says so with `stochastic = True`",
    ),
)
"""Every check, in the order in which they run."""


async def run_checks(context: CheckContext, send: Callable[[Finding], None]) -> None:
    """Run the checks and send each finding as it is made, up to a rollout that hangs."""
    gc.freeze()  # the collections that the clean-up check asks for need not look at what the caller had
    try:
        for check in CHECKS:
            context.player.say(check.name)
            send(await check.find(context))
    except Hang as hang:
        fix = "let CancelledError pass" if hang.swallowed else "give every wait in the environment a time limit"
        send(Finding(TIME, "failed", str(hang), fix))
        return
    seconds = sorted(play.seconds for play in context.player.plays)
    took = f"{len(seconds)} rollouts, median {seconds[len(seconds) // 2]:.2g} s, slowest {seconds[-1]:.2g} s"
    send(Finding(TIME, "passed", took))
