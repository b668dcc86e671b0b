"""Episodes against a real server, through the real SDK."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest

import rlkit
from rlkit.envs.openreward import openreward
from rlkit.errors import EnvironmentFault, LimitReached, UsageError
from rlkit.policy import Limits
from rlkit.testing import ScriptedPolicy
from tests.envs.openreward.worlds import CALLS, PROMPTS, Served, call


def play(worlds: Served, variant: str, replies: Sequence[str], **args: object) -> rlkit.Outcome:
    return play_with(worlds, variant, ScriptedPolicy(replies), **args)


def play_with(worlds: Served, variant: str, policy: ScriptedPolicy, **args: object) -> rlkit.Outcome:
    tasks = openreward(target=f"{worlds.url}#{variant}", **args)  # pyright: ignore[reportArgumentType]
    return asyncio.run(tasks[0].rollout(policy))


def tool_messages(outcome: rlkit.Outcome) -> list[str]:
    messages = outcome.info["messages"]
    assert isinstance(messages, list)
    return [message["content"] for message in messages[1:] if message["role"] in ("tool", "user")]  # pyright: ignore


def end_reason(outcome: rlkit.Outcome) -> str:
    (reason,) = [name for name, value in outcome.metrics.items() if name.startswith("ended/") and value]
    assert reason == f"ended/{outcome.info['ended']}"
    return reason.removeprefix("ended/")


def test_all_calls_of_a_turn_are_made_in_order_until_the_environment_ends_it(worlds: Served) -> None:
    CALLS.clear()
    first = call("mark", mark="a", reward=0.5) + call("mark", mark="b")
    last = call("mark", mark="c", reward=0.25, finished=True) + call("mark", mark="d", reward=9)
    outcome = play(worlds, "marks", [first, last])
    assert (outcome.reward, end_reason(outcome), outcome.truncated) == (0.75, "finished", False)
    assert tool_messages(outcome) == ["marked a", "marked b", "marked c"]
    assert outcome.info["rewards"] == [0.5, None, 0.25]
    assert CALLS == {"a": 1, "b": 1, "c": 1}


def test_each_turn_gets_the_rewards_of_its_own_calls(worlds: Served) -> None:
    policy = ScriptedPolicy(
        [call("mark", mark="a", reward=1) + call("mark", mark="b", reward=2), call("mark", mark="c"), "."]
    )
    play_with(worlds, "marks", policy)
    assert [turn.reward for turn in policy.turns] == [3.0, None, None]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("<tool_call>{broken</tool_call>", "error: not a valid tool call: {broken"),
        ("<tool_call>[1]</tool_call>", "error: not a valid tool call: [1]"),
        (call("nothing_of_the_kind"), "error: there is no tool 'nothing_of_the_kind'; the tools are fail, indented"),
        (call("indented", chars="many"), "error: Tool input validation error"),
        (call("indented"), "error: Tool input validation error"),
    ],
)
def test_an_invalid_call_is_reported_to_the_model_and_counted(worlds: Served, reply: str, message: str) -> None:
    outcome = play(worlds, "marks", [reply, call("mark", mark="then", reward=1, finished=True)])
    assert tool_messages(outcome)[0].startswith(message)
    assert outcome.metrics["wrong_tool_calls"] + outcome.metrics["malformed_tool_calls"] == 1
    assert outcome.reward == 1


def test_unparsable_calls_are_answered_by_one_user_message(worlds: Served) -> None:
    outcome = play(worlds, "marks", [call("mark", mark="a") + "<tool_call>{</tool_call>" * 2, "done"])
    messages = outcome.info["messages"]
    assert isinstance(messages, list)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user", "assistant"]  # pyright: ignore
    assert tool_messages(outcome)[1] == "error: not a valid tool call: {\nerror: not a valid tool call: {"


def test_an_episode_never_has_more_tokens_than_it_may(worlds: Served) -> None:
    for max_tokens in (600, 2000, 3000):
        policy = ScriptedPolicy([call("indented", chars=700)] * 20)
        tasks = openreward(target=f"{worlds.url}#marks", max_total_tokens=max_tokens, max_turns=20)
        outcome = asyncio.run(tasks[0].rollout(policy))
        assert end_reason(outcome) == "tokens"
        assert all(len(policy.prompts[n]) + len(turn.completion) <= max_tokens for n, turn in enumerate(policy.turns))
    assert len(policy.turns) > 0


def test_the_prompt_is_requested_once(worlds: Served) -> None:
    PROMPTS.clear()
    play(worlds, "marks", [call("mark", mark="a"), call("mark", mark="b"), "done"])
    assert list(PROMPTS.values()) == [1]


def test_a_task_that_begins_with_a_conversation_and_has_tools_of_its_own(worlds: Served) -> None:
    policy = ScriptedPolicy([call("own")])
    outcome = play_with(worlds, "talks", policy, system_prompt="Be polite.")
    messages = outcome.info["messages"]
    assert isinstance(messages, list)
    assert [message["role"] for message in messages[:4]] == ["system", "user", "assistant", "user"]  # pyright: ignore
    assert "Be polite.\n\nBe brief." in policy.prompts[0]
    assert '"own"' in policy.prompts[0] and '"shared"' in policy.prompts[0]
    assert outcome.reward == 1


def test_an_environment_without_tools_takes_the_message_as_the_answer(worlds: Served) -> None:
    outcome = play(worlds, "answers", ["yes, it is"])
    assert (outcome.reward, end_reason(outcome)) == (1.0, "answered")


def test_a_message_without_a_call_ends_the_episode_or_gets_a_nudge(worlds: Served) -> None:
    outcome = play(worlds, "marks", ["I am done."])
    assert (outcome.reward, end_reason(outcome), outcome.truncated) == (0.0, "no_call", False)
    policy = ScriptedPolicy(["I am done.", call("mark", mark="a", reward=1, finished=True)])
    outcome = play_with(worlds, "marks", policy, on_message="nudge")
    assert (outcome.reward, outcome.metrics["nudges"]) == (1.0, 1.0)
    assert "Call one of the tools: fail, indented, mark" in policy.prompts[1]


def test_an_episode_that_the_model_does_not_end_is_truncated_and_has_the_reward_for_that(worlds: Served) -> None:
    replies = [call("mark", mark="a", reward=0.5)] * 2
    outcome = play(worlds, "marks", replies, max_turns=2, nonterminal_reward=-1.0)
    assert (outcome.reward, end_reason(outcome), outcome.truncated) == (0.0, "max_turns", True)
    outcome = play(worlds, "marks", replies, max_turns=2, nonterminal_reward=-1.0, reward_reduction="last")
    assert outcome.reward == -1.0


def test_the_token_limit_ends_an_episode_and_its_rewards_count(worlds: Served) -> None:
    replies = [call("mark", mark="a", reward=0.5)] * 30
    outcome = play(worlds, "marks", replies, max_total_tokens=3000, max_turns=40)
    assert end_reason(outcome) == "tokens"
    assert 0 < len(outcome.info["rewards"]) < 30  # pyright: ignore
    limited = ScriptedPolicy(replies, limits=Limits(context_tokens=3000))
    assert end_reason(play_with(worlds, "marks", limited, max_turns=40)) == "tokens"
    short = ScriptedPolicy(replies, max_tokens=5)
    assert end_reason(play_with(worlds, "marks", short)) == "cut_off"


def test_an_image_in_a_tool_result_is_recorded_as_a_placeholder(worlds: Served) -> None:
    outcome = play(worlds, "marks", [call("picture")])
    assert tool_messages(outcome) == ["a dot\n[image]"]


def test_a_tool_that_raises_fails_the_episode_without_reward(worlds: Served) -> None:
    with pytest.raises(EnvironmentFault, match=r"calling fail: ToolFailed: .*the tool is broken"):
        play(worlds, "marks", [call("mark", mark="a", reward=1) + call("fail")])


def test_a_failed_setup_fails_the_episode(worlds: Served) -> None:
    with pytest.raises(EnvironmentFault, match="HTTP 500: RuntimeError: no room"):
        play(worlds, "broken", [])


def test_a_call_that_takes_too_long_fails_the_episode(worlds: Served) -> None:
    with pytest.raises(EnvironmentFault, match=r"no answer within 0\.2 s"):
        play(worlds, "marks", [call("sleep")], call_timeout_s=0.2)


def test_a_cancelled_rollout_leaves_no_session(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#marks")

    async def cancelled() -> None:
        playing = asyncio.create_task(task.rollout(ScriptedPolicy([call("sleep")])))
        while not worlds.sessions:
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancelled())
    assert worlds.sessions == 0


def test_a_session_cancelled_while_opening_is_deleted(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#marks")

    async def cancelled(after_s: float) -> None:
        playing = asyncio.create_task(task.rollout(ScriptedPolicy([call("sleep")])))
        await asyncio.sleep(after_s)
        playing.cancel()
        await asyncio.wait([playing])

    for number in range(8):
        asyncio.run(cancelled(0.004 * number))
    assert worlds.sessions == 0


def test_a_finished_episode_that_was_never_rewarded_fails(worlds: Served) -> None:
    with pytest.raises(EnvironmentFault, match="without any reward"):
        play(worlds, "marks", [call("mark", mark="a", finished=True)])


def test_a_task_can_be_pickled_and_played(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#answers")
    again = pickle.loads(pickle.dumps(task))
    assert again == task
    assert asyncio.run(again.rollout(ScriptedPolicy(["yes"]))).reward == 1


def test_an_environment_of_another_version_than_pinned_stops_the_run(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#answers@9.9")
    with pytest.raises(UsageError, match=r"target: answers has version .*, not 9\.9"):
        asyncio.run(task.rollout(ScriptedPolicy(["yes"])))
    (task, *_) = openreward(target=f"{worlds.url}#answers@0.1")
    assert asyncio.run(task.rollout(ScriptedPolicy(["yes"]))).reward == 1


def test_a_missing_task_stops_the_run(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#answers", splits="test")
    with pytest.raises(UsageError, match="target: answers: HTTP 400: Invalid index"):
        asyncio.run(replace(task, index=99).rollout(ScriptedPolicy(["yes"])))


def test_limits_of_the_run_do_not_fail_the_episode(worlds: Served) -> None:
    policy = ScriptedPolicy([call("mark", mark="a", reward=1)], limits=Limits(max_turns=1))
    try:
        outcome = play_with(worlds, "marks", policy)
    except LimitReached:
        pytest.fail("the limit is the environment's to catch")
    assert (outcome.reward, outcome.truncated) == (1.0, True)
