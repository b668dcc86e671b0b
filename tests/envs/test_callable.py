"""Tasks of coroutines; `tests/endpoint` plays them with clients and frameworks."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rlkit
from rlkit.errors import UsageError

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


def test_the_client_is_imported_beside_the_event_loop() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stdout + done.stderr
