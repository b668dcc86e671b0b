"""A hosted environment, where a server of these tests stands in for OpenReward behind its real SDK."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from rlkit.envs.openreward import openreward
from rlkit.testing import ScriptedPolicy
from tests.envs.openreward.worlds import CALLS, Marks, call, served

KEY = "or-key-of-the-platform"
GIVEN = list[Mapping[str, str]]()
"""What each session was given as secrets."""


class WhoDunIt(Marks):
    """Notes the secrets of its sessions."""

    def __init__(self, task_spec: Any = {}, secrets: Mapping[str, str] = {}) -> None:  # noqa: B006
        super().__init__(task_spec, secrets)
        GIVEN.append(dict(secrets))


@pytest.mark.parametrize(
    ("variable", "host"),
    [("OPENREWARD_URL", "sessions.openreward.test"), ("OPENREWARD_SESSION_URL", "openreward.test")],
)
def test_a_variable_says_where_hosted_environments_are(
    variable: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, resolved = set[str](), socket.getaddrinfo

    def resolve_here(name: Any, *arguments: Any, **named: Any) -> Any:
        if not str(name).endswith("openreward.test"):
            return resolved(name, *arguments, **named)
        names.add(str(name))
        return resolved("127.0.0.1", *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
    monkeypatch.setenv("OPENREWARD_API_KEY", KEY)
    CALLS.clear()
    GIVEN.clear()
    with served([WhoDunIt]) as running:
        monkeypatch.setenv(variable, f"http://openreward.test:{running.url.rpartition(':')[2]}")
        (task, *others) = openreward(target="GeneralReasoning/WhoDunIt")
        outcome = asyncio.run(task.rollout(ScriptedPolicy([call("mark", mark="a", reward=1.0, finished=True)])))
    assert (outcome.reward, dict(CALLS), len(others)) == (1.0, {"a": 1}, 5)
    assert task.task_id.startswith("GeneralReasoning/WhoDunIt")
    assert [headers["OPENREWARD_API_KEY"] for headers in GIVEN] == [KEY]
    assert names == {host}
