"""Environments on servers of OpenEnv, over its WebSocket protocol.

Invariant: a server that answers wrongly, late or not at all fails the episode.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field, FiniteFloat, JsonValue, ValidationError, WebsocketUrl
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from rlkit._util.sections import validate_fields
from rlkit.env import Env
from rlkit.errors import EnvironmentFault, LimitReached
from rlkit.policy import Policy
from rlkit.types import Json, Message, Outcome

MESSAGE_BYTES = 16 << 20
CLOSE_S = 1.0

type Action = Mapping[str, Json]

_DECODER = json.JSONDecoder()


class _Response(BaseModel):
    type: str
    data: dict[str, JsonValue]


class _Result(BaseModel, strict=True):
    observation: dict[str, JsonValue]
    reward: FiniteFloat | bool | None = None
    done: bool = False


class _InvalidActionError(EnvironmentFault):
    """The reply has no action, or the server rejected its form."""


@dataclass(frozen=True)
class OpenEnvTask(Env):
    """Episode of a server with a seed; `openenv` describes the fields."""

    url: str
    seed: int
    action: str | Action
    show: str | None
    system_prompt: str | None
    reset: Action
    max_turns: int
    answer_timeout_s: float
    max_reward = float("inf")

    @property
    def task_id(self) -> str:
        """The seed."""
        return str(self.seed)

    async def rollout(self, policy: Policy) -> Outcome:
        """Play until the environment is done, or a limit is reached."""
        try:
            async with connect(f"{self.url}/ws", max_size=MESSAGE_BYTES, close_timeout=CLOSE_S) as socket:
                return await self._play(socket, policy)
        except (OSError, ValidationError, WebSocketException) as error:  # TimeoutError is an OSError
            reason = str(error) or f"no answer within answer_timeout_s={self.answer_timeout_s:g}"
            raise EnvironmentFault(f"{type(error).__name__}: {self.url}: {reason}") from error

    async def _play(self, socket: ClientConnection, policy: Policy) -> Outcome:
        result = await self._request(socket, "reset", {"seed": self.seed, **self.reset})
        messages: list[Message] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        messages.append({"role": "user", "content": self._describe(result)})
        rewards, invalid = list[float | None](), 0
        while not result.done and len(policy.turns) < self.max_turns:
            try:
                reply = await policy.chat(messages)
            except LimitReached:
                break
            try:
                result = await self._request(socket, "step", self._read_action(reply.text))
                observation = self._describe(result)
                rewards.append(result.reward)
                policy.reward(float(result.reward or 0))
            except _InvalidActionError as error:
                if isinstance(self.action, Mapping):
                    raise  # the template is wrong, not the reply
                invalid += 1
                observation = f"error: {error}"
            messages.append(reply.message)
            messages.append({"role": "user", "content": observation})
        if (result.done or rewards) and all(reward is None for reward in rewards):
            raise EnvironmentFault("RewardError: the server gave no reward")
        reward = sum(filter(None, rewards), 0.0)
        return Outcome(reward, {"invalid_actions": float(invalid)}, truncated=not result.done)

    def _read_action(self, text: str) -> Action:
        if isinstance(self.action, Mapping):
            return json.loads(json.dumps(self.action).replace("{reply}", json.dumps(text)[1:-1]))
        with suppress(RecursionError):  # ends the search: each further brace would be as deep
            for brace in re.finditer("{", text):
                with suppress(ValueError):
                    action, _ = _DECODER.raw_decode(text, brace.start())
                    json.dumps(action, allow_nan=False)  # JSON has no NaN and infinity, which Python reads
                    return action
        raise _InvalidActionError("the reply contains no valid action")

    def _describe(self, result: _Result) -> str:
        observation = {name: value for name, value in result.observation.items() if name != "metadata"}
        if self.show is not None and self.show not in observation:
            raise EnvironmentFault(f"ObservationError: the server's observation has no {self.show!r}")
        value = observation if self.show is None else observation[self.show]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    async def _request(self, socket: ClientConnection, kind: str, data: Action) -> _Result:
        async with asyncio.timeout(self.answer_timeout_s):
            await socket.send(json.dumps({"type": kind, "data": data}))
            response = _Response.model_validate_json(await socket.recv())
        if response.type == "observation":
            return _Result.model_validate(response.data)
        code, message = response.data.get("code"), response.data.get("message")
        error = _InvalidActionError if code == "VALIDATION_ERROR" else EnvironmentFault
        raise error(f"{code or 'ProtocolError'}: {message or response.type}")


def openenv(
    *,
    url: str,
    count: Annotated[int, Field(ge=1, le=10**6)] = 1000,
    action: Literal["json"] | dict[str, JsonValue] = "json",
    show: str | None = None,
    system_prompt: str | None = None,
    reset: dict[str, JsonValue] | None = None,
    max_turns: Annotated[int, Field(ge=1)] = 16,
    answer_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0,
    seed: Annotated[int, Field(ge=0)] = 0,
) -> Sequence[OpenEnvTask]:
    """Return episodes of an environment on a server of OpenEnv.

    Args:
        url: address of the server, `ws://host:port` or `wss://host`.
        count: number of episodes; their seeds are `seed`, `seed + 1`, and so on.
        action: rule for the action of a reply. `json`: the first valid JSON object in the reply. A mapping: this
            action, with the reply in place of `{reply}`.
        show: field of an observation that the model sees; by default, the whole observation as JSON.
        reset: further data for the server's `reset`.
        max_turns: limit of replies of an episode.
        seed: seed of the first episode.
    """
    base = str(validate_fields(WebsocketUrl, url, place="url")).rstrip("/")
    return [
        OpenEnvTask(base, episode, action, show, system_prompt, reset or {}, max_turns, answer_timeout_s)
        for episode in range(seed, seed + count)
    ]
