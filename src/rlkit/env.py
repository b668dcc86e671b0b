"""What an environment is: one task, and playing it is a coroutine.

Invariant: an `Env` holds the task and never changes; the state of an episode lives in the local variables of `rollout`,
so that the same object can be played G times at once to make a group, and can be pickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from rlkit._util.json_values import escape_surrogates
from rlkit.errors import LimitReached
from rlkit.policy import Policy, Reply
from rlkit.types import Episode, Group, Json, Message, Outcome, Tool, ToolCall


@runtime_checkable
class Env(Protocol):
    """One task.

    A whole environment::

        class Reverse(rlkit.Env):
            def __init__(self, word: str): self.word = word
            async def rollout(self, policy: rlkit.Policy) -> float:
                reply = await policy.chat([{"role": "user", "content": f"Spell {self.word} backwards."}])
                return float(reply.text.strip() == self.word[::-1])

    Five attributes are optional. `task_id: str` names the task in records. `content: str` says what it asks: a task of
    the same content as one that is evaluated is not trained on. `rlkit check` reads the others: `gold: str`, a reply
    that deserves the full reward; `max_reward: float`, the full reward where it is not 1; `stochastic = True`, where
    chance is part of the task.
    """

    async def rollout(self, policy: Policy) -> Outcome | float:
        """Play one episode and return its outcome. An exception means that it failed, and so has no reward."""
        ...


@runtime_checkable
class GroupScorer(Protocol):
    """A task that compares the episodes of a group with each other, once all of them are over."""

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[float] | None:
        """The rewards of episodes that did not fail, in their order; None to leave them as they are.

        It may be asked again for a group of a run that was interrupted. An exception means that all of them failed.
        """
        ...


_NAMELESS = object()


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a run: the `draw`-th, of the environment `name`.

    Its `id` is what the env calls itself; the draw, where it has no name or cannot say it. It is read once, so that all
    records have the same.
    """

    draw: int
    name: str
    env: Env
    id: str = field(init=False)

    def __post_init__(self) -> None:
        own = read_task_id(self.env)
        object.__setattr__(self, "id", str(self.draw) if own is None else own)


def read_task_id(env: Env) -> str | None:
    """Return the name that the env gives itself; None without one, or where reading it fails."""
    try:
        own = getattr(env, "task_id", _NAMELESS)
        return None if own is _NAMELESS else escape_surrogates(str(own))
    except KeyboardInterrupt:
        raise
    except BaseException:  # the user's own code, and only for a name
        return None


class TaskSource(ABC):
    """Decides what is played next. Deterministic, given its seed and the groups that `observe` was given."""

    @abstractmethod
    def next(self) -> Env | None:
        """Return the next task, or None when there are no more."""

    @abstractmethod
    def state_dict(self) -> Mapping[str, Json]:
        """Return everything that `load_state_dict` needs to go on from here, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Go on from a state that `state_dict` returned."""

    def observe(self, group: Group) -> None:
        """Learn from a finished group, as difficulty filters and archives do; by default nothing."""
        return

    def metrics(self) -> Mapping[str, float]:
        """Return numbers by name after a step, for `env/<name>/tasks/…`; by default none."""
        return {}

    def keep_in(self, folder: Path) -> None:
        """Take a folder for files of one's own, before the first draw; by default unused."""
        return


class SingleTurnEnv(ABC, Env):
    """One prompt, one reply, one reward.

    The `prompt` is messages, rendered with the model's chat template, or a plain string, sampled as it stands::

        class Sum(rlkit.SingleTurnEnv):
            def __init__(self, a: int, b: int): self.a, self.b = a, b
            def prompt(self): return f"{self.a} + {self.b} ="
            def grade(self, reply): return float(reply.text.strip() == str(self.a + self.b))
    """

    @abstractmethod
    def prompt(self) -> str | Sequence[Message]:
        """What the model is asked."""

    @abstractmethod
    def grade(self, reply: Reply) -> Outcome | float:
        """The reward of a reply. It must be a function of the reply alone."""

    async def rollout(self, policy: Policy) -> Outcome | float:
        """Ask once, grade once."""
        prompt = self.prompt()
        reply = await (policy.sample(prompt) if isinstance(prompt, str) else policy.chat(prompt))
        return self.grade(reply)


@dataclass(frozen=True, slots=True)
class Step:
    """What the world answers to one reply.

    Args:
        messages: the observation that follows, ignored when done.
        reward: of this turn; the episode's reward is the sum.
        done: the episode is over.
        metrics: numbers to report; a later value replaces an earlier one.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class StepEnv[State](ABC, Env):
    """A conversation in steps: the model replies, the world answers.

    `reset` makes the state of one episode; `step` may change that state, never `self`::

        class Guess(rlkit.StepEnv[list[int]]):
            max_turns = 5
            def reset(self): return [], [{"role": "user", "content": "Guess a number from 1 to 9."}]
            def step(self, state, reply): ...
    """

    max_turns: int = 16
    """The episode is truncated after this many replies."""

    @abstractmethod
    def reset(self) -> tuple[State, Sequence[Message]]:
        """A fresh state and the first messages."""

    @abstractmethod
    async def step(self, state: State, reply: Reply) -> Step:
        """Answer one reply."""

    async def close(self, state: State) -> None:
        """Free what the episode holds; runs whatever happened."""

    async def rollout(self, policy: Policy) -> Outcome:
        """Play until a step is done, a limit of the run is reached or `max_turns` have passed."""
        state, opening = self.reset()
        messages = list(opening)
        total, metrics = 0.0, dict[str, float]()
        try:
            for _ in range(self.max_turns):
                try:
                    reply = await policy.chat(messages)
                except LimitReached:
                    break
                step = await self.step(state, reply)
                policy.reward(step.reward)
                total += step.reward
                metrics |= step.metrics
                messages += [reply.message, *step.messages]
                if step.done:
                    return Outcome(total, metrics)
            return Outcome(total, metrics, truncated=True)
        finally:
            await self.close(state)


class ToolEnv[State](ABC, Env):
    """A model that works with tools until it answers without calling one.

    A malformed call is told to the model and counted, an unknown tool as the tool's answer; `call` itself may raise
    `ValueError` to tell the model what was wrong with the arguments. Anything else that it raises fails the episode.
    """

    max_turns: int = 16
    """The episode is truncated, and still graded, after this many replies."""

    @abstractmethod
    def reset(self) -> tuple[State, Sequence[Message]]:
        """A fresh state and the first messages."""

    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """The tools that the model is shown."""

    @abstractmethod
    async def call(self, state: State, call: ToolCall) -> str:
        """Run one call and return what the model is told."""

    @abstractmethod
    async def grade(self, state: State, reply: Reply | None) -> Outcome | float:
        """The reward of the whole episode, given the last reply (None if a limit allowed none)."""

    async def close(self, state: State) -> None:
        """Free what the episode holds; runs whatever happened."""

    async def rollout(self, policy: Policy) -> Outcome:
        """Alternate replies and tool answers, then grade."""
        state, opening = self.reset()
        tools = self.tools()
        messages = list(opening)
        reply, truncated, malformed = None, True, 0
        try:
            for _ in range(self.max_turns):
                try:
                    reply = await policy.chat(messages, tools=tools)
                except LimitReached:
                    break
                malformed += len(reply.malformed)
                if not reply.tool_calls and not reply.malformed:
                    truncated = reply.turn.stop == "length"
                    break
                answers = [await self._answer(state, call, tools) for call in reply.tool_calls]
                messages += [reply.message, *answers]
                if reply.malformed:
                    # Not as a tool's answer: it would answer no call, which some chat formats cannot write.
                    told = "\n".join(f"error: not a valid tool call: {text}" for text in reply.malformed)
                    messages.append({"role": "user", "content": told})
            graded = await self.grade(state, reply)
            outcome = graded if isinstance(graded, Outcome) else Outcome(graded)
            metrics = {**outcome.metrics, "malformed_tool_calls": float(malformed)}
            return replace(outcome, metrics=metrics, truncated=truncated or outcome.truncated)
        finally:
            await self.close(state)

    async def _answer(self, state: State, call: ToolCall, tools: Sequence[Tool]) -> Message:
        names = [tool["name"] for tool in tools]
        if call["name"] not in names:
            content = f"error: there is no tool {call['name']!r}; the tools are {', '.join(names)}"
        else:
            try:
                content = await self.call(state, call)
            except ValueError as error:
                content = f"error: {error}"
        return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": call["name"]}
