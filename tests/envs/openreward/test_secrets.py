from __future__ import annotations

import asyncio
import pickle

import pytest

from rlkit.envs.openreward import openreward
from rlkit.envs.openreward.blocks import convert_messages, convert_tool
from rlkit.envs.openreward.connection import sdk
from rlkit.envs.openreward.connection.secrets import parse_secrets
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.testing import ScriptedPolicy
from tests.envs.openreward.worlds import Served, call

VALUE = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def _set(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk.load()
    monkeypatch.setenv("MY_JUDGE", VALUE)


def test_the_environment_gets_the_value_and_the_model_and_the_record_do_not(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#marks", secrets={"judge": "MY_JUDGE"})
    assert VALUE not in repr(task)
    assert VALUE.encode() not in pickle.dumps(task)
    policy = ScriptedPolicy([call("reveal")])
    outcome = asyncio.run(task.rollout(policy))
    assert "('judge', '***')" in str(outcome.info["messages"])
    assert VALUE not in str(outcome)


def test_tools_and_examples_are_redacted() -> None:
    from openreward.api.environments.types import Message, TextBlock, ToolCallBlock, ToolSpec

    clean = parse_secrets({"judge": "MY_JUDGE"}, hosted=False).cleaner()
    schema = {"type": "object", "properties": {"key": {"default": VALUE, "enum": [VALUE, 1, None]}}}
    example = Message("assistant", [ToolCallBlock("c", "look", {"with": [VALUE]})])
    tools = [convert_tool(ToolSpec("look", f"Use {VALUE}.", schema), clean)]
    messages = convert_messages([Message("user", [TextBlock(f"It is {VALUE}.")]), example], clean)
    assert VALUE not in str(tools) + str(messages)
    assert str(tools).count("***") == 3
    assert messages[1].get("tool_calls") == [{"id": "c", "name": "look", "arguments": {"with": ["***"]}}]


def test_the_platform_key_is_redacted_if_it_is_sent(worlds: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENREWARD_API_KEY", "or-key-of-the-platform")
    (task, *_) = openreward(target=f"{worlds.url}#marks", send_api_key=True)
    outcome = asyncio.run(task.rollout(ScriptedPolicy([call("reveal")])))
    assert "('OPENREWARD_API_KEY', '***')" in str(outcome.info["messages"])
    assert "or-key-of-the-platform" not in str(outcome)


def test_an_environment_error_is_redacted(worlds: Served) -> None:
    (task, *_) = openreward(target=f"{worlds.url}#marks", secrets={"judge": "MY_JUDGE"})
    with pytest.raises(EnvironmentFault, match=r"the secret is \*\*\*"):
        asyncio.run(task.rollout(ScriptedPolicy([call("fail")])))


def test_a_secret_value_in_place_of_a_name_is_rejected_and_not_shown() -> None:
    for secret in ("sk-1234567890abcdefghij", {"env": "sk-12345"}, {"env": "MY_JUDGE", "domain": "x"}, {"domains": []}):
        with pytest.raises(UsageError, match=r"^secrets\.key: ") as refused:
            parse_secrets({"key": secret}, hosted=False)  # pyright: ignore
        assert "sk-" not in str(refused.value)


def test_a_hosted_environment_is_told_where_a_secret_may_be_sent() -> None:
    with pytest.raises(UsageError, match=r"secrets\.judge: OpenReward has no allowed hosts"):
        parse_secrets({"judge": "MY_JUDGE"}, hosted=True)
    secrets = parse_secrets(
        {"openai_api_key": "MY_JUDGE", "judge": {"env": "MY_JUDGE", "domains": ["a.example"]}}, hosted=True
    )
    assert secrets.sent() == {"openai_api_key": VALUE, "judge": (VALUE, ["a.example"])}
