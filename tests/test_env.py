from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import override

import pytest

from rlkit.env import Env, SingleTurnEnv, Step, StepEnv, Task, ToolEnv
from rlkit.policy import Limits, Policy
from rlkit.testing import NoisyPolicy, ScriptedPolicy
from rlkit.types import Message, Outcome, Reply, Tool, ToolCall

CALL = '<tool_call>{"name": "double", "arguments": {"n": 4}}</tool_call>'


class Sum(SingleTurnEnv):
    def __init__(self, prompt: str | Sequence[Message]) -> None:
        self._prompt = prompt

    @override
    def prompt(self) -> str | Sequence[Message]:
        return self._prompt

    @override
    def grade(self, reply: Reply) -> Outcome | float:
        return float(reply.text.strip() == "3")


class Countdown(StepEnv[list[str]]):
    """Done at "stop"; each reply before earns its length."""

    max_turns = 3

    def __init__(self) -> None:
        self.closed: list[list[str]] = []

    @override
    def reset(self) -> tuple[list[str], Sequence[Message]]:
        return [], [{"role": "user", "content": "Begin."}]

    @override
    async def step(self, state: list[str], reply: Reply) -> Step:
        if reply.text == "crash":
            raise RuntimeError("the world broke")
        state.append(reply.text)
        return Step(
            [{"role": "user", "content": f"That was {len(state)}."}],
            reward=float(len(reply.text)),
            done=reply.text == "stop",
            metrics={"steps": float(len(state)), f"said_{reply.text}": 1.0},
        )

    @override
    async def close(self, state: list[str]) -> None:
        self.closed.append(state)


class Doubler(ToolEnv[list[int]]):
    max_turns = 3

    def __init__(self) -> None:
        self.closed = 0

    @override
    def tools(self) -> Sequence[Tool]:
        return [{"name": "double", "description": "doubles", "parameters": {"type": "object"}}]

    @override
    def reset(self) -> tuple[list[int], Sequence[Message]]:
        return [], [{"role": "user", "content": "What is twice 4?"}]

    @override
    async def call(self, state: list[int], call: ToolCall) -> str:
        number = call["arguments"].get("n")
        if not isinstance(number, int):
            raise ValueError("n must be a whole number")
        if number < 0:
            raise RuntimeError("the tool broke")
        state.append(number)
        return str(2 * number)

    @override
    async def grade(self, state: list[int], reply: Reply | None) -> Outcome | float:
        text = None if reply is None else reply.text
        return Outcome(float(text == "8"), {"calls": float(len(state))}, {"text": text})

    @override
    async def close(self, state: list[int]) -> None:
        self.closed += 1


def play(env: Env, policy: ScriptedPolicy | NoisyPolicy) -> Outcome:
    outcome = asyncio.run(env.rollout(policy))
    assert isinstance(outcome, Outcome)
    return outcome


def test_single_turn_env_sends_one_request_and_grades_once() -> None:
    policy = ScriptedPolicy(["3"])
    assert asyncio.run(Sum([{"role": "user", "content": "1 + 2"}]).rollout(policy)) == 1.0
    assert len(policy.turns) == 1


def test_plain_text_prompt_is_sampled_unchanged() -> None:
    policy = ScriptedPolicy([" 3"])
    assert asyncio.run(Sum("1 + 2 =").rollout(policy)) == 1.0
    assert policy.turns[0].prompt.tokens.tolist() == [*b"1 + 2 ="]


def test_step_env_sums_rewards_and_records_them_by_turn() -> None:
    env, policy = Countdown(), ScriptedPolicy(["a", "stop"])
    assert play(env, policy) == Outcome(5.0, {"steps": 2.0, "said_a": 1.0, "said_stop": 1.0})
    assert [turn.reward for turn in policy.turns] == [1.0, 4.0]
    assert [turn.parent for turn in policy.turns] == [None, 0]
    assert policy.prompts[1].endswith("That was 1.\n")


@pytest.mark.parametrize("limits", [Limits(), Limits(max_turns=2)], ids=["its own limit", "the run's limit"])
def test_a_step_env_that_reaches_a_limit_is_truncated(limits: Limits) -> None:
    env, policy = Countdown(), ScriptedPolicy(lambda prompt: "ab", limits=limits)
    outcome = play(env, policy)
    turns = limits.max_turns or Countdown.max_turns
    assert outcome == Outcome(2.0 * turns, {"steps": float(turns), "said_ab": 1.0}, truncated=True)
    assert env.closed == [["ab"] * turns]


@pytest.mark.parametrize("replies", [["crash"], ["a", "crash"], []], ids=["at once", "later", "in the policy"])
def test_a_step_env_is_closed_when_it_fails(replies: list[str]) -> None:
    env = Countdown()
    with pytest.raises((RuntimeError, AssertionError)):
        asyncio.run(env.rollout(ScriptedPolicy(replies)))
    assert len(env.closed) == 1


def test_an_env_is_closed_when_it_is_cancelled() -> None:
    async def cancelled(env: Countdown | Doubler) -> None:
        task = asyncio.ensure_future(env.rollout(ScriptedPolicy(lambda prompt: "a")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    steps, tools = Countdown(), Doubler()
    asyncio.run(cancelled(steps))
    asyncio.run(cancelled(tools))
    assert (len(steps.closed), tools.closed) == (1, 1)


def test_concurrent_rollouts_share_no_state() -> None:
    env = Countdown()

    async def play() -> list[Outcome]:
        return await asyncio.gather(*(env.rollout(ScriptedPolicy(["x" * n, "stop"])) for n in range(4)))

    assert [outcome.reward for outcome in asyncio.run(play())] == [4.0, 5.0, 6.0, 7.0]


def test_tool_env_shows_tool_results_to_the_model() -> None:
    env, policy = Doubler(), ScriptedPolicy([f"Hm. {CALL}", "8"])
    assert play(env, policy) == Outcome(1.0, {"calls": 1.0, "malformed_tool_calls": 0.0}, {"text": "8"})
    assert policy.prompts[1].endswith("8\n")
    assert [turn.parent for turn in policy.turns] == [None, 0]
    assert env.closed == 1


@pytest.mark.parametrize(
    ("call", "message", "malformed"),
    [
        ('{"name": "halve", "arguments": {}}', "there is no tool 'halve'; the tools are double", 0),
        ('{"name": "double", "arguments": {"n": "x"}}', "error: n must be a whole number", 0),
        ('{"name": "double"', 'not a valid tool call: {"name": "double"', 1),
        ("[", "not a valid tool call: [", 1),
    ],
)
def test_wrong_call_is_shown_to_the_model_which_may_continue(call: str, message: str, malformed: int) -> None:
    policy = ScriptedPolicy([f"<tool_call>{call}</tool_call>", "8"])
    outcome = play(Doubler(), policy)
    assert message in policy.prompts[1]
    assert outcome == Outcome(1.0, {"calls": 0.0, "malformed_tool_calls": float(malformed)}, {"text": "8"})


def test_calls_in_one_reply_are_answered_in_order() -> None:
    policy = ScriptedPolicy([CALL + CALL.replace("4", "5") + "<tool_call>?</tool_call>", "8"])
    assert play(Doubler(), policy).metrics == {"calls": 2.0, "malformed_tool_calls": 1.0}
    answers = policy.prompts[1].split("</tool_call>")[-1]
    assert answers.index("8") < answers.index("10") < answers.index("not a valid tool call")


def test_failing_tool_fails_the_episode() -> None:
    env = Doubler()
    with pytest.raises(RuntimeError, match="the tool broke"):
        play(env, ScriptedPolicy([CALL.replace("4", "-4")]))
    assert env.closed == 1


@pytest.mark.parametrize(
    ("limits", "graded"), [(Limits(), ""), (Limits(max_turns=2), ""), (Limits(max_turns=0), None)], ids=repr
)
def test_a_tool_env_that_reaches_a_limit_is_graded_as_truncated(limits: Limits, graded: str | None) -> None:
    outcome = play(Doubler(), ScriptedPolicy(lambda prompt: CALL, limits=limits))
    assert outcome.truncated
    assert outcome.info == {"text": graded}


def test_truncated_answer_is_graded_as_truncated() -> None:
    outcome = play(Doubler(), ScriptedPolicy(["8 or so"], max_tokens=1))
    assert (outcome.reward, outcome.truncated) == (1.0, True)


@pytest.mark.parametrize("env", [Countdown(), Doubler()], ids=["steps", "tools"])
def test_random_replies_never_fail_an_env(env: Env) -> None:
    for seed in range(30):
        policy = NoisyPolicy(seed)
        assert isinstance(play(env, policy).reward, float)
        assert policy.turns


def test_a_task_without_an_id_has_the_id_of_its_draw() -> None:
    class Unnamed(Env):
        task_id = None

        async def rollout(self, policy: Policy) -> float:
            return 1.0

    assert Task(7, "sums", Unnamed()).id == "7"
