"""`CallableEnv`: a coroutine that talks to the policy through a client of OpenAI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import isawaitable
from typing import TYPE_CHECKING

from rlkit._util.frames import iter_causes
from rlkit._util.threads import in_thread
from rlkit.env import Env
from rlkit.errors import UsageError
from rlkit.policy import Policy
from rlkit.rollout.validation import as_outcome
from rlkit.types import Outcome

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True)
class CallableEnv(Env):
    """A task that an agent of any framework plays, with a client whose requests are turns of the policy.

    ::

        async def answer(client: openai.AsyncOpenAI, question: str, result: str) -> float:
            messages = [{"role": "user", "content": question}]
            completion = await client.chat.completions.create(model="policy", messages=messages)
            return float(result in completion.choices[0].message.content)

        env = rlkit.CallableEnv(functools.partial(answer, question="6 times 7?", result="42"))

    Frameworks with clients of their own take `client.base_url` and `client.api_key`. See `Policy.endpoint`.

    Args:
        function: coroutine function that plays the task and returns its outcome or reward.
        task_id: name of the task in records; by default the draw.
        content: text of the task, to keep evaluated tasks out of training; None if it has none.
    """

    function: Callable[[AsyncOpenAI], Awaitable[Outcome | float]]
    task_id: str | None = None
    content: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(f"function: {self.function!r} is not a coroutine function")

    async def rollout(self, policy: Policy) -> Outcome | float:
        """Play the task; an error of the client at a limit of the rollout is that limit.

        An outcome after a limit is truncated.
        """
        await in_thread(import_module, "openai.resources.chat")  # takes seconds, and is loaded late by default
        import openai

        # Without repeats and limits of its own: a repeat would be another turn, and the rollout has a time limit.
        # Loopback has no certificates, and loading them would take most of the time of making a client. A proxy of the
        # environment's variables would not reach it.
        http_client = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
        async with (
            policy.endpoint() as endpoint,
            openai.AsyncOpenAI(
                base_url=endpoint.url, api_key=endpoint.key, max_retries=0, timeout=None, http_client=http_client
            ) as client,
        ):
            try:
                playing = self.function(client)
                if not isawaitable(playing):
                    raise TypeError(f"{self.function!r} returned {playing!r}: define it with `async def`")
                outcome = await playing
            except Exception as error:
                causes = iter_causes(error, suppressed=True)
                if endpoint.limit is not None and any(isinstance(cause, openai.APIError) for cause in causes):
                    raise endpoint.limit from error
                raise
        return outcome if endpoint.limit is None else replace(as_outcome(outcome), truncated=True)
