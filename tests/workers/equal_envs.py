"""Environments whose results must not depend on where they are played."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import rlkit
from rlkit.env import GroupScorer
from rlkit.types import Episode, Outcome


@dataclass
class Talk(rlkit.Env):
    """A conversation of a few turns."""

    turns: int = 3

    async def rollout(self, policy: rlkit.Policy) -> Outcome:
        messages: list[rlkit.Message] = [{"role": "user", "content": "begin"}]
        total = 0
        for number in range(self.turns):
            answer = await policy.chat(messages)
            total += sum(answer.text.encode())
            messages += [answer.message, {"role": "user", "content": f"turn {number}"}]
        return Outcome(total % 101 / 10, {"total": total}, {"last": messages[-2]["content"]}, masked=total % 2 == 0)


class InThreads(rlkit.Env):
    """Each turn on an event loop of its own, as frameworks without asyncio do it."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        def ask(number: int) -> str:
            return asyncio.run(policy.chat([{"role": "user", "content": f"in thread {number}"}])).text

        return float(sum([len(await asyncio.to_thread(ask, number)) for number in range(3)]))


class Short(rlkit.SingleTurnEnv):
    """One turn, so that the requests of a group are one."""

    def prompt(self) -> str:
        return "short"

    def grade(self, reply: rlkit.Reply) -> float:
        return float(len(reply.text))


class Ranked(GroupScorer):
    """Rewards depend on the group."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        return float(sum((await policy.chat([{"role": "user", "content": "rank"}])).text.encode()))

    async def score_group(self, episodes: Sequence[Episode]) -> list[float]:
        order = sorted(episode.reward or 0.0 for episode in episodes)
        return [float(order.index(episode.reward or 0.0)) for episode in episodes]


class BadlyRanked(Ranked):
    """Scores fail."""

    async def score_group(self, episodes: Sequence[Episode]) -> list[float]:
        raise rlkit.EnvironmentFault(f"no scores for {len(episodes)}")


class Raises(rlkit.Env):
    """Raises for some replies, so that retries are used up."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        answer = await policy.chat([{"role": "user", "content": "raise"}])
        if sum(answer.text.encode()) % 2:
            raise KeyError(answer.text)
        return 1.0


class Endless(rlkit.Env):
    """Plays until the limit of turns, and does not catch it."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        while True:
            await policy.chat([{"role": "user", "content": "more"}])


class Graded(Endless):
    """Plays until the limit of turns, and grades the result so far."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        try:
            return await super().rollout(policy)
        except rlkit.LimitReached:
            return float(len(policy.turns))


class Branches(rlkit.Env):
    """Requests side by side, of which one is abandoned."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        texts = [await policy.chat([{"role": "user", "content": text}]) for text in ("a", "b")]
        left = asyncio.create_task(policy.chat([{"role": "user", "content": "c"}]))
        await asyncio.sleep(0)
        left.cancel()
        return float(len(texts[0].text + texts[1].text))


class Late(rlkit.Env):
    """Exceeds its time limit without blocking."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        await policy.chat([{"role": "user", "content": "late"}])
        await asyncio.Event().wait()
        return 1.0


class Infinite(rlkit.Env):
    """Returns no finite reward."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        return float("inf")
