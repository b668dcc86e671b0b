from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlkit.envs.openreward.blocks import convert_content, convert_messages, convert_tool, make_readable
from rlkit.envs.openreward.connection import sdk
from rlkit.errors import EnvironmentFault


@pytest.fixture(scope="module", autouse=True)
def _load_sdk() -> None:
    sdk.load()


def test_a_conversation_keeps_its_thoughts_calls_and_results_in_order() -> None:
    from openreward.api.environments.types import (
        ImageBlock,
        Message,
        ReasoningBlock,
        TextBlock,
        ToolCallBlock,
        ToolResultBlock,
    )

    call = ToolCallBlock("c", "look", {"at": "cat"})
    result = ToolResultBlock("c", [TextBlock("a"), TextBlock("b")])
    messages = [
        Message("system", [TextBlock("one"), TextBlock("two")]),
        Message("assistant", [ReasoningBlock("hm"), TextBlock("I look."), call]),
        Message("user", [result, TextBlock("And?"), ImageBlock("AAAA", "image/png")]),
    ]
    converted = convert_messages(messages, lambda text: text.replace("two", "***"))
    assert converted == [
        {"role": "system", "content": "one\n***"},
        {
            "role": "assistant",
            "content": "I look.",
            "thinking": "hm",
            "tool_calls": [{"id": "c", "name": "look", "arguments": {"at": "cat"}}],
        },
        {"role": "tool", "content": "a\nb", "tool_call_id": "c", "name": "look"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And?"}, {"type": "image", "image": "data:image/png;base64,AAAA"}],
        },
    ]
    assert make_readable(converted)[-1] == {"role": "user", "content": "And?\n[image]"}


def test_a_block_of_an_unsupported_type_is_an_error() -> None:
    with pytest.raises(EnvironmentFault, match="block of type 'video'"):
        convert_content([SimpleNamespace(type="video")], str)


def test_a_tool_without_arguments_takes_an_empty_object() -> None:
    from openreward.api.environments.types import ToolSpec

    assert convert_tool(ToolSpec("go", "Go.", None), str)["parameters"] == {"type": "object", "properties": {}}
