"""Records of another tool as data of the page.

Invariant: a value that a record does not hold, or holds with another type, is None. A file that is no JSON is a
`UsageError` that names it.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, cast, override

from pydantic_core import from_json

from rlkit.errors import UsageError

type Row = dict[str, Any]
"""JSON object."""

type Kind = Literal["evaluation", "step"]
type Step = tuple[Kind, int]

type Place = tuple[int, int, int]
"""Position of a group in its step, member and attempt."""

_STATUSES = ("completed", "truncated", "failed")

LIVE_S = 600.0
"""Time after the last write until an unfinished record counts as interrupted."""


def parse_json(path: Path, data: bytes | str) -> Any:
    """Return JSON of a file."""
    try:
        return from_json(data)
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def read_json(path: Path) -> Row:
    """Return the object of a JSON file; empty if there is no such file, or no object in it."""
    return pick_object({"": parse_json(path, _read_bytes(path))}, "") if path.exists() else {}


def read_lines(path: Path) -> list[Row]:
    """Return the objects of a file with one a line, without an incomplete last line; none if there is no such file."""
    lines = _read_bytes(path).split(b"\n")[:-1] if path.exists() else []
    return pick_rows({"": [parse_json(path, line) for line in lines if line.strip()]}, "")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def pick[T](row: object, name: str, kind: type[T]) -> T | None:
    """Return a field of nested objects, whose names are separated by dots; None if it is missing or of another type.

    An integer counts as text and as a number; a number that JSON does not support counts as missing.
    """
    value: Any = row
    for part in name.split("."):
        value = cast("Row", value).get(part) if isinstance(value, dict) else None
    if type(value) in (int, float) and kind in (str, float):
        value = str(value) if kind is str else float(value) if abs(value) <= sys.float_info.max else None
    return cast("T | None", value if isinstance(value, kind) else None)


def pick_object(row: object, name: str) -> Row:
    """Return an object; empty if it is missing."""
    return cast("Row", pick(row, name, dict) or {})


def pick_list(row: object, name: str) -> list[Any]:
    """Return a list, or the values of an object; empty if it is missing."""
    return cast("list[Any]", pick(row, name, list) or list(pick_object(row, name).values()))


def pick_rows(row: object, name: str) -> list[Row]:
    """Return the objects of a list, or of the values of an object."""
    return [each for each in pick_list(row, name) if isinstance(each, dict)]


def pick_numbers(row: object, name: str) -> dict[str, float]:
    """Return the finite numbers of an object."""
    numbers = {key: pick({"": value}, "", float) for key, value in pick_object(row, name).items()}
    return {key: number for key, number in numbers.items() if number is not None}


def list_settings(config: Mapping[str, Any]) -> list[list[str]]:
    """Return a configuration as rows of name, text and origin."""
    return [[name, value if isinstance(value, str) else json.dumps(value), ""] for name, value in config.items()]


def make_message(source: Row, attachments: Mapping[str, str] | None = None) -> Row:
    """Return a message of any of the tools as the page's, with its attachments in their places."""
    parts, thinking, places = list[Row](), [pick(source, "reasoning_content", str)], attachments or {}
    for part in pick_rows(source, "content"):
        if part.get("type") in ("reasoning", "thinking"):
            thinking.append(pick(part, "reasoning", str) or pick(part, "thinking", str))
        elif image := pick(part, "image", str) or pick(part, "image_url.url", str):
            parts.append({"type": "image", "image": places.get(image, image)})
        else:
            text = json.dumps(part) if (text := pick(part, "text", str)) is None else text
            parts.append({"type": "text", "text": places.get(text, text)})
    text = pick(source, "content", str) or ""
    calls = [_make_call(call) for call in pick_list(source, "tool_calls")]
    fields = {"thinking": "\n".join(filter(None, thinking)), "tool_calls": calls}
    fields |= {name: pick(source, name, str) for name in ("tool_call_id", "name")}
    present = {name: value for name, value in fields.items() if value}
    return {"role": pick(source, "role", str) or "", "content": parts or places.get(text, text), **present}


def _make_call(call: object) -> Row:
    try:
        source = from_json(call) if isinstance(call, str) else call  # verifiers before 0.4 writes a call as text
    except ValueError:
        source = {"arguments": call}
    function = pick_object(source, "function") or source  # inspect_ai has the name in its place
    name, arguments = pick(function, "name", str) or pick(source, "function", str), pick(function, "arguments", object)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": pick(source, "id", str), "name": name, "arguments": text}


def make_turn(messages: Sequence[Row], *, index: int, **fields: object) -> Row:
    """Return turn `index` without tokens; the last message that it adds is its reply if the role is `assistant`."""
    names = ("version", "stop", "reward", "seconds", "trainer_logprobs", "advantages", "datum", "entropy")
    tokens = {name: list[int]() for name in ("prompt", "completion", "sampled", "logprobs", "images")}
    added = list(messages)
    if added and added[-1]["role"] == "assistant":
        added[-1] = {**added[-1], "turn": index}
    return {"parent": index - 1 if index else None, **dict.fromkeys(names), **tokens, "messages": added, **fields}


def split_turns(messages: Sequence[Row]) -> list[Row]:
    """Return a conversation as turns, each of which ends with a reply; messages may follow the last one."""
    ends = [index for index, message in enumerate(messages, 1) if message["role"] == "assistant"]
    ends += [len(messages)] if messages and len(messages) not in ends[-1:] else []
    return [make_turn(messages[first:end], index=index) for index, (first, end) in enumerate(pairwise([0, *ends]))]


def make_member(*, error: str | None, is_truncated: bool = False, **fields: object) -> Row:
    """Return an episode as a member of its group; it failed if there is an error."""
    row: Row = dict.fromkeys(("reward", "advantage", "tokens", "turns", "seconds", "cut", "versions"))
    status = "failed" if error else "truncated" if is_truncated else "completed"
    row |= {"attempt": 0, "status": status, "masked": False, "metrics": {}}
    return {**row, "error": error and error.split("\n")[0], **fields}


def make_group(position: int, *, env: str, task: str, members: Sequence[Row], **fields: object) -> Row:
    """Return a group as a row of its step."""
    row: Row = dict.fromkeys(("draw", "reason", "estimator", "baseline"))
    row |= {"position": position, "env": env, "task": task, "taught": False, "failed_attempts": []}
    return {**row, "members": [{**member, "member": index} for index, member in enumerate(members)], **fields}


class RecordReader(ABC):
    """Base class of readers: the data of the pages of one run."""

    kind = ""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def run(self) -> Row:
        """Return the header of the run's page."""

    @abstractmethod
    def summary(self) -> Row:
        """Return the run's row in the list of runs."""

    @abstractmethod
    def metrics(self) -> Row:
        """Return the metrics of all steps by name."""

    @abstractmethod
    def list_steps(self) -> Sequence[Step]:
        """Return the steps and evaluations, sorted."""

    @abstractmethod
    def read_groups(self, step: Step) -> Sequence[Row]:
        """Return the groups of a step."""

    @abstractmethod
    def read_replies(self, step: Step, places: Sequence[Place]) -> list[tuple[list[Row], Row, str | None]]:
        """Return messages, info and error of the episodes of a group."""

    @abstractmethod
    def read_details(self, step: Step, place: Place) -> Row:
        """Return the fields of an episode that its group lacks."""

    def step(self, number: int, *, kind: Kind | None = None) -> Row:
        """Return the groups of a step; without `kind`, of the evaluation if there is no such step."""
        return {"step": number, "groups": self.read_groups(self._find_step(number, kind))}

    def group(self, number: int, position: int, *, kind: Kind | None = None) -> Row:
        """Return a group with the messages that its episodes share, and the other messages of each."""
        step, group, _ = self._find_group(number, position, kind)
        places = [(position, row["member"], row["attempt"]) for row in (*group["members"], *group["failed_attempts"])]
        episodes = self.read_replies(step, places)
        texts = [messages for messages, *_ in episodes]
        rows = zip(*filter(None, texts), strict=False)  # an episode that failed early may have no message
        shared = [row[0] for row in takewhile(lambda row: "turn" not in row[0] and row.count(row[0]) == len(row), rows)]
        replies = [
            {"member": member, "attempt": attempt, "messages": text[len(shared) :], "info": info, "error": error}
            for (_, member, attempt), (text, info, error) in zip(places, episodes, strict=True)
        ]
        return {**group, "prompt": [*group.get("prompt", ()), *shared], "replies": replies}

    def episode(self, number: int, position: int, member: int, attempt: int, *, kind: Kind | None = None) -> Row:
        """Return an episode with its turns, and its neighbours in the step."""
        step, group, places = self._find_group(number, position, kind)
        if (place := (position, member, attempt)) not in places:
            raise UsageError(f"{self.path} has no member {member}, attempt {attempt}, in group {position}")
        around = [None, *map(list, places), None]
        previous, following = (around[places.index(place) + offset] for offset in (0, 2))
        rows: list[Row] = [*group["members"], *group["failed_attempts"]]
        row = next(row for row in rows if (row["member"], row["attempt"]) == (member, attempt))
        return {
            **{name: value for name, value in group.items() if name not in ("members", "failed_attempts")},
            **{**row, "step": number, "kind": step[0], "neighbours": {"previous": previous, "next": following}},
            **{"pieces": {}, "special": [], "files": [], "view": None},
            **self.read_details(step, place),
        }

    def tasks(self) -> Row:
        """Return the episodes of all tasks as columns, without earlier attempts."""
        envs, tasks, rows = dict[str, int](), dict[tuple[int, str], int](), list[Sequence[Any]]()
        for step in self.list_steps():
            for env, task, status, *values in self.list_episodes(step):
                key = envs.setdefault(env, len(envs)), task
                is_evaluation = int(step[0] == "evaluation")
                rows.append(
                    (tasks.setdefault(key, len(tasks)), _STATUSES.index(status), step[1], is_evaluation, *values)
                )
        names = ("task", "status", "step", "evaluation", "position", "member", "attempt", "reward")
        columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
        return {"env": list(envs), "task": list(tasks), "episodes": columns}

    def list_episodes(self, step: Step) -> Iterable[Sequence[Any]]:
        """Yield environment, task, status, position, member, attempt and reward of each episode of a step."""
        for group in self.read_groups(step):
            for row in group["members"]:
                place = (group["position"], row["member"], row["attempt"])
                yield (group["env"], group["task"], row["status"], *place, row["reward"])

    def _find_step(self, number: int, kind: Kind | None) -> Step:
        steps = [step for step in self.list_steps() if step[1] == number and kind in (None, step[0])]
        if not steps:
            raise UsageError(f"{self.path} has no {kind or 'step'} {number}")
        return steps[-1]

    def _find_group(self, number: int, position: int, kind: Kind | None) -> tuple[Step, Row, list[Place]]:
        """Return a group, its step, and the places of all episodes of the step."""
        step = self._find_step(number, kind)
        groups = {group["position"]: group for group in self.read_groups(step)}
        if position not in groups:
            raise UsageError(f"{self.path} has no group {position} in {step[0]} {number}")
        rows = [(each, row) for each in groups.values() for row in (*each["members"], *each["failed_attempts"])]
        return step, groups[position], sorted((each["position"], row["member"], row["attempt"]) for each, row in rows)


class LogReader(RecordReader):
    """Base class of readers of other tools; a reader keeps what it has read, so changed files need a new one."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self._clock = clock

    @abstractmethod
    def read_episode(self, step: Step, position: int, member: int) -> tuple[Sequence[Row], Row, str | None]:
        """Return an episode's turns, what else was recorded, and the reason of a failure with its traceback."""

    def make_run(self, file: Path, *, status: str | None, **fields: object) -> Row:
        """Return the header; without `status`, the time since the last write to `file` decides."""
        updated = file.stat().st_mtime
        status = status or ("running" if self._clock() - updated < LIVE_S else "interrupted")
        row: Row = {"id": self.path.name, "name": self.path.name, "kind": self.kind, "path": str(self.path)}
        row |= {"status": status, "live": status == "running", "updated": updated, "step": 0, "envs": [], "tags": []}
        row |= dict.fromkeys(("reason", "started", "steps", "model", "reward", "evaluation", "tokens", "usd"))
        row |= {"config": [], "findings": [], "checkpoints": [], "versions": {}, "parts": [], "best_step": None}
        names = {"step": "steps_recorded", "evaluation": "evaluations"}
        row |= {name: [number for each, number in self.list_steps() if each == kind] for kind, name in names.items()}
        return {**row, **fields}

    @override
    def summary(self) -> Row:
        names = ("config", "findings", "checkpoints", "versions", "parts", "best_step", "steps_recorded", "evaluations")
        return {name: value for name, value in self.run().items() if name not in names}

    @override
    def metrics(self) -> Row:
        columns = dict[str, list[float | None]]()
        for index, step in enumerate(self.list_steps()):
            groups = self.read_groups(step)
            for env in {group["env"]: None for group in groups}:
                name = f"{'env' if step[0] == 'step' else 'eval'}/{env}/reward/mean"
                column = columns.setdefault(name, [None] * len(self.list_steps()))
                column[index] = average_reward(group for group in groups if group["env"] == env)
        return {"step": [number for _, number in self.list_steps()], "metrics": columns}

    @override
    def read_replies(self, step: Step, places: Sequence[Place]) -> list[tuple[list[Row], Row, str | None]]:
        records = [self.read_episode(step, position, member) for position, member, _ in places]
        return [([m for turn in turns for m in turn["messages"]], info, error) for turns, info, error in records]

    @override
    def read_details(self, step: Step, place: Place) -> Row:
        turns, info, error = self.read_episode(step, *place[:2])
        return {"turns": turns, "info": info, "error": error}


def average_reward(groups: Iterable[Row]) -> float | None:
    """Return the mean reward of all members that have one."""
    rewards = [member["reward"] for group in groups for member in group["members"] if member["reward"] is not None]
    return fmean(rewards) if rewards else None
