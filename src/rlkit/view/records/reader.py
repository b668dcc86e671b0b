"""Readers of runs and of other tools' records: the data of the pages, from the groups and episodes of each step.

Invariant: an episode's neighbours are the episodes before and after it in its step, earlier attempts included.
"""

from __future__ import annotations

import base64
import json
import re
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, override

from rlkit._util.files.json_fields import pick, pick_list, pick_object, pick_rows
from rlkit._util.files.run_locks import LIVE_S
from rlkit.errors import UsageError
from rlkit.metrics.intervals import estimate_mean

type Row = dict[str, Any]
"""JSON object."""

type Kind = Literal["evaluation", "step"]
type Step = tuple[Kind, int]

type Place = tuple[int, int, int]
"""Position of a group in its step, member and attempt."""

_EXCERPT_CHARS = 80
_RUN = ("reason", "damaged", "started", "steps", "model", "reward", "evaluation", "tokens", "usd")
_GROUP = ("position", "draw", "env", "task", "taught", "reason", "estimator", "baseline")
_MEMBER = ("reward", "advantage", "tokens", "turns", "seconds", "cut", "versions")
_TURN = ("version", "stop", "reward", "seconds", "trainer_logprobs", "advantages", "datum")
_TOKENS = ("prompt", "completion", "sampled", "logprobs", "images")
_HEADER = ("config", "findings", "checkpoints", "best_step", "versions", "steps_recorded", "evaluations")


class RecordReader(ABC):
    """Base class of readers: the data of the pages of one run."""

    kind = ""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def run(self) -> Row:
        """Return the header of the run's page."""

    @abstractmethod
    def list_steps(self) -> Sequence[Step]:
        """Return the steps and evaluations, sorted."""

    def has_step(self, step: Step) -> bool:
        """Return whether a step or evaluation is among the steps."""
        return step in self.list_steps()

    @abstractmethod
    def read_groups(self, step: Step) -> Sequence[Row]:
        """Return the groups of a step."""

    @abstractmethod
    def read_replies(self, step: Step, position: int) -> Mapping[Place, Row]:
        """Return `turns`, `info` and `error` of each episode of a group; turns need no more than `messages`."""

    @abstractmethod
    def read_episode(self, step: Step, place: Place) -> Row:
        """Return `turns`, `info` and `error` of an episode, and whatever else its group lacks."""

    def summary(self) -> Row:
        """Return the run's row in the list of runs."""
        return {name: value for name, value in self.run().items() if name not in _HEADER}

    def read_metrics(self) -> Mapping[int, Mapping[str, float | None]]:
        """Return metrics by step."""
        return self.score_steps(self.list_steps())

    def score_steps(self, steps: Iterable[Step]) -> dict[int, dict[str, float | None]]:
        """Return the mean reward of each environment by step; in an evaluation, with the interval if it has one."""
        metrics = defaultdict[int, dict[str, "float | None"]](dict)
        for kind, number in steps:
            groups, row = self.read_groups((kind, number)), metrics[number]
            for env in dict.fromkeys(group["env"] for group in groups):
                env_groups = [group for group in groups if group["env"] == env]
                name = f"{'env' if kind == 'step' else 'eval'}/{env}/reward/mean"
                row[name] = self.average_reward(env_groups)
                means = [mean for group in env_groups if (mean := self.average_reward([group])) is not None]
                if kind == "evaluation" and means and min(means) >= 0 and max(means) <= 1:
                    score = estimate_mean(means)
                    row |= {f"{name}/low": score.low, f"{name}/high": score.high}
        return dict(sorted(metrics.items()))

    @staticmethod
    def average_reward(groups: Iterable[Row]) -> float | None:
        """Return the mean reward of all members that have one."""
        rewards = [member["reward"] for group in groups for member in group["members"] if member["reward"] is not None]
        return fmean(rewards) if rewards else None

    def read_reply_texts(self, step: Step) -> Iterator[tuple[Place, Iterable[str]]]:
        """Yield the place of each episode of a step, and the texts of its replies."""
        for group in self.step(step)["groups"]:
            for place, row in self.read_replies(step, group["position"]).items():
                messages = [message for message in join_turns(row["turns"]) if "turn" in message]
                yield place, [text for message in messages for text in _list_texts(message)]

    def list_episodes(self, step: Step) -> Iterable[Sequence[Any]]:
        """Yield environment, task, status, position, member, attempt and reward of each episode of a step."""
        for group in self.read_groups(step):
            for row in group["members"]:
                place = (group["position"], row["member"], row["attempt"])
                yield (group["env"], group["task"], row["status"], *place, row["reward"])

    def metrics(self) -> Row:
        """Return the metrics of all steps as columns."""
        rows = self.read_metrics()
        names = sorted({name for row in rows.values() for name in row})
        return {"step": list(rows), "metrics": {name: [row.get(name) for row in rows.values()] for name in names}}

    def tasks(self, *kinds: Kind) -> Row:
        """Return the kind and number of steps with the rows of `list_episodes`, without earlier attempts."""
        steps = [step for step in self.list_steps() if step[0] in kinds]
        return {"episodes": [[*step, *row] for step in steps for row in self.list_episodes(step)]}

    def search(self, step: Step, text: str) -> list[tuple[int, int, int, str]]:
        """Return the places of a step's episodes that have a text in a reply, whatever its case, with an excerpt."""
        pattern, matches = re.compile(re.escape(text), re.IGNORECASE), list[tuple[int, int, int, str]]()
        for place, texts in self.read_reply_texts(step) if text else ():
            if match := next(filter(None, map(pattern.search, texts)), None):
                excerpt = slice(max(match.start() - _EXCERPT_CHARS, 0), match.end() + _EXCERPT_CHARS)
                matches.append((*place, match.string[excerpt]))
        return sorted(matches)

    def step(self, step: Step) -> Row:
        """Return the groups of a step."""
        if not self.has_step(step):
            raise UsageError(f"{self.path} has no {step[0]} {step[1]}")
        return {"step": step[1], "groups": self.read_groups(step)}

    def group(self, step: Step, position: int) -> Row:
        """Return a group with the messages that its episodes share, and the other messages of each."""
        group = next((group for group in self.step(step)["groups"] if group["position"] == position), None)
        if group is None:
            raise UsageError(f"{self.path} has no group {position} in {step[0]} {step[1]}")
        rows = self.read_replies(step, position)
        conversations = [join_turns(row["turns"]) for row in rows.values()]
        # An episode that failed early may have no message. Shared are those before the first reply that are all equal.
        heads = zip(*filter(None, conversations), strict=False)
        equal = takewhile(lambda head: "turn" not in head[0] and head.count(head[0]) == len(head), heads)
        shared = [message for message, *_ in equal]
        replies = [
            {name: row[name] for name in ("info", "error")}
            | {"member": member, "attempt": attempt, "messages": messages[len(shared) :]}
            for ((_, member, attempt), row), messages in zip(rows.items(), conversations, strict=True)
        ]
        return {**group, "prompt": [*group.get("prompt", ()), *shared], "replies": replies}

    def episode(self, step: Step, place: Place) -> Row:
        """Return an episode with its turns, and its neighbours in the step."""
        groups = self.step(step)["groups"]
        episodes = {
            (group["position"], row["member"], row["attempt"]): (group, row)
            for group in groups
            for row in (*group["members"], *group["failed_attempts"])
        }
        if place not in episodes:
            position, member, attempt = place
            where = f"group {position} of {step[0]} {step[1]}"
            raise UsageError(f"{self.path} has no member {member}, attempt {attempt}, in {where}")
        group, row = episodes[place]
        places = [None, *sorted(episodes), None]
        index = places.index(place)
        return {
            **{name: group[name] for name in _GROUP},
            **row,
            "step": step[1],
            "kind": step[0],
            "neighbours": {"previous": places[index - 1], "next": places[index + 1]},
            **self.read_episode(step, place),
        }


@dataclass(frozen=True)
class LogGroup:
    """The records of a group's members in the log of another tool, and what the log says of the group itself."""

    env: str
    task: str
    records: list[Row]
    fields: Row = field(default_factory=dict[str, Any])


class LogReader(RecordReader):
    """Base class of readers of other tools; a reader keeps what it has read, so changed files need a new one."""

    @abstractmethod
    def load_groups(self) -> Mapping[Step, Sequence[LogGroup]]:
        """Return the groups of each step, in the order of the steps."""

    @abstractmethod
    def show_member(self, record: Row) -> Row:
        """Return an episode as a member of its group."""

    @abstractmethod
    def show_episode(self, record: Row) -> Row:
        """Return `turns`, `info` and `error` of an episode."""

    @cached_property
    def groups(self) -> Mapping[Step, Sequence[LogGroup]]:
        """Groups of each step, read once."""
        return self.load_groups()

    def make_run(self, file: Path, *, status: str | None, config: Mapping[str, Any], **fields: object) -> Row:
        """Return the header; without `status`, the time since the last write to `file` decides."""
        updated = file.stat().st_mtime
        status = status or ("running" if time.time() - updated < LIVE_S else "interrupted")
        row: Row = {"id": self.path.name, "name": self.path.name, "kind": self.kind, "path": str(self.path)}
        row |= {"status": status, "live": status == "running", "updated": updated, "step": 0, "envs": [], "tags": []}
        row |= dict.fromkeys(_RUN)
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in config.items()}
        row["config"] = [[name, text, ""] for name, text in texts.items()]  # without an origin
        row |= {"findings": [], "checkpoints": [], "versions": {}, "best_step": None}
        row["steps_recorded"] = [number for kind, number in self.list_steps() if kind == "step"]
        row["evaluations"] = [number for kind, number in self.list_steps() if kind == "evaluation"]
        return {**row, **fields}

    @override
    def list_steps(self) -> Sequence[Step]:
        return list(self.groups)

    @override
    def read_groups(self, step: Step) -> Sequence[Row]:
        rows = list[Row]()
        for position, group in enumerate(self.groups[step]):
            row: Row = {**dict.fromkeys(_GROUP), "position": position, "env": group.env, "task": group.task}
            members = [{**self.show_member(record), "member": member} for member, record in enumerate(group.records)]
            rows.append({**row, "taught": False, "members": members, "failed_attempts": [], **group.fields})
        return rows

    @override
    def read_replies(self, step: Step, position: int) -> Mapping[Place, Row]:
        records = enumerate(self.groups[step][position].records)
        return {(position, member, 0): self.show_episode(record) for member, record in records}

    @override
    def read_episode(self, step: Step, place: Place) -> Row:
        position, member, _ = place
        episode = self.show_episode(self.groups[step][position].records[member])
        return {**episode, "pieces": {}, "special": [], "files": [], "view": None}


def make_data_uri(kind: str, data: bytes) -> str:
    """Return an image as the page shows it, which loads nothing from elsewhere."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def join_turns(turns: Iterable[Row]) -> list[Row]:
    """Return the messages of turns with a parent; `branch` tells where a turn does not continue the one before it."""
    joined = list[Row]()
    for index, turn in enumerate(turns):
        parent, messages = turn["parent"], turn["messages"]
        if index and parent != index - 1 and messages:
            branch = "new segment" if parent is None else f"continues turn {parent + 1}"
            messages = [{**messages[0], "branch": branch}, *messages[1:]]
        joined += messages
    return joined


def make_member(*, error: str | None, is_truncated: bool, **fields: object) -> Row:
    """Return an episode as a member of its group; it failed if there is an error."""
    status = "failed" if error else "truncated" if is_truncated else "completed"
    row: Row = {"attempt": 0, "status": status, "masked": False, "metrics": {}, "error": error and error.split("\n")[0]}
    return {**dict.fromkeys(_MEMBER), **row, **fields}


def make_turn(messages: Sequence[Row], *, index: int, **fields: object) -> Row:
    """Return turn `index` without tokens; the last message that it adds is its reply if the role is `assistant`."""
    row: Row = {"parent": index - 1 if index else None, "messages": list(messages)}
    if messages and messages[-1]["role"] == "assistant":
        row["messages"][-1] = {**messages[-1], "turn": index}
    return {**dict.fromkeys(_TURN), **{name: [] for name in _TOKENS}, **row, **fields}


def split_turns(messages: Sequence[Row]) -> list[Row]:
    """Return a conversation as turns, each of which ends with a reply; messages may follow the last one."""
    ends = {index for index, message in enumerate(messages, 1) if message["role"] == "assistant"} | {len(messages)}
    places = pairwise(sorted({0, *ends}))
    return [make_turn(messages[start:end], index=index) for index, (start, end) in enumerate(places)]


def make_message(source: Row) -> Row:
    """Return a message of any of the tools."""
    parts, thinking = list[Row](), [pick(source, "reasoning_content", str)]
    for part in pick_rows(source, "content"):
        if part.get("type") in ("reasoning", "thinking"):
            thinking.append(pick(part, "reasoning", str) or pick(part, "thinking", str))
        elif image := pick(part, "image", str) or pick(part, "image_url.url", str):
            parts.append({"type": "image", "image": image})
        else:
            text = pick(part, "text", str)
            parts.append({"type": "text", "text": json.dumps(part) if text is None else text})
    extras = {
        "thinking": "\n".join(filter(None, thinking)),
        "tool_calls": [_make_call(call) for call in pick_list(source, "tool_calls")],
        "tool_call_id": pick(source, "tool_call_id", str),
        "name": pick(source, "name", str),
    }
    message = {"role": pick(source, "role", str) or "", "content": parts or pick(source, "content", str) or ""}
    return message | {name: value for name, value in extras.items() if value}


def _make_call(call: object) -> Row:
    if isinstance(call, str):  # verifiers before 0.4 writes a call as text
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            call = {"arguments": call}
    function = pick_object(call, "function") or call  # inspect_ai has the name in its place
    name, arguments = pick(function, "name", str) or pick(call, "function", str), pick(function, "arguments", object)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": pick(call, "id", str), "name": name, "arguments": text}


def _list_texts(message: Row) -> list[str]:
    """Return the texts of a message: its thinking, its content, and its calls of tools."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    calls = [f"{call['name']}({call['arguments']})" for call in message.get("tool_calls", ())]
    return [message.get("thinking", ""), *parts, *calls]
