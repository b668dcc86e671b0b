"""Conversations of files, and episodes of earlier runs, as tasks that record them instead of sampling.

Invariant: an episode of a run is trained on with the tokens that were sampled, never with their text.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rlkit.config.loading.run_config import find_run
from rlkit.config.schema.supervised import REWARD_CONDITION
from rlkit.endpoint.openai_chat import ChatCompletion
from rlkit.endpoint.rejection import Rejection, parse_body
from rlkit.env import Env
from rlkit.errors import UsageError
from rlkit.policy import Policy
from rlkit.store.history import read_groups, table_path
from rlkit.tasks.provenance import PinTasks
from rlkit.types import Episode, Message, Tool

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
}


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
        paths = [Path(path).expanduser() for path in ([files] if isinstance(files, str) else files or [])]
        envs: list[Env] = [env for path in paths for env in _read_file(path, roles)]
        problem = f"no conversation of {', '.join(map(str, paths))} has a message of a role in {', '.join(roles)}"
    else:
        directory = find_run(run)
        steps = sorted(int(path.name.partition("=")[2]) for path in directory.glob("episodes/step=*"))
        last = cast("int", pin(max(steps, default=0)))  # the other run may have gone on when this one is resumed
        episodes = list(_read_run(directory, [step for step in steps if step <= last], reward))
        envs = [*episodes[-newest:]] if newest else [*episodes]
        problem = f"{directory} has no episode{'' if reward is None else f' with a reward {reward}'}"
    if not envs:
        raise UsageError(problem)
    return envs


def _read_run(directory: Path, steps: Sequence[int], reward: str | None) -> Iterator[Env]:
    """Yield the episodes of a run whose rewards meet a condition, the oldest first."""
    match = REWARD_CONDITION.fullmatch(reward or "> -1e999")
    if match is None:
        raise UsageError(f"reward: {reward!r} is not a condition such as '>= 1'")
    is_met, limit = _COMPARISONS[match[1]], float(match[2])
    for step in steps:
        for recorded in read_groups(table_path(directory, step)):
            for episode in recorded.group.episodes:
                if episode.reward is not None and episode.sampled_tokens and is_met(episode.reward, limit):
                    yield RecordedEpisode(f"{directory.name}/{recorded.group.draw}/{episode.member}", episode)


def _read_file(path: Path, roles: Sequence[str]) -> Iterator[Env]:
    """Yield the conversations of a file that have a message to train on."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = parse_body(line, ChatCompletion)
            messages = [message.parse() for message in parsed.messages]
        except Rejection as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        raw = cast("list[dict[str, Any]]", json.loads(line)["messages"])
        trained = [
            index
            for index, (message, fields) in enumerate(zip(messages, raw, strict=True))
            if message["role"] in roles and fields.get("weight") != 0
        ]
        if trained:
            tools = [tool.parse() for tool in parsed.tools or ()]
            yield Conversation(f"{path.stem}/{number}", messages, tools, trained)
