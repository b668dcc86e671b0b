"""Tasks of coroutines; `tests/endpoint` plays them with clients and frameworks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import openai
import pytest

import rlkit
from rlkit.errors import LimitReached, UsageError
from rlkit.policy import Limits
from rlkit.testing import ScriptedPolicy

PROGRAM = """
import asyncio, sys, threading
import rlkit
from rlkit.testing import ScriptedPolicy

class Watch:
    def find_spec(self, name, *_):
        if name.startswith("openai") and threading.current_thread() is threading.main_thread():
            print(name)

async def answer(client):
    completion = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
    return float(completion.choices[0].message.content)

sys.meta_path.insert(0, Watch())
print(asyncio.run(rlkit.CallableEnv(answer).rollout(ScriptedPolicy(["0.5"]))))
"""


def test_a_function_that_is_none_is_a_mistake() -> None:
    with pytest.raises(UsageError, match=r"^function: 3 is not a coroutine function"):
        rlkit.CallableEnv(3)  # type: ignore[arg-type]


def test_a_function_that_is_no_coroutine_function_says_so() -> None:
    with pytest.raises(TypeError, match=r"returned 1\.0: define it with `async def`"):
        asyncio.run(rlkit.CallableEnv(lambda _: 1.0).rollout(ScriptedPolicy(["x"])))  # type: ignore[arg-type, return-value]


@pytest.mark.slow
def test_the_client_is_imported_beside_the_event_loop() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stdout + done.stderr


async def ask(client: Any) -> float:
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
    return 0.5


async def ask_in_a_framework(client: Any) -> float:
    try:
        return await ask(client)
    except openai.APIError as error:
        raise RuntimeError("the framework failed") from error


async def ask_and_go_on(client: Any) -> float:
    try:
        return await ask(client)
    except openai.APIError:
        return 0.25


async def ask_and_have_a_bug(client: Any) -> float:
    await ask_and_go_on(client)
    raise KeyError("bug")


def play(function: Callable[[Any], Any]) -> object:
    return asyncio.run(rlkit.CallableEnv(function).rollout(ScriptedPolicy(["fine"], limits=Limits(max_turns=0))))


@pytest.mark.parametrize("function", [ask, ask_in_a_framework])
def test_an_error_of_the_client_at_a_limit_is_the_limit(function: Callable[[Any], Any]) -> None:
    with pytest.raises(LimitReached, match="max_turns"):
        play(function)


def test_an_outcome_after_a_limit_is_truncated() -> None:
    assert play(ask_and_go_on) == rlkit.Outcome(0.25, truncated=True)


def test_another_error_after_a_limit_is_itself() -> None:
    with pytest.raises(KeyError, match="bug"):
        play(ask_and_have_a_bug)
