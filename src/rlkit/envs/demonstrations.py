"""Conversations of files, and episodes of earlier runs, as tasks that record them instead of sampling.

Invariant: an episode of a run is trained on with the tokens that were sampled, never with their text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rlkit._util.paths import expand_user
from rlkit.chat.demonstration import choose_trained
from rlkit.config.loading.run_config import find_run, load_run_config
from rlkit.config.schema.supervised import parse_condition
from rlkit.endpoint.openai_chat import ChatCompletion, encode_tool_call
from rlkit.endpoint.rejection import Rejection, parse_body
from rlkit.env import Env
from rlkit.errors import UsageError, did_you_mean
from rlkit.policy import Policy
from rlkit.store.history import list_table_steps, read_groups, table_path
from rlkit.tasks.provenance import PinTasks
from rlkit.types import Episode, Json, Message, Tool

_FIELDS = ("role", "content", "thinking", "reasoning_content", "tool_calls", "tool_call_id", "name", "weight")
"""Fields of a message in a file."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversation(Env):
    """A conversation that somebody else wrote, with the indices of the messages to train on."""

    task_id: str
    messages: Sequence[Message]
    tools: Sequence[Tool]
    trained: Sequence[int]

    async def rollout(self, policy: Policy) -> float:
        """Record the conversation; its reward is 1."""
        policy.demonstrate(self.messages, tools=self.tools, trained=self.trained)
        return 1.0


@dataclass(frozen=True, slots=True, eq=False)
class RecordedEpisode(Env):
    """An episode of an earlier run."""

    task_id: str
    episode: Episode

    async def rollout(self, policy: Policy) -> float:
        """Record the turns of the episode; its reward is the same."""
        policy.replay(self.episode.turns)
        return cast("float", self.episode.reward)


def demonstrations(
    *,
    pin: PinTasks,
    files: str | list[str] | None = None,
    run: str | None = None,
    reward: str | None = None,
    newest: int | None = None,
    roles: Sequence[str] = ("assistant",),
) -> list[Env]:
    """Return the conversations of files, or the episodes of a run; arguments as in the section `source`.

    Raises:
        UsageError: a file or the run does not exist or is damaged, or there is nothing to train on.
    """
    if run is None:
        paths = [expand_user(path) for path in ([files] if isinstance(files, str) else files or [])]
        try:
            contents = {str(path): path.read_bytes() for path in paths}
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
        if len(contents) < len(paths):
            raise UsageError(f"files: {', '.join(map(str, paths))}: a file is listed twice; remove one")
        digests = {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}
        recorded = _pin(pin, digests)
        for path, digest in digests.items():
            if recorded.get(path, digest) != digest:
                raise UsageError(f"{path} has changed since the run began: put it back, or start another run")
        envs: list[Env] = [env for path in paths for env in _read_conversations(path, contents[str(path)], roles)]
        problem = f"{', '.join(map(str, paths))}: there is no conversation; a line holds one, in JSON"
    else:
        directory = find_run(run)
        steps = list_table_steps(directory)
        last = _pin(pin, max(steps, default=0))  # the other run may have gone on when this one is resumed
        envs = list(_read_run(directory, [step for step in steps if step <= last], reward))[-(newest or 0) :]
        problem = f"{directory} has no sampled episode{'' if reward is None else f' with a reward {reward}'}"
    if not envs:
        raise UsageError(problem)
    return envs


def _pin[T: Json](pin: PinTasks, current: T) -> T:
    """Return the recorded description of the conversations; UsageError if they were of the other kind."""
    recorded = pin(current)
    if type(recorded) is type(current):
        return cast("T", recorded)
    was, now = ("run", "files") if isinstance(recorded, int) else ("files", "run")
    raise UsageError(f"{now}: the run began with conversations of `{was}`: set {was} again, or start another run")


def _read_run(directory: Path, steps: Sequence[int], reward: str | None) -> Iterator[Env]:
    """Yield the episodes of a run whose rewards meet a condition, the oldest first."""
    is_met = None if reward is None else parse_condition(reward)
    played = load_run_config(directory).reinforced_envs  # its own conversations have a reward that says nothing
    for step in steps:
        for recorded in read_groups(table_path(directory, step)):
            for episode in recorded.group.episodes if recorded.group.env in played else ():
                if episode.reward is not None and episode.sampled_tokens and (not is_met or is_met(episode.reward)):
                    yield RecordedEpisode(f"{directory.name}/{recorded.group.draw}/{episode.member}", episode)


def _read_conversations(path: Path, content: bytes, roles: Sequence[str]) -> Iterator[Env]:
    """Yield the conversations of a file."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            fields: Any = {**json.loads(line.decode("utf-8-sig"))}  # a TypeError for anything but an object
            conversation = {name: fields[name] for name in ("messages", "tools") if name in fields}
            for name in fields.keys() - conversation.keys():  # other fields are notes on the conversation
                if near := did_you_mean(name, ("messages", "tools")):
                    raise ValueError(f"unknown field {name!r}.{near}")
            parsed = parse_body(json.dumps(_to_openai(conversation)).encode(), ChatCompletion)
            messages = [message.parse() for message in parsed.messages]
            for message, given in zip(messages, conversation["messages"], strict=True):
                _require_known(given)
                if "weight" in given:
                    message["weight"] = given["weight"]
            trained = choose_trained(messages, roles)
        except (Rejection, ValueError, TypeError, RecursionError) as error:
            is_object = not isinstance(error, json.JSONDecodeError | TypeError)
            problem = error or "it is nested too deeply" if is_object else "a line must hold one conversation, in JSON"
            raise UsageError(f"{path}, line {number}: {problem}") from error
        if not trained:
            raise UsageError(f"{path}, line {number}: no message has a role in {', '.join(roles)} and a weight above 0")
        tools = [tool.parse() for tool in parsed.tools or ()]
        yield Conversation(f"{path.stem}/{number}", messages, tools, trained)


def _require_known(message: Mapping[str, object]) -> None:
    """Raise ValueError for a field of a message that would have no effect, such as a misspelt `weight`."""
    for name, value in message.items():
        if value is not None and name not in _FIELDS:
            raise ValueError(f"messages: unknown field {name!r}.{did_you_mean(name, _FIELDS) or ' Leave it out.'}")


def _to_openai(conversation: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation, with calls and tools of rlkit's shape, `{"name": …, "arguments": {…}}`, in OpenAI's."""
    with suppress(LookupError, TypeError, AttributeError):  # the parser names what is malformed
        for message in conversation["messages"]:
            calls = message.get("tool_calls") or ()
            message["tool_calls"] = [encode_tool_call(c, c.get("id", "")) if "arguments" in c else c for c in calls]
        tools = conversation.get("tools") or ()
        conversation["tools"] = [{"type": "function", "function": t} if "parameters" in t else t for t in tools]
    return conversation
