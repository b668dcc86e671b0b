"""Protocols and base classes of environments: an object is a task, and a coroutine plays it.

Invariant: an `Env` never changes. The state of an episode lives in the local variables of `rollout`, so that the G
rollouts of a group can share the object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeGuard, runtime_checkable

from rlkit._util.json_values import escape_surrogates
from rlkit.errors import LimitReached
from rlkit.policy import Policy
from rlkit.types import Episode, Group, Json, Message, Outcome, Reply, Tool, ToolCall


@runtime_checkable
class Env(Protocol):
    """A task of an environment, with the coroutine that plays it.

    A complete environment::

        class Reverse(rlkit.Env):
            def __init__(self, word: str): self.word = word
            async def rollout(self, policy: rlkit.Policy) -> float:
                reply = await policy.chat([{"role": "user", "content": f"Spell {self.word} backwards."}])
                return float(reply.text.strip() == self.word[::-1])

    Optional attributes, of which the last three are for `rlkit check`:
        task_id (str): name of the task in records.
        content (str): text of the task; training skips tasks with the content of an evaluated task.
        render (method): returns the HTML of an `Episode` that `rlkit view` shows, or None.
        gold (str): a reply that deserves the full reward.
        max_reward (float): the full reward, if it is not 1; `math.inf` if there is none.
        stochastic (bool): chance is part of the task.
    """

    async def rollout(self, policy: Policy) -> Outcome | float:
        """Play one episode and return its outcome, or just its reward.

        An exception fails the episode: a failed episode has no reward and is played again.
        """
        ...


def is_env(value: object) -> TypeGuard[Env]:
    """Return whether a value is an object, not a class, with a method `rollout`."""
    return not isinstance(value, type) and callable(getattr(value, "rollout", None))


@runtime_checkable
class GroupScorer(Protocol):
    """A task that scores the episodes of its group together."""

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[float] | None:
        """Return a reward for each of the episodes that did not fail, or None to keep their rewards.

        Called when the group is complete; a resumed run may call it again. An exception fails the whole group.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A task that a run drew."""

    draw: int  # position in the order of drawing
    name: str  # name of the environment in the run
    env: Env  # the task itself
    id: str = field(init=False)  # `task_id` of the env, or the draw; read once, so all records agree

    def __post_init__(self) -> None:
        task_id = read_task_id(self.env)
        object.__setattr__(self, "id", str(self.draw) if task_id is None else task_id)


def read_task_id(env: Env) -> str | None:
    """Return the env's `task_id`; None if it has none, or reading it fails."""
    try:
        task_id = getattr(env, "task_id", None)
        return None if task_id is None else escape_surrogates(str(task_id))
    except (Exception, SystemExit):  # the user's code may raise anything, and this is only a name
        return None


class TaskSource(ABC):
    """A source of tasks for a run. Its draws follow from its seed and from the groups that it observed."""

    @abstractmethod
    def next(self) -> Env | None:
        """Return the next task, or None if there are no more."""

    @abstractmethod
    def state_dict(self) -> Mapping[str, Json]:
        """Return the state as JSON for `load_state_dict`."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Resume from a state that `state_dict` returned."""

    def observe(self, group: Group) -> None:
        """Learn from a finished group, as curricula do; by default nothing."""
        return

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of a step, reported as `env/<name>/tasks/…`; by default none."""
        return {}

    def set_folder(self, folder: Path) -> None:
        """Set the folder for the source's files, before the first draw; by default unused."""
        return


class SingleTurnEnv(ABC, Env):
    """An environment of one prompt, one reply and one reward.

    ::

        class Sum(rlkit.SingleTurnEnv):
            def __init__(self, a: int, b: int): self.a, self.b = a, b
            def prompt(self): return f"{self.a} + {self.b} ="
            def grade(self, reply): return float(reply.text.strip() == str(self.a + self.b))
    """

    @abstractmethod
    def prompt(self) -> str | Sequence[Message]:
        """Return messages for the model's chat template, or a string to complete without a template."""

    @abstractmethod
    def grade(self, reply: Reply) -> Outcome | float:
        """Return the reward of a reply, as a function of the reply alone."""

    async def rollout(self, policy: Policy) -> Outcome | float:
        """Sample one reply and grade it."""
        prompt = self.prompt()
        reply = await (policy.sample(prompt) if isinstance(prompt, str) else policy.chat(prompt))
        return self.grade(reply)


@dataclass(frozen=True, slots=True)
class Step:
    """The result of `StepEnv.step`.

    Args:
        messages: the next observation; ignored when done.
        reward: reward of this turn; the episode's reward is their sum.
        done: the episode is over.
        metrics: numbers to report; later values replace earlier ones.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class _ConversationEnv[State](ABC, Env):
    """An environment whose episodes have a state of their own."""

    max_turns: int = 16
    """Limit of the replies of an episode; an episode that reaches it is truncated."""

    @abstractmethod
    def reset(self) -> tuple[State, Sequence[Message]]:
        """Return a fresh state and the first messages."""

    async def close(self, state: State) -> None:
        """Release the resources of an episode, however it ended."""


class StepEnv[State](_ConversationEnv[State]):
    """A conversation in which the environment answers each reply.

    `reset` makes the state of one episode; `step` may change that state, never `self`::

        class Guess(rlkit.StepEnv[list[int]]):
            max_turns = 5
            def reset(self): return [], [{"role": "user", "content": "Guess a number from 1 to 9."}]
            async def step(self, state, reply): ...
    """

    @abstractmethod
    async def step(self, state: State, reply: Reply) -> Step:
        """Answer a reply."""

    async def rollout(self, policy: Policy) -> Outcome:
        """Play until a step is done, or a limit of the run or `max_turns` is reached."""
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


class ToolEnv[State](_ConversationEnv[State]):
    """A conversation in which the model calls tools until it replies without a call.

    The model gets an error message for a malformed call (counted in `malformed_tool_calls`), an unknown tool, or a
    `ValueError` of `call`. Other exceptions fail the episode. An episode that reaches `max_turns` is graded too.
    """

    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """Return the tools that the model may call."""

    @abstractmethod
    async def call(self, state: State, call: ToolCall) -> str:
        """Run a tool call and return its result for the model."""

    @abstractmethod
    async def grade(self, state: State, reply: Reply | None) -> Outcome | float:
        """Return the reward of the episode, given the last reply; None if a limit ended it before any reply."""

    async def rollout(self, policy: Policy) -> Outcome:
        """Alternate replies and tool results, then grade."""
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
                malformed += len(reply.malformed_tool_calls)
                if not reply.tool_calls and not reply.malformed_tool_calls:
                    truncated = reply.turn.stop == "length"
                    break
                results = [await self._run_call(state, call, tools) for call in reply.tool_calls]
                messages += [reply.message, *results]
                if reply.malformed_tool_calls:
                    # Not a tool message: some chat formats cannot write one that answers no call.
                    errors = "\n".join(f"error: not a valid tool call: {text}" for text in reply.malformed_tool_calls)
                    messages.append({"role": "user", "content": errors})
            grade = await self.grade(state, reply)
            outcome = grade if isinstance(grade, Outcome) else Outcome(grade)
            metrics = {**outcome.metrics, "malformed_tool_calls": float(malformed)}
            return replace(outcome, metrics=metrics, truncated=truncated or outcome.truncated)
        finally:
            await self.close(state)

    async def _run_call(self, state: State, call: ToolCall, tools: Sequence[Tool]) -> Message:
        names = [tool["name"] for tool in tools]
        try:
            if call["name"] not in names:
                raise ValueError(f"there is no tool {call['name']!r}; the tools are {', '.join(names)}")
            content = await self.call(state, call)
        except ValueError as error:
            content = f"error: {error}"
        return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": call["name"]}
