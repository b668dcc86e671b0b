"""Checks of an environment: one function each, and their table.

Invariant: only the last check changes the process, permanently: it moves the wall clock and seeds the random
generators.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import pickle
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import batched, product
from operator import attrgetter
from typing import cast

import numpy as np

from rlkit.check.conditions import make_conditions, seed_chance
from rlkit.check.context import BUDGET_S, DEFAULT_MAX_REWARD, SAMPLE_TASKS, CheckContext, draw_tasks, limit_time
from rlkit.check.leaks import count_resources, find_leaks
from rlkit.check.player import Script, abbreviate
from rlkit.check.replies import EMPTY, ODD, PLAIN, write_replies
from rlkit.check.report import Finding
from rlkit.check.snapshots import find_changes, take_snapshot
from rlkit.env import Env
from rlkit.errors import UsageError
from rlkit.testing.policies import MAX_TOKENS, NoisyPolicy
from rlkit.types import Json

TIME = "time limit"

NOISE_REPLIES = 20  # number of noise replies
JUDGED_AT_ONCE, AGREEMENT = 8, 0.8  # number of concurrent judgements; least share of verdicts near their labels
CUT_TOKENS = 7  # limit that truncates some replies
RAISED_FIX = "correct the code that raised; a wrong answer has a finite reward, not an exception"


class Skip(Exception):
    """A check does not apply, for the reason in the message."""


async def _check_task_source(context: CheckContext) -> str:
    if context.source is None:
        raise Skip("the tasks are a sequence, not a source")
    try:
        context.source.load_state_dict(cast("Mapping[str, Json]", json.loads(json.dumps(context.state))))
        second_draw = draw_tasks(context.source, tasks=len(context.envs), seed=context.seed)
    except Exception as error:
        context.problems.append(f"its state does not survive JSON and load_state_dict: {type(error).__name__}: {error}")
        return ""
    if [*context.snapshots] != [take_snapshot(env) for env in second_draw]:
        context.problems.append("after load_state_dict(state_dict()) it draws other tasks")
    return f"draws the same {len(context.envs)} tasks again from its saved state"


async def _check_pickling(context: CheckContext) -> str:
    for env in context.envs:
        try:
            copy = cast("object", pickle.loads(pickle.dumps(env)))
        except Exception as error:
            context.add_problem(env, f"{type(error).__name__}: {error}")
            continue
        if changes := find_changes(take_snapshot(env), take_snapshot(copy), allow_caches=False):
            context.add_problem(env, f"its copy differs: {changes[0]}")
    return f"pickling changes none of {len(context.envs)} tasks"


async def _check_prompt(context: CheckContext) -> str:
    for env in context.envs:
        rollout = await context.player.play(env, PLAIN)
        if not rollout.prompts:
            context.add_problem(env, f"it made no request to the policy, and ended with: {rollout.result}")
        elif not rollout.prompts[0].strip():
            context.add_problem(env, "the first prompt is empty")
    lengths = [len(rollout.prompts[0]) for rollout in context.player.rollouts if rollout.prompts]
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    return f"first prompts of {longest if shortest == longest else f'{shortest} to {longest}'} characters"


async def _check_gold_answer(context: CheckContext) -> str:
    try:
        cases = context.gold_cases = [(env, gold) for env in context.envs for gold in _read_gold(env)]
    except UsageError as error:
        context.add_problem(context.envs[0], str(error))
        return "is invalid"
    if not cases:
        raise Skip("the environment has no `gold`")
    for env, gold in cases:
        rollout, full = await context.player.play(env, gold), _get_full_reward(env)
        context.gold_reward = max(context.gold_reward, rollout.reward or 0.0)
        if rollout.reward is None:
            context.add_problem(env, f"{abbreviate(gold)} has no reward: it {rollout.result}")
        elif math.isfinite(full) and rollout.reward < full - 1e-9:
            context.add_problem(env, f"{abbreviate(gold)} gets {rollout.result}, not {full:g}")
    return f"gets the full reward on {len(cases)} tasks"


async def _check_empty_answer(context: CheckContext) -> str:
    rewards = list[float]()
    envs = [env for env in context.envs if getattr(env, "gold", None) not in EMPTY]
    for reply, env in limit_time(product(EMPTY, envs)):
        if (reward := (await context.player.play(env, reply)).reward) is None:
            continue
        rewards.append(reward)
        full = float(getattr(env, "max_reward", math.inf))
        if reward >= (full if math.isfinite(full) else context.gold_reward) - 1e-9:
            context.add_problem(env, f"the reply {abbreviate(reply)} gets the full reward, {reward:g}")
    if not rewards:
        raise Skip("no empty answer has a reward, or the empty answer is right")
    return f"gets at most {max(rewards):g}"


async def _check_judge(context: CheckContext) -> str:
    find_method, scores = attrgetter("judge.score"), list[float]()
    try:
        pairs = [(env, *example) for env in context.envs for example in getattr(env, "judged_examples", ())]
        examples = {json.dumps([fields, label]): (env, fields, float(label)) for env, fields, label in pairs}
        for some in batched(examples.values(), JUDGED_AT_ONCE):
            context.player.announce(f"judging example {len(scores) + 1} of {len(examples)}")
            async with asyncio.timeout(context.player.timeout_s):
                verdicts = await asyncio.gather(*(find_method(env)(**fields) for env, fields, _ in some))
            scores += [verdict.score for verdict in verdicts]
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        context.problems.append(f"judged_examples: example {len(scores) + 1} or later has no verdict: {problem}")
        return ""
    if not examples:
        raise Skip("the environment has no `judged_examples`")
    env, judged_env = context.envs[0], next(iter(examples.values()))[0]
    low, high = cast("tuple[float, float]", attrgetter("judge.scale")(judged_env))
    labels, verdicts = np.array([label for _, _, label in examples.values()], np.float64), np.array(scores, np.float64)
    if not all(low <= label <= high for label in labels.tolist()):
        context.problems.append(f"judged_examples: a label is not within the judge's scale, {low:g} to {high:g}")
        return ""
    tolerance, wanted = getattr(env, "judge_tolerance", (high - low) / 10), getattr(env, "judge_agreement", AGREEMENT)
    share = float(np.mean(np.abs(labels - verdicts) <= tolerance + 1e-9))
    correlation = np.corrcoef(labels, verdicts)[0, 1] if np.ptp(labels) and np.ptp(verdicts) else 0.0
    detail = f"{share:.0%} of {len(scores)} verdicts within {tolerance:g} of the label, correlation {correlation:.2f}"
    if share < wanted:
        context.problems.append(f"{detail}; judge_agreement is {wanted:.0%}")
    return detail


async def _check_exact_tokens(context: CheckContext) -> str:
    counts = list[tuple[int, int]]()
    for reply, env in limit_time(product(context.replies, context.envs[:SAMPLE_TASKS])):
        rollout = await context.player.play(env, reply)
        if len(rollout.turns) > 1 or rollout.end == "limit":
            context.long_cases.append((env, reply))
            counts.append((len(rollout.turns), sum(turn.parent is None for turn in rollout.turns)))
        if rollout.rewritten and rollout.rewritten not in context.problems:
            context.problems.append(rollout.rewritten)
    if not counts:
        raise Skip("no rollout requested a second completion")
    turns, segments = max(counts)[0], max(segments for _, segments in counts)
    if segments == 1:
        return f"up to {turns} turns, each of which extends the one before"
    return f"up to {turns} turns in {segments} segments"


async def _check_turn_limit(context: CheckContext) -> str:
    if not context.long_cases:
        raise Skip("no rollout requested a second completion")
    for env, reply in context.long_cases[: 2 * SAMPLE_TASKS]:
        rollout = await context.player.play(env, reply, max_turns=1)
        if rollout.end == "limit":
            context.add_problem(env, f"limited to one turn, it {rollout.result}")
    return "a rollout that reaches it is graded"


async def _check_clean_up(context: CheckContext) -> str:
    for reply, env in limit_time(product(context.replies, context.envs[:SAMPLE_TASKS])):
        leaks = await find_leaks(partial(context.player.play, env, reply))
        for leak in leaks:
            context.add_problem(env, f"each rollout leaks {leak}")
        if leaks:
            break
    return f"a rollout leaks none of: {', '.join(count_resources())}"


async def _check_cancellation(context: CheckContext) -> str:
    cases = [(env, PLAIN, 0) for env in context.envs[:SAMPLE_TASKS]]
    cases += [(env, reply, 1) for env, reply in context.long_cases[:SAMPLE_TASKS]]
    was_cancelled = False
    for env, reply, turn in cases:
        cancel = partial(context.player.cancel, env, reply, turn=turn)
        if (rollout := await cancel()) is None:
            continue
        was_cancelled = True
        if rollout.end != "cancelled":
            result = rollout.detail or "returned a reward"
            context.add_problem(env, f"cancelled at reply {turn + 1}, it {result} instead of raising CancelledError")
        for leak in await find_leaks(cancel):
            context.add_problem(env, f"each cancelled rollout leaks {leak}")
    if not was_cancelled:
        raise Skip("no rollout made a request to the policy")
    return "a cancelled rollout ends at once and leaks nothing"


async def _check_odd_replies(context: CheckContext) -> str:
    noise = NoisyPolicy(context.seed, chat=context.player.chat)
    replies = [*EMPTY, *ODD, *context.replies, *[(await noise.sample("?")).text for _ in range(NOISE_REPLIES)]]
    tasks = len(context.envs)
    cases = [(context.envs[(lap + index) % tasks], index) for lap in range(tasks) for index in range(len(replies))]
    count = 0
    for env, index in limit_time(cases, budget_s=2 * BUDGET_S):
        for max_tokens in (MAX_TOKENS, CUT_TOKENS) if index % 8 == 0 else (MAX_TOKENS,):
            rollout = await context.player.play(env, replies[index], max_tokens=max_tokens)
            count += 1
            if rollout.reward is None and rollout.end != "limit":
                context.add_problem(env, f"for the reply {abbreviate(replies[index])} it {rollout.result}")
    return f"{count} rollouts with odd text have finite rewards"


async def _check_unchanged(context: CheckContext) -> str:
    """Compare environments before and after rollouts; a private attribute that is set once counts as a cache."""
    snapshots = [take_snapshot(env) for env in context.envs]
    for reply, env in limit_time(product(["again", *context.replies], context.envs)):
        await context.player.play(env, reply)
    for env, before, after in zip(context.envs, context.snapshots, snapshots, strict=True):
        lines = list(find_changes(before, after, allow_caches=True))
        lines += find_changes(after, take_snapshot(env), allow_caches=False)
        for line in lines[:1]:
            context.add_problem(env, f"rollouts change {line}")
    return f"{len(context.player.rollouts)} rollouts did not change the environment"


async def _check_reward_range(context: CheckContext) -> str:
    rewards = [rollout.reward for rollout in context.player.rollouts if rollout.reward is not None]
    if not rewards:
        raise Skip(f"no rollout has a reward; the first {context.player.rollouts[0].result}")
    max_reward = max(map(_get_full_reward, context.envs))
    if max(rewards) > max_reward + 1e-9:
        context.problems.append(f"a reward of {max(rewards):g} is above max_reward, {max_reward:g}")
    if max(rewards) == min(rewards) and not context.gold_cases:
        raise Skip(f"each reward was {max(rewards):g}: give the environment a `gold` reply, which earns another one")
    return f"from {min(rewards):g} to {max(rewards):g}"


async def _check_determinism(context: CheckContext) -> str:
    if all(getattr(env, "stochastic", False) for env in context.envs):
        raise Skip("the environment declares that it is stochastic (stochastic = True)")
    seed_chance(context.seed)
    cases = [*context.gold_cases, *((env, reply) for env in context.envs for reply in context.replies)]
    expected = [(env, reply, await context.player.play(env, reply)) for env, reply in cases]
    conditions = make_conditions(context.seed)
    for condition in conditions:
        for env, reply, first in limit_time(expected, budget_s=BUDGET_S / len(conditions)):
            condition.prepare()
            play = partial(context.player.play, env, reply, delay_s=condition.delay_s, condition=condition.name)
            for other in await asyncio.gather(*(play() for _ in range(condition.concurrency))):
                if not first.has_same_reward(other) and (other.end == "done" or condition.is_strict):
                    rewards = f"{first.result}, and {condition.name} {other.result}"
                    context.add_problem(env, f"the reply {abbreviate(reply)} gets {rewards}")
        if context.problems:
            break
    return f"{len(expected)} replies have the same reward under {len(conditions)} conditions"


def _read_gold(env: Env) -> list[Script]:
    """Return the gold answer, of a list the assistant's messages; UsageError if it is neither."""
    gold: object = getattr(env, "gold", None)
    if gold is None or isinstance(gold, str):
        return [gold] if gold is not None else []
    if not (replies := write_replies(gold)):
        raise UsageError("gold: expected a text or a list of messages, one of them the assistant's")
    return [replies]


def _get_full_reward(env: Env) -> float:
    return float(getattr(env, "max_reward", DEFAULT_MAX_REWARD))


@dataclass(frozen=True, slots=True)
class Check:
    """Check of an environment."""

    name: str
    # Adds problems to the context, and returns an observation to report if there are none; may raise `Skip`.
    inspect: Callable[[CheckContext], Awaitable[str]]
    fix: str
    needs_reward: bool = True  # its rollouts show nothing if none has a reward

    async def run(self, context: CheckContext) -> Finding:
        """Run the check; a failure names the first two problems."""
        context.problems = problems = list[str]()
        earlier, status = len(context.player.rollouts), "passed"
        try:
            detail = await self.inspect(context)
        except Skip as reason:
            status, detail = "skipped", str(reason)
        rollouts = context.player.rollouts[earlier:]
        is_void = self.needs_reward and rollouts and all(rollout.reward is None for rollout in rollouts)
        if problems:
            more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
            fix = RAISED_FIX if is_void and all(rollout.end == "raised" for rollout in rollouts) else self.fix
            return Finding(self.name, "failed", "; ".join(problems[:2]) + more, fix)
        if is_void:
            status, detail = "skipped", f"could not be tried: each rollout failed; the first {rollouts[0].result}"
        return Finding(self.name, status, detail)


CHECKS = (
    Check("task source", _check_task_source, "let next() depend on the seed and on state_dict() only"),
    Check("pickling", _check_pickling, "define the class at the top of a module, without files, locks or clients"),
    Check("prompt", _check_prompt, "request a reply, with a prompt that is not empty", needs_reward=False),
    Check("gold answer", _check_gold_answer, "give env.gold the reward env.max_reward (or 1.0), or correct env.gold"),
    Check("empty answer", _check_empty_answer, "make the grader reject a reply without an answer"),
    Check("judge", _check_judge, "correct the judge's prompt, choose a stronger model, or set judge_tolerance"),
    Check("token prefix", _check_exact_tokens, "append reply.message; edit no earlier message", needs_reward=False),
    Check("turn limit", _check_turn_limit, "catch rlkit.LimitReached around the policy and grade the turns so far"),
    Check("clean-up", _check_clean_up, "close resources in a `finally`, and await the tasks that a rollout starts"),
    Check("cancellation", _check_cancellation, "do not catch CancelledError, and close resources in a `finally`"),
    Check(
        "odd replies",
        _check_odd_replies,
        "return a finite number for each reply, such as 0 if it cannot be parsed; a tool may raise ValueError",
    ),
    Check("environment state", _check_unchanged, "keep the state of an episode in local variables of rollout"),
    Check("reward range", _check_reward_range, "return finite numbers up to env.max_reward (1 by default), or set it"),
    Check(
        "determinism", _check_determinism, "compute the reward from task and reply alone, or set `stochastic = True`"
    ),
)
"""All checks, in their order."""


async def run_checks(context: CheckContext, send: Callable[[Finding], None]) -> None:
    """Run the checks and send each finding immediately; raise `Abort` if a rollout hangs."""
    gc.freeze()  # excludes the caller's objects from the garbage collections of the clean-up check
    for check in CHECKS:
        context.player.announce(check.name)
        send(await check.run(context))
    seconds = sorted(rollout.seconds for rollout in context.player.rollouts)
    timing = f"{len(seconds)} rollouts, median {seconds[len(seconds) // 2]:.2g} s, slowest {seconds[-1]:.2g} s"
    send(Finding(TIME, "passed", timing))
