"""The checks of prompts, rewards and conversations.

Invariant: a check asks for plays and judges them; it changes neither the environment nor the process.
"""

from __future__ import annotations

import pickle
from typing import cast

from rlkit.check.exam import BUDGET_S, CLOSELY, Exam, Problems, full_reward
from rlkit.check.play import name_of, shown
from rlkit.check.replies import EMPTY, ODD, PLAIN
from rlkit.check.report import Finding
from rlkit.check.structure import changes, snapshot
from rlkit.testing.policies import MAX_TOKENS, NoisyPolicy

NOISE = 20
"""How many replies of noise are played."""

CUT_TOKENS = 7
"""Where some replies are cut off."""


async def picklable(exam: Exam) -> Finding:
    """Whether tasks can be sent to another process."""
    problems = Problems(
        "picklable", "define the class at the top of a module, and keep files, locks and clients out of it"
    )
    for env in exam.envs:
        try:
            copy = cast("object", pickle.loads(pickle.dumps(env)))
        except Exception as error:
            problems.lines.append(f"{name_of(env)}: {type(error).__name__}: {error}")
            continue
        if lost := changes(snapshot(env), snapshot(copy), lazy=False):
            problems.lines.append(f"{name_of(env)}: its copy differs: {lost[0]}")
    return problems.finding(f"{len(exam.envs)} tasks come back from pickle as they were")


async def prompt(exam: Exam) -> Finding:
    """Whether the model is asked something."""
    problems = Problems("prompt", "ask the policy for a reply, with a prompt that says something")
    for env in exam.envs:
        play = await exam.player.play(env, PLAIN)
        exam.first.append(play)
        if not play.prompts:
            problems.lines.append(f"{name_of(env)}: it never asked the policy, and {play.told}")
        elif not play.prompts[0].strip():
            problems.lines.append(f"{name_of(env)}: the first prompt is empty")
    lengths = [len(play.prompts[0]) for play in exam.first if play.prompts]
    return problems.finding(f"first prompts of {min(lengths, default=0)} to {max(lengths, default=0)} characters")


async def gold_answer(exam: Exam) -> Finding:
    """Whether the right answer earns the full reward."""
    problems = Problems("gold answer", "give env.gold the full reward (1.0, or env.max_reward), or correct env.gold")
    golden = [(env, gold) for env in exam.envs if isinstance(gold := getattr(env, "gold", None), str)]
    if not golden:
        return problems.skipped("the environment offers no `gold: str`")
    for env, gold in golden:
        play = await exam.player.play(env, gold)
        exam.golden = max(exam.golden, play.reward or 0.0)
        if play.reward is None or play.reward < full_reward(env) - 1e-9:
            problems.lines.append(f"{name_of(env)}: {shown(gold)} gets {play.told}, not {full_reward(env):g}")
    return problems.finding(f"gets the full reward on {len(golden)} tasks")


async def empty_answer(exam: Exam) -> Finding:
    """Whether no answer earns less than the right one."""
    problems = Problems("empty answer", "make the grader refuse a reply without an answer")
    rewards: list[float] = []
    for env, reply in exam.cases([env for env in exam.envs if getattr(env, "gold", None) not in EMPTY], EMPTY):
        reward = (await exam.player.play(env, reply)).reward
        if reward is None:
            continue
        rewards.append(reward)
        if reward >= (full_reward(env) if hasattr(env, "max_reward") else exam.golden) - 1e-9:
            problems.lines.append(f"{name_of(env)}: the reply {shown(reply)} gets the full reward, {reward:g}")
    if not rewards:
        return problems.skipped("no empty answer had a reward, or it is the right answer")
    return problems.finding(f"gets at most {max(rewards):g}")


async def token_exact(exam: Exam) -> Finding:
    """Whether conversations go on from the exact tokens that were sampled."""
    problems = Problems(
        "token-exact", "append reply.message to the conversation as it is; leave earlier messages alone"
    )
    counts: list[tuple[int, int]] = []
    for env, reply in exam.cases(exam.envs[:CLOSELY], exam.replies):
        play = await exam.player.play(env, reply)
        if len(play.turns) > 1 or play.end == "limit":
            exam.long.append((env, reply))
            counts.append((len(play.turns), sum(turn.parent is None for turn in play.turns)))
        if play.rewritten and play.rewritten not in problems.lines:
            problems.lines.append(play.rewritten)
    if not counts:
        return problems.skipped("no rollout asked for a second completion")
    turns, segments = max(counts)[0], max(segments for _, segments in counts)
    if segments == 1:
        return problems.finding(f"up to {turns} turns, each of which extends the one before")
    return problems.finding(f"up to {turns} turns in {segments} segments")


async def turn_limit(exam: Exam) -> Finding:
    """Whether a rollout that may not ask again is graded."""
    problems = Problems("turn limit", "catch rlkit.LimitReached around the policy and grade what is there")
    if not exam.long:
        return problems.skipped("no rollout asked for a second completion")
    for env, reply in exam.long[: 2 * CLOSELY]:
        play = await exam.player.play(env, reply, max_turns=1)
        if play.end == "limit":
            problems.lines.append(f"{name_of(env)}: allowed one turn, it {play.told}")
    return problems.finding("a rollout that reaches it is graded")


async def odd_replies(exam: Exam) -> Finding:
    """Whether any text has a reward."""
    problems = Problems("odd replies", "give text that cannot be read the reward of a wrong answer, a finite number")
    noise = [NoisyPolicy(exam.seed * NOISE + n, chat=exam.player.chat) for n in range(NOISE)]
    replies = [*EMPTY, *ODD, *exam.replies, *[(await policy.sample("?")).text for policy in noise]]
    played = 0
    for lap in range(len(exam.envs)):
        for index, (_, reply) in enumerate(exam.cases(exam.envs[:1], replies, budget_s=BUDGET_S / (lap + 1))):
            env = exam.envs[(lap + index) % len(exam.envs)]
            for max_tokens in (MAX_TOKENS, CUT_TOKENS) if index % 8 == 0 else (MAX_TOKENS,):
                play = await exam.player.play(env, reply, max_tokens=max_tokens)
                played += 1
                if play.end in ("raised", "no reward"):
                    problems.lines.append(f"{name_of(env)}: for the reply {shown(reply)} it {play.told}")
    return problems.finding(f"{played} plays of odd text gave finite rewards")


async def unchanged(exam: Exam) -> Finding:
    """Whether rollouts leave the environment as it was; what a private attribute is filled with once is a cache."""
    problems = Problems("unchanged", "keep an episode's state in local variables of rollout, not in the environment")
    middle = [snapshot(env) for env in exam.envs]
    for env, reply in exam.cases(exam.envs, ["again", *exam.replies]):
        await exam.player.play(env, reply)
    for env, before, mid in zip(exam.envs, exam.before, middle, strict=True):
        lines = [*changes(before, mid, lazy=True), *changes(mid, snapshot(env), lazy=False)]
        problems.lines += [f"{name_of(env)}: rollouts change {line}" for line in lines[:1]]
    return problems.finding(f"{len(exam.player.plays)} rollouts left the environment as it was")


async def reward_range(exam: Exam) -> Finding:
    """What rewards there were."""
    problems = Problems(
        "reward range", "return a finite number, at most env.max_reward where the environment names one"
    )
    rewards = [play.reward for play in exam.player.plays if play.reward is not None]
    if not rewards:
        problems.lines.append(f"no rollout had a reward: it {exam.first[0].told}")
        return problems.finding("")
    most = max((full_reward(env) for env in exam.envs if hasattr(env, "max_reward")), default=None)
    if most is not None and max(rewards) > most + 1e-9:
        problems.lines.append(f"a reward of {max(rewards):g} is above max_reward, {most:g}")
    return problems.finding(f"from {min(rewards):g} to {max(rewards):g}")
